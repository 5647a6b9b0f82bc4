"""Products with scales of blocks by Mosaic-GPU's interpreter, plain and grouped: sizes, scales,
and races.

Replaced is the instruction wgmma (interpreted_products). tests/absent/test_matmul_kernels.py
compiles the kernels, and tests/ops/test_block_matmul.py has the op's layouts.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import read_the_next_tiles
from interpreted_products import interpret, longer_results, replace_products

from maxmeg.kernels import fp8_blockwise as kernel
from maxmeg.kernels import grouped_matmul, matmul, mosaic
from maxmeg.kernels.fp8_blockwise import BLOCK, block_matmul
from maxmeg.ops.experts import grouped_matmul_xla
from maxmeg.ops.experts.aligned_groups import aligned_sizes
from maxmeg.ops.quantized import dequantize_blocks

pytestmark = pytest.mark.slow

E4M3 = "float8_e4m3fn"
TOLERANCE = 2e-6  # by norm, of sums in float32
ROWS = 8  # of a warpgroup, to be quick


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    depth: int = 2 * BLOCK
    in_rows: bool = False  # scales of right
    pairs: int = 1
    programs: int = 1


CASES = {
    "weights, one tile": Case(24, 128),
    "weights, parts of tiles": Case(13, 64),
    "weights, several tiles and programs, more blocks than slots": Case(
        40, 384, 5 * BLOCK, programs=3
    ),
    "weights, stacked": Case(9, 256, pairs=3, programs=2),
    "rows, one tile": Case(16, 256, in_rows=True),
    "rows, parts of tiles": Case(21, 320, 3 * BLOCK, in_rows=True),
    "rows, stacked": Case(8, 128, in_rows=True, pairs=2),
}


@pytest.fixture
def interpreter(monkeypatch):
    replace_products(monkeypatch)
    for module in (kernel, matmul, grouped_matmul):
        monkeypatch.setattr(module, "WARPGROUP_ROWS", ROWS)
    if mosaic.launch is longer_results:
        monkeypatch.setattr(mosaic, "launch", functools.partial(longer_results, dims=3))
    return monkeypatch


def operands(case: Case) -> list:
    """Codes, and scales with many different powers of two."""
    rng = np.random.default_rng(0)
    columns = case.columns if case.in_rows else -(-case.columns // BLOCK)
    codes = [
        jnp.asarray(rng.normal(size=(case.pairs, size, case.depth)), E4M3)
        for size in (case.rows, case.columns)
    ]
    scales = [
        jnp.asarray(2.0 ** rng.integers(-9, 9, (case.pairs, size, case.depth // BLOCK)), "float32")
        for size in (case.rows, columns)
    ]
    return [*codes, *scales]


def expected(left, right, left_scale, right_scale) -> np.ndarray:
    right_scale = np.repeat(right_scale, -(-right.shape[1] // right_scale.shape[1]), 1)
    wide = [
        np.asarray(codes, np.float64) * np.repeat(scale[:, : codes.shape[1]], BLOCK, 2)
        for codes, scale in ((left, left_scale), (right, right_scale))
    ]
    return np.einsum("emk,enk->emn", *wide)


def product(case: Case, monkeypatch) -> tuple[float, bool]:
    """(error by norm, whether there was a race)."""
    arrays = operands(case)
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", case.programs)
    call = lambda: block_matmul(*arrays, out_dtype=jnp.float32)  # noqa: E731
    actual, race = interpret(call, monkeypatch)
    if race:
        return np.inf, True
    wanted = expected(*arrays)
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)), False


@pytest.mark.parametrize("name", CASES)
def test_product_without_a_race(name: str, interpreter):
    error, race = product(CASES[name], interpreter)
    assert not race and error < TOLERANCE


def test_a_tile_that_was_not_waited_for_is_a_race(interpreter):
    read_the_next_tiles(interpreter, kernel)
    assert product(CASES["rows, parts of tiles"], interpreter)[1]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows of each group; rows after the last, which are NaN. A tile has 24 rows."""

    sizes: tuple[int, ...]
    rest: int = 0
    inner: int = 2 * BLOCK
    outer: int = 2 * BLOCK
    programs: int = 1


