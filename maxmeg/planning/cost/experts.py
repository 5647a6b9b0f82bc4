"""Copies of tokens on their way to experts: rows, bytes and seconds of a layer, by formulas.

Letters as in `memory`, and: n devices that the experts lie on, K experts that a token goes to, N
rows that a device's experts multiply, F width of an expert.
"""

import dataclasses
import math

from maxmeg.config.mixers import ExpertBackend
from maxmeg.config.schema import ExpertExchange
from maxmeg.ops.experts.dispatch import capacity_of
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.workload import Unit, Workload
from maxmeg.planning.hardware import Cluster


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Of one layer and microbatch on a device.

    tokens: that a device sends from, T, or where an expert is whole on a device (folded) T / t;
    devices: that they are sent to, or gathered from. here: experts of a device. width: of what is
    sent. parts: devices that an expert is cut over. itemsize: e. room: rows that a device has for
    each expert, padded; 0: as many as there are.
    """

    tokens: int
    top_k: int
    devices: int
    here: int
    width: int
    parts: int
    kind: ExpertExchange
    buffer: float
    itemsize: int
    room: int = 0

    @property
    def gathers(self) -> bool:
        return self.devices == 1 or self.kind is ExpertExchange.gather

    @property
    def most(self) -> int:
        """Rows that the most uneven loads have: min(K, experts here) for every token."""
        return self.devices * self.tokens * min(self.top_k, self.here)

    @property
    def rows(self) -> int:
        """N: gathered, as many as there may be; exchanged, what a round brings: `buffer` times the
        mean load, as many from each device; padded, `room` of each for every expert."""
        if self.room:
            return self.devices * self.here * self.room
        if self.gathers:
            return self.most
        load = self.buffer * self.tokens * self.top_k
        if self.kind is ExpertExchange.ragged:
            return min(math.ceil(load), self.most)
        return min(self.devices * math.ceil(load / self.devices), self.most)

    @property
    def in_rounds(self) -> bool:
        """Whether uneven loads need more of them."""
        return not self.room and self.rows < self.most

    @property
    def load(self) -> int:
        """Rows that even loads have, T K."""
        return self.tokens * self.top_k

    @property
    def vectors(self) -> int:
        """Bytes that one collective of vectors has on a device."""
        rows = self.devices * self.tokens if self.gathers else self.rows
        return self.itemsize * rows * self.width

    @property
    def weights(self) -> int:
        """Bytes of gathered weights."""
        return FLOAT32 * self.devices * self.load

    @property
    def labels(self) -> int:
        """Bytes of what goes with the vectors: a row's weight and, where it may be of any, its
        expert; or gathered experts, weights and whether copies are kept or, padded, their rows."""
        if self.gathers:
            return 2 * self.weights + (FLOAT32 if self.room else 1) * self.devices * self.load
        return (1 if self.room else 2) * FLOAT32 * self.rows

    @property
    def counts(self) -> int:
        """Bytes of the copies' numbers, of every pair of devices."""
        return 4 * self.devices**2


def dispatch(work: Workload) -> Dispatch:
    model, parallel = work.config.model, work.config.parallel
    tensor, kind = work.axes["tensor"], parallel.expert_exchange
    tokens = work.tokens // (tensor if folded(work) else 1)
    given = (tokens, model.moe.top_k, model.moe.num_experts, model.moe.capacity_factor)
    return Dispatch(
        tokens=tokens,
        top_k=model.moe.top_k,
        devices=work.axes["expert"] if kind is ExpertExchange.gather else parallel.expert,
        here=model.moe.num_experts // parallel.expert,
        width=model.moe.latent_size or model.hidden_size,
        parts=1 if parallel.fold > 1 else tensor,
        kind=kind,
        buffer=parallel.expert_buffer,
        itemsize=work.itemsize,
        room=capacity_of(*given) if model.moe.pad_to_capacity else 0,
    )


def folded(work: Workload) -> bool:
    """Whether devices along tensor each send their own tokens, to experts that are whole."""
    parallel = work.config.parallel
    return parallel.fold > 1 and parallel.expert_exchange is not ExpertExchange.gather


def axes(work: Workload) -> tuple[str, ...]:
    """Mesh axes along which tokens go to experts."""
    names = ("expert", "context", "tensor") if folded(work) else ("expert",)
    return tuple(name for name in names if work.axes[name] > 1)


