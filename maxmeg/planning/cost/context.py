"""Attention and convolutions over context in a step: transfers, hidden seconds and memory, by
formulas; nothing is compiled.

Letters: T tokens of a microbatch on a device, t size of tensor, e bytes of the compute dtype.
"""

import dataclasses
import math
from collections.abc import Iterator

from maxmeg.distributed.attention.context_choice import (
    ContextShape,
    ContextStrategy,
    Rates,
    chosen,
    exposed_seconds,
    halo_of,
    inner_size,
    repeated,
    travelling,
)
from maxmeg.layers.attention import AttentionSpec
from maxmeg.ops.attention.spec import ScoreSpec
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.workload import Unit, Workload
from maxmeg.planning.hardware import (
    ATTENTION_BACKWARD_REACHED,
    ATTENTION_FORWARD_REACHED,
    GPUS_A_NODE,
    Cluster,
)
from maxmeg.planning.report import ALL_TO_ALL, GATHER, PERMUTE, SCATTER, Traffic

PIECES_FORWARD, PIECES_BACKWARD = "keys and values, forward", "keys and values, backward"
PIECE_GRADIENTS = "gradients of keys and values"
HEADS_FORWARD = "queries, keys, values and outputs, forward"
HEADS_BACKWARD = "queries, keys, values and outputs, backward"
EDGES = "tokens at the edges of pieces"
STATES = "states of scans"
DOCUMENTS = "documents of tokens"
KEPT = {"context_output", "context_lse"}
IN_FLIGHT = 2  # rounds of a ring whose arrays exist at a time


@dataclasses.dataclass(frozen=True)
class OverContext:
    """The attention of one layer. strategy: the one that runs. key_size, value_size: of a head.
    expanded: elements of a head's keys and values that are made of latents."""

    strategy: ContextStrategy
    shape: ContextShape
    scores: ScoreSpec
    key_size: int
    value_size: int
    expanded: int = 0

    @property
    def inner(self) -> int:
        """Number of devices that exchange heads."""
        return inner_size(self.strategy, self.shape)

    @property
    def ring(self) -> int:
        """Number of devices of a ring; 1: there is none."""
        return 1 if self.strategy.name == "gather" else self.shape.context // self.inner

    @property
    def tokens(self) -> int:
        return self.shape.rows * self.shape.length // self.shape.context

    @property
    def halo(self) -> int | None:
        return halo_of(self.scores, self.shape.half * self.inner)

    @property
    def piece(self) -> int:
        """Bytes of the keys and values of a device of the ring."""
        return int(travelling(self.shape, self.inner) * self.tokens * self.inner)

    @property
    def permuted(self) -> tuple[int, int]:
        """(permutes, their bytes) that bring keys and values to all queries once."""
        if self.ring == 1:
            return 0, 0
        if self.halo is None:
            return self.ring - 1, (self.ring - 1) * self.piece
        size = travelling(self.shape, self.inner) * self.shape.rows * self.halo
        return 2 * (self.halo > 0), int(2 * size)

    @property
    def exchanged(self) -> tuple[int, int]:
        """(all-to-alls, bytes of their inputs) in forward."""
        if self.inner == 1:
            return 0, 0
        shape, sizes = self.shape, self.shape.heads * (self.key_size + self.value_size)
        if shape.of_each_head:
            sizes += repeated(shape.kv_heads, self.inner) * shape.travelling
        return 2 + shape.of_each_head, self.tokens * shape.bytes * sizes

    @property
    def gathered(self) -> tuple[int, int]:
        """(number of devices that gather keys and values or latents, bytes of the result)."""
        everywhere = self.strategy.name == "gather"
        if not everywhere and (self.shape.of_each_head or self.inner == 1):
            return 1, 0
        devices = self.shape.context if everywhere else self.inner
        return devices, int(devices * self.tokens * travelling(self.shape))


def attentions(work: Workload, unit: Unit) -> list[OverContext]:
    """The attention of each mixer of a unit; empty without context parallelism."""
    if work.axes["context"] == 1:
        return []
    work = work.of(unit)
    mixers = [mixer for one in unit.specs for mixer in one.mixers]
    attend = (m for m in mixers if isinstance(m, AttentionSpec) and m.spans_devices)
    return [over_context(work, mixer) for mixer in attend]


