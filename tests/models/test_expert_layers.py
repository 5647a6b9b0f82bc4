"""Where a model has experts, and which settings of them cannot be together."""

import pytest
from layouts import tiny

from maxmeg.config.mixers import ExpertBackend, ExpertDrop, ExpertExchange, RouterScore
from maxmeg.config.model import ModelConfig
from maxmeg.config.model_rules import expert_layout_problems, model_problems
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.config.setting import declared_problems, with_fields
from maxmeg.config.validate import validate
from maxmeg.models.mixers import pattern

PLAIN = {"layers": "*(attention,moe)", "moe.num_experts": 4}
EVEN = {"moe.sinkhorn": True}
PADDED = {"moe.pad_to_capacity": True}
WITHOUT_SINKHORN = [  # with sinkhorn these settings have no meaning
    *(("moe.aux_loss", 0.1), ("moe.sequence_aux_loss", 0.1), ("moe.global_aux_loss", 0.1)),
    *(("moe.bias_balancing", True), ("moe.num_groups", 2), ("moe.capacity_factor", 1.0)),
    *(("moe.normalize_weights", True), ("moe.force_balance", True)),
]
MOSAIC = {"moe.capacity_factor": 1.0, "moe.backend": ExpertBackend.mosaic}
REFUSED = [
    *(({**EVEN, n: v}, f"{n}={v} cannot be combined with sinkhorn") for n, v in WITHOUT_SINKHORN),
    ({**EVEN, "moe.score": RouterScore.sigmoid}, "moe.score=sigmoid cannot be combined"),
    ({"layers": "*(attention,mlp)", **EVEN}, "moe.sinkhorn=True: no layer of model.layers="),
    ({"layers": "*(attention,mlp attention+moe)"}, "moe cannot be in a parallel block"),
    ({"layers": "*(attention+local,moe)"}, "attention and local cannot stand in one sublayer"),
    ({"layers": "*(mla,mlp attention,mlp)"}, "mla cannot be combined with attention and local"),
    (PADDED, "pad_to_capacity=True has no effect without model.moe.capacity_factor: set that"),
    (PADDED | MOSAIC, "moe.backend=mosaic has no effect with pad_to_capacity=True"),
]
ALLOWED = [
    {**EVEN, "moe.z_loss": 0.1, "moe.jitter": 0.1, "moe.scale": 2.0},
    {**EVEN, "moe.top_k": 1},
    {"moe.top_k": 1},
    {"moe.top_k": 1, "moe.score": RouterScore.sigmoid},
    {"moe.aux_loss": 0.1, "moe.sequence_aux_loss": 0.1, "moe.global_aux_loss": 0.1}
    | {"moe.bias_balancing": True, "moe.z_loss": 0.1, "moe.latent_size": 8},
    PADDED | {"moe.capacity_factor": 1.25, "moe.drop_policy": ExpertDrop.weight},
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_incompatible_settings_are_refused(fields, message):
    model = with_fields(ModelConfig(), PLAIN | fields)
    actual = [*declared_problems(model, "model."), *model_problems(model)]
    assert any(message in problem for problem in actual), actual


def test_a_router_without_a_gradient_is_refused_only_in_training():
    config = tiny(PLAIN | {"moe.top_k": 1}, fsdp=1)
    with pytest.raises(ValueError, match=r"router gets no gradient: set softmax_before_topk=True"):
        validate(config, 1)
    validate(config, 1, training=False)
    config.model.moe.softmax_before_topk = True
    validate(config, 1)
    config.model.moe.softmax_before_topk, config.lora.rank = False, 2
    validate(config, 1)


@pytest.mark.parametrize("fields", ALLOWED)
def test_compatible_settings_are_accepted(fields):
    model = with_fields(ModelConfig(), PLAIN | fields)
    assert not [*declared_problems(model, "model."), *model_problems(model)]


GATHER, EXCHANGE = (
    {"expert_exchange": getattr(ExpertExchange, name)} for name in ("gather", "all_to_all")
)
XLA = {"moe.backend": ExpertBackend.xla}
BATCHED = {"moe.backend": ExpertBackend.batched}
FULL = PADDED | {"moe.capacity_factor": 1.0}
BUFFER, TWO_NODES = {"expert_buffer": 2.0}, {"expert": 8, "expert_nodes": 2}


@pytest.mark.parametrize(
    ("fields", "parallel", "message"),
    [
        # padded experts are exchanged at once
        (FULL, {"expert": 2} | BUFFER, "leave the buffer"),
        (FULL, {"expert": 2} | GATHER, ""),
        (FULL, {"expert": 2} | EXCHANGE, ""),
        # a buffer needs blocks or an exchange
        (XLA, BUFFER, "expert_buffer=2.0 has no effect with model.moe.backend"),
        (BATCHED, BUFFER, ""),
        ({"moe.backend": ExpertBackend.mosaic}, {"expert": 2} | BUFFER, ""),
        # nodes divide the devices of experts
        ({}, {"expert": 8, "expert_nodes": 3}, "expert_nodes=3 does not divide expert=8: choose"),
        ({}, TWO_NODES | GATHER, "not gather"),
        ({}, TWO_NODES, ""),
    ],
)
def test_layouts_fit_how_experts_are_computed_and_exchanged(fields, parallel, message):
    model = with_fields(ModelConfig(), PLAIN | {"moe.num_experts": 8} | fields)
    actual = [*expert_layout_problems(Config(model=model, parallel=ParallelConfig(**parallel)))]
    assert (len(actual) == 1 and message in actual[0]) if message else not actual


@pytest.mark.parametrize(
    ("groups", "parallel", "nodes"),
    [
        (8, {"expert": 64}, 8),
        (8, {"expert": 64, "tensor": 2}, 16),  # four devices of experts in a node
        (8, {"expert": 64, "tensor": 2, "expert_tensor": 1}, 8),
        (1, {"expert": 64}, 1),
        (8, {"expert": 8}, 1),
        (8, {"expert": 64, "expert_exchange": ExpertExchange.gather}, 1),
        (1, {"expert": 64, "expert_nodes": 4}, 4),
    ],
)
def test_tokens_are_sent_by_nodes_where_experts_are_chosen_by_groups(groups, parallel, nodes):
    assert ParallelConfig(**parallel).nodes_of_experts(groups) == nodes


def test_loads_are_frozen_beside_adapters():
    config = tiny(PLAIN | {"moe.global_aux_loss": 0.1}, fsdp=1)
    config.lora.rank = 2
    with pytest.raises(ValueError, match=r"moe.global_aux_loss=0\.1 needs the loads of each"):
        validate(config, 1)


def test_every_setting_reaches_the_layer():
    fields = {"moe.global_aux_loss": 0.25, "moe.jitter": 0.125, "moe.latent_size": 24}
    config = with_fields(ModelConfig(), PLAIN | fields | {"moe.force_balance": True})
    spec = pattern(config)[0][0][1].mixers[0]
    assert spec.routing.force_balance and not spec.routing.sinkhorn
    assert (spec.global_aux_loss, spec.jitter, spec.latent_size) == (0.25, 0.125, 24)


@pytest.mark.parametrize(("chosen", "score"), [(1, "sigmoid"), (2, "softmax")])
def test_sinkhorn_weighs_as_megatron_does(chosen, score):
    config = with_fields(ModelConfig(), PLAIN | EVEN | {"moe.top_k": chosen})
    routing = pattern(config)[0][0][1].mixers[0].routing
    assert routing.sinkhorn and routing.softmax_before_topk and routing.score.value == score
    assert routing.top_k == chosen
