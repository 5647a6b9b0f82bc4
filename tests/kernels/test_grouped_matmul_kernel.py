"""The grouped matmul kernels by the interpreter, and their tables; see kernels/interpreted.py.

tests/absent/test_matmul_kernels.py compiles them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import COMPLETE, WRITES_PAST_THE_END, interpret
from ops.grouped_matmul_cases import CASES, NAMES, arrays_of, error, run
from ops.grouped_matmul_cases import expected as plain
from ops.grouped_matmul_cases import rounded as quantized

import maxmeg.ops.backend as choice
from maxmeg.kernels import grouped_matmul as kernel
from maxmeg.kernels.grouped_matmul import part_sizes, row_tiles
from maxmeg.kernels.matmul import ATOM_ROWS
from maxmeg.ops.backend import Device
from maxmeg.ops.experts import grouped_matmul

pytestmark = pytest.mark.slow

ROWS = 128  # of a tile
TOLERANCE = 4e-3  # of the norm, against products of the same operands
# name of a case: programs that share the items
INTERPRETED = {"odd sizes": 3}
if COMPLETE:  # jax 0.10 takes 10 s a case
    INTERPRETED |= {"rows after the last": 2, "fp8, rows after the last": 3}
    INTERPRETED |= {"blockwise, several blocks": 3}
SIZES = [(*case.sizes, case.rest) for case in CASES.values()]


@pytest.fixture
def hopper(monkeypatch):
    """Lets calls name the backend mosaic; small tiles, so that there are several."""
    for module in (choice, grouped_matmul):
        monkeypatch.setattr(module, "target_device", lambda: Device("cuda", (9, 0)))
    for name in ("ROWS_TILING", "FP8_ROWS_TILING", "WEIGHTS_TILING", "FP8_WEIGHTS_TILING"):
        small = dataclasses.replace(getattr(kernel, name), columns=64, stages=2)
        monkeypatch.setattr(kernel, name, small)
    return monkeypatch


def errors(name: str, monkeypatch) -> tuple[dict[str, float], bool]:
    """Of the results, which are rounded to bfloat16; and whether there was a race."""
    case = CASES[name]
    if not WRITES_PAST_THE_END:
        case = dataclasses.replace(case, inner=128, outer=128)
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", INTERPRETED[name])
    arrays, sizes = arrays_of(case, "bfloat16")
    actual, race = interpret(lambda: run(case, arrays, sizes, "mosaic"), monkeypatch)
    if race:
        return {}, True
    wanted = (plain if case.recipe == "none" else quantized)(case, arrays)
    return {part: error(actual[part], wanted[part]) for part in NAMES}, False


@pytest.mark.parametrize("name", INTERPRETED)
def test_product_and_gradients_without_a_race(name: str, hopper):
    actual, race = errors(name, hopper)
    assert not race
    assert all(error < TOLERANCE for error in actual.values()), actual


@pytest.mark.parametrize("sizes", SIZES)
def test_tiles_hold_every_row_once_and_one_group_each(sizes: tuple[int, ...]):
    tokens, groups = sum(sizes), len(sizes) - 1
    tiles, count = jax.jit(row_tiles, static_argnums=(1, 2))(jnp.array(sizes[:-1]), tokens, ROWS)
    assert int(count[0]) <= len(tiles) <= tokens // ROWS + 1.05 * (groups + 1) + 1
    used = np.asarray(tiles)[: int(count[0])]
    owner = np.repeat(np.arange(groups + 1), sizes)
    rows = [np.arange(begin, end) for _, _, begin, end in used]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(tokens))
    for (group, first, begin, end), own in zip(used, rows, strict=True):
        assert first % ATOM_ROWS == 0 and first <= begin < end <= first + ROWS
        assert (owner[own] == group).all()


@pytest.mark.parametrize("begin", [0, 5, 64, 71, 1000])
def test_steps_hold_a_groups_rows(begin: int):
    for size in range(200):
        rows = [int(number) for number in kernel.rows_of(jnp.int32(begin), jnp.int32(size), 64)]
        assert rows[:2] == [begin, begin + size] and rows[2] % ATOM_ROWS == 0
        assert 0 <= begin - rows[2] < ATOM_ROWS and rows[3] >= 1
        assert rows[2] + 64 * rows[3] >= begin + size
        assert rows[3] == 1 or rows[2] + 64 * (rows[3] - 1) < begin + size


def test_parts_add_up_to_any_number_of_rows():
    sizes = part_sizes()
    for live in range(64):
        assert sum(size for size in sizes if live & size) == live
