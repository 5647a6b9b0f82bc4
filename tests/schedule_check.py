"""The invariants of every schedule table.

`check` proves that the executor can run a table: in a tick the forward lane comes first, then the
head, backward and weight gradients, or with the lanes together both lanes, head and weights; a
value sent to another stage arrives at the next tick and is used in it; the residuals of a stage lie
in the numbered slots of a ring.
"""

import dataclasses

import numpy as np

from maxmeg.pipeline.schedule import Lane, Table

Times = dict[str, np.ndarray]  # lane -> [microbatches, chunks, stages]: the tick of each unit


def check(table: Table) -> None:
    """Raise AssertionError if the executor cannot run the table.

    Every lane runs every unit once on every stage, after the units that it depends on. The head
    runs when the backward lane of the last stage needs its gradient. No slot is overwritten before
    its last read, and every read finds its own unit.
    """
    times = {name: _times(table, name, lane) for name, lane in table.lanes().items()}
    for name, before in (("backward", "forward"), ("weight", "backward")):
        if name in times:
            assert (times[name] >= times[before]).all(), f"{name} of a unit before its {before}"
    _check_arrivals(times)
    _check_head(table, times)
    readers = [lane for lane in (table.backward, table.weight) if lane is not None]
    if readers:
        _check_ring("slot", [table.forward, *readers], table.slots)
    if table.weight is not None:
        _check_ring("deferred", readers, table.deferred)


def _times(table: Table, name: str, lane: Lane) -> np.ndarray:
    for field in dataclasses.fields(lane):
        assert getattr(lane, field.name).shape == (table.ticks, table.stages), (name, field.name)
    times = np.full((table.microbatches, table.chunks, table.stages), -1)
    for tick, stage in np.argwhere((lane.microbatch != -1) | (lane.chunk != -1)).tolist():
        m, v = int(lane.microbatch[tick, stage]), int(lane.chunk[tick, stage])
        assert 0 <= m < table.microbatches and 0 <= v < table.chunks, (name, tick, stage, m, v)
        assert times[m, v, stage] < 0, f"{name} of microbatch {m}, chunk {v} twice on {stage}"
        times[m, v, stage] = tick
    assert (times >= 0).all(), f"{name} does not run every unit"
    return times


def _check_arrivals(times: Times) -> None:
    """A unit runs on the tick after its neighbour: virtual stage c is chunk c // S of stage c % S.

    Later would be in time too, but then other values would have arrived in its place.
    """
    for name, step in (("forward", 1), ("backward", -1)):
        if name in times:
            path = times[name].reshape(len(times[name]), -1)  # [microbatches, virtual stages]
            assert (np.diff(path, axis=1) == step).all(), f"{name} not on the next tick"


def _check_head(table: Table, times: Times) -> None:
    user = "forward" if table.backward is None else "backward"
    expected, used = np.full(table.ticks, -1), times[user][:, -1, -1]
    if table.together:  # the gradient of the head of a tick lies in one place for the next
        used = used - 1
        assert (times["forward"][:, -1, -1] == used).all(), (
            "backward not on the tick after the head"
        )
    expected[used] = np.arange(table.microbatches)
    assert (np.asarray(table.head) == expected).all(), f"head not at the {user} of the last stage"


def _check_ring(ring: str, lanes: list[Lane], size: int) -> None:
    """Play the ring: lanes[0] writes, idle stages too where it is on; the others read."""
    writer, readers = lanes[0], lanes[1:]
    on = np.any(writer.active, axis=1)
    for stage in range(writer.active.shape[1]):
        holds: dict[int, tuple[int, int]] = {}
        for tick in range(len(on)):
            for lane in lanes if on[tick] else readers:
                unit = int(lane.microbatch[tick, stage]), int(lane.chunk[tick, stage])
                slot = int(getattr(lane, ring)[tick, stage])
                if lane is not writer and unit[0] < 0:
                    continue
                where = f"tick {tick}, stage {stage}, {ring} {slot} of {size} for {unit}"
                assert 0 <= slot < size, where
                if lane is writer:
                    assert slot not in holds, f"{where}: overwrites {holds[slot]}"
                    if unit[0] >= 0:
                        holds[slot] = unit
                else:
                    assert holds.get(slot) == unit, f"{where}: finds {holds.get(slot)}"
                    if lane is readers[-1]:
                        del holds[slot]
