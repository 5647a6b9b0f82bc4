"""Quantizers against NumPy with ml_dtypes; products and gradients within what the formats allow."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tables import thinned

from maxmeg.ops import quantized
from maxmeg.ops.backend import Device
from maxmeg.ops.quantized import (
    Recipe,
    dequantize_blocks,
    matmul,
    quantize,
    quantize_blocks,
    scale_of,
)

E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
RECIPES = {
    "hybrid": Recipe(),
    "e4m3": Recipe(backward=E4M3),
    "mxfp8": Recipe(backward=E4M3, block=32),
    "squares": Recipe(backward=E4M3, block=16, square=True),
}
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # largest relative rounding
PRODUCT = {E4M3: 0.05, E5M2: 0.08}  # of the norm of a product of normal numbers


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from((E4M3, E5M2)))
def test_a_scale_is_the_smallest_power_of_two_that_fits(largest: float, dtype: str):
    scale, most = float(scale_of(jnp.float32(largest), dtype)), float(ml_dtypes.finfo(dtype).max)
    assert np.frexp(scale)[0] == 0.5
    assert largest / scale <= most * (1 + 1e-7) < 2 * largest / scale * (1 + 2e-7)


coded = jax.jit(quantize, static_argnums=1)
coded_blocks = jax.jit(quantize_blocks, static_argnums=(1, 2))
# XLA takes subnormal numbers for zero.
ELEMENTS = st.floats(-3e4, 3e4, width=32, allow_subnormal=False)
NUMBERS = arrays.arrays(np.float32, (4, 6), elements=ELEMENTS)


@given(NUMBERS, st.sampled_from((E4M3, E5M2)), st.sampled_from(("float32", "bfloat16", "float16")))
def test_codes_are_those_of_ml_dtypes(x, dtype: str, wide: str):
    x = np.asarray(jnp.asarray(x, wide))
    codes, scale = coded(x, dtype)
    wanted = (x.astype(np.float32) / np.float32(scale)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), wanted.view(np.uint8))


def in_numpy(x, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The E4M3 codes and E8M0 scales of a float32 matrix, one block at a time."""
    codes, scales = np.zeros(x.shape, E4M3), np.zeros(np.array(x.shape) // block, E8M0)
    for i, j in np.ndindex(scales.shape):
        part = tuple(slice(n * m, (n + 1) * m) for n, m in zip((i, j), block, strict=True))
        largest = max(np.abs(x[part]).max() / 448, 2.0**-126)
        scales[i, j] = np.float32(2.0 ** np.ceil(np.log2(np.float64(largest))))
        codes[part] = (x[part] / np.float32(scales[i, j])).astype(E4M3)
    return codes, scales


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (32, 32)])
def test_codes_of_blocks_are_those_of_ml_dtypes(block):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 96)) * np.exp(3 * rng.normal(size=(64, 96)))
    x[:, 0] = 0
    x = jnp.asarray(x, "bfloat16")
    codes, exponents = coded_blocks(x, E4M3, block)
    wanted, scales = in_numpy(np.asarray(x, np.float32), block)
    np.testing.assert_array_equal(exponents, scales.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), wanted.view(np.uint8))
    width = block[0] // 32 * 40, block[1] // 32 * 40  # the last block of 32 is cut
    part = x[: width[0] or 64, : width[1] or 96]
    padded, _ = coded_blocks(part, E4M3, block)
    rows, columns = part.shape
    assert padded.shape == (-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1])
    assert not np.asarray(padded, np.float32)[rows:].any()
    assert not np.asarray(padded, np.float32)[:, columns:].any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_extreme_numbers_keep_their_range(dtype):
    rows = np.float32([[0, 0], [3e-39, 1e-39], [1e38, -3e38], [1, 448], [np.nan, 1], [np.inf, 1]])
    for row in rows:
        codes, scale = coded(jnp.asarray(row, jnp.bfloat16), dtype)
        actual = np.asarray(codes, np.float32) * float(scale)
        rounded = np.asarray(jnp.asarray(row, jnp.bfloat16), np.float32)
        if np.isfinite(row).all():
            assert np.isfinite(actual).all()
            if np.abs(row).max() > 1e-30:
                assert (np.abs(actual - rounded) <= HALF_STEP[dtype] * np.abs(rounded)).all()
        else:
            assert not np.isfinite(actual[0])


