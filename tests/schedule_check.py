"""The invariants of every schedule table, and the bubble of stages that run freely.

`check` proves that the executor can run a table: in a tick the forward lane comes first, then the
head, backward and weight gradients; a value sent to another stage arrives at the next tick and is
used in it; the residuals of a stage lie in the numbered slots of a ring.
"""

import dataclasses
from typing import NoReturn

import numpy as np

from maxmeg.pipeline.schedule import Lane, Table, most_at_once

Times = dict[str, np.ndarray]  # lane -> [microbatches, chunks, stages]: the tick of each unit


def check(table: Table) -> None:
    """Raise AssertionError with tick, stage and unit if the executor cannot run the table.

    Every lane runs every unit once on every stage, after the units that it depends on. The head
    runs when the backward lane of the last stage needs its gradient. No slot is overwritten before
    its last read, and every read finds its own unit.
    """
    times = _times(table)
    _check_order(table, times)
    _check_head(table, times)
    if table.backward is None:
        return
    readers = [lane for lane in (table.backward, table.weight) if lane is not None]
    _check_ring(table, "slot", [table.forward, *readers], table.slots)
    if table.weight is not None:
        _check_ring(table, "deferred", readers, table.deferred)


def free_running(table: Table, forward: float, backward: float, weight: float) -> float:
    """Idle time if each stage runs its units in the table's order, as early as it can.

    Papers give bubbles in this form: times (F, B, W) of a whole stage, without ticks. `bubble` is
    for the executor, where all stages run every tick in lockstep.
    """
    S, V = table.stages, table.chunks
    cost = {"forward": forward, "backward": backward, "weight": weight}
    if table.weight is None:
        cost["backward"] += weight
    units = [
        (tick, lane, name, stage)
        for lane, (name, table_lane) in enumerate(table.lanes().items())
        for tick, stage in np.argwhere(table_lane.active).tolist()
    ]
    done: dict[tuple[str, int, int], float] = {}  # (lane, microbatch, virtual stage)
    free = [0.0] * S
    for tick, _, name, stage in sorted(units):
        row = table.lanes()[name]
        m, c = int(row.microbatch[tick, stage]), int(row.chunk[tick, stage]) * S + stage
        before = {
            "forward": [("forward", m, c - 1)],
            "backward": [("forward", m, c), ("backward", m, c + 1)],
            "weight": [("backward", m, c)],
        }[name]
        start = max([free[stage], *(done.get(unit, 0.0) for unit in before)])
        free[stage] = done[name, m, c] = start + cost[name] / V
    return max(free) - table.microbatches * sum(cost[name] for name in table.lanes())


def _times(table: Table) -> Times:
    return {name: _lane_times(table, name, lane) for name, lane in table.lanes().items()}


def _lane_times(table: Table, name: str, lane: Lane) -> np.ndarray:
    M, V, S = table.microbatches, table.chunks, table.stages
    for field in dataclasses.fields(lane):
        shape = getattr(lane, field.name).shape
        if shape != (table.ticks, S):
            raise AssertionError(f"{name}.{field.name} is {shape}, must be {(table.ticks, S)}")
    times = np.full((M, V, S), -1)
    for tick, stage in np.argwhere((lane.microbatch != -1) | (lane.chunk != -1)).tolist():
        m, v = int(lane.microbatch[tick, stage]), int(lane.chunk[tick, stage])
        if not (0 <= m < M and 0 <= v < V):
            _fail(name, tick, stage, (m, v), f"of {M} microbatches and {V} chunks")
        if times[m, v, stage] >= 0:
            _fail(name, tick, stage, (m, v), f"ran at tick {times[m, v, stage]} already")
        times[m, v, stage] = tick
    for m, v, stage in np.argwhere(times < 0).tolist():
        raise AssertionError(f"{name} never runs {_unit((m, v))} on stage {stage}")
    return times


