"""Models with experts in the train step: every layout gives one device's losses and gradients, and
loads are evened by counts of the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import (
    BATCH,
    LENGTH,
    assert_equal_but_rounding,
    batch_gradients,
    controls,
    mesh_of,
    tiny,
    tiny_batch,
    tiny_state,
)

from maxmeg.checkpoint.names import array_name, to_arrays
from maxmeg.config.mixers import ExpertBackend, ExpertExchange, RouterScore
from maxmeg.config.model import DType, NormPlace
from maxmeg.config.parallel import LaneOrder, Schedule
from maxmeg.config.schema import LoraConfig
from maxmeg.layers.auxiliary import by_layer
from maxmeg.models.lm import language_model
from maxmeg.parallel.trainable import frozen, trained
from maxmeg.planning.cost.flops import training_flops
from maxmeg.step import make_train_step

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-8  # for gradients that are zero in exact arithmetic
RATE = 0.01
MODELS = {
    "mixtral": {
        "layers": "*(attention,moe)",
        "moe.num_experts": 8,
        "moe.scale_inputs": True,
        "moe.aux_loss": 0.1,
        "moe.z_loss": 0.01,
    },
    "by turns": {
        "layers": "*(attention,moe attention,mlp)",
        "moe.num_experts": 4,
        "moe.sinkhorn": True,
        "moe.z_loss": 0.01,
    },
    "deepseek": {
        "layers": "mla,mlp *(mla,moe)",
        "moe.num_experts": 8,
        "moe.top_k": 3,
        "moe.ffn_size": 32,
        "moe.shared_ffn_size": 32,
        "moe.norms": True,
        "norm_place": NormPlace.sandwich,
        "moe.score": RouterScore.sigmoid,
        "moe.normalize_weights": True,
        "moe.scale": 2.5,
        "moe.num_groups": 4,
        "moe.topk_groups": 2,
        "moe.bias_balancing": True,
        "moe.bias_rate": RATE,
        "moe.sequence_aux_loss": 0.1,
        "moe.global_aux_loss": 0.1,
        "moe.jitter": 0.1,
        "moe.latent_size": 16,
        "mla.kv_rank": 16,
        "mla.query_rank": 12,
        "mla.rotary_size": 2,
        "mtp.num_layers": 1,
    },
}
DENSE = {"layers": "*(attention,mlp)"}
# The loss over a microbatch depends on what that is: "mixtral" takes the whole batch at once.
LAYOUTS = [
    (
        "mixtral",
        {"expert": 4, "fsdp": 2, "expert_buffer": 1.0},  # several rounds
        {"moe.backend": ExpertBackend.batched},
        0,
    ),
    ("by turns", {"pipe": 2, "tensor": 2, "fsdp": 1}, {"recompute": "selective"}, 16),
    (
        "mixtral",
        {"data": 2, "expert": 2, "fsdp": 1, "tensor": 2},
        {
            "moe.capacity_factor": 4.0,
            "moe.pad_to_capacity": True,
        },  # all that there may be: nothing is dropped
        0,
    ),
    (
        "deepseek",
        {"pipe": 2, "expert": 4, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble}
        | {"expert_tensor": 1, "expert_nodes": 2, "expert_buffer": 3.0},
        {},
        2,
    ),
]


def configured(model: str, fields: dict, micro: int, **parallel):
    return tiny(
        {"num_layers": 4, **MODELS[model], **fields}, {"micro_batch_size": micro}, **parallel
    )


def gradients(model: str, parallel: dict, fields: dict, micro: int):
    """(loss, gradients and auxiliary values by name in model order) of one batch."""
    sums, found, *_ = batch_gradients(configured(model, fields, micro, **parallel), prepare=loaded)
    auxiliary = {name: np.asarray(rows) for name, rows in by_layer(sums).items()}
    return {"loss": sums["loss_sum"] / sums["tokens"]}, auxiliary | found


def loaded(model):
    """The model after a step in which each expert got more tokens than the one before it."""

    def one(path, array):
        is_load = array_name(path).endswith("moe.load")
        return array + 1 + jnp.arange(array.shape[-1]) if is_load else array

    return jax.tree_util.tree_map_with_path(one, model)


@functools.cache
def one_device(model: str):
    return gradients(model, {"fsdp": 1}, {}, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel", "fields", "micro"), LAYOUTS)
def test_layout_equals_single_device(model, parallel, fields, micro):
    """Also the auxiliary values; the counts of tokens are whole numbers."""
    found, wanted = gradients(model, parallel, fields, micro), one_device(model)
    assert_equal_but_rounding(found, wanted, TOLERANCE, FLOOR)
    copies = MODELS[model].get("moe.top_k", 2) * BATCH * LENGTH
    sparse = {"mixtral": 4, "by turns": 2, "deepseek": 3 + 1}[model]  # layers with experts
    assert wanted[1]["expert_tokens"].sum(-1).tolist() == [copies] * sparse


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "minimal"])
def test_experts_of_two_lanes_that_follow_each_other_equal_single_device(recompute, monkeypatch):
    """As where they are on several nodes: here with two devices a node."""
    monkeypatch.setattr("maxmeg.config.parallel.GPUS_A_NODE", 2)
    parallel = {"pipe": 2, "expert": 4, "fsdp": 1, "lanes": LaneOrder.together}
    assert configured("deepseek", {}, 2, **parallel).parallel.experts_cross_nodes
    found = gradients("deepseek", parallel, {"recompute": recompute}, 2)
    wanted = one_device("deepseek")
    assert_equal_but_rounding(found, wanted, TOLERANCE, FLOOR)


@pytest.mark.slow
def test_a_bias_moves_by_counts_and_by_nothing_else():
    """No decay, no clipping, no moments; the norm of the gradients leaves the counts out."""
    plain = {"moe.jitter": 0.0, "mtp.num_layers": 0}  # whose noise is another in every step
    config = configured("deepseek", plain, 2, data=2, fsdp=1)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    batch = tiny_batch(config, mesh)
    counts = gradients("deepseek", {"fsdp": 1}, plain, 0)[1]
    before = {name: np.asarray(array) for name, array in to_arrays(state.model).items()}
    step = make_train_step(config, mesh, optimizer, abstract)
    state, metrics = step(state, batch, controls(mesh))
    (name,) = (name for name in before if name.endswith("moe.bias"))
    after = {name: np.asarray(array) for name, array in to_arrays(state.model).items()}
    moved, found = after[name] - before[name], metrics["layers"]
    tokens = np.asarray(found["expert_tokens"])
    assert np.array_equal(tokens, counts["expert_tokens"])
    even = tokens.sum(-1)  # a loss of 1: no step before it has counted
    np.testing.assert_allclose(found["global_load_balancing_loss"], even, rtol=TOLERANCE)
    assert np.array_equal(after[name.replace("bias", "load")], tokens)
    mean = tokens.mean(-1, keepdims=True)
    np.testing.assert_allclose(moved, RATE * np.sign(mean - tokens), rtol=1e-5)
    assert float(metrics["grad_norm"]) < tokens.max()
    assert not any(name.endswith(("moe.bias", "moe.load")) for name in to_arrays(state.optimizer))
    losses = [float(metrics["loss"])]
    for _ in range(3):
        state, metrics = step(state, batch, controls(mesh))
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and step._cache_size() == 1


def test_flops_of_latent_experts():
    """Two of the four layers have experts. A token uses two experts of latent width 16, the latent
    projections and the router."""
    fields = {"moe.latent_size": 16, "layers": "*(attention,moe attention,mlp)"}
    dense, latent = (configured("mixtral", each, 0).model for each in (DENSE, fields))
    inner = 2 * 3 * 16 * dense.ffn + 2 * dense.hidden_size * 16 + 8 * dense.hidden_size
    more = training_flops(latent, 16) - training_flops(dense, 16)
    assert more == 6 * 16 * 2 * (inner - 3 * dense.hidden_size * dense.ffn)


@pytest.mark.parametrize(
    ("fields", "parallel", "message"),
    [
        ({"moe.top_k": 9}, {}, "top_k=9 must be from 1 to num_experts=8"),
        ({"moe.num_groups": 3}, {}, "moe.num_groups=3 does not divide num_experts=8"),
        ({"moe.num_groups": 8, "moe.topk_groups": 1}, {}, "must hold top_k=2"),
        (
            {"layers": "*(attention,moe)", "moe.num_experts": 6},
            {"expert": 4},
            "num_experts=6 is not divisible by parallel.expert=4",
        ),
        (DENSE, {"expert": 2}, "parallel.expert=2: only for models with experts"),
        ({"moe.ffn_size": 33}, {"tensor": 2}, "moe.ffn_size=33 is not divisible"),
        (
            {"moe.latent_size": 15, "moe.ffn_size": 33},
            {"fsdp": 2},
            "moe.latent_size=15 is not divisible by parallel.fsdp=2: choose fsdp in 1, 3",
        ),
        ({}, {"tensor": 2, "expert_tensor": 1}, "expert=1 is not divisible by 2: with"),
        ({}, {"tensor": 4, "expert_tensor": 3}, "expert_tensor=3 does not divide tensor=4: choose"),
        ({}, {"expert_exchange": ExpertExchange.gather}, "has no effect without parallel.expert:"),
        (
            {"moe.shared_gate": True},
            {},
            "shared_gate=True has no effect without model.moe.shared_ffn_size",
        ),
    ],
)
def test_invalid_arguments_are_refused(fields, parallel, message):
    with pytest.raises(ValueError, match=message):
        mesh_of(configured("mixtral", fields, 0, **{"fsdp": 1, **parallel}))


@pytest.mark.slow
def test_adapters_leave_the_experts_frozen_and_the_bias_exact():
    fields = {"dtype": DType.bfloat16, "mtp.num_layers": 0, "moe.global_aux_loss": 0.0}
    config = configured("deepseek", fields, 0, fsdp=1)
    config.lora = LoraConfig(rank=2, targets=("mixers.*",))
    model = jax.eval_shape(lambda: language_model(jax.random.key(0), config))
    arrays = to_arrays(frozen(model))
    experts = [array for name, array in arrays.items() if ".moe.experts." in name]
    (bias,) = (array for name, array in arrays.items() if name.endswith("moe.bias"))
    assert len(experts) == 3 and all(array.dtype == jnp.bfloat16 for array in experts)
    assert bias.dtype == jnp.float32
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    state, metrics = step(state, tiny_batch(config, mesh), controls(mesh))
    assert float(metrics["grad_norm"]) > 0 and metrics["layers"]["expert_tokens"].shape == (3, 8)
    (bias,) = (a for name, a in to_arrays(state.model).items() if name.endswith("moe.bias"))
    assert not np.any(bias)  # the base's own state does not change
    assert {name.split(".")[-3] for name in to_arrays(trained(model)) if "moe" in name} == {
        "gate",
        "up",
        "out",
        "latent_down",
        "latent_up",
    }
