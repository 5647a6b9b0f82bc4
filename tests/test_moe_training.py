"""Models with experts in the train step: every layout gives one device's losses and gradients, and
loads are evened by counts of the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import BATCH, LENGTH, controls, mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.config.model import DType, ExpertBackend, Recompute, RouterScore
from maxmeg.config.schema import ExpertExchange, LoraConfig, Schedule
from maxmeg.layers.balance import TALLIES
from maxmeg.models.lm import language_model
from maxmeg.parallel.parts import frozen, trained
from maxmeg.planning.flops import training_flops
from maxmeg.state import array_name, to_arrays
from maxmeg.step import make_gradients, make_train_step

TOLERANCE = 1e-5  # relative, float32: the order of sums differs
FLOOR = 1e-8  # for gradients that are zero in exact arithmetic
RATE = 0.01
MODELS = {
    "mixtral": {
        "num_experts": 8,
        "router_aux_loss": 0.1,
        "router_z_loss": 0.01,
    },
    "by turns": {
        "num_experts": 4,
        "expert_every": 2,
        "router_sinkhorn": True,
        "router_z_loss": 0.01,
    },
    "deepseek": {
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_ffn_size": 32,
        "shared_ffn_size": 32,
        "first_dense_layers": 1,
        "router_score": RouterScore.sigmoid,
        "router_normalize": True,
        "router_scale": 2.5,
        "router_groups": 4,
        "router_groups_kept": 2,
        "router_bias": True,
        "router_bias_rate": RATE,
        "router_sequence_aux_loss": 0.1,
        "router_global_aux_loss": 0.1,
        "router_jitter": 0.1,
        "expert_latent_size": 16,
        "mla_kv_rank": 16,
        "mla_query_rank": 12,
        "mla_rotary_size": 2,
        "mtp_depths": 1,  # every stage runs that layer: its experts' tokens are counted once
    },
}
TIGHT = {"expert_exchange": ExpertExchange.ragged, "expert_buffer": 1.0}  # several rounds
WIDE = {"expert_buffer": 3.0}  # one
# The loss over a microbatch depends on what that is: "mixtral" takes the whole batch at once.
LAYOUTS = [
    ("mixtral", {"expert": 4, "fsdp": 2}, {}, 0),
    (
        "mixtral",
        {"data": 2, "expert": 2, "fsdp": 1, "tensor": 2},
        {"expert_capacity": 4.0, "expert_pad": True},  # all that there may be: nothing is dropped
        0,
    ),
    ("by turns", {"pipe": 2, "tensor": 2, "fsdp": 1}, {"recompute": Recompute.selective}, 16),
    (
        "deepseek",
        {"expert": 4, "fsdp": 1, "tensor": 4, "expert_tensor": 2, **TIGHT},
        {"recompute": Recompute.full},
        2,
    ),
    (
        "deepseek",
        {"pipe": 2, "expert": 4, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble}
        | {"expert_tensor": 1, **WIDE},
        {},
        2,
    ),
]


def configured(model: str, fields: dict, micro: int, **parallel):
    return tiny(
        {"num_layers": 4, **MODELS[model], **fields}, {"micro_batch_size": micro}, **parallel
    )


def gradients(model: str, parallel: dict, fields: dict, micro: int):
    """(loss, gradients by name in model order) of one batch."""
    config = configured(model, fields, micro, **parallel)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    found, sums = function(loaded(state.model), tiny_batch(config, mesh), state.key)
    layout, arrays = abstract.model.stack.layout, {}
    for name, array in to_arrays(found).items():
        array = np.asarray(array)
        if name.startswith("stack."):
            array = array[layout.places(int(name.split(".")[2]))]
        arrays[name] = array
    return float(sums["loss_sum"] / sums["tokens"]), arrays


def loaded(model):
    """The model after a step in which each expert got more tokens than the one before it."""

    def one(path, array):
        is_load = array_name(path).endswith("moe.load")
        return array + 1 + jnp.arange(array.shape[-1]) if is_load else array

    return jax.tree_util.tree_map_with_path(one, model)


@functools.cache
def one_device(model: str):
    return gradients(model, {"fsdp": 1}, {}, 0)


@pytest.mark.parametrize(
    ("model", "parallel", "fields", "micro"),
    [*(pytest.param(*one, marks=pytest.mark.slow) for one in LAYOUTS[:-1]), LAYOUTS[-1]],
)
def test_layout_equals_single_device(model, parallel, fields, micro):
    """Also the counts behind the router's bias, whole numbers of all tokens."""
    loss, found = gradients(model, parallel, fields, micro)
    reference_loss, reference = one_device(model)
    assert loss == pytest.approx(reference_loss, rel=TOLERANCE)
    assert found.keys() == reference.keys()
    for name, array in found.items():
        wanted = reference[name]
        rows = min(len(array), len(wanted))  # the padding of the vocabulary differs
        error = np.abs(array[:rows] - wanted[:rows]).max()
        assert error <= TOLERANCE * np.abs(wanted).max() + FLOOR, name
    counts = [a for name, a in reference.items() if name.endswith("moe.bias")]
    counts = [a[..., : MODELS[model]["num_experts"]].sum(-1) for a in counts]
    copies = MODELS[model].get("experts_per_token", 2) * BATCH * LENGTH
    assert len(counts) == 1 + (model == "deepseek") and all((c == copies).all() for c in counts)


