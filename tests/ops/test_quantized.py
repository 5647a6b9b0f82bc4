"""Quantizers against NumPy with ml_dtypes; products and gradients within what the formats allow."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from maxmeg.ops.quantized import Recipe, matmul, quantize, scale_of

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # largest relative rounding
PRODUCT = {E4M3: 0.05, E5M2: 0.08}  # of the norm of a product of normal numbers


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from((E4M3, E5M2)))
def test_a_scale_is_the_smallest_power_of_two_that_fits(largest: float, dtype: str):
    scale, most = float(scale_of(jnp.float32(largest), dtype)), float(ml_dtypes.finfo(dtype).max)
    assert np.frexp(scale)[0] == 0.5
    assert largest / scale <= most * (1 + 1e-7) < 2 * largest / scale * (1 + 2e-7)


NUMBERS = arrays.arrays(np.float32, (4, 6), elements=st.floats(-3e4, 3e4, width=32))


@given(NUMBERS, st.sampled_from((E4M3, E5M2)), st.sampled_from(("float32", "bfloat16")))
def test_codes_are_those_of_ml_dtypes(x, dtype: str, wide: str):
    x = np.asarray(jnp.asarray(x, wide))
    codes, scale = quantize(jnp.asarray(x), dtype)
    wanted = (x.astype(np.float32) / np.float32(scale)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_extreme_numbers_keep_their_range(dtype):
    rows = np.float32([[0, 0], [3e-39, 1e-39], [1e38, -3e38], [1, 448], [np.nan, 1], [np.inf, 1]])
    for row in rows:
        codes, scale = quantize(jnp.asarray(row, jnp.bfloat16), dtype)
        actual = np.asarray(codes, np.float32) * float(scale)
        rounded = np.asarray(jnp.asarray(row, jnp.bfloat16), np.float32)
        if np.isfinite(row).all():
            assert np.isfinite(actual).all()
            if np.abs(row).max() > 1e-30:
                assert (np.abs(actual - rounded) <= HALF_STEP[dtype] * np.abs(rounded)).all()
        else:
            assert not np.isfinite(actual[0])


@given(st.integers(0, 2**31), st.integers(0, 3))
def test_what_shares_a_scale_hardly_changes_a_number(seed: int, shift: int):
    """The reason for powers of two: codes times scale are the same with any larger neighbour."""
    x = np.random.default_rng(seed).uniform(0.01, 1, 64).astype(np.float32)
    alone, scale = quantize(jnp.asarray(x), E4M3)
    beside, larger = quantize(jnp.asarray([*x, 2.0**shift]), E4M3)
    alone, beside = (
        np.asarray(c, np.float32) * float(s) for c, s in ((alone, scale), (beside, larger))
    )
    np.testing.assert_array_equal(alone, beside[:-1])


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("backward", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_are_those_of_the_rounded_operands(shape, backward, dtype):
    """Bit for bit but for the order of float32 sums; the error against the unrounded operands is
    the format's."""
    rng, recipe = np.random.default_rng(0), Recipe(backward=backward)
    x, w, slope = (
        jnp.asarray(rng.normal(size=(*shape, *size)), dtype)
        for size in ((48, 32), (32, 64), (48, 64))
    )
    codes, scale = quantize(w, recipe.forward)
    y, pull = jax.vjp(lambda x, w: matmul(x, w, codes, scale, recipe), x, w)
    actual = y, *pull(slope)
    exact = [np.asarray(a, np.float64) for a in (x, w, slope)]
    kinds = (recipe.forward, recipe.forward, backward)
    near = [
        np.asarray(codes, np.float64) * float(scale)
        for codes, scale in (
            quantize(a, kind) for a, kind in zip((x, w, slope), kinds, strict=True)
        )
    ]
    for values, tolerance in (
        (near, 2.0**-7 if dtype == "bfloat16" else 1e-3),
        (exact, PRODUCT[backward]),
    ):
        x_, w_, slope_ = values
        wanted = x_ @ w_, slope_ @ w_.swapaxes(-1, -2), x_.swapaxes(-1, -2) @ slope_
        for one, other in zip(actual, wanted, strict=True):
            assert one.dtype == dtype
            error = np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
            assert error < tolerance
