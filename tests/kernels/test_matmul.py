"""The matrix product loop by the interpreter: operands' orders, parts of tiles, programs of many
items, and races. tests/absent/test_matmul_kernels.py compiles it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import WRITES_PAST_THE_END, interpret

from maxmeg.kernels import matmul as kernel
from maxmeg.kernels.matmul import Tiling, item_count, tile_place

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # by norm, of products of bfloat16 in float32


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    depth: int
    columns: int
    tiling: Tiling = Tiling(columns=64, stages=2)
    programs: int = 1


EDGE = 8 if WRITES_PAST_THE_END else 64
CASES = {
    "more steps than slots": Case(128, 256, 64),
    "more items than programs": Case(384, 128, 128, programs=4),
    "both transposed": Case(256, 128, 128, Tiling(columns=64, stages=2, left="KM", right="NK")),
    "parts of tiles": Case(192 + EDGE, 192, 192, Tiling(columns=128, depth=128, stages=2)),
}


def product(case: Case, monkeypatch, plainly: bool = False) -> tuple[float, bool]:
    """(error by norm, whether there was a race)."""
    rng = np.random.default_rng(0)
    shapes = ((case.rows, case.depth), (case.depth, case.columns))
    left, right = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    wanted = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
    left = left.T if case.tiling.left == "KM" else left
    right = right.T if case.tiling.right == "NK" else right
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", case.programs)
    call = lambda: kernel.matmul(left, right, case.tiling, jnp.float32)  # noqa: E731
    actual, race = interpret(call, monkeypatch, plainly)
    if race:
        return np.inf, True
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)), False


@pytest.mark.parametrize("name", CASES)
def test_product_without_a_race(name: str, monkeypatch):
    error, race = product(CASES[name], monkeypatch)
    assert not race and error < TOLERANCE


def test_a_tile_that_was_not_waited_for_is_a_race(monkeypatch):
    case = CASES["more steps than slots"]
    assert not product(case, monkeypatch, plainly=True)[1]
    real = kernel.tiles_at
    monkeypatch.setattr(kernel, "tiles_at", lambda *call: real(*call[:2], call[2] + 1, *call[3:]))
    assert product(case, monkeypatch, plainly=True)[1]


@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 16), (5, 3, 2), (40, 7, 16)])
def test_every_tile_has_its_turn(rows: int, columns: int, width: int):
    index = jnp.arange(rows * columns, dtype=jnp.int32)
    places = jax.vmap(lambda i: tile_place(i, rows, columns, width))(index)
    actual = list(zip(*(np.asarray(part).tolist() for part in places), strict=True))
    assert sorted(actual) == list(np.ndindex(rows, columns))
    assert {row for row, _ in actual[: width * columns]} == set(range(min(width, rows)))


@pytest.mark.parametrize(("total", "programs"), [(1, 1), (7, 3), (6, 3), (2, 5), (0, 4)])
def test_programs_share_all_items(total: int, programs: int):
    counts = [int(item_count(total, jnp.int32(n), programs)) for n in range(programs)]
    assert counts == [len(range(n, total, programs)) for n in range(programs)]


def struct(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


FP8 = jnp.float8_e4m3fn
NK = Tiling(right="NK")
REFUSED = [
    ((struct(8, 64), struct(64, 64, dtype=jnp.float16)), Tiling(), "not both one of bfloat16"),
    ((struct(64, 64, dtype=jnp.float32),) * 2, Tiling(), "not both one of bfloat16"),
    ((struct(8, 128, dtype=FP8), struct(128, 128, dtype=FP8)), Tiling(), "not MK and NK"),
    (
        (struct(8, 64, dtype=FP8), struct(128, 64, dtype=FP8)),
        NK,
        "multiple of 8 by 128 float8_e4m3fn",
    ),
    ((struct(8, 96), struct(96, 64)), Tiling(), r"\(8, 96\) is not a multiple of 8 by 64 bfloat16"),
    ((struct(12, 64), struct(64, 64)), Tiling(), r"\(12, 64\) is not a multiple of 8 by 64"),
    ((struct(8, 64), struct(128, 64)), Tiling(), "left has depth 64 and right 128"),
    ((struct(8, 64), struct(72, 64)), NK, r"the product \[8, 72\] is not a multiple of 8 by 64"),
]


@pytest.mark.parametrize(("operands", "tiling", "message"), REFUSED)
def test_invalid_sizes_are_refused(operands, tiling: Tiling, message: str):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda left, right: kernel.matmul(left, right, tiling), *operands)
