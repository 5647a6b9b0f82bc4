"""What the mesh axes carry in a step, by formulas; nothing is compiled.

Counted is what the program asks for, stage by stage and tick by tick; the compiler may combine
collectives or drop one of two equal ones. Left out are sums of scalars. Letters: B samples of a
microbatch on a device, L tokens a sample, D width of the residual stream, t size of tensor.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from maxmeg.config.schema import ExpertExchange
from maxmeg.parallel.mesh import AXES
from maxmeg.planning.cost import experts
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.memory import head
from maxmeg.planning.cost.workload import Shard, Workload
from maxmeg.planning.hardware import GPUS_A_NODE, Cluster
from maxmeg.planning.report import Traffic

GATHER, SCATTER, REDUCE, PERMUTE = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
)
EXCHANGES = ALL_TO_ALL, RAGGED = "all-to-all", "ragged-all-to-all"
PARAMETERS_FORWARD = "parameters of layers, forward"
PARAMETERS_BACKWARD = "parameters of layers, backward"
LAYER_GRADIENTS = "gradients of layers"
SENT_FORWARD, SENT_BACKWARD = "hidden state to the next stage", "its gradient to the one before"
EXCHANGED_FORWARD, EXCHANGED_BACKWARD = "copies to experts and back", "their gradients"


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often a step runs each part: layers on a device forward and backward, embedding forward
    and backward, and head.

    With a pipeline every stage takes part in every tick, also where its own work is void.
    """

    layers_forward: int
    layers_backward: int
    embed: int
    embed_backward: int
    head: int


def runs(work: Workload) -> Runs:
    """With one chunk a stage the embedding is in every tick, with more in those that need it."""
    layers, lanes = sum(work.places), work.lanes
    forward, backward = lanes.forward * layers, lanes.backward * layers
    M = work.microbatches
    if work.config.parallel.chunks > 1:
        return Runs(forward, backward, M, M, M)
    return Runs(forward, backward, lanes.forward, lanes.backward, M)


def traffic(work: Workload, cluster: Cluster) -> tuple[Traffic, ...]:
    """Every axis and purpose with what a device sends in a step.

    Of n devices a gather or scatter of `size` bytes (the larger side) sends (n - 1) / n of it, an
    all-to-all too, an all-reduce twice that, a permute all. Seconds: at `Cluster.link_rate` of the
    group's span; of an all-to-all over nodes what leaves the node, through a GPU's own adapter.
    """
    found = [
        *_tensor(work),
        *_experts(work),
        *_loss(work),
        *_fsdp(work),
        *_data(work),
        *_pipe(work),
    ]
    return tuple(_timed(entry, work, cluster) for entry in found if entry.runs)


def _timed(entry: Traffic, work: Workload, cluster: Cluster) -> Traffic:
    axes = tuple(entry.axis.split(" x "))
    n, nodes, adapters = span(tuple(work.axes.values()), axes)
    share = {REDUCE: 2 * (n - 1) / n, PERMUTE: 1.0}.get(entry.kind, (n - 1) / n)
    volume = int(entry.volume * share)
    own = entry.kind in (PERMUTE, *EXCHANGES)
    rate = cluster.link_rate(nodes, 1 if own else adapters)
    leaving = entry.volume * (n - adapters) / n if entry.kind in EXCHANGES and nodes > 1 else volume
    return dataclasses.replace(entry, volume=volume, seconds=leaving / rate)


