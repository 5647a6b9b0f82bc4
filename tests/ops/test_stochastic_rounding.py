"""Rounded numbers against NumPy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxmeg.ops import stochastic_rounding as rounding

SIGMAS, ROUNDINGS = 4, 100_000
FIRST_GRID = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
SECOND_GRID = np.array([0, *(2.0 ** (c // 8 - 31) * (1 + c % 8 / 8) for c in range(1, 256))])


def numbers(shape: tuple[int, ...], squares: bool = False) -> np.ndarray:
    """float32 over many magnitudes, with zeros and a block of zeros."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-25, 3, size=shape)
    x[rng.random(shape) < 0.05] = 0
    x[0] = 0
    return np.float32(x**2 if squares else x)


def on_grid(y: np.ndarray, uniform: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Indices of grid points: of the one above y with the probability of y's place in between."""
    lower = np.searchsorted(grid, y, side="right") - 1
    upper = np.minimum(lower + 1, len(grid) - 1)
    step = np.where(upper > lower, grid[upper] - grid[lower], 1)
    return lower + ((y - grid[lower]) / step + uniform >= 1)


def powers(x: np.ndarray, block: int, largest: int) -> np.ndarray:
    """The scale of each element: a power of two by the largest number of its block."""
    biggest = np.abs(x).reshape(*x.shape[:-1], -1, block).max(axis=-1)
    scale = np.exp2(np.maximum(np.floor(np.log2(np.maximum(biggest, 1e-38))) - largest, -126.0))
    return np.repeat(scale, block, axis=-1)


@pytest.mark.parametrize("size", [256, 96, 262])
def test_codes_are_those_of_numpy(size):
    shape = (7, size)

    @jax.jit
    def stored(x, squares):
        bits = rounding.element_bits(shape, jax.random.key(1))
        codes, scale = rounding.to_float8(x, bits)
        signed = codes, rounding.of_elements(scale, size), rounding.of_float8(codes, scale)
        codes, scale = rounding.to_squares(squares, bits)
        return bits, signed, (codes, rounding.of_squares(codes, scale))

    x, squares = numbers(shape), numbers(shape, squares=True)
    bits, signed, unsigned = jax.device_get(stored(x, squares))
    uniform = np.float64(bits >> 12) * 2.0**-20
    block = rounding.block_size(size)
    assert block == {256: 128, 96: 96, 262: 2}[size]
    codes, scale, decoded = signed
    powers_x = powers(x, block, 7)
    np.testing.assert_array_equal(scale[1:], powers_x[1:])
    expected = on_grid(np.abs(x / powers_x), uniform, FIRST_GRID) + 128 * np.signbit(x)
    np.testing.assert_array_equal(codes.view(np.uint8), expected)
    wanted = FIRST_GRID[expected % 128] * np.where(expected < 128, 1, -1) * powers_x
    np.testing.assert_array_equal(decoded, np.float32(wanted))
    codes, decoded = unsigned
    powers_x = powers(squares, block, -1)
    expected = on_grid(squares / powers_x, uniform, SECOND_GRID)
    expected = np.where(squares > 0, np.maximum(expected, 1), 0)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(decoded, np.float32(SECOND_GRID[expected] * powers_x))


def test_bfloat16_is_a_neighbour_and_exact_numbers_stay():
    x = numbers((64, 64))
    bits = rounding.element_bits(x.shape, jax.random.key(1))
    found = np.asarray(rounding.to_bfloat16(jnp.asarray(x), bits)).view(np.uint16).astype(np.uint32)
    whole = x.view(np.uint32)
    rounds_up = (np.asarray(bits) >> 16) + (whole & 0xFFFF) >= 1 << 16
    np.testing.assert_array_equal(found, (whole >> 16) + rounds_up)
    exact = x.astype(ml_dtypes.bfloat16)
    again = np.asarray(rounding.to_bfloat16(jnp.float32(exact), bits))
    np.testing.assert_array_equal(again.view(np.uint16), exact.view(np.uint16))


@pytest.mark.parametrize("kind", ["bfloat16", "float8", "squares"])
def test_rounding_has_no_bias(kind):
    x = np.float32([0.7123, 0.99, 0.31, 1e-3, 2.3e-5, 1.0])

    @jax.jit
    def rounded(x):
        rows = jnp.broadcast_to(x, (ROUNDINGS, len(x)))
        bits = rounding.element_bits(rows.shape, jax.random.key(2))
        if kind == "bfloat16":
            return rounding.to_bfloat16(rows, bits)
        if kind == "float8":
            return rounding.of_float8(*rounding.to_float8(rows, bits))
        return rounding.of_squares(*rounding.to_squares(rows, bits))

    found = np.float64(rounded(x))
    error = np.abs(found.mean(axis=0) - x)
    assert (error <= SIGMAS * found.std(axis=0) / np.sqrt(ROUNDINGS) + 1e-9).all()
    assert (found.std(axis=0)[:-1] > 0).all()
