"""Communication of a step over each mesh axis, by formulas; nothing is compiled.

The formulas count the collectives that the program calls in every tick. The compiler may combine
collectives or drop duplicates. Sums of scalars are left out. Letters: B samples of a microbatch on
a device, L tokens per sample, D hidden size, t size of tensor.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from maxmeg.parallel.mesh import AXES
from maxmeg.parallel.parameter import info
from maxmeg.planning.cost import context, experts
from maxmeg.planning.cost.backward import split_once
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.memory import head
from maxmeg.planning.cost.optimizer import exchanged
from maxmeg.planning.cost.workload import Shard, Workload
from maxmeg.planning.hardware import GPUS_A_NODE, Cluster
from maxmeg.planning.report import ALL_TO_ALL, GATHER, PERMUTE, REDUCE, SCATTER, Traffic

INSIDE, BETWEEN = ", inside nodes", ", between nodes"  # of an exchange by nodes
PARAMETERS_FORWARD = "parameters of layers, forward"
PARAMETERS_BACKWARD = "parameters of layers, backward"
FIRST_FORWARD = "first parameters of a layer, forward"
FIRST_BACKWARD = "first parameters of a layer, backward"
LAYER_GRADIENTS = "gradients of layers"
ZERO1_WEIGHTS, ZERO1_GRADIENTS = "weights of layers (ZeRO-1)", "gradients of layers (ZeRO-1)"
ZERO1_FIRST = "weights of the first layer (ZeRO-1)"
ZERO1_LAST = "gradients of the last sublayer (ZeRO-1)"
SENT_FORWARD, SENT_BACKWARD = "hidden state to the next stage", "its gradient to the one before"
EXCHANGED_FORWARD, EXCHANGED_BACKWARD = "copies to experts and back", "their gradients"


def embeddings(work: Workload) -> tuple[int, int]:
    """How often a step runs the embedding, forward and backward.

    With one chunk per stage it runs in every tick, also when the first stage idles.
    """
    if work.config.parallel.chunks > 1:
        return work.microbatches, work.microbatches
    return work.lanes.forward, work.lanes.backward


def traffic(work: Workload, cluster: Cluster) -> tuple[Traffic, ...]:
    """The bytes that a device sends in a step, and their seconds, for every axis and purpose.

    Among n devices a gather or scatter of `size` bytes (the larger of input and output) sends
    (n - 1) / n of it, as does an all-to-all; an all-reduce sends twice that, a permute all of it.
    Seconds: at `Cluster.link_rate` of the group; for an all-to-all between nodes, the bytes that
    leave the node, through one adapter per GPU.
    """
    entries = [
        *_tensor(work),
        *_experts(work),
        *_loss(work),
        *_fsdp(work),
        *_data(work),
        *_pipe(work),
        *_whole_matrices(work),
    ]
    timed = (_timed(entry, work, cluster) for entry in entries if entry.runs)
    return *timed, *context.traffic(work, cluster)


def _timed(entry: Traffic, work: Workload, cluster: Cluster) -> Traffic:
    axes = tuple(entry.axis.partition(",")[0].split(" x "))
    n, nodes, adapters = span(tuple(work.axes.values()), axes)
    if entry.axis.endswith(INSIDE):
        n, nodes = n // nodes, 1
        adapters = n
    elif entry.axis.endswith(BETWEEN):
        n, adapters = nodes, 1
    share = {REDUCE: 2 * (n - 1) / n, PERMUTE: 1.0}.get(entry.kind, (n - 1) / n)
    volume = int(entry.volume * share)
    one_adapter = entry.kind in (PERMUTE, ALL_TO_ALL)
    rate = cluster.link_rate(nodes, 1 if one_adapter else adapters)
    leaves_nodes = entry.kind == ALL_TO_ALL and nodes > 1
    leaving = entry.volume * (n - adapters) / n if leaves_nodes else volume
    return dataclasses.replace(entry, volume=volume, seconds=leaving / rate)


@functools.lru_cache(maxsize=4096)
def span(sizes: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, int, int]:
    """(devices in a group along `axes`, most nodes of a group, its devices per node).

    Ranks are in mesh order, the last axis fastest, GPUS_A_NODE per node.
    """
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    dims = [AXES.index(axis) for axis in axes]
    groups = np.moveaxis(ranks, dims, range(-len(dims), 0))
    members = math.prod(sizes[dim] for dim in dims)
    nodes = np.sort(groups.reshape(-1, members) // GPUS_A_NODE, axis=1)
    most = 1 + int((np.diff(nodes, axis=1) > 0).sum(axis=1).max()) if members > 1 else 1
    return members, most, members // most


def entry(axis: str, purpose: str, kind: str, times: int, size: int, count: int = 1) -> Traffic:
    """`times` as often `count` collectives of `size` bytes together; `_timed` reduces the volume to
    the bytes sent."""
    return Traffic(axis, purpose, kind, times * count, times * size, 0.0)


def _tensor(work: Workload) -> Iterator[Traffic]:
    """Whole sequences, B x L x D in the compute dtype.

    In forward a sublayer gathers its input and scatters its output. In backward it gathers its
    input again (which is not stored) and the output's gradient, and scatters the input's gradient.
    Full recomputation scatters the output of each sublayer but the last again. Multi-latent
    attention gathers latents instead of its input; `experts.sums` counts the scatters of experts.
    """
    tensor = work.axes["tensor"]
    if tensor == 1:
        return
    size, M = work.hidden_bytes * tensor, work.microbatches
    embed, embed_backward = embeddings(work)
    inputs, outputs, repeats = [0, 0], [0, 0], [0, 0]  # numbers of sequences, and their bytes
    for unit, runs in zip(work.units, work.unit_runs, strict=True):
        of_unit, sums = work.of(unit), experts.sums(work, unit)
        sequence = of_unit.hidden_bytes * tensor
        read = of_unit.itemsize * of_unit.tokens * sum(unit.gathered)
        repeated = sum(sums[:-1]) * ("mixer_output" in work.unsaved)
        for total, count, volume in (
            (inputs, len(unit.gathered), read),
            (outputs, sum(sums), sum(sums) * sequence),
            (repeats, repeated, repeated * sequence),
        ):
            total[0] += runs * count
            total[1] += runs * volume
    forward, backward = work.lanes.forward, work.lanes.backward
    inward, outward = "sequences into sublayers", "sums of sublayers"

    def both(purpose: str, kind: str, times: int, *sequences: list[int]) -> Traffic:
        count, total = map(sum, zip(*sequences, strict=True))
        return entry("tensor", purpose, kind, times, total, count)

    yield both(f"{inward}, forward", GATHER, forward, inputs)
    yield both(f"{outward}, forward", SCATTER, forward, outputs)
    yield both(f"{inward} and gradients, backward", GATHER, backward, inputs, outputs)
    yield both(f"{outward}, backward", SCATTER, backward, inputs, repeats)
    ends = "embedding and head"
    yield entry("tensor", ends, GATHER, M + embed_backward, size)
    yield entry("tensor", ends, SCATTER, embed + M, size)
    runs, total = shared_heads(work)
    yield entry("tensor", "gradients of shared key/value heads", SCATTER, backward, total, runs)
    source = work.itemsize * work.source_tokens * work.config.model.hidden_size
    yield entry("tensor", ends, GATHER, embed_backward * (source > 0), source)
    yield entry("tensor", ends, SCATTER, embed * (source > 0), source)


def shared_heads(work: Workload) -> tuple[int, int]:
    """(projections, bytes) whose gradients are summed over the devices that share a key/value head
    before they are rounded (parallel.collectives.of_shared_head), in backward of a microbatch."""
    runs = total = 0
    for shard in work.shards:
        parameter = shard.parameter
        heads = info(parameter.variable).num_kv_heads
        if work.is_quantized(shard) and 0 < heads < work.axes["tensor"]:
            number = 1 if parameter.group is None else work.unit_runs[parameter.group]
            width = info(parameter.variable).sizes[-1] // heads
            runs, total = runs + number, total + number * work.itemsize * work.tokens * width
    return runs, total


def _experts(work: Workload) -> Iterator[Traffic]:
    """Copies of tokens and sums of outputs, if experts lie on several devices.

    Exchange: rows and their labels are sent to the experts, outputs back, and all gradients; rows
    and labels again if they are not stored. Devices that share experts gather what arrives, and
    scatter the sums that go back. With train.quantization.dispatch, rows and gradients
    that are sent to experts have 8 bits. Unbalanced loads may need further rounds, which are left
    out; blocks need no counts of copies. By nodes: the same twice, between nodes and inside one.
    Gather: vectors and labels are gathered and sums scattered; backward gathers again, with all
    gradients.
    """
    if not any(unit.sparse for unit in work.units):
        return
    dispatch, axes = experts.dispatch_of(work), experts.axes(work)
    sparse = sum(unit.sparse * runs for unit, runs in zip(work.units, work.unit_runs, strict=True))
    forward, backward = work.lanes.forward * sparse, work.lanes.backward * sparse
    name, vectors, labels = " x ".join(axes), dispatch.vectors, dispatch.labels
    if dispatch.gathers:
        ordered = dispatch.in_blocks  # only weights once more
        if work.axes["tensor"] > 1:
            chosen, count = FLOAT32 * dispatch.balanced_rows, 1 if ordered else 2
            yield entry("tensor", "experts and weights", GATHER, forward, 2 * chosen, 2)
            yield entry("tensor", "experts and weights", GATHER, backward, count * chosen, count)
            yield entry("tensor", "experts and weights", SCATTER, backward, chosen)
        if not axes:
            return
        yield entry(name, EXCHANGED_FORWARD, GATHER, forward, vectors + labels, 4)
        yield entry(name, EXCHANGED_FORWARD, SCATTER, forward, vectors)
        count, repeated = (3, dispatch.weights) if ordered else (5, labels)
        yield entry(name, EXCHANGED_BACKWARD, GATHER, backward, 2 * vectors + repeated, count)
        yield entry(name, EXCHANGED_BACKWARD, SCATTER, backward, vectors + dispatch.weights, 2)
        return

    # repeats, labels_sent: how often backward sends rows and labels again. Labels are stored, but
    # not those inside a node.
    def exchanged(name, vectors: int, labels: int, repeats: int, labels_sent: int):
        packed = int(dispatch.sent * vectors)
        yield entry(name, EXCHANGED_FORWARD, ALL_TO_ALL, forward, packed + vectors + labels, 3)
        size = vectors + (1 + repeats) * packed + (1 + labels_sent) * labels
        yield entry(name, EXCHANGED_BACKWARD, ALL_TO_ALL, backward, size, 3 + repeats + labels_sent)

    def joined(vectors: int, labels: int, repeats: int, labels_sent: int):
        packed = int(dispatch.sent * vectors)
        yield entry("tensor", EXCHANGED_FORWARD, GATHER, forward, packed + labels, 2)
        yield entry("tensor", EXCHANGED_FORWARD, SCATTER, forward, vectors)
        size = (1 + repeats) * packed + labels_sent * labels
        yield entry("tensor", EXCHANGED_BACKWARD, GATHER, backward, size, 1 + repeats + labels_sent)
        yield entry("tensor", EXCHANGED_BACKWARD, SCATTER, backward, vectors + labels, 2)

    repeats, labels_sent = int("dispatched_tokens" not in work.saved), 0
    if dispatch.node_rows:
        vectors_labels = dispatch.node_vectors, dispatch.node_labels
        yield from exchanged(name + BETWEEN, *vectors_labels, repeats, labels_sent)
        name, repeats, labels_sent = name + INSIDE, 1, 1
    yield from exchanged(name, vectors, labels, repeats, labels_sent)
    if dispatch.joined > 1:
        yield from joined(dispatch.joined * vectors, dispatch.joined * labels, repeats, labels_sent)
    if not dispatch.in_blocks:
        yield entry(name, "how many copies", GATHER, forward, dispatch.counts)


def _loss(work: Workload) -> Iterator[Traffic]:
    """For each block of tokens, in float32: the largest logit, then two sums in one collective.

    (The sum of all logits affects the smoothed loss, not its gradient: a step does not compute it.)
    """
    axes = [axis for axis in ("pipe", "tensor") if work.axes[axis] > 1]
    if not (axes and work.has_output):
        return
    blocks, tokens = head(work).blocks
    times, size = blocks * work.microbatches, 3 * FLOAT32 * tokens
    yield entry(" x ".join(axes), "sums of the loss", REDUCE, times, size, 2)


def _whole_matrices(work: Workload) -> Iterator[Traffic]:
    """Of Muon and SOAP: parts of matrices for whole ones and back, and results for devices with
    copies."""
    sizes: dict[tuple[bool, str], list[int]] = {}
    for is_exchange, names, size in exchanged(work):
        axes = dict.fromkeys("tensor" if name == "fold" else name for name in names)
        sizes.setdefault((is_exchange, " x ".join(axes)), []).append(size)
    for (is_exchange, axis), each in sizes.items():
        kind, times = (ALL_TO_ALL, 2) if is_exchange else (GATHER, 1)
        yield entry(axis, "parts of matrices for the update", kind, times, sum(each), len(each))


def _fsdp(work: Workload) -> Iterator[Traffic]:
    """Parameters in the compute dtype are gathered at every use, their gradients scattered in
    parallel.gradient_dtype; a fused weight is one array.

    Backward gathers a layer's parameters again. The gradients of a unit's first sublayer wait for
    the next layer, so that a step scatters them once more, at its end, and under ZeRO-1 also before
    its last tick. Where a microbatch has fewer tokens than the table of token embeddings has rows,
    the tokens' ids are gathered and their vectors, B x L x D, exchanged instead, in backward the
    vectors' gradients, and the ids again.
    """
    for axes in dict.fromkeys(shard.fsdp for shard in work.shards if shard.fsdp):
        yield from _gathered(work, axes)


def _gathered(work: Workload, axes: tuple[str, ...]) -> Iterator[Traffic]:
    """The traffic over fsdp of the shards that are gathered over these mesh axes."""
    name, e, chunks = " x ".join(axes), work.itemsize, work.config.parallel.chunks
    embed, embed_backward = embeddings(work)
    sharded = [shard for shard in work.shards if shard.fsdp == axes]
    layered = [shard for shard in sharded if shard.parameter.group is not None]
    lanes = work.lanes

    def layers(purpose: str, kind: str, times: int, shards: list[Shard]) -> Traffic:
        """The parameters of all layers that a chunk runs."""
        count = size = 0
        for shard in shards:
            runs, places = (n[shard.parameter.group or 0] for n in (work.unit_runs, work.places))
            weights = work.weight_bytes(shard, shard.gathered)
            each = weights if kind == GATHER else work.gradient_itemsize * shard.gathered
            count += runs * shard.first_fused
            size += each // (chunks * places) * runs
        return entry(name, purpose, kind, times, size, count)

    for purpose, first_purpose, times, first in (
        (PARAMETERS_FORWARD, FIRST_FORWARD, lanes.forward, _reads_input),
        (PARAMETERS_BACKWARD, FIRST_BACKWARD, lanes.backward, _writes_output),
    ):
        yield layers(first_purpose, GATHER, times, [s for s in layered if first(work, s)])
        yield layers(purpose, GATHER, times, [s for s in layered if not first(work, s)])
    trained = [shard for shard in layered if shard.trained]
    yield layers(LAYER_GRADIENTS, SCATTER, lanes.weight, trained)
    first = [shard for shard in trained if shard.parameter.path[4] == "0"]
    added = work.accumulates and not split_once(work)
    every = work.shards if added else ()
    cut = {s.parameter.group for s in every if s.trained and s.zero1_axes}
    times = [2 if shard.parameter.group in cut else 1 for shard in first]
    size = sum(
        n * work.gradient_itemsize * s.gathered // (chunks * work.places[s.parameter.group or 0])
        for n, s in zip(times, first, strict=True)
    )
    count = sum(n * s.first_fused for n, s in zip(times, first, strict=True))
    yield entry(name, LAYER_GRADIENTS, SCATTER, 1, size, count)
    ends = [shard for shard in sharded if shard.parameter.group is None]
    tied = not any(shard.parameter.kind == "output" for shard in ends)
    tied = tied and work.has_output
    for shard in ends:
        kind = shard.parameter.kind
        head = work.microbatches * (kind == "output" or (tied and kind == "embedding"))
        forward, backward = head, head
        for tokens in filter(None, (work.tokens, work.source_tokens)):
            if kind == "embedding" and tokens < work.embedded:
                vectors = e * tokens * work.config.model.hidden_size
                repeats = embed_backward if shard.trained else 0
                ids = FLOAT32 * tokens * work.fsdp
                yield entry(name, "ids of tokens", GATHER, embed + repeats, ids)
                yield entry(name, "vectors of tokens", ALL_TO_ALL, embed, vectors)
                if shard.trained:
                    yield entry(name, "their gradients", ALL_TO_ALL, embed_backward, vectors)
            elif kind != "output" and (kind == "embedding" or tokens == work.tokens):
                forward, backward = forward + embed, backward + embed_backward
        yield entry(name, f"{kind} table", GATHER, forward, e * shard.gathered)
        if shard.trained:
            size = work.gradient_itemsize * shard.gathered
            yield entry(name, f"gradient of the {kind} table", SCATTER, backward, size)


def _reads_input(work: Workload, shard: Shard) -> bool:
    """Whether the products that forward begins a unit with need the parameter: it is of the first
    sublayer and reads the hidden size."""
    axes = info(shard.parameter.variable).axes
    return shard.parameter.path[4] == "0" and axes[-1] != "embed"


def _writes_output(work: Workload, shard: Shard) -> bool:
    """Whether the products that backward begins a unit with need the parameter: it is of the last
    sublayer and writes the hidden size."""
    unit = work.units[shard.parameter.group or 0]
    axes = info(shard.parameter.variable).axes
    return shard.parameter.path[4] == str(unit.sublayers - 1) and axes[-1] == "embed"


def _data(work: Workload) -> Iterator[Traffic]:
    """Once per step: ZeRO-1 gathers weights in the compute dtype and scatters gradients; gradients
    of a replicated parameter are summed over the axes along which it is replicated.

    Weights of layers are gathered in the first tick, a slot of each chunk beside the layer before
    it (a loop gathers its last slot twice), and their gradients scattered in the last tick: those
    of a unit's first sublayer beside the next layer, once more at the end.
    """
    scattered = _by_axes(work, lambda shard: shard.zero1_axes)
    for axes, members in scattered.items():
        name = " x ".join(axes)
        ends = [shard for shard in members if shard.parameter.group is None]
        computed, count = sum(shard.computed for shard in ends), len(ends)
        size = work.gradient_itemsize * computed
        yield entry(
            name, "weights of the step (ZeRO-1)", GATHER, 1, work.itemsize * computed, count
        )
        yield entry(name, "gradients (ZeRO-1)", SCATTER, 1, size, count)
        layers = [shard for shard in members if shard.parameter.group is not None]
        yield from _zero1_of_layers(work, name, layers)
    for axes, members in _by_axes(work, lambda shard: shard.sum_axes).items():
        size = sum(work.gradient_itemsize * shard.stored for shard in members)
        yield entry(" x ".join(axes), "gradients of replicated parameters", REDUCE, 1, size)


def _zero1_of_layers(work: Workload, axis: str, layers: list[Shard]) -> Iterator[Traffic]:
    model, chunks = work.config.model, work.config.parallel.chunks
    unroll = model.scan_unroll if model.scan_layers else 0

    def one(purpose: str, kind: str, bytes_of: Callable, runs: Callable) -> Traffic:
        """runs(slots of a chunk, whether a loop runs them, whether the unit begins with it)."""
        count = size = 0
        for shard in layers:
            slots = work.places[shard.parameter.group or 0]
            loops = 0 < unroll < slots and not work.is_quantized(shard)  # codes: before all layers
            times = runs(slots, loops, shard.parameter.path[4] == "0")
            count += times * chunks * shard.first_fused
            size += times * bytes_of(shard) // slots  # a slot of each chunk
        return entry(axis, purpose, kind, 1, size, count)

    def gradients(shard: Shard) -> int:
        return work.gradient_itemsize * shard.computed

    def weights(shard: Shard) -> int:
        return work.copies(shard) * work.weight_bytes(shard, shard.computed)

    yield one(ZERO1_FIRST, GATHER, weights, lambda slots, loops, begins: 1)
    yield one(ZERO1_WEIGHTS, GATHER, weights, lambda slots, loops, begins: slots - 1 + loops)
    yield one(ZERO1_GRADIENTS, SCATTER, gradients, lambda slots, loops, begins: slots)
    yield one(ZERO1_LAST, SCATTER, gradients, lambda slots, loops, begins: int(begins))


def _by_axes(work: Workload, axes: Callable[[Shard], tuple[str, ...]]) -> dict:
    """The shards by axes(shard), those without axes left out."""
    groups: dict[tuple[str, ...], list[Shard]] = {}
    for shard in work.shards:
        if axes(shard):
            groups.setdefault(axes(shard), []).append(shard)
    return groups


def _pipe(work: Workload) -> Iterator[Traffic]:
    """Residual streams, B x L x D / t: sent to the next stage at every tick of a lane; summed over
    pipe after the embedding and before the head, as are the gradients of both."""
    if not work.pipelined:
        return
    (embed, embed_backward), size = embeddings(work), work.carried_bytes
    yield entry("pipe", SENT_FORWARD, PERMUTE, work.lanes.forward, size)
    yield entry("pipe", SENT_BACKWARD, PERMUTE, work.lanes.backward, size)
    yield entry("pipe", "embedded tokens", REDUCE, embed, size)
    yield entry("pipe", "gradient of embedded tokens", REDUCE, embed_backward, size)
    yield entry("pipe", "input of the head and its gradient", REDUCE, 2 * work.microbatches, size)
