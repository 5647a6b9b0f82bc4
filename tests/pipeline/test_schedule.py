"""Every schedule over a grid: the invariants, and counts that equal closed forms.

With S stages, M microbatches and V chunks, stage s from 0; F, B and W are the times of a whole
stage: forward, gradients of inputs, gradients of weights.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from schedule_check import check

from maxmeg.config.parallel import Schedule
from maxmeg.pipeline.schedule import (
    SCHEDULES,
    Lane,
    Table,
    bubble,
    forward_only,
    live,
    one_f_one_b,
    runs,
    zero_bubble,
)

STAGES = range(1, 9)
CHUNKS = range(1, 5)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Closed forms. The rings have one slot more than is live where the writing lane goes on
    while a stage is idle and all that it keeps still lives: its result falls into that slot."""

    ticks: int
    live: list[int]
    slots: int
    deferred: int
    lost: tuple[float, float, float]  # of F, B, W


def one_f_one_b_forms(S: int, M: int, V: int, delay: int = 0) -> Expected:
    """Stage s makes its k-th forward at tick s + k and its k-th backward at SV + S - 2 - s + k, and
    `delay` later."""
    deepest = [S * (V + 1) - 1 - 2 * s + delay for s in range(S)]  # V = 1: 2 (S - 1 - s) + 1
    lost = (S - 1) / V
    return Expected(
        ticks=M * V + S * V + S - 2 + delay,
        live=[min(M * V, depth) for depth in deepest],
        slots=min(M * V + (S > 1 or not delay), deepest[0]),
        deferred=0,
        lost=(lost, lost, lost),
    )


def zero_bubble_forms(S: int, M: int, V: int, delay: int = 0) -> Expected:
    """As 1F1B, read last by the weights at tick 2S - 2 + m on every stage, without a bubble."""
    return Expected(
        ticks=M + 2 * S - 2 + delay,
        live=[min(M, 2 * S - 1 - s + delay) for s in range(S)],
        slots=min(M + 1, 2 * S - 1 + delay),
        deferred=min(M + 1, S),
        lost=(S - 1.0, S - 1.0, 0.0),
    )


def forward_only_forms(S: int, M: int, V: int, delay: int = 0) -> Expected:
    return Expected(M * V + S - 1, [0] * S, 0, 0, ((S - 1) / V, 0.0, 0.0))


FORMS: dict[Callable, tuple[Callable[[int, int, int], Expected], range]] = {
    one_f_one_b: (one_f_one_b_forms, CHUNKS),
    zero_bubble: (zero_bubble_forms, range(1, 2)),
    forward_only: (forward_only_forms, CHUNKS),
}


EVERY = [(schedule, {}) for schedule in FORMS]
EVERY += [(schedule, {"together": True}) for schedule in SCHEDULES.values()]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("schedule", "lanes"), EVERY)
def test_tables_over_the_grid_keep_the_invariants_and_equal_closed_forms(schedule, lanes, stages):
    forms, chunk_counts = FORMS[schedule]
    for chunks in chunk_counts:
        for microbatches in range(1, 4 * stages + 1):
            if chunks > 1 and microbatches % stages:
                continue
            table = schedule(microbatches, stages, chunks, **lanes)
            expected = forms(stages, microbatches, chunks, len(lanes) * (microbatches > 1))
            check(table)
            actual = Expected(
                table.ticks,
                live(table),
                table.slots,
                table.deferred,
                bubble(table).lost,
            )
            assert actual == expected, (stages, microbatches, chunks)


def test_every_schedule_has_closed_forms():
    assert set(SCHEDULES.values()) | {forward_only} == set(FORMS)
    assert all(schedule(4, 2).name == name for name, schedule in SCHEDULES.items())
    assert SCHEDULES.keys() == {schedule.value for schedule in Schedule}


def test_bubble_counts_ticks_and_its_fraction_of_the_ideal():
    actual = bubble(one_f_one_b(8, 4, 2))
    assert actual.ticks == {"forward": 19, "backward": 19}
    assert actual.ideal == (8.0, 8.0, 8.0)
    assert actual.fraction == pytest.approx(4.5 / 24)  # (S-1)/V = 1.5 of each, beside M = 8
    assert bubble(zero_bubble(8, 4)).fraction == pytest.approx(6 / 24)  # (S-1)(F+B)
    assert bubble(one_f_one_b(8, 4)).fraction == 3 / 8
    assert bubble(forward_only(8, 4)).fraction == 3 / 8
    assert bubble(one_f_one_b(8, 1)).fraction == 0


