"""NVFP4, MXFP4 and int8 against NumPy with ml_dtypes; stochastic rounding; Hadamard transforms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ops.test_quantized import scaled_matmul
from tables import thinned

from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
from maxmeg.ops import fp4, quantized
from maxmeg.ops.backend import Device
from maxmeg.ops.fp4 import Nvfp4, decoded, hadamard, packed, quantize_nvfp4, rotated
from maxmeg.ops.quantized import Recipe, Shares, matmul
from maxmeg.ops.recipes import recipe_of

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
ROUNDINGS, SIGMAS = 10_000, 4
BFLOAT16, CANCELLED = 2.0**-6, 0.02  # of results; of sums of numbers of either sign near 10
NAMES = ("nvfp4", "mxfp4", "qat_nvfp4", "qat_mxfp4", "qat_int8")
EXACT = 1e-6  # float32 sums of 64 products, against float64
SUMS = {"float32": EXACT, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # with rounded results
NVFP4 = 0.17  # products of 4-bit numbers
BIASED = 0.02  # of the mean of products over keys: 1 / 16 of the error of one


def numbers(shape, dtype="float32", seed=0) -> jax.Array:
    """Normal numbers with outliers, and a column of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))
    x[..., 0] = 0
    return jnp.asarray(x, dtype)


