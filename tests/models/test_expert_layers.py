"""Where a model has experts, and which settings of them cannot be together."""

import dataclasses

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
REFUSED = [
    ({**EVEN, "moe.aux_loss": 0.1}, "moe.aux_loss=0.1 cannot be combined with sinkhorn"),
    ({**EVEN, "moe.sequence_aux_loss": 0.1}, "moe.sequence_aux_loss=0.1 cannot be combined"),
    ({**EVEN, "moe.global_aux_loss": 0.1}, "moe.global_aux_loss=0.1 cannot be combined"),
    (
        {**EVEN, "moe.bias_balancing": True},
        "moe.bias_balancing=True cannot be combined with sinkhorn",
    ),
    ({**EVEN, "moe.num_groups": 2}, "moe.num_groups=2 cannot be combined with sinkhorn"),
    (
        {**EVEN, "moe.capacity_factor": 1.0},
        "moe.capacity_factor=1.0 cannot be combined with sinkhorn",
    ),
    ({**EVEN, "moe.score": RouterScore.sigmoid}, "moe.score=sigmoid cannot be combined"),
    ({**EVEN, "moe.normalize_weights": True}, "moe.normalize_weights=True cannot be combined"),
    ({**EVEN, "moe.force_balance": True}, "moe.force_balance=True cannot be combined"),
    ({"layers": "*(attention,mlp)", **EVEN}, "moe.sinkhorn=True: no layer of model.layers="),
    ({"layers": "*(attention,mlp attention+moe)"}, "moe cannot be in a parallel block"),
    ({"layers": "*(attention+local,moe)"}, "attention and local cannot stand in one sublayer"),
    ({"layers": "*(mla,mlp attention,mlp)"}, "mla cannot be combined with attention and local"),
    (
        {"moe.pad_to_capacity": True},
        "pad_to_capacity=True has no effect without model.moe.capacity_factor: set that",
    ),
    (
        {
            "moe.pad_to_capacity": True,
            "moe.capacity_factor": 1.0,
            "moe.backend": ExpertBackend.mosaic,
        },
        "moe.backend=mosaic has no effect with pad_to_capacity=True",
    ),
]
ALLOWED = [
    {**EVEN, "moe.z_loss": 0.1, "moe.jitter": 0.1, "moe.scale": 2.0},
    {**EVEN, "moe.top_k": 1},
    {"moe.top_k": 1},
    {"moe.top_k": 1, "moe.score": RouterScore.sigmoid},
    {"moe.aux_loss": 0.1, "moe.sequence_aux_loss": 0.1, "moe.global_aux_loss": 0.1}
    | {"moe.bias_balancing": True, "moe.z_loss": 0.1, "moe.latent_size": 8},
    {
        "moe.capacity_factor": 1.25,
        "moe.pad_to_capacity": True,
        "moe.drop_policy": ExpertDrop.weight,
    },
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_incompatible_settings_are_refused(fields, message):
    model = with_fields(ModelConfig(), PLAIN | fields)
    actual = [*declared_problems(model, "model."), *model_problems(model)]
    assert any(message in problem for problem in actual), actual


def test_a_router_without_a_gradient_is_refused_only_in_training():
    config = tiny({"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.top_k": 1}, fsdp=1)
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
    model = with_fields(
        ModelConfig(),
        {
            "layers": "*(attention,moe)",
            "moe.num_experts": 4,
            "moe.capacity_factor": 1.0,
            "moe.pad_to_capacity": True,
        },
    )
    config = Config(model=model, parallel=ParallelConfig(expert=2, **parallel))
    actual = [*expert_layout_problems(config)]
    assert (len(actual) == 1 and message in actual[0]) if message else not actual


@pytest.mark.parametrize(
    ("backend", "parallel", "message"),
    [
        ("batched", {"expert": 2, "expert_exchange": ExpertExchange.ragged}, "choose auto, all_to"),
        ("xla", {"expert_buffer": 2.0}, "expert_buffer=2.0 has no effect with model.moe.backend"),
        ("batched", {"expert_buffer": 2.0}, ""),
        ("mosaic", {"expert": 2, "expert_buffer": 2.0}, ""),
    ],
)
def test_a_buffer_needs_blocks_or_an_exchange(backend, parallel, message):
    model = with_fields(ModelConfig(), PLAIN | {"moe.backend": ExpertBackend(backend)})
    actual = [*expert_layout_problems(Config(model=model, parallel=ParallelConfig(**parallel)))]
    assert (len(actual) == 1 and message in actual[0]) if message else not actual


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"expert": 8, "expert_nodes": 3}, "expert_nodes=3 does not divide expert=8: choose it in"),
        ({"expert": 8, "expert_nodes": 2, "expert_exchange": ExpertExchange.gather}, "not gather"),
        ({"expert": 8, "expert_nodes": 2, "expert_exchange": ExpertExchange.ragged}, "not ragged"),
        ({"expert": 8, "expert_nodes": 2}, ""),
    ],
)
def test_nodes_divide_the_devices_of_experts(parallel, message):
    model = with_fields(ModelConfig(), PLAIN | {"moe.num_experts": 8})
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
        (8, {"expert": 64, "expert_exchange": ExpertExchange.ragged}, 1),
        (1, {"expert": 64, "expert_nodes": 4}, 4),
    ],
)
def test_tokens_are_sent_by_nodes_where_experts_are_chosen_by_groups(groups, parallel, nodes):
    assert ParallelConfig(**parallel).nodes_of_experts(groups) == nodes


def test_loads_are_frozen_beside_adapters():
    config = tiny(
        {"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.global_aux_loss": 0.1}, fsdp=1
    )
    config.lora.rank = 2
    with pytest.raises(ValueError, match=r"moe.global_aux_loss=0\.1 needs the loads of each"):
        validate(config, 1)


def test_every_setting_reaches_the_layer():
    fields = {"moe.global_aux_loss": 0.25, "moe.jitter": 0.125, "moe.latent_size": 24}
    config = with_fields(
        ModelConfig(),
        {"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.force_balance": True, **fields},
    )
    spec = pattern(config)[0][0][1].mixers[0]
    assert spec.routing.force_balance and not spec.routing.sinkhorn
    assert (spec.global_aux_loss, spec.jitter, spec.latent_size) == (0.25, 0.125, 24)


def test_sinkhorn_weighs_as_megatron_does():
    for chosen, score in ((1, "sigmoid"), (2, "softmax")):
        config = with_fields(
            ModelConfig(),
            {
                "layers": "*(attention,moe)",
                "moe.num_experts": 4,
                "moe.sinkhorn": True,
                "moe.top_k": chosen,
            },
        )
        routing = pattern(config)[0][0][1].mixers[0].routing
        assert routing.sinkhorn and routing.softmax_before_topk and routing.score.value == score
        assert dataclasses.replace(routing, sinkhorn=False).top_k == chosen
