"""Pipeline schedules as integer tables, in pure NumPy.

All stages go through the ticks together. In a tick, each active lane runs at most one unit on each
stage: one chunk of one microbatch. A lane's output reaches other stages at the next tick. An entry
of -1 means idle. References: 1F1B (PipeDream, Narayanan et al. 2019), interleaved 1F1B
(Megatron-LM, Narayanan et al. 2021), separate weight gradients (Zero Bubble Pipeline Parallelism,
Qi et al. 2023).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Lane:
    """Arrays [ticks, stages]: microbatch and chunk (-1: idle), and slots of two ring buffers.

    slot: where the forward lane stores residuals. deferred: where the backward lane stores the
    inputs of the weight lane. An idle stage writes too while its lane is active: it has a free
    slot.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    deferred: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return self.microbatch >= 0


@dataclasses.dataclass(frozen=True)
class Table:
    """What every stage does at every tick.

    backward: gradients of inputs and weights; with a weight lane, of inputs alone.
    head [ticks]: the microbatch whose loss is computed, -1 for none. Its input is the last stage's
    output of this tick.
    slots, deferred: sizes of the ring buffers. together: in a tick, one loop over layers runs both
    lanes, and the head after it; the last stage's backward is one tick after its head.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    forward: Lane
    backward: Lane | None
    weight: Lane | None
    head: np.ndarray
    slots: int
    deferred: int = 0
    together: bool = False

    @property
    def ticks(self) -> int:
        return len(self.head)

    def lanes(self) -> dict[str, Lane]:
        every = {"forward": self.forward, "backward": self.backward, "weight": self.weight}
        return {name: lane for name, lane in every.items() if lane is not None}


def one_f_one_b(microbatches: int, stages: int, chunks: int = 1, together: bool = False) -> Table:
    """1F1B; with more than one chunk a stage interleaved 1F1B, for multiples of `stages`.

    Microbatch m = g * stages + i of chunk v runs forward on stage s at tick
    s + g * stages * chunks + v * stages + i; backward mirrors it from tick stages * chunks - 1 on.
    together: of several microbatches, the lanes of a tick together, and backward one tick later: as
    many ticks of each lane, one slot more.
    """
    together = together and microbatches > 1
    forward, backward = _staggered(microbatches, stages, chunks, delay=int(together))
    sizes = (microbatches, stages, chunks)
    return _table("one_f_one_b", sizes, forward, backward, together=together)


def zero_bubble(microbatches: int, stages: int, chunks: int = 1, together: bool = False) -> Table:
    """1F1B with weight gradients in a lane of their own, on all stages at once, in the cool-down.

    ZB-H1: stages that run freely lose (S - 1)(F + B - W) in this order, with 1F1B's memory. In
    lockstep forward and backward are active for M + S - 1 ticks and the weight lane for M, the
    minimum: it loses (S - 1)(F + B), 1F1B (S - 1)(F + B + W), with as many slots.
    """
    if chunks != 1:
        raise ValueError(
            f"the schedule zero_bubble has one chunk a stage, not parallel.chunks={chunks}"
        )
    M, S, together = microbatches, stages, together and microbatches > 1
    forward, backward = _staggered(M, S, 1, delay=int(together))
    weight = {(s, 2 * S - 2 + together + m): (m, 0) for s in range(S) for m in range(M)}
    return _table("zero_bubble", (M, S, 1), forward, backward, weight, together)


def forward_only(microbatches: int, stages: int, chunks: int = 1) -> Table:
    """Evaluation: the forward lane alone, without residuals."""
    forward, _ = _staggered(microbatches, stages, chunks)
    return _table("forward_only", (microbatches, stages, chunks), forward, None)


SCHEDULES = {"one_f_one_b": one_f_one_b, "zero_bubble": zero_bubble}


def runs(table: Table, ends_apart: bool = False) -> list[tuple[int, int, tuple[str, ...]]]:
    """(first tick, tick after the last, active lanes) of each run of ticks with the same lanes.

    "head" counts as a lane; with several chunks it is active from its first tick to its last.
    ends_apart: the first tick and the last one are runs of their own.
    """
    with_head = table.head >= 0
    if table.chunks > 1:
        first, last = np.flatnonzero(with_head)[[0, -1]]
        with_head[first : last + 1] = True
    lanes = [
        tuple(name for name, lane in table.lanes().items() if lane.active[tick].any())
        + ("head",) * bool(with_head[tick])
        for tick in range(table.ticks)
    ]
    end_ticks = (1, table.ticks - 1) if ends_apart else ()
    starts = [
        tick
        for tick in range(table.ticks)
        if tick == 0 or lanes[tick] != lanes[tick - 1] or tick in end_ticks
    ]
    return [
        (start, stop, lanes[start])
        for start, stop in zip(starts, [*starts[1:], table.ticks], strict=True)
    ]


def live(table: Table) -> list[int]:
    """The most units whose residuals each stage holds at once.

    A unit is live from its forward to its last reader, both ticks included.
    """
    last_reader = table.weight or table.backward
    if last_reader is None:
        return [0] * table.stages
    writes, read = (_ticks(table, lane) for lane in (table.forward, last_reader))
    return [most_at_once(writes[:, s], read[:, s]) for s in range(table.stages)]


def most_at_once(first: np.ndarray, last: np.ndarray) -> int:
    """The most units that are live in one tick; each from tick `first` to `last`, both included."""
    change = np.zeros(int(last.max()) + 2, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    return int(change.cumsum().max())


@dataclasses.dataclass(frozen=True)
class Bubble:
    """The time of a step, in times (F, B, W) of a whole stage and microbatch: forward, gradients
    of inputs, gradients of weights. A chunk takes 1 / chunks of each.

    ticks: number of ticks in which each lane is active. lost: what all stages in lockstep take
    beyond `ideal`, the time of a stage that is never idle.
    """

    ticks: dict[str, int]
    lost: tuple[float, float, float]
    ideal: tuple[float, float, float]

    @property
    def fraction(self) -> float:
        """Lost over ideal time if F = B = W: (S - 1) / M for 1F1B."""
        return sum(self.lost) / sum(self.ideal)


def bubble(table: Table) -> Bubble:
    """The idle time of a table; without a weight lane a tick of backward takes B + W."""
    M, V = table.microbatches, table.chunks
    ticks = {name: int(lane.active.any(axis=1).sum()) for name, lane in table.lanes().items()}
    backward = ticks.get("backward", 0)
    counts = (ticks["forward"], backward, ticks.get("weight", backward))
    lost = [(count - M * V) / V if count else 0.0 for count in counts]
    ideal = [float(M) if count else 0.0 for count in counts]
    return Bubble(ticks, (lost[0], lost[1], lost[2]), (ideal[0], ideal[1], ideal[2]))


def _ticks(table: Table, lane: Lane) -> np.ndarray:
    """[microbatches x chunks, stages]: the tick of each unit."""
    ticks, stages = np.nonzero(lane.active)
    units = lane.microbatch[ticks, stages] * table.chunks + lane.chunk[ticks, stages]
    tick_of_unit = np.empty((table.microbatches * table.chunks, table.stages), np.int64)
    tick_of_unit[units, stages] = ticks
    return tick_of_unit


Units = dict[tuple[int, int], tuple[int, int]]  # (stage, tick) -> (microbatch, chunk)


def _staggered(M: int, S: int, V: int, delay: int = 0) -> tuple[Units, Units]:
    if V > 1 and M % S:
        choices = [str(number) for number in (M // S * S, (M // S + 1) * S) if number]
        raise ValueError(
            f"{M} microbatches are not divisible by parallel.pipe={S}, as interleaved chunks need"
            f": choose {' or '.join(choices)}"
        )
    forward, backward = {}, {}
    for m in range(M):
        group, i = divmod(m, S) if V > 1 else (0, m)
        for v in range(V):
            for s in range(S):
                forward[s, s + (group * V + v) * S + i] = (m, v)
                mirrored = S - 1 - s + (group * V + V - 1 - v) * S + i
                backward[s, S * V - 1 + delay + mirrored] = (m, v)
    return forward, backward


def _lane(units: Units, ticks: int, stages: int) -> Lane:
    microbatch, chunk, slot, deferred = np.full((4, ticks, stages), -1, np.int32)
    for (stage, tick), (m, v) in units.items():
        microbatch[tick, stage], chunk[tick, stage] = m, v
    return Lane(microbatch, chunk, slot, deferred)


def _table(
    name: str,
    sizes: tuple[int, int, int],
    forward: Units,
    backward: Units | None,
    weight: Units | None = None,
    together: bool = False,
) -> Table:
    """The table of these units, with its slots, and the head where the last stage needs it."""
    M, S, V = sizes
    ticks = 1 + max(tick for units in (forward, backward, weight) for _, tick in units or ())
    f = _lane(forward, ticks, S)
    b = _lane(backward, ticks, S) if backward else None
    w = _lane(weight, ticks, S) if weight else None
    head = np.where(f.chunk[:, -1] == V - 1, f.microbatch[:, -1], -1)
    slots = deferred = 0
    if b is not None:
        readers = [b] if w is None else [b, w]
        slots = _assign(f, readers, [lane.slot for lane in (f, *readers)])
    if b is not None and w is not None:
        deferred = _assign(b, [w], [b.deferred, w.deferred])
    return Table(name, S, M, V, f, b, w, head, slots, deferred, together)


def _assign(writer: Lane, readers: list[Lane], numbers: list[np.ndarray]) -> int:
    """Fill in the slots of a ring buffer, freed by the last of `readers`. Returns its size.

    An idle stage writes to a free slot while the lane is active.
    """
    ticks, stages = writer.microbatch.shape
    is_active = np.any(writer.microbatch >= 0, axis=1)
    count = 0
    for stage in range(stages):
        free: list[int] = []
        size, slot_of = 0, {}
        for tick in range(ticks):
            if is_active[tick]:
                if not free:
                    free, size = [size], size + 1
                slot = free[-1]
                if writer.active[tick, stage]:
                    slot_of[writer.microbatch[tick, stage], writer.chunk[tick, stage]] = free.pop()
                numbers[0][tick, stage] = slot
            for reader, number in zip(readers, numbers[1:], strict=True):
                unit = (reader.microbatch[tick, stage], reader.chunk[tick, stage])
                if unit[0] >= 0:
                    number[tick, stage] = slot_of[unit]
                    if reader is readers[-1]:
                        free.append(slot_of.pop(unit))
        count = max(count, size)
    return count