def in_numpy(x: np.ndarray, block: tuple[int, int], encode: np.float32) -> tuple:
    """TransformerEngine's NVFP4 of a float32 matrix: (E2M1 codes, E4M3 scales), with `encode` in
    place of its 2688 / largest magnitude."""
    codes, scales = (
        np.zeros(x.shape, E2M1),
        np.zeros((x.shape[0] // block[0], x.shape[1] // block[1]), E4M3),
    )
    for i, j in np.ndindex(scales.shape):
        part = tuple(slice(n * m, (n + 1) * m) for n, m in zip((i, j), block, strict=True))
        ratio = np.abs(x[part]).max() * (encode * (np.float32(1) / np.float32(6)))
        scales[i, j] = min(ratio, np.float32(448))
        with np.errstate(divide="ignore"):
            inverse = np.float32(1) / (np.float32(scales[i, j]) * (1 / encode))
        largest = np.finfo(np.float32).max
        codes[part] = np.clip(x[part] * min(inverse, largest), -6, 6).astype(E2M1)
    return codes, scales


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
def test_codes_are_those_of_transformer_engine(block):
    x = numbers((48, 64), "bfloat16")
    codes, scales, scale = jax.jit(quantize_nvfp4, static_argnums=1)(x, block)
    assert np.frexp(float(scale))[0] == 0.5
    assert 448 / 2 < float(jnp.max(scales.astype(jnp.float32))) <= 448
    wanted = in_numpy(np.asarray(x, np.float32), block, 1 / np.float32(scale))
    for one, other in zip((codes, scales), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), other.view(np.uint8))
    np.testing.assert_array_equal(decoded(packed(codes), "float32"), np.asarray(codes, "float32"))
    bytes_of_pairs = wanted[0].view(np.uint8)
    np.testing.assert_array_equal(
        packed(codes), bytes_of_pairs[:, ::2] | bytes_of_pairs[:, 1::2] << 4
    )


def test_weights_in_squares_serve_both_directions():
    w, recipe = numbers((3, 64, 32), "bfloat16"), Nvfp4(square=True)

    @jax.jit
    def rounded(w):
        largest = jnp.max(jnp.abs(w), axis=(1, 2))
        return recipe.wide(recipe.weights(w, largest)[0], jnp.bfloat16)

    wide, turned = np.asarray(rounded(w)), np.asarray(rounded(w.swapaxes(1, 2)))
    np.testing.assert_array_equal(wide.swapaxes(1, 2), turned)
    assert not np.array_equal(wide, np.asarray(w))


def test_the_hadamard_transform_cancels_in_products():
    matrix = np.asarray(hadamard(), np.float64)
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    x, slope = numbers((40, 24)), numbers((40, 16), seed=1)
    found = np.asarray(rotated(x), np.float64).T @ np.asarray(rotated(slope), np.float64)
    wanted = np.asarray(x, np.float64).T @ np.asarray(slope, np.float64)
    assert distance(found, wanted) < EXACT


def test_stochastic_rounding_is_unbiased():
    """Numbers beyond six times their scale are clipped, by less than the scale's own rounding."""
    x = numbers((1, 64))
    keys = jax.random.split(jax.random.key(0), ROUNDINGS)

    @jax.jit
    def roundings(x, keys):
        one = lambda key: quantize_nvfp4(x, (1, 16), key=key)  # noqa: E731
        return jax.vmap(lambda key: Nvfp4().wide(one(key), jnp.float32))(keys), one(None)

    rounded, (_, scales, scale) = jax.tree.map(np.asarray, roundings(x, keys))
    most = 6 * np.repeat(scales.astype(np.float32), 16, -1) * scale
    clipped = np.clip(x, -most, most)
    assert 0 < (np.abs(clipped) < np.abs(x)).sum() < 4
    np.testing.assert_allclose(clipped, x, rtol=1 / 16)
    difference = rounded.astype(np.float64) - clipped
    sigma = np.sqrt((difference**2).mean(0) / ROUNDINGS)
    assert (sigma > 0).sum() > 40
    assert (np.abs(difference.mean(0)) <= SIGMAS * sigma + 1e-6 * np.abs(x)).all()


def of(name: str) -> Recipe:
    recipe = recipe_of(QuantizationConfig(QuantizationRecipe[name]))
    assert recipe is not None
    return recipe


def copies_of(recipe: Recipe, w: jax.Array):
    largest = {
        Shares.nothing: None,
        Shares.layer: jnp.max(jnp.abs(w)),
        Shares.column: jnp.max(jnp.abs(w), axis=-2, keepdims=True),
    }
    copies = recipe.weights(w, largest[recipe.shares])
    assert len(copies) == recipe.copies
    return copies


def compute(recipe: Recipe, x, w, slope, key=None):
    copies = copies_of(recipe, w)
    y, pull = jax.vjp(lambda x, w: matmul(x, w, copies[0], copies[-1], recipe, key), x, w)
    return y, *pull(slope)


run = jax.jit(compute, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def rounded(recipe: Recipe, x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """The inputs for the output, and for the gradient of w, and the weights, in float32."""
    operands = *recipe.inputs(x), copies_of(recipe, w)[0]
    return tuple(recipe.wide(each, jnp.float32) for each in operands)


def operands(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    sizes = (40, 32), (32, 64), (40, 64)
    return [jnp.asarray(rng.normal(size=(*shape, *size)), dtype) for size in sizes]


def exact(x, w, slope) -> tuple[np.ndarray, ...]:
    x, w, slope = (np.asarray(a, np.float64) for a in (x, w, slope))
    return x @ w, slope @ w.swapaxes(-1, -2), x.swapaxes(-1, -2) @ slope


def distance(found, wanted) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_spoil_their_products(name):
    """4-bit floats and integers have no NaN, and XLA's maximum on CPUs may lose one."""
    x, w, slope = (jnp.ones(shape) for shape in ((40, 32), (32, 64), (40, 64)))
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        y, _, w_slope = run(of(name), x.at[3, 5].set(bad), w, slope)
        assert not np.isfinite(y[3]).any() and not np.isfinite(w_slope[5]).any()
        assert not np.isfinite(run(of(name), x, w.at[5, 3].set(bad), slope)[0][:, 3]).any()
        _, x_slope, w_slope = run(of(name), x, w, slope.at[3, 5].set(bad))
        assert not np.isfinite(x_slope[3]).any() and not np.isfinite(w_slope[:, 5]).any()


@pytest.mark.parametrize(
    ("name", "dtype", "shape"), thinned(itertools.product(NAMES, SUMS, [(3,), ()]), 6)
)
def test_products_are_those_of_the_rounded_operands(name, dtype, shape):
    """Backward multiplies the operands of forward; the gradients are rounded by nvfp4 alone."""
    recipe, (x, w, slope) = of(name), operands(shape, dtype)
    near_x, _, near_w = rounded(recipe, x, w)
    assert np.array_equal(near_x, x) == (name == "qat_mxfp4")
    found, wanted = run(recipe, x, w, slope), exact(near_x, near_w, slope)
    limits = [SUMS[dtype]] * 3
    if name == "nvfp4":
        wanted = wanted[0], *exact(x, near_w, slope)[1:]
        limits[1:] = [NVFP4] * 2
    for one, other, limit in zip(found, wanted, limits, strict=True):
        assert one.dtype == dtype and distance(one, other) < limit


def test_int8_codes_are_symmetric_by_token_and_by_column():
    x, w, _ = operands((), "float32")
    recipe = of("qat_int8")
    for quantized_, original, axis in (
        (recipe.inputs(x)[0], x, 1),
        (copies_of(recipe, w)[0], w, 0),
    ):
        codes, scale = (np.asarray(a) for a in quantized_)
        wanted = np.abs(np.asarray(original)).max(axis, keepdims=True) / np.float32(127)
        np.testing.assert_allclose(scale, wanted, rtol=2e-7)
        np.testing.assert_allclose(codes, np.asarray(original) / wanted, atol=0.5001)
        assert (np.abs(codes).max(axis) == 127).all()


def test_mxfp4_is_that_of_ml_dtypes():
    w = numbers((64, 32))
    codes, exponents = jax.jit(lambda w: of("qat_mxfp4").weights(w, None)[0])(w)
    blocks = np.asarray(w).reshape(2, 32, 32)
    most = np.maximum(np.abs(blocks).max(1, keepdims=True), 6 * 2.0**-126)
    scale = 2.0 ** np.ceil(np.log2(most.astype(np.float64) / 6))
    np.testing.assert_array_equal(
        np.ldexp(1.0, np.asarray(exponents, int) - 127), np.maximum(scale[:, 0], 2.0**-126)
    )
    wanted = (blocks / scale).astype(np.float32).astype(E2M1).reshape(64, 32)
    np.testing.assert_array_equal(decoded(codes, "float32"), wanted.astype(np.float32))


def test_keys_and_microbatches_draw_different_numbers_and_the_mean_is_exact():
    recipe, (x, w, slope) = of("nvfp4"), operands((), "float32")
    keys = jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in (0, *range(256))])

    @jax.jit
    def results(keys):
        runs = jax.vmap(lambda key: compute(recipe, x, w, slope, key))(keys)
        # The same rows in another microbatch are rounded otherwise.
        return runs, [recipe.slopes(y, keys[0])[0][0] for y in (slope, slope.at[-1, -1].add(1e-3))]

    (y, x_slopes, w_slopes), codes = jax.tree.map(np.asarray, results(keys))
    first, again, other = x_slopes[:3]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(codes[0][:16], codes[1][:16])
    forward_x, near_x, near_w = rounded(recipe, x, w)
    assert distance(y[0], exact(forward_x, near_w, slope)[0]) < EXACT
    assert distance(x_slopes[1:].mean(0), exact(x, near_w, slope)[1]) < BIASED
    wanted = np.asarray(near_x).T @ np.asarray(rotated(slope))
    assert distance(w_slopes[1:].mean(0), wanted) < BIASED


def multiply_fp4(a, b, a_scale, b_scale, **options):
    assert a.dtype == b.dtype == "float4_e2m1fn"
    assert a_scale.dtype == b_scale.dtype == "float8_e4m3fn"
    return scaled_matmul(a, b, a_scale, b_scale, **options)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_the_products_of_gpus_get_blocks_in_rows(shape, monkeypatch):
    recipe, arrays = of("nvfp4"), operands(shape, "bfloat16")
    wanted = run(recipe, *arrays)
    for module in (fp4, quantized):
        monkeypatch.setattr(module, "target_device", lambda: Device("cuda", (10, 0)))
    monkeypatch.setattr(jax.nn, "scaled_matmul", multiply_fp4)
    found = jax.jit(functools.partial(compute, recipe))(*arrays)
    for one, other in zip(found, wanted, strict=True):
        one, other = (np.asarray(array, np.float32) for array in (one, other))
        np.testing.assert_allclose(one, other, rtol=BFLOAT16, atol=CANCELLED)


def test_gpus_before_blackwell_are_refused():
    with pytest.raises(ValueError, match=r"nvfp4\) needs .* 10\.0 .* found 9\.0: set"):
        quantized.check_device(of("nvfp4"), Device("cuda", (9, 0)))
    for name in NAMES:
        if name != "nvfp4":
            quantized.check_device(of(name), Device("cuda", (8, 0)))