def test_a_bias_moves_by_counts_and_by_nothing_else():
    """No decay, no clipping, no moments; the norm of the gradients leaves the counts out."""
    plain = {"router_jitter": 0.0, "mtp_depths": 0}  # whose noise is another in every step
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
    moved, found = after[name] - before[name], np.asarray(metrics["expert_loads"])
    is_even = np.arange(found.shape[1]) == 8 + TALLIES.index("global_load_balancing_loss")
    wanted = np.where(is_even, 1, counts[name])  # no step before it has counted
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)
    counts = counts[name][:, :8]
    assert np.array_equal(after[name.replace("bias", "load")], counts)
    mean = counts.mean(-1, keepdims=True)
    np.testing.assert_allclose(moved, RATE * np.sign(mean - counts), rtol=1e-5)
    assert float(metrics["grad_norm"]) < counts.max()
    losses = [float(metrics["loss"])]
    for _ in range(3):
        state, metrics = step(state, batch, controls(mesh))
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and step._cache_size() == 1


def test_without_router_bias_it_stays_zero():
    config = configured("mixtral", {}, 0, fsdp=1)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    state, metrics = step(state, tiny_batch(config, mesh), controls(mesh))
    biases = [a for name, a in to_arrays(state.model).items() if name.endswith("moe.bias")]
    assert len(biases) == 1 and not np.any(biases[0])
    assert metrics["expert_loads"].shape == (4, 8 + len(TALLIES))


def test_a_backend_that_cannot_run_here_is_refused():
    config = configured("mixtral", {"expert_backend": ExpertBackend.mosaic}, 0, fsdp=1)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    with pytest.raises(ValueError, match=r"grouped_matmul.*mosaic"):
        make_gradients(config, mesh, abstract.model)(
            state.model, tiny_batch(config, mesh), state.key
        )


def test_flops_count_the_experts_of_a_token():
    dense = configured("mixtral", {"num_experts": 0}, 0).model
    sparse = configured("mixtral", {}, 0).model
    mlp = 3 * dense.hidden_size * dense.ffn
    router = 8 * dense.hidden_size
    more = training_flops(sparse, 16) - training_flops(dense, 16)
    assert more == 6 * 16 * 4 * (mlp + router)  # a second expert and the router, four layers
    latent = configured("mixtral", {"expert_latent_size": 16, "expert_every": 2}, 0).model
    more = training_flops(latent, 16) - training_flops(dense, 16)
    inner = 2 * 3 * 16 * dense.ffn + 2 * dense.hidden_size * 16
    assert more == 6 * 16 * 2 * (inner + router - mlp)


@pytest.mark.parametrize(
    ("fields", "parallel", "message"),
    [
        ({"experts_per_token": 9}, {}, "experts_per_token=9 must be from 1 to num_experts=8"),
        ({"router_groups": 3}, {}, "router_groups=3 does not divide num_experts=8"),
        ({"router_groups": 8, "router_groups_kept": 1}, {}, "must hold experts_per_token=2"),
        ({"first_dense_layers": 4}, {}, "first_dense_layers=4 must leave some"),
        ({"parallel_block": True}, {}, "cannot be in a parallel_block"),
        ({"num_experts": 6}, {"expert": 4}, "num_experts=6 is not divisible by parallel.expert=4"),
        ({"num_experts": 0}, {"expert": 2}, "parallel.expert=2: only for models with experts"),
        ({"expert_ffn_size": 33}, {"tensor": 2}, "expert_ffn_size=33 is not divisible"),
        (
            {},
            {"tensor": 2, "expert_tensor": 1},
            "expert=1 is not divisible by 2: with",
        ),
        ({}, {"tensor": 4, "expert_tensor": 3}, "expert_tensor=3 does not divide tensor=4: choose"),
        ({}, {"expert": 2, "expert_buffer": 0.5}, "expert_buffer=0.5 must be at least 1"),
        ({}, {"expert_exchange": ExpertExchange.ragged}, "have no effect with expert=1"),
        ({"num_experts": 0}, {}, "router_aux_loss=0.1, .*has no effect without model.num_experts"),
        ({"shared_gate": True}, {}, "shared_gate=True has no effect without model.shared_ffn_size"),
        ({"router_bias_rate": 0.1}, {}, "no effect without model.router_bias"),
        ({"expert_capacity": -1.0}, {}, "expert_capacity=-1.0"),
    ],
)
def test_what_does_not_fit_is_refused(fields, parallel, message):
    with pytest.raises(ValueError, match=message):
        mesh_of(configured("mixtral", fields, 0, **{"fsdp": 1, **parallel}))


def test_adapters_leave_the_experts_frozen_and_the_bias_exact():
    fields = {"dtype": DType.bfloat16, "mtp_depths": 0, "router_global_aux_loss": 0.0}
    config = configured("deepseek", fields, 0, fsdp=1)
    config.lora = LoraConfig(rank=2, targets=("mixers.*",))
    model = jax.eval_shape(lambda: language_model(jax.random.key(0), config))
    arrays = to_arrays(frozen(model))
    experts = [array for name, array in arrays.items() if ".experts." in name]
    (bias,) = (array for name, array in arrays.items() if name.endswith("moe.bias"))
    assert len(experts) == 3 and all(array.dtype == jnp.bfloat16 for array in experts)
    assert bias.dtype == jnp.float32
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    _, metrics = step(state, tiny_batch(config, mesh), controls(mesh))
    assert float(metrics["grad_norm"]) > 0 and "expert_loads" not in metrics
    assert {name.split(".")[-3] for name in to_arrays(trained(model)) if "moe" in name} == {
        "gate",
        "up",
        "out",
        "latent_down",
        "latent_up",
    }