def _check_order(table: Table, times: Times) -> None:
    for name, after in (("forward", ""), ("backward", "forward"), ("weight", "backward")):
        if name not in times:
            continue
        if name != "weight":
            _check_arrivals(table, name, times[name])
        if after:
            for m, v, stage in np.argwhere(times[name] < times[after]).tolist():
                tick, needed = times[name][m, v, stage], times[after][m, v, stage]
                _fail(name, tick, stage, (m, v), f"comes before its {after} at tick {needed}")


def _check_arrivals(table: Table, name: str, times: np.ndarray) -> None:
    """A unit runs on the tick after its neighbour: virtual stage c is chunk c // S of stage c % S.

    Later would be in time too, but then other values would have arrived in its place.
    """
    S = table.stages
    path = times.reshape(len(times), -1)  # [microbatches, virtual stages]
    step = 1 if name == "forward" else -1
    late = np.argwhere(step * np.diff(path, axis=1) != 1).tolist()
    for m, before in late:
        source, target = (before, before + 1) if step == 1 else (before + 1, before)
        made, tick = path[m, source], path[m, target]
        problem = "was made at" if made < tick else "is made only at"
        needs = f"its input, of chunk {source // S} on stage {source % S}, {problem} tick {made}"
        _fail(name, tick, target % S, (m, target // S), f"not on the next tick: {needs}")


def _check_head(table: Table, times: Times) -> None:
    V, last = table.chunks, table.stages - 1
    user = "forward" if table.backward is None else "backward"
    made, used = times["forward"][:, V - 1, last], times[user][:, V - 1, last]
    expected = np.full(table.ticks, -1)
    expected[used] = np.arange(table.microbatches)
    for tick in np.flatnonzero(np.asarray(table.head) != expected).tolist():
        _fail("head", tick, last, (table.head[tick], V - 1), f"not microbatch {expected[tick]}")
    waits = made < used  # in the place of its microbatch; an idle stage's result falls into 0
    if waits.any() and table.outputs < table.microbatches:
        count = most_at_once(made[waits], used[waits])
        raise AssertionError(
            f"{count} outputs of stage {last} wait for the head at once, in {table.outputs} places "
            f"instead of one for each of {table.microbatches} microbatches"
        )
    on = np.any(table.forward.active, axis=1)
    for tick in np.flatnonzero(on & (table.forward.microbatch[:, last] < 0)).tolist():
        if made[0] < tick <= used[0]:
            _fail("forward", tick, last, (-1, -1), "overwrites the output of microbatch 0")


def _check_ring(table: Table, ring: str, lanes: list[Lane], size: int) -> None:
    """Play the ring: lanes[0] writes, idle stages too where it is on; the others read."""
    names = {id(lane): name for name, lane in table.lanes().items()}
    writer, readers = lanes[0], lanes[1:]
    on = np.any(writer.active, axis=1)
    for stage in range(table.stages):
        holds: dict[int, tuple[int, int]] = {}
        for tick in range(table.ticks):
            for lane in lanes if on[tick] else readers:
                unit = int(lane.microbatch[tick, stage]), int(lane.chunk[tick, stage])
                slot = int(getattr(lane, ring)[tick, stage])
                if lane is not writer and unit[0] < 0:
                    continue
                where = names[id(lane)], tick, stage, unit
                if not 0 <= slot < size:
                    _fail(*where, f"has {ring} {slot} of {size}")
                if lane is writer:
                    if slot in holds:
                        _fail(*where, f"overwrites {_unit(holds[slot])} in {ring} {slot}")
                    if unit[0] >= 0:
                        holds[slot] = unit
                elif holds.get(slot) != unit:
                    found = _unit(holds[slot]) if slot in holds else "nothing"
                    _fail(*where, f"finds {found} in {ring} {slot}")
                elif lane is readers[-1]:
                    del holds[slot]


def _fail(lane: str, tick: int, stage: int, unit: tuple[int, int], problem: str) -> NoReturn:
    raise AssertionError(f"tick {tick}, stage {stage}, {lane} of {_unit(unit)}: {problem}")


def _unit(unit: tuple[int, int]) -> str:
    return f"microbatch {unit[0]}, chunk {unit[1]}" if unit[0] >= 0 else "an idle stage"