@functools.lru_cache(maxsize=4096)
def span(sizes: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int, int]:
    """(devices of a group along `axes`, most nodes that one lies on, its fewest in a node).

    Ranks go through the mesh with the last axis fastest, GPUS_A_NODE to a node.
    """
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    dims = [AXES.index(axis) for axis in axes]
    groups = np.moveaxis(ranks, dims, range(-len(dims), 0))
    members = math.prod(sizes[dim] for dim in dims)
    nodes = np.sort(groups.reshape(-1, members) // GPUS_A_NODE, axis=1)
    most = 1 + int((np.diff(nodes, axis=1) > 0).sum(axis=1).max()) if members > 1 else 1
    return members, most, members // most


def entry(axis: str, purpose: str, kind: str, count: int, size: int) -> Traffic:
    """`count` collectives of `size` bytes each; the volume is cut to what is sent by `_timed`."""
    return Traffic(axis, purpose, kind, count, count * size, 0.0)


def _tensor(work: Workload) -> Iterator[Traffic]:
    """Whole sequences, B x L x D in the compute dtype.

    A sublayer gathers its input and scatters its output, forward; backward gathers its input again
    (it is not kept) and the output's gradient, and scatters the input's. Full recomputation also
    scatters the output of each sublayer but the last once more. Latents are gathered in place of
    the input they are made of; `experts.sums` says what experts scatter.
    """
    tensor = work.axes["tensor"]
    if tensor == 1:
        return
    size, times = work.hidden_bytes * tensor, runs(work)
    layers = list(zip(work.units, work.places, strict=True))
    read = [width for unit, places in layers for width in unit.gathered * places]
    bytes_read = work.itemsize * work.tokens * sum(read)
    written = sum(sum(experts.sums(work, unit)) * places for unit, places in layers)
    again = 0
    if not work.kept:
        again = sum(sum(experts.sums(work, unit)[:-1]) * places for unit, places in layers)
    forward, backward = work.lanes.forward, work.lanes.backward
    into, out = "sequences into sublayers", "sums of sublayers"

    def both(purpose: str, kind: str, times: int, inputs: int, outputs: int) -> Traffic:
        """What sublayers read and write; a sum's size is that of a stream."""
        total = inputs * bytes_read + outputs * size
        return Traffic(
            "tensor", purpose, kind, times * (inputs * len(read) + outputs), times * total, 0
        )

    yield both(f"{into}, forward", GATHER, forward, 1, 0)
    yield both(f"{out}, forward", SCATTER, forward, 0, written)
    yield both(f"{into} and gradients, backward", GATHER, backward, 1, written)
    yield both(f"{out}, backward", SCATTER, backward, 1, again)
    ends = "embedding and head"
    yield entry("tensor", ends, GATHER, times.head + times.embed_backward, size)
    yield entry("tensor", ends, SCATTER, times.embed + times.head, size)


def _experts(work: Workload) -> Iterator[Traffic]:
    """Copies of tokens and sums of outputs, where experts lie on several devices.

    Exchanged: rows and their labels there, outputs back, and all gradients; where rows are made
    again, rows and labels once more; further rounds, of uneven loads, are left out, and padded ones
    have none, nor numbers of copies that it took to know. Gathered:
    vectors, labels and, scattered, sums; backward again and the gradients of all.
    """
    if not any(unit.sparse for unit in work.units):
        return
    given, axes = experts.dispatch(work), experts.axes(work)
    if not axes:
        return
    layers = list(zip(work.units, work.places, strict=True))
    sparse = sum(unit.sparse * places for unit, places in layers)
    forward, backward = work.lanes.forward * sparse, work.lanes.backward * sparse
    name = " x ".join(axes)

    def some(purpose: str, kind: str, times: int, count: int, size: int) -> Traffic:
        return Traffic(name, purpose, kind, times * count, times * size, 0.0)

    vectors, labels = given.vectors, given.labels
    if given.gathers:
        yield some(EXCHANGED_FORWARD, GATHER, forward, 4, vectors + labels)
        yield some(EXCHANGED_FORWARD, SCATTER, forward, 1, vectors)
        yield some(EXCHANGED_BACKWARD, GATHER, backward, 5, 2 * vectors + labels)
        yield some(EXCHANGED_BACKWARD, SCATTER, backward, 2, vectors + given.weights)
        return
    again = int("dispatched_tokens" not in work.kept)
    kind = RAGGED if given.kind is ExpertExchange.ragged else ALL_TO_ALL
    yield some(EXCHANGED_FORWARD, kind, forward, 3, 2 * vectors + labels)
    sizes = (2 + again) * vectors + (1 + again) * labels
    yield some(EXCHANGED_BACKWARD, kind, backward, 3 + 2 * again, sizes)
    counted = forward + (0 if "dispatch_counts" in work.kept else backward)
    if given.room:
        return
    yield some("how many copies", GATHER, counted, 1, given.counts)


def _loss(work: Workload) -> Iterator[Traffic]:
    """For each block of tokens, in float32: the largest logit, then two sums in one collective.

    (The sum of all logits enters the smoothed loss, not its gradient: no step asks for it.)
    """
    axes = [axis for axis in ("pipe", "tensor") if work.axes[axis] > 1]
    if not axes:
        return
    loss = head(work)
    blocks, tokens = loss.blocks
    count = blocks * runs(work).head
    total = 3 * FLOAT32 * tokens * count
    yield Traffic(" x ".join(axes), "sums of the loss", REDUCE, 2 * count, total, 0.0)


def _fsdp(work: Workload) -> Iterator[Traffic]:
    """Parameters in the compute dtype gathered at every use, and their gradients scattered.

    Backward gathers a layer's again. Embedding and output are gathered once a microbatch each.
    """
    if work.axes["fsdp"] == 1:
        return
    times, e, chunks = runs(work), work.itemsize, work.config.parallel.chunks
    sharded = [shard for shard in work.shards if shard.whole != shard.computed]
    layered = [shard for shard in sharded if shard.parameter.group is not None]
    lanes = work.lanes

    def layers(purpose: str, kind: str, times: int, shards: list[Shard]) -> Traffic:
        """One layer of every group, over all places of a chunk."""
        count = sum(work.places[s.parameter.group or 0] for s in shards)
        size = sum(e * shard.whole // chunks for shard in shards)
        return Traffic("fsdp", purpose, kind, times * count, times * size, 0.0)

    yield layers(PARAMETERS_FORWARD, GATHER, lanes.forward, layered)
    yield layers(PARAMETERS_BACKWARD, GATHER, lanes.backward, layered)
    trained = [shard for shard in layered if shard.trained]
    yield layers(LAYER_GRADIENTS, SCATTER, lanes.backward, trained)
    ends = [shard for shard in sharded if shard.parameter.group is None]
    tied = not any(shard.parameter.kind == "output" for shard in ends)
    for shard in ends:
        kind, size = shard.parameter.kind, e * shard.whole
        head = times.head if kind == "output" or (tied and kind == "embedding") else 0
        forward = head + (times.embed if kind != "output" else 0)
        backward = head + (times.embed_backward if kind != "output" else 0)
        yield entry("fsdp", f"{kind} table", GATHER, forward, size)
        if shard.trained:
            yield entry("fsdp", f"gradient of the {kind} table", SCATTER, backward, size)


def _data(work: Workload) -> Iterator[Traffic]:
    """Once a step: weights gathered in the compute dtype and gradients scattered in float32
    (ZeRO-1), and gradients of what is replicated summed over all axes that it is replicated on."""
    scattered = [shard for shard in work.shards if shard.scattered]
    weights = sum(work.itemsize * shard.computed for shard in scattered)
    gradients = sum(FLOAT32 * shard.computed for shard in scattered)
    yield Traffic("data", "weights of the step (ZeRO-1)", GATHER, len(scattered), weights, 0.0)
    yield Traffic("data", "gradients (ZeRO-1)", SCATTER, len(scattered), gradients, 0.0)
    by_axes: dict[tuple[str, ...], list[Shard]] = {}
    for shard in work.shards:
        if shard.sum_axes:
            by_axes.setdefault(shard.sum_axes, []).append(shard)
    for axes, members in by_axes.items():
        size = sum(FLOAT32 * shard.stored for shard in members)
        yield entry(" x ".join(axes), "gradients of replicated parameters", REDUCE, 1, size)


def _pipe(work: Workload) -> Iterator[Traffic]:
    """Residual streams, B x L x D / t: sent on at every tick of a lane; summed over the stages
    when embedded, when given to the head, and both gradients."""
    if not work.pipelined:
        return
    times, size = runs(work), work.hidden_bytes
    yield entry("pipe", SENT_FORWARD, PERMUTE, work.lanes.forward, size)
    yield entry("pipe", SENT_BACKWARD, PERMUTE, work.lanes.backward, size)
    yield entry("pipe", "embedded tokens", REDUCE, times.embed, size)
    yield entry("pipe", "gradient of embedded tokens", REDUCE, times.embed_backward, size)
    yield entry("pipe", "input of the head and its gradient", REDUCE, 2 * times.head, size)
