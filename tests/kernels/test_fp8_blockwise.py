"""Products with scales of blocks by Mosaic-GPU's interpreter: sizes, scales, and races.

Replaced is the instruction wgmma (interpreted_products). tests/absent/test_matmul_kernels.py
compiles the kernels, tests/ops/test_block_matmul.py has the op's layouts,
test_grouped_matmul_kernel.py the grouped products.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_products import interpret, longer_results, replace_products

from maxmeg.kernels import fp8_blockwise as kernel
from maxmeg.kernels import matmul, mosaic
from maxmeg.kernels.fp8_blockwise import BLOCK, block_matmul

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
    "weights, several tiles and programs, more blocks than slots": Case(
        40, 384, 5 * BLOCK, programs=3
    ),
    "rows, parts of tiles, stacked": Case(21, 320, 3 * BLOCK, in_rows=True, pairs=2),
}


@pytest.fixture
def interpreter(monkeypatch):
    replace_products(monkeypatch)
    for module in (kernel, matmul):
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
