"""One table of blockwise products that every backend runs, and what they should give.

Imports neither pytest nor a backend's code: a machine with a GPU runs it too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.ops.quantized import BLOCK, Recipe, dequantize_blocks, matmul

NAMES = ("y", "dx", "dw")
# Of the norm, against sums of the same codes; bfloat16 is that of the results.
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}
SPREAD = 2.0  # of the logarithms of rows and columns: scales differ


@dataclasses.dataclass(frozen=True)
class Case:
    """pairs: matrices in a stack; 0: no stack."""

    tokens: int
    inner: int = 256
    outer: int = 384
    pairs: int = 0


CASES = {
    "one block": Case(128, 128, 128),
    "rows that fill no tile": Case(200),
    "rows that fill no block": Case(13),
    "wide": Case(384, 128, 1152),
    "deep": Case(640, 1152, 128),
    "stacked": Case(72, pairs=3),
    "several programs": Case(4100, 1024, 2176),
}


def recipe_of(backend: str) -> Recipe:
    return Recipe(backward="float8_e4m3fn", block=BLOCK, square=True, backend=backend)


def arrays_of(case: Case, dtype: str) -> list[np.ndarray]:
    """[x, w, cotangent of y]."""
    rng = np.random.default_rng(case.tokens + case.inner)
    stack = (case.pairs,) * bool(case.pairs)
    sizes = (case.tokens, case.inner), (case.inner, case.outer), (case.tokens, case.outer)
    arrays = []
    for rows, columns in sizes:
        spread = [rng.normal(size=(rows, 1)), rng.normal(size=(1, columns))]
        numbers = rng.normal(size=(*stack, rows, columns)) * np.exp(SPREAD * sum(spread))
        arrays.append(np.asarray(jnp.asarray(numbers, dtype)))
    return arrays


@jax.jit
def rounded(x, w, slope) -> list[jax.Array]:
    """The weights; inputs and slopes by rows; both by columns."""
    recipe = recipe_of("xla")
    pairs = [(x, -1), (slope, -1), (x, -2), (slope, -2)]
    quantized = [recipe.quantize(array, recipe.forward, dim) for array, dim in pairs]
    quantized = [recipe.weights(w, None)[0], *quantized]
    return [dequantize_blocks(*each, jnp.float32) for each in quantized]


def expected(case: Case, x, w, slope) -> dict[str, np.ndarray]:
    """Products of the rounded numbers in float64."""
    arrays = [np.asarray(array, np.float64) for array in rounded(x, w, slope)]
    w, x_rows, slope_rows, x_columns, slope_columns = arrays
    return {
        "y": x_rows @ w,
        "dx": slope_rows @ w.swapaxes(-1, -2),
        "dw": x_columns.swapaxes(-1, -2) @ slope_columns,
    }


def run(case: Case, x, w, slope, backend: str) -> dict[str, np.ndarray]:
    """What a backend gives for `expected`; a call that it refuses raises ValueError."""
    recipe = recipe_of(backend)

    def both(x, w, slope):
        codes = recipe.weights(w, None)[0]
        y, pull = jax.vjp(lambda x, w: matmul(x, w, codes, codes, recipe), x, w)
        return y, *pull(slope)

    actual = jax.jit(both)(*map(jnp.asarray, (x, w, slope)))
    return {name: np.asarray(array) for name, array in zip(NAMES, actual, strict=True)}


def error(actual, wanted) -> float:
    """Of the norm; NaN where anything is NaN."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))