def test_1f1b_is_three_runs_and_the_others_few():
    """Interleaved, the head comes and goes: on from its first microbatch to its last."""
    warm, steady, cold = ("forward",), ("forward", "backward", "head"), ("backward",)
    for M in (1, 2, 7):
        assert runs(one_f_one_b(M, 4)) == [(0, 3, warm), (3, M + 3, steady), (M + 3, M + 6, cold)]
        assert runs(one_f_one_b(M, 1)) == [(0, M, steady)]
    assert runs(one_f_one_b(8, 4, 2)) == [(0, 7, warm), (7, 19, steady), (19, 26, cold)]
    kinds = [on for _, _, on in runs(zero_bubble(8, 4))]
    every = ("forward", "backward", "weight", "head")
    assert kinds == [warm, steady, every, ("backward", "weight")]
    assert runs(forward_only(8, 4)) == [(0, 3, warm), (3, 11, ("forward", "head"))]


def test_chunks_that_a_schedule_does_not_support():
    with pytest.raises(ValueError, match=r"zero_bubble has one chunk.*chunks=2"):
        zero_bubble(4, 2, 2)


@pytest.mark.parametrize("schedule", [one_f_one_b, forward_only])
def test_interleaving_needs_microbatches_that_divide(schedule):
    with pytest.raises(ValueError, match=r"6 microbatches.*pipe=4.*choose 4 or 8"):
        schedule(6, 4, 2)
    with pytest.raises(ValueError, match=r"3 microbatches.*pipe=4.*choose 4$"):
        schedule(3, 4, 2)


def edited(table: Table, name: str, array: str, tick: int, stage: int) -> Table:
    """A copy of the table in which a number of a lane is one less."""
    lane = table.lanes()[name]
    changed = getattr(lane, array).copy()
    changed[tick, stage] -= 1
    return dataclasses.replace(table, **{name: dataclasses.replace(lane, **{array: changed})})


def shifted(table: Table, name: str, stage: int, ticks: int) -> Table:
    """A copy of the table in which a stage runs a lane so many ticks later."""
    lane = table.lanes()[name]
    arrays = {f.name: getattr(lane, f.name).copy() for f in dataclasses.fields(lane)}
    for array in arrays.values():
        array[:, stage] = np.roll(array[:, stage], ticks)
    return dataclasses.replace(table, **{name: Lane(**arrays)})


def is_refused(table: Table) -> bool:
    try:
        check(table)
    except AssertionError:
        return True
    return False


PLAIN, CHUNKED, APART = one_f_one_b(4, 3), one_f_one_b(4, 2, 2), zero_bubble(4, 3)


@pytest.mark.parametrize("table", [PLAIN, CHUNKED, APART], ids=lambda table: table.name)
def test_every_changed_number_that_is_used_is_found(table: Table):
    """Whatever single number is changed: used ones are found, and only unused ones are not."""
    missed = set()
    for name, lane in table.lanes().items():
        for field in dataclasses.fields(lane):
            for tick, stage in np.ndindex(table.ticks, table.stages):
                if not is_refused(edited(table, name, field.name, tick, stage)):
                    missed.add((name, field.name, bool(lane.active[tick, stage])))
    rings = {("forward", "slot"), ("backward", "slot"), ("weight", "slot")}
    rings |= {("backward", "deferred"), ("weight", "deferred")} if table.weight else set()
    assert all(not active or (name, array) not in rings for name, array, active in missed), missed
    assert not any(array in ("microbatch", "chunk") for _, array, _ in missed), missed
    for tick, number in enumerate(table.head):
        head = np.array(table.head)
        head[tick] = number - 1
        assert is_refused(dataclasses.replace(table, head=head)), tick


@pytest.mark.parametrize("table", [PLAIN, CHUNKED, APART], ids=lambda table: table.name)
def test_units_out_of_order_and_rings_that_are_too_small_are_found(table: Table):
    """A stage that is a tick ahead of the others; a weight lane, before its backward."""
    for name, stage in itertools.product(table.lanes(), range(table.stages)):
        if name != "weight" or stage == 0:
            assert is_refused(shifted(table, name, stage, -1)), (name, stage)
    for size in ("slots", "deferred") if table.weight else ("slots",):
        assert is_refused(dataclasses.replace(table, **{size: getattr(table, size) - 1}))
    assert is_refused(dataclasses.replace(table, stages=table.stages - 1))
