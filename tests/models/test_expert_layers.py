"""Where a model has experts, and which settings of them cannot be together."""

import dataclasses

import pytest
from layouts import tiny

from maxmeg.config.architecture import model_problems
from maxmeg.config.experts import layout_problems
from maxmeg.config.model import ExpertBackend, ExpertDrop, ModelConfig, RouterScore
from maxmeg.config.schema import Config, ExpertExchange, ParallelConfig
from maxmeg.config.validate import validate
from maxmeg.layers.moe import MoeSpec
from maxmeg.models.lm import layer_places, layout, pattern

PLACED = {  # num_layers and fields -> (which have experts, layers apart at the start, in a unit)
    "every": ((4, {}), ("1111", 0, 1)),
    "first": ((4, {"first_dense_layers": 3}), ("0001", 3, 1)),
    "every 2nd": ((5, {"expert_every": 2}), ("10101", 0, 2)),
    "every 3rd": ((7, {"expert_every": 3}), ("1001001", 0, 3)),
    "more than there are": ((2, {"expert_every": 3}), ("10", 0, 3)),
    "all": ((3, {"expert_pattern": (1, 1, 1)}), ("111", 0, 1)),
    "deepseek": ((6, {"expert_pattern": (0, 0, 1, 1, 1, 1)}), ("001111", 2, 1)),
    "glm": ((6, {"expert_pattern": (0, 1, 1, 1, 1, 1)}), ("011111", 1, 1)),
    "odd layers": ((5, {"expert_pattern": (0, 1, 0, 1, 0)}), ("01010", 0, 2)),
    "then by turns": ((7, {"expert_pattern": (0, 0, 0, 1, 0, 1, 0)}), ("0001010", 3, 2)),
    "without order": ((5, {"expert_pattern": (0, 1, 1, 0, 1)}), ("01101", 1, 4)),
    "the last": ((3, {"expert_pattern": (0, 0, 1)}), ("001", 2, 1)),
    "by turns with windows": (
        (7, {"expert_every": 2, "attention_window": 4, "attention_global_every": 3}),
        ("1010101", 0, 6),
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_layers_have_experts_where_they_should(name):
    (num_layers, fields), (wanted, apart, unit) = PLACED[name]
    config = ModelConfig(num_layers=num_layers, num_experts=4, **fields)
    assert not [*model_problems(config)]
    assert (config.dense_layers, config.layers_of_unit) == (apart, unit)
    groups, places = pattern(config), layer_places(config)
    assert len(set(places)) == num_layers
    kinds, windows = "", []
    for group, repeat, first in places:
        sublayers, repeats = groups[group]
        assert repeat < repeats
        kinds += str(int(isinstance(sublayers[first + 1].mixers[0], MoeSpec)))
        windows.append(sublayers[first].mixers[0].window)
    assert kinds == wanted
    every = config.attention_global_every
    local = [bool(every) and (layer + 1) % every > 0 for layer in range(num_layers)]
    assert windows == [config.attention_window * is_local for is_local in local]
    assert sum(len(unit) * repeats for unit, repeats in groups) == 2 * num_layers
    assert config.num_units == sum(repeats for _, repeats in groups)
    assert sum(map(len, layout(config, ParallelConfig()).orders)) == config.num_units


EVEN = {"router_sinkhorn": True}
REFUSED = [
    ({"expert_every": 0}, "expert_every=0 must be at least 1"),
    ({"expert_every": 2, "first_dense_layers": 1}, "say it twice"),
    ({"expert_every": 2, "expert_pattern": (1, 0, 1, 0)}, "say it twice"),
    ({"expert_pattern": (1, 0)}, "must be num_layers=4 numbers"),
    ({"expert_pattern": (0, 0, 0, 0)}, "some of them 1"),
    ({"expert_pattern": (1, 2, 0, 0)}, "1 for a layer with experts"),
    (
        {"expert_pattern": (0, 1, 1, 1), "attention_window": 4, "attention_global_every": 2},
        "cannot be beside attention_global_every",
    ),
    ({"experts_per_token": 1}, "gives the router no gradient: set router_over_all=True"),
    ({**EVEN, "router_aux_loss": 0.1}, "router_aux_loss=0.1 cannot be beside router_sinkhorn"),
    ({**EVEN, "router_sequence_aux_loss": 0.1}, "router_sequence_aux_loss=0.1 cannot be beside"),
    ({**EVEN, "router_global_aux_loss": 0.1}, "router_global_aux_loss=0.1 cannot be beside"),
    ({**EVEN, "router_bias": True}, "router_bias=True cannot be beside router_sinkhorn"),
    ({**EVEN, "router_groups": 2}, "router_groups=2 cannot be beside router_sinkhorn"),
    ({**EVEN, "expert_capacity": 1.0}, "expert_capacity=1.0 cannot be beside router_sinkhorn"),
    ({**EVEN, "router_score": RouterScore.sigmoid}, "router_score=sigmoid cannot be beside"),
    ({**EVEN, "router_normalize": True}, "router_normalize=True cannot be beside"),
    ({**EVEN, "benchmark_even_experts": True}, "benchmark_even_experts=True cannot be beside"),
    ({"num_experts": 0, **EVEN}, "router_sinkhorn=True has no effect without model.num_experts"),
    ({"num_experts": 0, "expert_every": 2}, "expert_every=2 has no effect without"),
    ({"expert_pad": True}, "expert_pad=True has no effect without model.expert_capacity: set that"),
    (
        {"expert_pad": True, "expert_capacity": 1.0, "expert_backend": ExpertBackend.mosaic},
        "expert_backend=mosaic has no effect with expert_pad=True",
    ),
]
ALLOWED = [
    {**EVEN, "router_z_loss": 0.1, "router_jitter": 0.1, "router_scale": 2.0},
    {**EVEN, "experts_per_token": 1},
    {"experts_per_token": 1, "router_score": RouterScore.sigmoid},
    {"router_aux_loss": 0.1, "router_sequence_aux_loss": 0.1, "router_global_aux_loss": 0.1}
    | {"router_bias": True, "router_z_loss": 0.1, "expert_latent_size": 8},
    {"expert_capacity": 1.25, "expert_pad": True, "expert_drop": ExpertDrop.weight},
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_together_is_refused(fields, message):
    found = [*model_problems(ModelConfig(**{"num_layers": 4, "num_experts": 4} | fields))]
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize("fields", ALLOWED)
def test_what_can_be_together_is_not(fields):
    assert not [*model_problems(ModelConfig(num_layers=4, num_experts=4, **fields))]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"expert_exchange": ExpertExchange.ragged}, "choose auto, all_to_all or gather"),
        ({"expert_buffer": 2.0}, "leave the buffer"),
        ({"expert_exchange": ExpertExchange.gather}, ""),
        ({"expert_exchange": ExpertExchange.all_to_all}, ""),
    ],
)
def test_padded_experts_are_exchanged_at_once(parallel, message):
    model = ModelConfig(num_experts=4, expert_capacity=1.0, expert_pad=True)
    config = Config(model=model, parallel=ParallelConfig(expert=2, **parallel))
    found = [*layout_problems(config)]
    assert (len(found) == 1 and message in found[0]) if message else not found


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ((0, 0, 0, 1, 0, 1, 0, 1), r"3 layers without experts.*is not for a pipeline"),
        ((1, 1, 0, 1, 0, 0, 1, 1), r"a unit of 8, which a pipeline does not cut.*expert_pattern"),
    ],
)
def test_patterns_that_a_pipeline_cannot_cut_are_refused(pattern, message):
    config = tiny({"num_layers": 8, "num_experts": 4, "expert_pattern": pattern}, pipe=2)
    config.train.micro_batch_size = 2
    with pytest.raises(ValueError, match=message):
        validate(config, 2)
    config.model.expert_pattern = (0, 1) * 4
    validate(config, 2)
    config.parallel.pipe, config.model.expert_pattern = 1, pattern
    validate(config, 2)


def test_adapters_count_no_loads():
    config = tiny({"num_experts": 4, "router_global_aux_loss": 0.1}, fsdp=1)
    config.lora.rank = 2
    with pytest.raises(ValueError, match=r"router_global_aux_loss=0\.1 needs the loads of each"):
        validate(config, 1)


def test_every_setting_reaches_the_layer():
    fields = {"router_global_aux_loss": 0.25, "router_jitter": 0.125, "expert_latent_size": 24}
    config = ModelConfig(num_experts=4, benchmark_even_experts=True, **fields)
    spec = pattern(config)[0][0][1].mixers[0]
    assert spec.routing.in_turn and not spec.routing.sinkhorn
    assert (spec.global_aux_loss, spec.jitter, spec.latent_size) == (0.25, 0.125, 24)


def test_sinkhorn_weighs_as_megatron_does():
    for chosen, score in ((1, "sigmoid"), (2, "softmax")):
        config = ModelConfig(num_experts=4, router_sinkhorn=True, experts_per_token=chosen)
        routing = pattern(config)[0][0][1].mixers[0].routing
        assert routing.sinkhorn and routing.before and routing.score.value == score
        assert dataclasses.replace(routing, sinkhorn=False).top_k == chosen
