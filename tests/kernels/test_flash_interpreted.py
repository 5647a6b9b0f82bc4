"""The flash attention kernels by Mosaic-GPU's interpreter on the CPU, with its race detection.

What runs, through the op, forward and backward, is the kernels' own program: grid, copies, rings,
barriers, turns, masks, softmax, stores. Replaced is the instruction wgmma (interpreted_products).
Warpgroups have 8 rows here instead of 64, so that short sequences are many blocks.
tests/absent/test_kernels.py compiles the kernels.
"""

import dataclasses

import pytest
from interpreted_products import interpret, replace_products
from ops.attention_cases import FULL, TOLERANCE, Case, arrays_of, error, expected, run

import maxmeg.ops.backend as choice
from maxmeg.kernels import attention_backward as backward
from maxmeg.kernels import attention_forward as forward
from maxmeg.kernels.mosaic import plgpu
from maxmeg.ops.attention.spec import ScoreSpec
from maxmeg.ops.backend import Device

pytestmark = pytest.mark.slow

ROWS = 8  # of a warpgroup
HEAD = 16  # dim, the smallest of which copies make swizzled tiles


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Slots of the rings, consumers of a program, length of a block in the rings; and whether key
    gradients are made apart."""

    stages: int = 2
    consumers: int = 2
    block: int = 8
    split: bool = False


CASES = {
    "causal, more blocks than slots": (Case(24, heads=1, head_dim=HEAD), Sizes(stages=1)),
    "grouped, all keys, a block cut": (
        Case(8, 40, 2, 1, HEAD, spec=FULL),
        Sizes(consumers=1, block=16),
    ),
    "window, later queries": (
        Case(8, 48, 1, 1, HEAD, spec=ScoreSpec(window=25, softcap=1.5), offset=33),
        Sizes(stages=3),
    ),
    "chunks of all keys": (
        Case(24, 32, 1, 1, HEAD, spec=ScoreSpec(causal=False, chunk=12)),
        Sizes(consumers=3),
    ),
    "documents": (Case(24, heads=1, head_dim=HEAD, segments=(3, 13, 8), sinks=True), Sizes()),
    "heads of 192 and 128": (Case(16, 24, 1, 1, 192, 128, offset=8), Sizes(split=True)),
}


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(choice, "target_device", lambda: Device("cuda", (9, 0)))
    for module in (forward, backward):
        monkeypatch.setattr(module, "WARPGROUP_ROWS", ROWS)
    replace_products(monkeypatch)
    return monkeypatch


def attend(case: Case, sizes: Sizes, monkeypatch) -> tuple[dict[str, float], bool]:
    """(errors of results and gradients, whether there was a race)."""
    dims, count = (case.head_dim, case.value_dim or case.head_dim), sizes.consumers
    tile, walk = (kind(sizes.block, sizes.stages, count) for kind in (forward.Tile, backward.Walk))
    monkeypatch.setitem(forward.FORWARD_TILES, dims, tile)
    tiles = backward.BackwardTiles(walk, walk, sizes.split)
    monkeypatch.setitem(backward.BACKWARD_TILES, dims, tiles)
    arrays, operands = arrays_of(case, "bfloat16")
    actual, race = interpret(lambda: run(case, arrays, operands, "mosaic"), monkeypatch)
    if race or actual is None:
        return {}, True
    wanted = expected(case, arrays, operands)
    return {part: error(actual[part], wanted[part]) for part in actual}, False


@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_without_a_race(name: str, interpreter):
    errors, race = attend(*CASES[name], interpreter)
    assert not race and all(error <= TOLERANCE["bfloat16"] for error in errors.values()), errors


def test_a_slot_released_before_its_products_are_made_is_a_race(interpreter):
    real = backward.add_query_gradient

    def release_first(plan, tiles, stream, slot, carry):
        plgpu.barrier_wait(stream.ready.at[slot])
        plgpu.barrier_arrive(stream.free.at[slot])
        with interpreter.context() as patch:
            for name in ("barrier_wait", "barrier_arrive"):
                patch.setattr(plgpu, name, lambda barrier: None)
            return real(plan, tiles, stream, slot, carry)

    interpreter.setattr(backward, "add_query_gradient", release_first)
    case = Case(8, 24, heads=1, head_dim=HEAD, spec=FULL)
    assert attend(case, Sizes(stages=1, consumers=1), interpreter)[1]
