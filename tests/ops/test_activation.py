"""Activations against float64 NumPy: one rounding in bfloat16, clamps and offsets of gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers.test_sublayers import FORMULAS

from maxmeg.ops.activation import ACTIVATIONS, GATED, activate

FLOAT32 = 1e-5  # relative, and of numbers near 0
BFLOAT16 = 2**-8  # of each value: one rounding of the result


def inputs(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = ("x", "up") if name in GATED else ("x",)
    return {key: 2 * rng.normal(size=(3, 40)).astype(np.float32) for key in names}


def formula(name: str, x, up=1.0):
    return FORMULAS[name](np.float64(x)) * np.float64(up)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bfloat16_is_rounded_once(name):
    given = {key: jnp.bfloat16(value) for key, value in inputs(name).items()}
    actual = jax.jit(activate, static_argnums=0)(name, **given)
    expected = formula(name, **{key: np.float64(value) for key, value in given.items()})
    assert actual.dtype == jnp.bfloat16
    assert (np.abs(np.float64(actual) - expected) <= BFLOAT16 * np.abs(expected) + 1e-6).all()
    gradient = jax.grad(lambda g: jnp.sum(activate(name, **g).astype(jnp.float32)))
    slope = jax.eval_shape(gradient, given)
    assert {value.dtype for value in slope.values()} == {jnp.dtype(jnp.bfloat16)}


def test_clamped_and_offset_gates():
    given = inputs("quick_geglu")
    actual = jax.jit(lambda g: activate("quick_geglu", **g, clamp=1.5, offset=1.0))(given)
    x, up = (np.float64(given[key]) for key in ("x", "up"))
    assert (x > 1.5).any() and (x < -1.5).any() and (np.abs(up) > 1.5).any()
    expected = formula("quick_geglu", np.minimum(x, 1.5), np.clip(up, -1.5, 1.5) + 1)
    np.testing.assert_allclose(actual, expected, rtol=FLOAT32, atol=FLOAT32)
