"""Stored moments and masters against NumPy and ml_dtypes, and against float32 states."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from maxmeg.config.schema import Moments, OptimConfig, Optimizer
from maxmeg.ops.random import fold
from maxmeg.optim import storage
from maxmeg.optim.build import make_optimizer

SIGMAS, ROUNDINGS = 4, 100_000
RATES = {"learning_rate": 0.01, "weight_decay": 0.1}
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
    bits = np.asarray(storage.element_bits(shape, jax.random.key(1)))
    uniform = np.float64(bits >> 12) * 2.0**-20
    block = storage.block_size(size)
    assert block == {256: 128, 96: 96, 262: 2}[size]
    x = numbers(shape)
    codes, scale = jax.jit(storage.to_float8)(x, bits)
    powers_x = powers(x, block, 7)
    np.testing.assert_array_equal(storage.of_elements(scale, size)[1:], powers_x[1:])
    expected = on_grid(np.abs(x / powers_x), uniform, FIRST_GRID) + 128 * np.signbit(x)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), expected)
    decoded = FIRST_GRID[expected % 128] * np.where(expected < 128, 1, -1) * powers_x
    np.testing.assert_array_equal(storage.of_float8(codes, scale), np.float32(decoded))
    x = numbers(shape, squares=True)
    codes, scale = jax.jit(storage.to_squares)(x, bits)
    powers_x = powers(x, block, -1)
    expected = on_grid(x / powers_x, uniform, SECOND_GRID)
    expected = np.where(x > 0, np.maximum(expected, 1), 0)
    np.testing.assert_array_equal(codes, expected)
    decoded = np.float32(SECOND_GRID[expected] * powers_x)
    np.testing.assert_array_equal(storage.of_squares(codes, scale), decoded)


def test_bfloat16_is_a_neighbour_and_exact_numbers_stay():
    x = numbers((64, 64))
    bits = storage.element_bits(x.shape, jax.random.key(1))
    found = np.asarray(storage.to_bfloat16(x, bits)).view(np.uint16).astype(np.uint32)
    whole = x.view(np.uint32)
    rounds_up = (np.asarray(bits) >> 16) + (whole & 0xFFFF) >= 1 << 16
    np.testing.assert_array_equal(found, (whole >> 16) + rounds_up)
    exact = x.astype(ml_dtypes.bfloat16)
    again = np.asarray(storage.to_bfloat16(np.float32(exact), bits))
    np.testing.assert_array_equal(again.view(np.uint16), exact.view(np.uint16))


@pytest.mark.parametrize("kind", ["bfloat16", "float8", "squares"])
def test_rounding_has_no_bias(kind):
    x = np.float32([0.7123, 0.99, 0.31, 1e-3, 2.3e-5, 1.0])
    rows = np.broadcast_to(x, (ROUNDINGS, len(x)))
    bits = storage.element_bits(rows.shape, jax.random.key(2))
    if kind == "bfloat16":
        found = storage.to_bfloat16(rows, bits)
    elif kind == "float8":
        found = storage.of_float8(*storage.to_float8(rows, bits))
    else:
        found = storage.of_squares(*storage.to_squares(rows, bits))
    found = np.asarray(found, np.float64)
    error = np.abs(found.mean(axis=0) - x)
    assert (error <= SIGMAS * found.std(axis=0) / np.sqrt(ROUNDINGS) + 1e-9).all()
    assert (found.std(axis=0)[:-1] > 0).all()


def trees():
    """(parameters, gradients of step n)."""
    rng = np.random.default_rng(0)
    shapes = {"up": (3, 8, 256), "table": (16, 32), "norm": (3, 32)}
    axes = {"up": ("embed", "mlp"), "table": ("vocab", "embed"), "norm": ("norm",)}
    tree = {
        name: nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32), axes=axes[name])
        for name, shape in shapes.items()
    }

    def gradients(step: int):
        rng = np.random.default_rng(step)
        return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), tree)

    return tree, gradients


def updated(config: OptimConfig, steps: int, remainders: bool = False):
    tree, gradients = trees()
    optimizer = make_optimizer(config)
    state, rest = optimizer.init(tree), None
    if remainders:
        tree, rest = storage.divided(tree)

    @jax.jit
    def step(tree, rest, state, gradients, key):
        masters = storage.whole(tree, rest)
        updates, state = optimizer.update(gradients, state, masters, key=key, **RATES)
        masters = jax.tree.map(jnp.add, masters, updates)
        return (*(storage.divided(masters) if remainders else (masters, None)), state)

    for n in range(steps):
        tree, rest, state = step(tree, rest, state, gradients(n), fold(jax.random.key(0), n))
    return tree, rest, state


def test_masters_with_remainders_are_those_of_float32():
    masters, _, moments = updated(OptimConfig(), 20)
    weights, rest, same = updated(OptimConfig(), 20, remainders=True)
    for name, master in masters.items():
        assert weights[name].dtype == jnp.bfloat16 and rest[name].dtype == jnp.uint16
        nearest = master[...].astype(jnp.bfloat16)
        assert (np.asarray(weights[name][...] == nearest)).mean() > 0.999  # all but ties
        found = storage.whole(weights, rest)[name][...]
        np.testing.assert_array_equal(found.view(np.uint32), master[...].view(np.uint32))
    jax.tree.map(np.testing.assert_array_equal, moments, same)


def test_every_float32_comes_back_and_its_weight_is_the_nearest():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, size=(1000, 64), dtype=np.uint32)
    bits[0, :] = (bits[0] & 0xFFFF0000) | 0x8000  # ties
    x = jnp.asarray(np.where(np.isfinite(bits.view(np.float32)), bits, 0).view(np.float32))
    weights, rest = storage.divided({"w": nnx.Param(x, axes=("embed", "mlp"))})
    back = storage.whole(weights, rest)["w"][...]
    np.testing.assert_array_equal(back.view(np.uint32), x.view(np.uint32))
    lower = np.asarray(x).view(np.uint32) & 0xFFFF
    nearest = np.asarray(x.astype(jnp.bfloat16))[lower != 0x8000]  # of ties, the even one
    np.testing.assert_array_equal(np.asarray(weights["w"][...])[lower != 0x8000], nearest)


@pytest.mark.parametrize("optimizer", [Optimizer.adamw, Optimizer.sgd])
@pytest.mark.parametrize(("moments", "near"), [(Moments.bfloat16, 0.01), (Moments.float8, 0.15)])
def test_updates_are_close_to_those_of_float32_moments(optimizer, moments, near):
    start = trees()[0]
    exact, _, _ = updated(OptimConfig(optimizer), 10)
    config = OptimConfig(optimizer, moments=moments)
    found, _, state = updated(config, 10)
    for name in exact:
        change = np.asarray(exact[name][...] - start[name][...])
        off = np.asarray(found[name][...] - exact[name][...])
        assert np.sqrt((off**2).mean() / (change**2).mean()) < near
        assert (name == "norm") == (not off.any())  # vectors keep float32 moments
    itemsize = {Moments.bfloat16: 2, Moments.float8: 1}[moments]
    dtypes = [a.dtype.itemsize for a in jax.tree.leaves(state) if a.ndim > 1 and a.shape[-1] == 256]
    assert set(dtypes) == {itemsize}
