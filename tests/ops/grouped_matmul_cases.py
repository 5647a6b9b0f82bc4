"""One table of grouped products that every backend runs, and what they should give.

Imports neither pytest nor a backend's code: a machine with a GPU runs it too. Dimensions are
multiples of 64, of 128 with fp8, which every backend takes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.config.quantization import QuantizationConfig, QuantizationRecipe
from maxmeg.ops.experts.grouped_matmul import grouped_matmul
from maxmeg.ops.recipes import recipe_of

NAMES = ("y", "dx", "dw")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}  # of the norm
FP8_TOLERANCE = 5e-2  # e4m3 rounds by up to 2^-4, two operands
RECIPES = {recipe.value: recipe_of(QuantizationConfig(recipe)) for recipe in QuantizationRecipe}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of each group; rows after the last, which are NaN."""

    sizes: tuple[int, ...]
    rest: int = 0
    inner: int = 128
    outer: int = 128
    recipe: str = "none"


MANY = tuple((7 * n) % 11 * (n % 3 > 0) for n in range(256))
CASES = {
    "one group": Case((40,)),
    "one row": Case((1,)),
    "two groups": Case((24, 40)),
    "odd sizes": Case((3, 70, 1, 130, 13)),
    "whole tiles": Case((128, 64, 256)),
    "empty groups": Case((0, 0, 37, 0, 91, 0)),
    "one has everything": Case((0, 0, 0, 200, 0)),
    "rows after the last": Case((30, 0, 50), rest=60),
    "whole tiles after the last": Case((100, 28), rest=300),
    "nothing but rows after": Case((0, 0, 0), rest=70),
    "after an empty group": Case((30, 0), rest=5),
    "every size of a part": Case(tuple(range(1, 64, 6)), rest=9),
    "256 groups": Case(MANY, rest=40),
    "256 groups, one in use": Case((0,) * 200 + (90,) + (0,) * 55),
    "wide": Case((60, 70), inner=64, outer=576),
    "deep": Case((60, 70), inner=576, outer=64),
    "fp8": Case((3, 70, 0, 130, 13), recipe="tensorwise"),
    "fp8, rows after the last": Case((30, 0, 50), rest=60, inner=384, recipe="tensorwise"),
    "blockwise": Case((3, 70, 0, 130, 13), rest=60, recipe="blockwise"),
    "blockwise, several blocks": Case((300, 0, 50), 60, 384, 256, recipe="blockwise"),
    "mxfp8": Case((3, 70, 0, 130, 13), rest=60, inner=64, outer=96, recipe="mxfp8"),
}


def arrays_of(case: Case, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    """([x, w, cotangent of y], sizes); rows after the last group are NaN."""
    rng = np.random.default_rng(sum(case.sizes) + case.inner)
    live, groups = sum(case.sizes), len(case.sizes)
    x = rng.normal(size=(live + case.rest, case.inner))
    slope = rng.normal(size=(live + case.rest, case.outer))
    x[live:] = slope[live:] = np.nan
    w = rng.normal(size=(groups, case.inner, case.outer))
    rounded = [np.asarray(jnp.asarray(array, dtype)) for array in (x, w, slope)]
    return rounded, np.asarray(case.sizes, np.int32)


def expected(case: Case, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Product and gradients in float64, a group at a time."""
    x, w, slope = (np.asarray(array, np.float64) for array in arrays)
    actual = {"y": 0 * np.nan_to_num(slope), "dx": 0 * np.nan_to_num(x), "dw": 0 * w}
    first = 0
    for group, size in enumerate(case.sizes):
        rows = slice(first, first + size)
        actual["y"][rows] = x[rows] @ w[group]
        actual["dx"][rows] = slope[rows] @ w[group].T
        actual["dw"][group] = x[rows].T @ slope[rows]
        first += size
    return actual


def rounded(case: Case, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    """As `expected`, of operands rounded to E4M3 in the blocks of the recipe: of w, of rows along
    features, and for dw along the tokens of a group (one scale per tensor: per row, per column)."""
    recipe = RECIPES[case.recipe]
    x, w, slope = (np.asarray(array, np.float64) for array in arrays)
    assert recipe is not None
    size, live = recipe.block, sum(case.sizes)

    def rows(array, axis):
        return e4m3(array, axis, size or array.shape[axis])

    def weights(axis):
        if recipe.square:
            return e4m3(w, (1, 2), size)
        return e4m3(w, axis, size) if size else e4m3(w, (0, 1, 2), w.size)

    spans = np.split(np.arange(live), np.cumsum(case.sizes)[:-1])
    x, slope = x[:live], slope[:live]
    actual = {
        "y": np.zeros((live + case.rest, w.shape[2])),
        "dx": np.zeros((live + case.rest, w.shape[1])),
        "dw": 0 * w,
    }
    columns = [rows(array, 0) if not size else array for array in (x, slope)]
    for group, span in enumerate(spans):
        actual["y"][span] = rows(x[span], 1) @ weights(1)[group]
        actual["dx"][span] = rows(slope[span], 1) @ weights(2)[group].T
        left, right = (rows(array[span], 0) if size else array[span] for array in columns)
        actual["dw"][group] = left.T @ right
    return actual


def e4m3(array: np.ndarray, axes, size: int) -> np.ndarray:
    """The array rounded to E4M3, with one scale, a power of two, for `size` numbers along axes."""
    axes = (axes,) if isinstance(axes, int) else axes
    result = np.zeros_like(array)
    counts = [-(-n // size) if axis in axes else n for axis, n in enumerate(array.shape)]
    for index in np.ndindex(*counts):
        block = tuple(
            slice(i * size, (i + 1) * size) if axis in axes else i for axis, i in enumerate(index)
        )
        largest = np.abs(array[block]).max(initial=0.0)
        scale = 2.0 ** np.ceil(np.log2(largest / 448)) if largest else 1.0
        codes = np.float32(array[block] / scale).astype(jnp.float8_e4m3fn)
        result[block] = np.float64(codes) * scale
    return result


def run(case: Case, arrays: list, sizes, backend: str, jit=jax.jit) -> dict[str, np.ndarray]:
    """What a backend gives for `expected`; a call that it refuses raises ValueError. Where it can
    multiply codes of blocks, it does."""
    recipe = RECIPES[case.recipe]
    recipe = recipe and dataclasses.replace(recipe, backend=backend)

    def both(x, w, slope, sizes):
        def call(x, w):
            codes = recipe.weights(w, jnp.max(jnp.abs(w))) if recipe else None
            return grouped_matmul(x, w, sizes, codes=codes, recipe=recipe, backend=backend)

        y, pull = jax.vjp(call, x, w)
        return y, *pull(slope)

    actual = jit(both)(*arrays, sizes)
    return {name: np.asarray(array) for name, array in zip(NAMES, actual, strict=True)}


def tolerance(case: Case, key: str, dtype: str) -> float:
    return TOLERANCE[dtype] if case.recipe == "none" else FP8_TOLERANCE


def error(actual, wanted) -> float:
    """Of the norm; of a norm of nothing, the size. NaN where anything is NaN."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(actual - wanted) / (np.linalg.norm(wanted) or 1.0))
