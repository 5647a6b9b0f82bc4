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
from maxmeg.optim.build import make_optimizer
from maxmeg.optim.muon import COEFFICIENTS, newton_schulz
from maxmeg.step import make_train_step

SAME_UPDATE = 1e-5  # of the largest; orthogonalizing amplifies rounding of the gradients
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


MODEL = {"num_layers": 4, "layers": "*(attention,moe)", "moe.num_experts": 4, "moe.top_k": 2}
MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "expert": 2, "fsdp": 2, "micro_batch_size": 2},
    {"data": 8, "zero1": False},
]


def parameters_after_steps(parallel: dict) -> dict:
    sizes = {name: value for name, value in parallel.items() if name != "micro_batch_size"}
    config = tiny(MODEL, {"micro_batch_size": parallel.get("micro_batch_size", 0)}, **sizes)
    config.optim = OptimConfig(Optimizer.muon, muon=MuonConfig(nesterov=True, **EXACT))
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


@pytest.mark.parametrize(
    "parallel", [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES]
)
def test_updates_on_a_mesh_are_those_of_one_device(parallel, on_one_device):
    found = parameters_after_steps(parallel)

    def compare(a, b):
        np.testing.assert_allclose(a, b[tuple(map(slice, a.shape))], atol=SAME_UPDATE)

    jax.tree.map(compare, on_one_device, found)
