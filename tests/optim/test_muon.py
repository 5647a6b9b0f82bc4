"""Muon against NumPy, and on meshes against one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layouts import controls, in_model_order, mesh_of, tiny, tiny_batch, tiny_state

from maxmeg.config.model import DType
from maxmeg.config.optimizers import MuonConfig, MuonScale, NewtonSchulz
from maxmeg.config.schema import OptimConfig, Optimizer
from maxmeg.layers.lora import linears
from maxmeg.models.lm import language_model
from maxmeg.optim.build import make_optimizer
from maxmeg.optim.muon import COEFFICIENTS, newton_schulz, orthogonalized
from maxmeg.parallel.trainable import trained
from maxmeg.step import make_train_step

SAME_UPDATE = 1e-5  # of the largest; orthogonalizing amplifies rounding of the gradients
SAME_GRADIENT = 1e-6  # of updates up to 1.5, from equal gradients
EXACT = {"dtype": DType.float32}


def iterated(x: np.ndarray, sets: list, steps: int) -> np.ndarray:
    """Newton-Schulz on the singular values, which leaves the singular vectors."""
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for a, b, c in itertools.islice(itertools.cycle(sets), steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 2, 7, 7)])
@pytest.mark.parametrize("name", NewtonSchulz)
def test_iterations_act_on_singular_values(name, shape):
    sets = COEFFICIENTS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    actual = newton_schulz(jnp.asarray(x), MuonConfig(coefficients=name, steps=len(sets), **EXACT))
    flat = x.reshape(-1, *shape[-2:])
    expected = np.stack([iterated(matrix, sets, len(sets)) for matrix in flat]).reshape(shape)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
    assert 0.6 < np.linalg.svd(np.asarray(actual), compute_uv=False).mean() < 1.4


def test_bfloat16_is_close_and_zero_stays_zero():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 8)), jnp.float32).at[1].set(0)
    exact = newton_schulz(x, MuonConfig(**EXACT))
    rounded = newton_schulz(x, MuonConfig())
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.05)
    assert not np.any(rounded[1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_are_the_formula(nesterov):
    muon = MuonConfig(0.8, nesterov, scale=MuonScale.unit_rms_norm, extra_scale=0.3, **EXACT)
    muon.adamw_lr = 0.02
    config = OptimConfig(Optimizer.muon, lr=0.1, beta1=0.7, beta2=0.9, eps=1e-3, muon=muon)
    rng = np.random.default_rng(0)
    shape, axes = (2, 3, 4), ("embed", "mlp")
    tree = {
        "stack": nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32), axes=axes),
        "embedding": nnx.Param(jnp.ones((3, 4)), axes=("vocab", "embed")),
    }
    optimizer = make_optimizer(config)
    state, moment, first, second = optimizer.init(tree), 0.0, 0.0, 0.0
    expected, table = np.asarray(tree["stack"][...]), np.ones((3, 4))
    for step in (1, 2, 3):
        gradients = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), tree)
        rates = {"learning_rate": 0.1, "weight_decay": 0.5}
        updates, state = optimizer.update(gradients, state, tree, **rates)
        tree = jax.tree.map(jnp.add, tree, updates)
        g, h = np.asarray(gradients["stack"][...]), np.asarray(gradients["embedding"][...])
        moment = 0.8 * moment + 0.2 * g
        ahead = 0.8 * moment + 0.2 * g if nesterov else moment
        sets = COEFFICIENTS[NewtonSchulz.quintic]
        direction = 0.3 * np.sqrt(4 / 3) * np.stack([iterated(m, sets, 5) for m in ahead])
        expected = expected - 0.1 * (direction + 0.5 * expected)
        first, second = 0.7 * first + 0.3 * h, 0.9 * second + 0.1 * h**2
        adam = first / (1 - 0.7**step) / (np.sqrt(second / (1 - 0.9**step)) + 1e-3)
        table = table - 0.02 * (adam + 0.5 * table)
    np.testing.assert_allclose(tree["stack"][...], expected, atol=1e-5)
    np.testing.assert_allclose(tree["embedding"][...], table, rtol=1e-5)


@pytest.mark.parametrize("per_head", [False, True])
def test_each_part_of_a_head_is_a_matrix(per_head):
    """Two layers, three heads with parts of 4 and of 2 columns."""
    muon = MuonConfig(per_head=per_head, scale=MuonScale.unit_rms_norm, **EXACT)
    x = np.random.default_rng(0).normal(size=(2, 5, 18)).astype(np.float32)
    tree = {"stack": nnx.Param(jnp.asarray(x), axes=("embed", "heads"), parts=(4, 2))}
    ends = [0, 4, 6, 10, 12, 16, 18] if per_head else [0, 18]
    sets = COEFFICIENTS[NewtonSchulz.quintic]
    blocks = [x[:, :, first:last] for first, last in itertools.pairwise(ends)]
    directions = [
        np.sqrt(block.shape[2] / 5) * np.stack([iterated(m, sets, 5) for m in block])
        for block in blocks
    ]
    found = orthogonalized(tree, muon, None, False)["stack"][...]
    np.testing.assert_allclose(found, np.concatenate(directions, axis=2), atol=1e-4)


PARTS = {
    "attention gated_delta": {
        **{"attention.query": (4, 4), "attention.key": (4,), "attention.value": (4,)},
        **{"gated_delta.query": (5,), "gated_delta.key": (5,), "gated_delta.value": (7,)},
    },
    "mla mla": {"mla.query_up": (4, 2), "mla.kv_down": (6, 2), "mla.key_up": (4,)}
    | {"mla.value_up": (3,)},
}


@pytest.mark.parametrize("layers", PARTS)
def test_heads_of_projections_have_these_parts(layers):
    """With an output gate: a query and a gate; of latents, parts without and with rotation."""
    fields = {"layers": layers, "attention.head_dim": 4}
    if "mla" in layers:
        fields |= {
            "mla.kv_rank": 6,
            "mla.rotary_size": 2,
            "mla.query_rank": 10,
            "mla.value_size": 3,
        }
    else:
        fields |= {"attention.output_gate": True, "delta.num_heads": 2}
        fields |= {"delta.key_size": 5, "delta.value_size": 7}
    config, found = tiny(fields), {}
    model = jax.eval_shape(lambda key: language_model(key, config), jax.random.key(0))
    for path, linear in linears(model.stack).items():
        if parts := linear.weight.get_metadata("parts"):
            assert linear.weight.shape[-1] % sum(parts) == 0
            found[".".join(path.split(".")[-2:])] = parts
    assert found == PARTS[layers]


EXPERTS = {"layers": "*(attention,moe)", "moe.num_experts": 4, "moe.top_k": 2}
LATENT = {"mla.kv_rank": 16, "mla.query_rank": 16, "mla.rotary_size": 4}
MODEL = EXPERTS | LATENT | {"num_layers": 4, "layers": "*(mla,moe)"}
MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "expert": 2, "fsdp": 2, "micro_batch_size": 2},
    {"data": 8, "zero1": False},
]


def parameters_after_steps(parallel: dict) -> dict:
    sizes = {name: value for name, value in parallel.items() if name != "micro_batch_size"}
    config = tiny(MODEL, {"micro_batch_size": parallel.get("micro_batch_size", 0)}, **sizes)
    muon = MuonConfig(nesterov=True, per_head=True, **EXACT)
    config.optim = OptimConfig(Optimizer.muon, muon=muon)
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    for seed in range(2):
        state, metrics = step(state, tiny_batch(config, mesh, seed), controls(mesh))
        assert not metrics["skipped"]
    return jax.device_get(in_model_order({"model": state.model}))


@pytest.fixture(scope="module")
def on_one_device() -> dict:
    return parameters_after_steps({})


def updates_of_weights(parallel: dict, per_head: bool) -> dict:
    """Muon's updates with the weights in place of gradients, which are the same on every mesh."""
    model = EXPERTS | {"num_layers": 16}
    train = {"micro_batch_size": int("pipe" in parallel)}
    config = tiny(model, train, **parallel)
    config.optim = OptimConfig(Optimizer.muon, muon=MuonConfig(per_head=per_head, **EXACT))
    mesh = mesh_of(config)
    optimizer, _, state = tiny_state(config, mesh)
    rates = {"learning_rate": 1.0, "weight_decay": 0.0}

    def update(model, moments):
        return optimizer.update(model, moments, model, **rates)[0]

    found = jax.jit(update)(trained(state.model), state.optimizer)
    return jax.device_get(in_model_order({"model": found}))


@pytest.mark.slow
@pytest.mark.parametrize("per_head", [False, True])
def test_equal_gradients_give_equal_updates_on_every_mesh(per_head):
    """Of 16 layers each device has at least 4: XLA's products of fewer matrices round differently
    on CPUs, which the iterations amplify (by 5e-6 instead)."""
    expected = updates_of_weights({}, per_head)

    def compare(a, b):
        np.testing.assert_allclose(a, b[tuple(map(slice, a.shape))], atol=SAME_GRADIENT)

    for parallel in ({"tensor": 4}, {"fsdp": 4}, {"pipe": 2}, {"expert": 2, "data": 2}):
        jax.tree.map(compare, expected, updates_of_weights(parallel, per_head))


@pytest.mark.parametrize(
    "parallel", [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES]
)
def test_updates_on_a_mesh_are_those_of_one_device(parallel, on_one_device):
    found = parameters_after_steps(parallel)

    def compare(a, b):
        np.testing.assert_allclose(a, b[tuple(map(slice, a.shape))], atol=SAME_UPDATE)

    jax.tree.map(compare, on_one_device, found)
