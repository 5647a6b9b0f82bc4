"""Delayed scaling against TransformerEngine's formulas, and its products."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ops.grouped_matmul_cases import CASES, NAMES, TOLERANCE, arrays_of, e4m3, error, expected

from maxmeg.ops.delayed import GRADIENT, INPUT, PLAIN, matmul, rolled, saturated, scales_of
from maxmeg.ops.experts.grouped_matmul import grouped_matmul
from maxmeg.ops.quantized import AmaxHistory, Recipe, quantize, scale_of
from maxmeg.ops.quantized import matmul as matmul_of_current_scales

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FORMATS = (E4M3, E4M3, E5M2)
STEPS, ROUNDING = 60, 1e-6


class TransformerEngine:
    """amax_and_scale_update of one tensor: entry 0 of the history is that of the current step."""

    def __init__(self, dtype: str, length: int, algorithm: str, margin: int):
        self.most, self.margin = float(ml_dtypes.finfo(dtype).max), margin
        self.history, self.scale = np.zeros(length, np.float32), 1.0
        self.algorithm = algorithm

    def update(self, amax: float) -> None:
        self.history[0] = amax
        largest = self.history.max() if self.algorithm == "max" else self.history[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = (self.most / largest) / 2.0**self.margin
        if largest > 0 and np.isfinite(scale) and np.isfinite(largest):
            self.scale = float(scale)
        self.history = np.roll(self.history, -1)
        self.history[0] = 0


def trace(seed: int) -> np.ndarray:
    """Maxima [steps, 3] that grow and fall, among them zeros, infinities and NaN."""
    rng = np.random.default_rng(seed)
    values = np.exp(np.cumsum(rng.normal(0, 2, (STEPS, 3)), axis=0)).astype(np.float32)
    values[rng.random(values.shape) < 0.15] = 0
    values[rng.random(values.shape) < 0.05] = np.inf
    values[rng.random(values.shape) < 0.03] = np.nan
    values[:3, INPUT] = 0  # nothing is known yet
    return values


@pytest.mark.parametrize(
    ("length", "algorithm", "margin"),
    [(1, "max", 0), (7, "max", 2), (7, "most_recent", 0), (1024, "max", 0)],
)
def test_scales_and_history_are_those_of_transformer_engine(length, algorithm, margin):
    recipe = Recipe(history=AmaxHistory(length, algorithm == "most_recent", margin))
    start, maxima = jnp.zeros((3, 1 + length)), trace(length + margin)

    def step(history, largest):
        history = rolled(history, largest, recipe)
        return history, (history, scales_of(history))

    histories, scales = map(np.asarray, jax.lax.scan(step, start, jnp.asarray(maxima))[1])
    for row, dtype in enumerate(FORMATS):
        engine, kept = TransformerEngine(dtype, length, algorithm, margin), [1.0]
        for i, largest in enumerate(maxima[:, row]):
            engine.update(largest)
            kept.append(engine.scale)
            # Theirs starts with an empty entry and ends with the newest one.
            newest = engine.history[1:][::-1]
            np.testing.assert_array_equal(histories[i, row, 1:][: length - 1], newest)
            assert np.array_equal(histories[i, row, 1], largest, equal_nan=True)
        powers = 2.0 ** np.floor(np.log2(kept[1:]) + ROUNDING)
        np.testing.assert_array_equal(1 / scales[:, row], powers)
        assert any(old == new for old, new in itertools.pairwise(kept))  # it was kept
        assert row == INPUT or kept[-1] != 1


def test_numbers_out_of_range_saturate_and_infinity_does_not():
    x = jnp.array([1e3, -1e3, 449, 3.0, jnp.inf, jnp.nan], jnp.bfloat16)
    found = np.asarray(saturated(x, jnp.float32(1), E4M3), np.float32)
    np.testing.assert_array_equal(found[:4], [448, -448, 448, 3])
    assert np.isnan(found[4:]).all()
    found = np.asarray(saturated(1e5 * x[:5], jnp.float32(8), E5M2), np.float32)
    np.testing.assert_array_equal(found, [57344, -57344, 57344, 40960, np.inf])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_with_scales_that_fit_products_are_those_of_current_scaling(dtype):
    """Scales 1 give the same codes as exact ones as long as nothing leaves the format's range. The
    gradient of `largest` is the maxima of both operands."""
    rng, recipe = np.random.default_rng(0), Recipe(history=AmaxHistory(4))
    x, w, slope = (
        jnp.asarray(rng.integers(-7, 8, shape), dtype) for shape in ((12, 16), (16, 8), (12, 8))
    )
    codes = quantize(w, E4M3)

    @jax.jit
    def run(scales):
        def call(x, w, largest):
            return matmul(x, w, codes, scales, largest, PLAIN, recipe)

        y, pull = jax.vjp(call, x, w, jnp.zeros(3))
        *slopes, largest = pull(slope)
        return (y, *slopes), largest

    @jax.jit
    def current():
        y, pull = jax.vjp(lambda x, w: matmul_of_current_scales(x, w, codes, codes, recipe), x, w)
        return y, *pull(slope)

    results, largest = run(jnp.ones(3))
    for found, exact in zip(results, current(), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(exact))
    np.testing.assert_array_equal(largest, [abs(x).max(), 0, abs(slope).max()])
    scales = jnp.ones(3).at[INPUT].set(2.0**-10).at[GRADIENT].set(2.0**10)
    np.testing.assert_array_equal(run(scales)[1], largest)  # before scaling and saturation


@pytest.mark.parametrize("name", ["odd sizes", "rows after the last"])
def test_products_of_groups_are_those_of_rounded_operands(name: str):
    """Rows after the last group, NaN, do not count as magnitudes. The scale of gradients is for the
    range of E5M2; grouped products round them to E4M3, in its range."""
    case, recipe = CASES[name], Recipe(history=AmaxHistory(4))
    arrays, sizes = arrays_of(case, "float32")
    live = [arrays[0][: sum(sizes)], arrays[1], arrays[2][: sum(sizes)]]
    largest = [jnp.max(jnp.abs(array)) for array in live]
    scales = jnp.stack([scale_of(most, to) for most, to in zip(largest, FORMATS, strict=True)])
    codes = [quantize(jnp.asarray(arrays[1]), E4M3)]

    @jax.jit
    def run(x, w, slope):
        def call(x, w, largest):
            how = {"codes": codes, "recipe": recipe, "past": (scales, largest), "backend": "xla"}
            return grouped_matmul(x, w, jnp.asarray(sizes), **how)

        y, pull = jax.vjp(call, x, w, jnp.zeros(3))
        return y, *pull(slope)

    y, *slopes, found = run(*arrays)
    np.testing.assert_array_equal(found, [largest[INPUT], 0, largest[GRADIENT]])
    rounded = [
        e4m3(np.asarray(array, np.float64), tuple(range(array.ndim)), array.size) for array in live
    ]
    wanted = expected(case, rounded)
    for part, array in zip(NAMES, (y, *slopes), strict=True):
        rows = slice(sum(sizes)) if part != "dw" else slice(None)
        assert error(array[rows], wanted[part]) < TOLERANCE["float32"], part
    assert not np.asarray(y[sum(sizes) :]).any() and not np.asarray(slopes[0][sum(sizes) :]).any()
