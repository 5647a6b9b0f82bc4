"""RMSNorm and LayerNorm against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.norm_cases import EPS, reference

from maxmeg.ops.norm import norm

TOLERANCE = 2e-6  # of the largest value, float32
BFLOAT16 = 2**-8  # of each value: one rounding of the result


@jax.jit
def normalize(x, weight, bias):
    return norm(x, weight, bias, EPS, centred=bias is not None)


def inputs(with_bias: bool, scale: float = 1.0):
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=(2, 3, 24)) + 0.5 * scale).astype(np.float32)
    weight, bias = rng.normal(size=(2, 24)).astype(np.float32)
    return x, weight, bias if with_bias else None


KINDS = pytest.mark.parametrize("with_bias", [False, True], ids=["rms", "layer"])


@KINDS
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_kernel_equals_the_reference_forward(with_bias, scale):
    given = inputs(with_bias, scale)
    expected = reference(*given)
    assert np.abs(normalize(*given) - expected).max() <= TOLERANCE * np.abs(expected).max()


@KINDS
def test_gradients_equal_finite_differences(with_bias):
    x, weight, bias = inputs(with_bias)
    cotangent = np.random.default_rng(1).normal(size=x.shape)
    given = {"x": x, "weight": weight} | ({"bias": bias} if with_bias else {})

    def loss(given):
        out = normalize(given["x"], given["weight"], given.get("bias"))
        return jnp.sum(out * cotangent.astype(np.float32))

    actual = jax.jit(jax.grad(loss))(given)
    for name, array in given.items():
        direction = np.random.default_rng(2).normal(size=array.shape)
        ends = []
        for sign in (1, -1):
            moved = {k: v.astype(np.float64) for k, v in given.items()}
            moved[name] = moved[name] + sign * 1e-6 * direction
            out = reference(moved["x"], moved["weight"], moved.get("bias"))
            ends.append((out * cotangent).sum())
        slope = (ends[0] - ends[1]) / 2e-6
        assert (actual[name] * direction).sum() == pytest.approx(slope, rel=1e-5), name


@KINDS
def test_bfloat16_computes_in_float32(with_bias):
    x, weight, bias = inputs(with_bias)
    x, weight = (np.asarray(jnp.bfloat16(a)) for a in (x, weight))
    bias = None if bias is None else np.asarray(jnp.bfloat16(bias))
    expected = reference(x, weight, None if bias is None else bias.astype(np.float64))
    out = normalize(x, weight, bias)
    assert out.dtype == jnp.bfloat16
    assert (np.abs(np.float64(out) - expected) <= BFLOAT16 * np.abs(expected) + 1e-6).all()