def over_context(work: Workload, mixer: AttentionSpec) -> OverContext:
    tensor, (heads, width) = work.axes["tensor"], mixer.travelling
    of_latents = sum(mixer.widths().stored.get(name, 0) for name in ("key_up", "value_up"))
    shape = ContextShape(
        rows=work.samples,
        length=work.config.data.source_tokens if mixer.reads_memory else work.length,
        heads=max(mixer.num_heads // tensor, 1),
        kv_heads=max(heads // tensor, 1),
        travelling=width,
        head_size=2 * mixer.key_size,
        bytes=work.itemsize,
        context=work.axes["context"],
        tensor=tensor,
        of_each_head=not of_latents,
    )
    scores = mixer.score_spec()
    strategy, _ = chosen(mixer.context, shape, scores)
    if mixer.buckets or mixer.reads_memory:
        strategy = ContextStrategy("gather")
    sizes = mixer.key_size, mixer.head_output_size, of_latents // mixer.num_heads
    return OverContext(strategy, shape, scores, *sizes)


def kernel_sizes(work: Workload, mixer: AttentionSpec) -> tuple[int, int, int, int]:
    """(samples, length, devices over which the heads are sharded, length of the sequence whose keys
    are gathered over context or 0) of a mixer's largest attention call: of a device's piece, after
    an exchange of the pieces of several devices."""
    length, tensor = work.length, work.axes["tensor"]
    if work.axes["context"] == 1 or not mixer.spans_devices:
        return work.samples, length, tensor, 0
    attention = over_context(work, mixer)
    inner, gathered = attention.inner, length * (attention.strategy.name == "gather")
    return work.samples, length * inner // work.axes["context"], tensor * inner, gathered


def keeps_rounds(work: Workload) -> bool:
    """Whether backward reads the output of a ring from memory instead of repeating it."""
    return work.saved >= KEPT


def in_rounds(work: Workload, unit: Unit) -> float:
    """Share of a unit's attention layers whose attention is a ring; 0 without attention."""
    every = attentions(work, unit)
    return sum(one.ring > 1 for one in every) / len(every) if every else 0.0


def stored_bytes(work: Workload, unit: Unit) -> int:
    """Bytes that a unit stores for backward beyond the same layers without context.

    Of every ring its output and log-sum-exp, (e T H K + 4 T H) / t with H heads of value size K.
    minimal: keys and values made of gathered latents are those of the whole sequence; a ring makes
    them in every round and stores none.
    """
    total, work = 0, work.of(unit)
    for one in attentions(work, unit):
        heads = work.tokens * one.shape.heads
        if one.ring > 1 and keeps_rounds(work):
            total += heads * (work.itemsize * one.value_size + FLOAT32)
        if "key_up" in work.saved:
            pieces = -1 if one.ring > 1 else 0
            pieces = one.shape.context - 1 if one.strategy.name == "gather" else pieces
            total += pieces * work.itemsize * heads * one.expanded
    return total


def working(work: Workload, unit: Unit) -> int:
    """Bytes of a ring's backward beside the arrays of other attention, in one layer.

    Gradient of the queries in float32, 4 T H K / t; two pieces of keys and values and two of their
    float32 gradients, of which one is on its way. With halos, which are short: the gradients of the
    queries and of one piece. full: MLP products wait to run beside the permutes, so that the
    arrays of two rounds exist beside the MLP's: queries, outputs and both gradients, 8 e T H K / t.
    """
    sizes = [0]
    for one in attentions(work, unit):
        if one.ring == 1:
            continue
        width = one.tokens * one.shape.heads * one.key_size
        slopes = one.piece * FLOAT32 // work.itemsize
        if one.halo is not None:
            sizes.append(FLOAT32 * width + slopes)
        else:
            arrays = 0 if work.saved else 4 * work.itemsize * width
            sizes.append(FLOAT32 * width + IN_FLIGHT * (arrays + one.piece + slopes))
    return max(sizes)


def traffic(work: Workload, cluster: Cluster) -> Iterator[Traffic]:
    """Transfers over context, timed: inside a node over NVLink, else over a GPU's own adapter.

    Ring: keys and values R - 1 times in forward and, unless the ring's outputs are stored, once
    more in backward; there also R - 1 times in the other direction, with their gradients in
    float32; halos of a window instead of all. Exchange: queries, keys, values, outputs; backward
    repeats forward, then sends all gradients. Gather: again in backward, which sums the gradients
    in float32 to where they belong.
    """
    totals: dict[tuple[str, str], list[float]] = {}
    rates = rates_of(cluster, 1.0)
    tensor, context = work.axes["tensor"], work.axes["context"]

    def add(purpose: str, kind: str, times: int, count: int, size: float, reach: int) -> None:
        """`times` as often `count` transfers of `size` bytes together. reach: number of consecutive
        devices that they span."""
        rate = rates.inside if reach <= GPUS_A_NODE else rates.between
        total = totals.setdefault((purpose, kind), [0, 0, 0.0])
        for number, amount in enumerate((times * count, times * size, times * size / rate)):
            total[number] += amount

    for unit, runs in zip(work.units, work.unit_runs, strict=True):
        forward, backward = work.lanes.forward * runs, work.lanes.backward * runs
        for one in attentions(work, unit):
            repeats = backward * (not keeps_rounds(work))
            (count, size), reach = one.permuted, context * tensor
            slopes = size * FLOAT32 // work.itemsize
            add(PIECES_FORWARD, PERMUTE, forward, count, size, reach)
            add(PIECES_BACKWARD, PERMUTE, repeats + backward, count, size, reach)
            add(PIECE_GRADIENTS, PERMUTE, backward, count, slopes, reach)
            inner = one.inner
            (count, size), reach = one.exchanged, inner * tensor
            size *= (inner - 1) / inner
            add(HEADS_FORWARD, ALL_TO_ALL, forward, count, size, reach)
            add(HEADS_BACKWARD, ALL_TO_ALL, 2 * backward, count, size, reach)
            devices, size = one.gathered
            size, count, reach = size * (devices - 1) / devices, devices > 1, devices * tensor
            add(PIECES_FORWARD, GATHER, forward, count, size, reach)
            add(PIECES_BACKWARD, GATHER, backward, count, size, reach)
            add(PIECE_GRADIENTS, SCATTER, backward, count, size * FLOAT32 / work.itemsize, reach)
            if work.config.data.has_segments:
                size = FLOAT32 * one.tokens * (context - 1)
                add(DOCUMENTS, GATHER, forward + backward, 1, size, context * tensor)
        for mixer in (mixer for spec in unit.specs for mixer in spec.mixers):
            if context == 1:
                continue
            for elements in filter(None, mixer.halos(tensor)):
                size = work.itemsize * work.samples * elements
                add(EDGES, PERMUTE, 2 * (forward + 2 * backward), 1, size, context * tensor)
            if mixer.state():
                size = 2 * FLOAT32 * work.samples * mixer.state(tensor) * (context - 1)
                add(STATES, GATHER, forward + 2 * backward, 1, size, context * tensor)
    for key, (runs, volume, seconds) in totals.items():
        if runs:
            yield Traffic("context", *key, int(runs), int(volume), seconds)


def rates_of(cluster: Cluster, attention: float) -> Rates:
    """attention: FLOPs per second as a fraction of the peak."""
    flops = cluster.gpu.bf16_tflops * 1e12 * attention
    return Rates(flops, cluster.link_rate(1, 1), cluster.link_rate(2, 1))


def hidden_seconds(work: Workload, cluster: Cluster, backward_products: float) -> float:
    """Seconds of a step's permutes that run beside the attention of a ring's rounds.

    backward_products: FLOPs of attention's backward over those of forward. It sends keys, values
    and, in float32, their gradients beside each round.
    """
    passes = (
        (0, rates_of(cluster, ATTENTION_FORWARD_REACHED)),
        (FLOAT32, rates_of(cluster, ATTENTION_BACKWARD_REACHED / backward_products)),
    )
    total = 0.0
    for unit, runs in zip(work.units, work.unit_runs, strict=True):
        times = [work.lanes.forward * runs, work.lanes.backward * runs]
        times[0] += 0 if keeps_rounds(work) else times[1]
        for one in attentions(work, unit):
            for count, (slopes, rates) in zip(times, passes, strict=True):
                shape = dataclasses.replace(one.shape, bytes=one.shape.bytes + slopes)
                exposed = [
                    exposed_seconds(one.strategy, shape, one.scores, each)
                    for each in (dataclasses.replace(rates, flops=math.inf), rates)
                ]
                total += count * (exposed[0] - exposed[1])
    return total
