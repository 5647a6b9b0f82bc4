"""Every schedule over a grid: the invariants, and counts that equal closed forms.

With S stages, M microbatches and V chunks, stage s from 0; F, B and W are the times of a whole
stage: forward, gradients of inputs, gradients of weights.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from schedule_check import check, free_running

from maxmeg.pipeline.schedule import (
    SCHEDULES,
    Lane,
    Table,
    bubble,
    forward_only,
    gpipe,
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
    outputs: int
    lost: tuple[float, float, float]  # of F, B, W


def gpipe_forms(S: int, M: int, V: int) -> Expected:
    """The last forward is before the first backward: everything lives."""
    slots = M + (S > 1)
    lost = float(S - 1)
    return Expected(2 * (M + S - 1), [M] * S, slots, 0, M, (lost, lost, lost))


def one_f_one_b_forms(S: int, M: int, V: int) -> Expected:
    """Stage s makes its k-th forward at tick s + k and its k-th backward at SV + S - 2 - s + k."""
    deepest = [S * (V + 1) - 1 - 2 * s for s in range(S)]  # V = 1: 2 (S - 1 - s) + 1
    lost = (S - 1) / V
    return Expected(
        ticks=M * V + S * V + S - 2,
        live=[min(M * V, depth) for depth in deepest],
        slots=min(M * V + 1, deepest[0]),
        deferred=0,
        outputs=0,
        lost=(lost, lost, lost),
    )


def zero_bubble_forms(S: int, M: int, V: int) -> Expected:
    """As 1F1B, read last by the weights at tick 2S - 2 + m on every stage, without a bubble."""
    return Expected(
        ticks=M + 2 * S - 2,
        live=[min(M, 2 * S - 1 - s) for s in range(S)],
        slots=min(M + 1, 2 * S - 1),
        deferred=min(M + 1, S),
        outputs=0,
        lost=(S - 1.0, S - 1.0, 0.0),
    )


def forward_only_forms(S: int, M: int, V: int) -> Expected:
    return Expected(M * V + S - 1, [0] * S, 0, 0, 0, ((S - 1) / V, 0.0, 0.0))


FORMS: dict[Callable, tuple[Callable[[int, int, int], Expected], range]] = {
    gpipe: (gpipe_forms, range(1, 2)),
    one_f_one_b: (one_f_one_b_forms, CHUNKS),
    zero_bubble: (zero_bubble_forms, range(1, 2)),
    forward_only: (forward_only_forms, CHUNKS),
}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("schedule", FORMS, ids=lambda schedule: schedule.__name__)
def test_tables_over_the_grid_keep_the_invariants_and_equal_closed_forms(schedule, stages: int):
    forms, chunk_counts = FORMS[schedule]
    for chunks in chunk_counts:
        for microbatches in range(1, 4 * stages + 1):
            if chunks > 1 and microbatches % stages:
                continue
            table = schedule(microbatches, stages, chunks)
            expected = forms(stages, microbatches, chunks)
            check(table)
            actual = Expected(
                table.ticks,
                live(table),
                table.slots,
                table.deferred,
                table.outputs,
                bubble(table).lost,
            )
            assert actual == expected, (stages, microbatches, chunks)


def test_every_schedule_has_closed_forms():
    assert set(SCHEDULES.values()) | {forward_only} == set(FORMS)
    assert all(schedule(4, 2).name == name for name, schedule in SCHEDULES.items())


def test_bubble_counts_ticks_and_its_fraction_of_the_ideal():
    actual = bubble(one_f_one_b(8, 4, 2))
    assert actual.ticks == {"forward": 19, "backward": 19}
    assert actual.ideal == (8.0, 8.0, 8.0)
    assert actual.fraction == pytest.approx(4.5 / 24)  # (S-1)/V = 1.5 of each, beside M = 8
    assert bubble(zero_bubble(8, 4)).fraction == pytest.approx(6 / 24)  # (S-1)(F+B)
    assert bubble(gpipe(8, 4)).fraction == bubble(one_f_one_b(8, 4)).fraction == 3 / 8
    assert bubble(forward_only(8, 4)).fraction == 3 / 8
    assert bubble(one_f_one_b(8, 1)).fraction == 0


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (10.0, 12.0, 9.0)])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_free_running_stages_lose_what_the_papers_say(stages: int, times):
    """ZB-H1 (p - 1)(F + B - W), 1F1B and GPipe (p - 1)(F + B + W), interleaved that / V."""
    F, B, W = times
    for microbatches in (2 * stages, 4 * stages):
        sizes = (microbatches, stages)
        lost = {name: free_running(SCHEDULES[name](*sizes), F, B, W) for name in SCHEDULES}
        whole = (stages - 1) * (F + B + W)
        assert lost["gpipe"] == pytest.approx(whole)
        assert lost["one_f_one_b"] == pytest.approx(whole)
        assert lost["zero_bubble"] == pytest.approx((stages - 1) * (F + B - W))
        for chunks in (2, 4):
            interleaved = free_running(one_f_one_b(*sizes, chunks), F, B, W)
            assert interleaved == pytest.approx(whole / chunks)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 64])
def test_1f1b_is_three_runs_for_any_number_of_microbatches(microbatches: int):
    M = microbatches
    assert runs(one_f_one_b(M, 4)) == [
        (0, 3, ("forward",)),
        (3, M + 3, ("forward", "backward", "head")),
        (M + 3, M + 6, ("backward",)),
    ]
    assert runs(one_f_one_b(M, 1)) == [(0, M, ("forward", "backward", "head"))]


def test_runs_of_the_other_schedules():
    """Interleaved, the head comes and goes: on from its first microbatch to its last."""
    warm, steady, cold = ("forward",), ("forward", "backward", "head"), ("backward",)
    assert runs(one_f_one_b(8, 4, 2)) == [(0, 7, warm), (7, 19, steady), (19, 26, cold)]
    assert runs(gpipe(8, 4)) == [(0, 11, warm), (11, 19, ("backward", "head")), (19, 22, cold)]
    kinds = [on for _, _, on in runs(zero_bubble(8, 4))]
    every = ("forward", "backward", "weight", "head")
    assert kinds == [warm, steady, every, ("backward", "weight")]
    assert runs(forward_only(8, 4)) == [(0, 3, warm), (3, 11, ("forward", "head"))]


@pytest.mark.parametrize("schedule", [gpipe, zero_bubble])
def test_chunks_that_a_schedule_does_not_support(schedule):
    with pytest.raises(ValueError, match=f"{schedule.__name__} has one chunk.*chunks=2"):
        schedule(4, 2, 2)


@pytest.mark.parametrize("schedule", [one_f_one_b, forward_only])
def test_interleaving_needs_microbatches_that_divide(schedule):
    with pytest.raises(ValueError, match=r"6 microbatches.*pipe=4.*choose 4 or 8"):
        schedule(6, 4, 2)
    with pytest.raises(ValueError, match=r"3 microbatches.*pipe=4.*choose 4$"):
        schedule(3, 4, 2)


def edited(table: Table, *edits: tuple[str, str, int, int, int], **fields) -> Table:
    """A copy of the table with numbers (lane, array, tick, stage) and fields replaced."""
    lanes: dict[str, Lane | None] = {"forward": None, "backward": None, "weight": None}
    for name, lane in table.lanes().items():
        arrays = {
            field.name: getattr(lane, field.name).copy() for field in dataclasses.fields(lane)
        }
        for which, array, tick, stage, value in edits:
            if which == name:
                assert arrays[array][tick, stage] != value, "an edit that changes nothing"
                arrays[array][tick, stage] = value
        lanes[name] = Lane(**arrays)
    return dataclasses.replace(table, **{**lanes, **fields})


def moved(table: Table, lane: str, source: tuple[int, int], tick: int) -> Table:
    """A copy with the unit at `source` (tick, stage) of a lane at another, idle tick instead."""
    old, stage = source
    edits = []
    for array in ("microbatch", "chunk", "slot", "deferred"):
        values = getattr(table.lanes()[lane], array)
        if array in ("microbatch", "chunk"):
            assert values[old, stage] >= 0 > values[tick, stage]
            edits.append((lane, array, old, stage, -1))
        if values[tick, stage] != values[old, stage]:
            edits.append((lane, array, tick, stage, int(values[old, stage])))
    return edited(table, *edits)


PLAIN, CHUNKED, APART, ALL = one_f_one_b(4, 3), one_f_one_b(4, 2, 2), zero_bubble(4, 3), gpipe(3, 2)
LATE = moved(moved(ALL, "forward", (2, 0), 3), "forward", (3, 1), 4)
HEAD = np.array(PLAIN.head)


def head(tick: int, microbatch: int) -> np.ndarray:
    changed = HEAD.copy()
    changed[tick] = microbatch
    return changed


# PLAIN: forward of m on stage s at tick s + m, backward at 4 - s + m; the head at 2 + m. What one
# changed number of a lane does is tested below.
VIOLATIONS = [
    # every unit once
    (
        edited(PLAIN, ("backward", "microbatch", 4, 0, -1), ("backward", "chunk", 4, 0, -1)),
        "backward never runs microbatch 0, chunk 0 on stage 0",
    ),
    (dataclasses.replace(PLAIN, stages=2), r"forward.microbatch is \(8, 3\), must be \(8, 2\)"),
    # in time
    (
        moved(PLAIN, "forward", (4, 1), 5),
        "tick 5, stage 1, forward of microbatch 3.*stage 0, was made at tick 3",
    ),
    (
        moved(PLAIN, "forward", (1, 1), 0),
        "tick 0, stage 1, forward of microbatch 0.*stage 0, is made only at tick 0",
    ),
    (
        moved(PLAIN, "backward", (3, 1), 2),
        "tick 4, stage 0, backward of microbatch 0.*stage 1, was made at tick 2",
    ),
    (
        moved(CHUNKED, "forward", (8, 1), 9),
        "tick 9, stage 1, forward of microbatch 3, chunk 1.*chunk 1 on stage 0.*tick 7",
    ),
    (
        edited(
            CHUNKED,
            *(("forward", "microbatch", 2, 0, 2), ("forward", "chunk", 2, 0, 0)),
            *(("forward", "microbatch", 4, 0, 0), ("forward", "chunk", 4, 0, 1)),
        ),
        "tick 4, stage 0, forward of microbatch 0, chunk 1.*chunk 0 on stage 1.*tick 1",
    ),
    (moved(APART, "weight", (4, 0), 3), "tick 3, stage 0, weight.*before its backward at tick 4"),
    # the head
    (edited(PLAIN, head=head(2, 1)), "tick 2, stage 2, head of microbatch 1.*not microbatch 0"),
    (edited(PLAIN, head=head(3, -1)), "tick 3, stage 2, head of an idle.*not microbatch 1"),
    (edited(PLAIN, head=head(0, 0)), "tick 0, stage 2, head of microbatch 0.*not microbatch -1"),
    (dataclasses.replace(ALL, outputs=2), "3 outputs of stage 1 wait.*in 2 places.*of 3"),
    (moved(ALL, "forward", (3, 1), 4), "not on the next tick"),
    (LATE, "tick 3, stage 1, forward of an idle stage: overwrites the output of microbatch 0"),
    # the rings
    (edited(PLAIN, ("backward", "slot", 2, 2, 4)), "tick 2, stage 2, backward.*finds nothing"),
    (dataclasses.replace(PLAIN, slots=4), "tick 4, stage 0, forward of an idle.*slot 4 of 4"),
    (dataclasses.replace(APART, deferred=2), "deferred 2 of 2"),
]


def name_of(value: Table | str) -> str:
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize(("table", "message"), VIOLATIONS, ids=name_of)
def test_planted_violation_is_found(table: Table, message: str):
    with pytest.raises(AssertionError, match=message):
        check(table)


@pytest.mark.parametrize("table", [PLAIN, CHUNKED, APART, ALL], ids=lambda table: table.name)
def test_every_changed_number_that_is_used_is_found(table: Table):
    """Whatever single number is changed: used ones are found, and only unused ones are not."""
    missed = set()
    for name, lane in table.lanes().items():
        for field in dataclasses.fields(lane):
            for tick, stage in np.ndindex(table.ticks, table.stages):
                used = name, field.name, bool(lane.active[tick, stage])
                changed = int(getattr(lane, field.name)[tick, stage]) - 1
                try:
                    check(edited(table, (name, field.name, tick, stage, changed)))
                    missed.add(used)
                except AssertionError:
                    pass
    rings = {("forward", "slot"), ("backward", "slot"), ("weight", "slot")}
    rings |= {("backward", "deferred"), ("weight", "deferred")} if table.weight else set()
    assert all(not active or (name, array) not in rings for name, array, active in missed), missed
    assert not any(array in ("microbatch", "chunk") for _, array, _ in missed), missed