def sums(work: Workload, unit: Unit) -> tuple[int, ...]:
    """Number of outputs that each sublayer scatters over tensor: one, of experts also that of the
    shared expert. The outputs of experts that are whole on a device need no sum."""
    found = []
    for spec in unit.specs:
        whole = [mixer for mixer in spec.mixers if mixer.writes == "whole"]
        shared = any(mixer.widths().shared_expert for mixer in spec.mixers)
        found.append(1 if whole else int(not folded(work)) + shared)
    return tuple(found)


def kept(work: Workload, unit: Unit) -> int:
    """Bytes that the experts of a unit keep for backward, beside those of `unit_activations`.

    Of their products with the stream, up and gate, e N (widths) / t, where an expert is cut over
    tensor, else e N (widths). minimal: also rows that came from other devices, e N D, and labels.
    """
    if not unit.sparse or not work.kept:
        return 0
    given = dispatch(work)
    size = work.itemsize * given.rows * unit.expert_columns // given.parts
    if "dispatched_tokens" in work.kept and not given.gathers:
        size += unit.sparse * (given.vectors + given.labels)
    return size


def deferred(work: Workload, unit: Unit) -> int:
    """Bytes that the experts of a unit keep for a weight lane: gradients of what their last product
    reads, and rows of vectors, e N (F / t + D); full: also up and gate and what they read, e N
    (widths / t + D)."""
    if not unit.sparse:
        return 0
    given = dispatch(work)
    widths = unit.expert_inputs // given.parts + unit.sparse * given.width
    if not work.kept:
        widths += unit.expert_columns // given.parts + unit.sparse * given.width
    return work.itemsize * given.rows * widths


def working(work: Workload, unit: Unit) -> int:
    """Bytes while one layer of experts runs backward: cotangents of its products and what they
    read, vectors in the order of experts and of devices, and their gradients, 2 e N (widths / t)
    and 3 e N D; exchanged, as XLA schedules them (ragged: less), 3 e N (widths / t) and 7 e N D,
    and where further rounds may be needed, whose gradients are added up, 4 e (the experts'
    matrices) of a device. Padded as gathered, and under full recomputation what is made again,
    e N (widths / t + D); in a pipeline also gradients of the experts' matrices in float32."""
    if not unit.sparse:
        return 0
    given, e = dispatch(work), work.itemsize
    columns = unit.expert_columns // unit.sparse // given.parts
    widths = (unit.expert_columns + unit.expert_inputs) // unit.sparse // given.parts
    matrices = given.here * given.width * widths // work.axes["fsdp"]
    if given.room:
        again = not work.kept
        total = e * given.rows * ((2 + again) * columns + (3 + again) * given.width)
        return total + FLOAT32 * matrices * work.pipelined
    if given.gathers:
        return e * given.rows * (2 * columns + 3 * given.width)
    total = e * given.rows * (3 * columns + 7 * given.width)
    return total + (4 * e * matrices if given.in_rounds else 0)


def streamed(work: Workload, unit: Unit) -> float:
    """Bytes that experts read and write in forward beside their products: each column twice, and
    vectors in the order of experts written and read on both ways, exchanged or gathered alike."""
    if not unit.sparse:
        return 0.0
    given = dispatch(work)
    columns = unit.expert_columns // given.parts
    return work.itemsize * given.rows * (2 * columns + 6 * unit.sparse * given.width)


def surplus_seconds(work: Workload, cluster: Cluster) -> float:
    """What the products of an average layer's experts take in forward beyond the chosen experts'
    FLOPs: XLA multiplies all rows by every expert of the device, padded ones by their own; all wait
    for memory where few rows share an expert's matrices."""
    total, given = 0.0, dispatch(work)
    rows = given.load
    if given.room:
        rows = given.rows
    elif work.config.model.moe.backend is not ExpertBackend.mosaic:
        rows = given.rows * given.here
    for unit in work.units:
        matrices = given.width * (unit.expert_columns + unit.expert_inputs) // given.parts
        needed = 2 * given.load * matrices / cluster.matmul_rate
        made = needed * rows / given.load
        read = work.itemsize * given.here * matrices / cluster.memory_rate
        total += unit.repeats * max(made - needed, read - needed, 0.0)
    return total / work.config.model.num_layers


def shared_seconds(work: Workload, cluster: Cluster) -> float:
    """Of the products of an average layer's shared experts in forward."""
    model = work.config.model
    sides = 3 if model.gated else 2
    products = 2 * work.tokens * sides * model.hidden_size * model.moe.shared_ffn_size
    sparse = sum(unit.repeats * unit.sparse for unit in work.units)
    each = products / work.axes["tensor"] / cluster.matmul_rate
    return sparse * each / model.num_layers