def rounded(x, dtype: str, dim: int, recipe: Recipe) -> jax.Array:
    """x as a product that sums over `dim` reads it."""
    codes, scale = recipe.quantize(x, dtype, dim)
    if recipe.block:
        return dequantize_blocks(codes, scale, jnp.float32)[..., : x.shape[-2], : x.shape[-1]]
    return codes.astype(jnp.float32) * scale


def scaled_matmul(a, b, a_scale, b_scale, preferred_element_type):
    """jax.nn.scaled_matmul: [B, M, K] times [B, N, K], with scales for equal parts of rows."""
    size = a.shape[-1] // a_scale.shape[-1]
    a, b = (
        x.astype("float32") * jnp.repeat(scale.astype("float32"), size, -1)
        for x, scale in ((a, a_scale), (b, b_scale))
    )
    return jnp.einsum("bmk,bnk->bmn", a, b).astype(preferred_element_type)


@pytest.mark.parametrize("dims", [(-1, -2), (-1, -1), (-2, -2)])
def test_the_product_of_gpus_gets_blocks_in_rows(monkeypatch, dims):
    rng, recipe = np.random.default_rng(0), RECIPES["mxfp8"]
    arrays = [jnp.asarray(rng.normal(size=(2, 64, 64)), "bfloat16") for _ in dims]

    def product(*arrays):
        pairs = zip(arrays, dims, strict=True)
        operands = [recipe.quantize(array, E4M3, dim) for array, dim in pairs]
        return recipe.multiply(*operands, dims, jnp.bfloat16)

    wanted = jax.jit(product)(*arrays)
    monkeypatch.setattr(quantized, "target_device", lambda: Device("cuda", (10, 0)))
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    found = jax.jit(lambda *arrays: product(*arrays))(*arrays)
    np.testing.assert_allclose(*(np.asarray(a, "float32") for a in (found, wanted)), rtol=2.0**-7)


@pytest.mark.parametrize(
    ("shape", "name", "dtype"),
    thinned(itertools.product([(), (3,)], RECIPES, ["float32", "bfloat16", "float16"]), 5),
)
def test_products_are_those_of_the_rounded_operands(shape, name, dtype):
    """Bit for bit but for the order of float32 sums; the error against the unrounded operands is
    the format's."""
    rng, recipe = np.random.default_rng(0), RECIPES[name]
    x, w, slope = (
        jnp.asarray(rng.normal(size=(*shape, *size)), dtype)
        for size in ((48, 32), (32, 64), (48, 64))
    )

    @jax.jit
    def run(x, w, slope):
        copies = recipe.weights(w, jnp.max(jnp.abs(w)))
        y, pull = jax.vjp(lambda x, w: matmul(x, w, copies[0], copies[-1], recipe), x, w)
        kinds = {"x": (x, recipe.forward), "w": (w, recipe.forward)}
        kinds["slope"] = slope, recipe.backward
        pairs = itertools.product(kinds, (-1, -2))
        near = {(name, dim): rounded(*kinds[name], dim, recipe) for name, dim in pairs}
        return (y, *pull(slope)), near

    actual, near = run(x, w, slope)
    near = {place: np.asarray(array, np.float64) for place, array in near.items()}
    operands = {"x": x, "w": w, "slope": slope}
    exact = {(name, dim): np.asarray(operands[name], np.float64) for name, dim in near}
    for values, tolerance in (
        (near, 2.0**-7 if dtype == "bfloat16" else 1e-3),
        (exact, PRODUCT[recipe.backward]),
    ):
        wanted = (
            values["x", -1] @ values["w", -2],
            values["slope", -1] @ values["w", -1].swapaxes(-1, -2),
            values["x", -2].swapaxes(-1, -2) @ values["slope", -2],
        )
        for one, other in zip(actual, wanted, strict=True):
            assert one.dtype == dtype
            error = np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
            assert error < tolerance


def test_products_of_backward_add_up_in_float32():
    """With the default precision, cuBLAS on Hopper adds up 8-bit products with about 14 bits."""
    x, w, recipe = jnp.ones((32, 16)), jnp.ones((16, 48)), RECIPES["hybrid"]
    (codes,) = recipe.weights(w, jnp.max(w))

    def product(x, w):
        return matmul(x, w, codes, codes, recipe)

    def exact(function) -> int:
        return jax.jit(function).lower(x, w).as_text().count("precision = [HIGHEST, HIGHEST]")

    assert exact(product) == 0
    assert exact(lambda x, w: jax.vjp(product, x, w)[1](jnp.ones((32, 48)))) == 2