GROUPS = {
    "one row": Groups((1,), inner=BLOCK),
    "odd sizes, rows after the last": Groups((3, 30, 0, 50, 13), rest=21, programs=3),
    "more blocks than slots": Groups((20, 9), inner=5 * BLOCK, programs=2),
    "several columns of tiles": Groups((24, 40), outer=4 * BLOCK, programs=5),
    "empty groups": Groups((0, 0, 37, 0), rest=3, programs=2),
    "nothing but rows after": Groups((0, 0), rest=30),
    "every size of a part": Groups(tuple(range(1, 9)), programs=2),
}
COLUMNS = {  # groups of tokens that are summed; blocks of groups begin with each
    "one token": Groups((1,), inner=BLOCK, outer=BLOCK),
    "parts of blocks, empty groups": Groups((0, 200, 3), inner=BLOCK, programs=3),
    "more blocks than slots": Groups((5 * BLOCK + 1, 7), inner=BLOCK, programs=2),
    "nothing": Groups((0, 0), rest=30, inner=BLOCK),
}


def coded(rng, shape: tuple[int, ...], block: tuple[int, int]) -> tuple:
    """Codes, and scales of their blocks with many different powers of two."""
    counts = (*shape[:-2], shape[-2] // block[0], shape[-1] // block[1])
    scales = jnp.asarray(2.0 ** rng.integers(-9, 9, counts), "float32")
    return jnp.asarray(rng.normal(size=shape), E4M3), scales


def compare(call, wanted, monkeypatch) -> None:
    """That a kernel has no race, and gives what XLA gives of the dequantized numbers."""
    actual, race = interpret(call, monkeypatch)
    assert not race
    assert np.linalg.norm(actual - wanted) <= TOLERANCE * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", GROUPS)
def test_rows_times_their_groups_matrix(name: str, interpreter):
    case, rng = GROUPS[name], np.random.default_rng(0)
    interpreter.setattr(grouped_matmul, "MULTIPROCESSORS", case.programs)
    sizes, live = jnp.asarray(case.sizes), sum(case.sizes)
    x = coded(rng, (live + case.rest, case.inner), (1, BLOCK))
    w = coded(rng, (len(sizes), case.outer, case.inner), (BLOCK, BLOCK))
    x_codes = x[0].at[live:].set(jnp.nan)
    wide = [dequantize_blocks(*each, jnp.float32) for each in ((x_codes, x[1]), w)]
    wanted = grouped_matmul_xla.rows(*wide, sizes, (), "NK")
    how = {"right": "NK", "out_dtype": jnp.float32}
    compare(
        lambda: grouped_matmul.grouped_rows(x_codes, w[0], sizes, (x[1], w[1]), **how),
        wanted,
        interpreter,
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_products_over_the_tokens_of_each_group(name: str, interpreter):
    case, rng = COLUMNS[name], np.random.default_rng(0)
    interpreter.setattr(grouped_matmul, "MULTIPROCESSORS", case.programs)
    sizes = aligned_sizes(jnp.asarray(case.sizes), BLOCK)
    tokens = int(sizes.sum()) + BLOCK  # a block after the last group, which is NaN
    x, y = (coded(rng, (tokens, size), (BLOCK, 1)) for size in (case.inner, case.outer))
    codes = [each[0].at[tokens - BLOCK :].set(jnp.nan) for each in (x, y)]
    wide = [
        dequantize_blocks(array, scales, jnp.float32)
        for array, scales in zip(codes, (x[1], y[1]), strict=True)
    ]
    wanted = grouped_matmul_xla.weights(*wide, sizes, ())
    transposed = [array.T for array in codes]
    scales = x[1], y[1]
    compare(
        lambda: grouped_matmul.grouped_weights(*transposed, sizes, scales, out_dtype=jnp.float32),
        wanted,
        interpreter,
    )
