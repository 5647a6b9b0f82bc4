"""Memory of one device in bytes, by formulas; nothing is compiled.

Letters: T tokens of a microbatch on a device (B x L), D hidden size, t size of the axis tensor, e
bytes of the compute dtype.
"""

import math

from maxmeg.config.parallel import GPUS_A_NODE
from maxmeg.config.recompute import POLICIES
from maxmeg.parallel.parameter import info
from maxmeg.planning.cost import context, experts
from maxmeg.planning.cost.attention import keeps_attention, stored_attention
from maxmeg.planning.cost.backward import layer, scattered_in_branch, split_once, two_ticks
from maxmeg.planning.cost.loss import FLOAT32, Head
from maxmeg.planning.cost.optimizer import host_master_bytes, is_halved, state_bytes
from maxmeg.planning.cost.workload import Shard, Unit, Workload


def unit_activations(work: Workload, unit: Unit) -> int:
    """Bytes that one unit stores for one microbatch in device memory.

    full: its input, e T D / t.
    selective: input and output of every sublayer (`Unit.streams`), e T D / t each, and the outputs
    of its column-parallel products (query, key, value, up, gate), e T (their widths summed) / t.
    Norms, activation functions, rotations and gathered sequences are recomputed.
    minimal: the same, and for fused attention its output and log-sum-exp, (e T H K + 4 T H) / t
    with H heads of value size K; for XLA and L <= 512 output, weights: (e T H K + 4 B H L^2) / t.
    Experts add `experts.stored_bytes`. Only minimal stores the up-projections of latents. Of an
    encoder-decoder T, L and D are of the unit's side, but the unit's input is of both
    (`Workload.carried_bytes`), and cross attention's scores are with the source's keys.
    """
    work, tensor = work.of(unit), work.axes["tensor"]
    if work.offloaded:
        work = work.with_recompute(",".join(sorted(work.saved - work.offloaded)) or "full")
    if not work.saved:
        return work.carried_bytes
    columns, replicated = unit.kept_columns(work.saved)
    size = work.itemsize * work.tokens * (columns // tensor + replicated)
    streams = 1 if "mixer_output" in work.unsaved else unit.streams
    size += (streams - 1) * work.hidden_bytes + work.carried_bytes
    size += experts.stored_bytes(work, unit) + context.stored_bytes(work, unit)
    return size + (0 if context.in_rounds(work, unit) else stored_attention(work, unit))


def unit_deferred(work: Workload, unit: Unit) -> int:
    """Bytes that one unit of one microbatch stores for a weight lane.

     Gradients of query, key, value, of the input of the MLP's last product and of the sublayers'
    inputs, e T (width) / t each (one less without norms before them); gradients of the gathered
    outputs of the sublayers, e T D each (t = 1: only the last one; the others follow from it).
    Mixers with norms of their own: one gradient more, and under tensor parallelism whole ones. If
    cuDNN's attention is recomputed, its output, e T H K / t. full: also the other recomputed
    arrays: the MLP's columns and the outputs of all sublayers but the last, e T (width) / t each,
    and the gathered inputs, e T D each (t = 1: none).
    """
    work, tensor = work.of(unit), work.axes["tensor"]
    projected = unit.total("queries_keys_values")
    widths = projected + unit.total("last_input")
    own_norms = sum(spec.own_norms for spec in unit.specs)
    hidden = unit.sublayers - (unit.specs[-1].place.startswith("post"))
    hidden += -own_norms if tensor > 1 else own_norms
    gathered = unit.sublayers + 3 * own_norms if tensor > 1 else 1
    transposed = unit.sublayers + own_norms if transposes(work) else 0
    if not keeps_attention(work, unit):
        widths += unit.total("head_outputs")
    if not work.saved:
        widths += unit.columns - projected + unit.total("normalized")
        hidden += unit.sublayers - (unit.specs[-1].place == "pre")
        gathered += unit.sublayers if tensor > 1 else 0
    size = work.itemsize * work.tokens * widths // tensor
    size += experts.deferred(work, unit)
    if transposes(work) and not work.saved:
        hidden, transposed = hidden * 2, gathered
    return size + (hidden + (gathered + transposed) * tensor) * work.hidden_bytes


def transposes(work: Workload) -> bool:
    """Whether XLA holds gathered sequences of a weight lane twice (full: all residual streams).

    Collectives along the sequence store several samples with the tokens outermost; the last ticks,
    which only read them, transpose them all.
    """
    return work.lanes.deferred > 0 and work.axes["tensor"] > 1 and work.samples > 1


def activations(work: Workload) -> int:
    """Bytes stored for backward at the peak.

    Without a pipeline: every layer of one microbatch, or of two with the lanes together. With one:
    the ring buffers.
    """
    if not work.pipelined:
        layers = zip(work.units, work.places, strict=True)
        slots = work.lanes.slots
        return slots * sum(unit_activations(work, unit) * places for unit, places in layers)
    return sum(rings(work))


def rings(work: Workload) -> list[int]:
    """Bytes of each group's ring buffer: its slots x the layers of a chunk; with a weight lane also
    its deferred units (`unit_deferred`)."""
    sizes, lanes = [], work.lanes
    unlooped = work.microbatches == work.axes["pipe"] == 2  # over ticks: XLA copies the ring
    for unit, places in zip(work.units, work.places, strict=True):
        stored = unit_activations(work, unit) * (2 if transposes(work) and not work.saved else 1)
        deferred = unit_deferred(work, unit) * (2 if unlooped else 1)
        sizes.append(places * (lanes.slots * stored + lanes.deferred * deferred))
    return sizes


def activations_by_mode(work: Workload) -> dict[str, int]:
    """`activations` under each recompute mode."""
    return {mode: activations(work.with_recompute(mode)) for mode in POLICIES}


def head(work: Workload) -> Head:
    model, train = work.config.model, work.config.train
    return Head(
        tokens=work.targets,
        width=model.hidden_size,
        words=work.vocabulary,
        itemsize=work.itemsize,
        chunk=train.loss_chunk,
        named=train.loss_backend,
        smoothed=train.label_smoothing > 0,
        capped=model.logit_softcap > 0,
    )


def multiplied_last(work: Workload) -> bool:
    """Whether XLA multiplies the output weight's gradient after backward of the layers: that of all
    tokens in one product. Under tensor parallelism the product of several chunks hides the scatter
    of the hidden state's gradient, before the layers; not in a pipeline nor, in compiled programs,
    with experts or with fsdp on one node."""
    loss, sparse = head(work), any(unit.sparse for unit in work.units)
    hides = work.axes["tensor"] > 1 and not (work.pipelined or sparse or fsdp_on_one_node(work))
    hides = hides and loss.blocks[0] > 1
    return loss.backend == "xla" and loss.once and not hides


def waiting_gradient(work: Workload) -> int:
    """Bytes of the output weight's gradient, v D, while backward of the layers runs: XLA adds it to
    the sums, or scatters it over fsdp, only after that. In float32 if the loss accumulated it so;
    XLA converts it before only under full recomputation without a pipeline or tensor parallelism.
    If the product itself waits, what it reads: the logits' gradient and the hidden state of the
    targets, e T (v + D). With the tiled loss under fsdp the gathered weight waits for a loop that
    makes the gradient; on one node, where XLA schedules by other latencies, also its zeros, but for
    one microbatch without full recomputation.
    """
    loss, width = head(work), work.config.model.hidden_size
    if work.config.lora.rank:
        return 0
    if multiplied_last(work):
        return work.itemsize * work.targets * (work.vocabulary + width)
    delays = work.pipelined or work.axes["tensor"] > 1 or bool(work.saved)
    accumulated = loss.backend == "xla" and not loss.once
    itemsize = FLOAT32 if accumulated and delays else work.itemsize
    begins_early = fsdp_on_one_node(work) and (work.microbatches > 1 or not work.saved)
    copies = 2 if loss.backend == "tiled" and begins_early else 1
    return copies * itemsize * work.vocabulary * width


def fsdp_on_one_node(work: Workload) -> bool:
    return math.prod(work.axes.values()) <= GPUS_A_NODE and work.fsdp > 1


def cuts_layers(work: Workload) -> bool:
    """Whether ZeRO-1 cuts weights of layers."""
    return any(shard.zero1_axes and shard.parameter.group is not None for shard in work.shards)


def of_first_sublayers(work: Workload) -> int:
    """Bytes of the gradients of each group that wait for the next unit under fsdp: those of the
    first sublayer of one unit."""
    if work.fsdp == 1:
        return 0
    total = 0
    for group, places in enumerate(work.places):
        parameters = [s for s in work.shards if s.trained and s.parameter.group == group]
        first = sum(s.gathered for s in parameters if s.parameter.sublayer == 0)
        total += work.itemsize * (first // (places * work.config.parallel.chunks))
    return total


def without_loop(work: Workload) -> bool:
    """Whether a step under ZeRO-1 and fsdp has two microbatches and no loop over them: XLA then
    adds both gradients of a table after the second."""
    return two_ticks(work) and cuts_layers(work)


def held_by_ticks(work: Workload) -> int:
    """Bytes that XLA keeps from the first tick of a step to the last, which ZeRO-1 takes out of the
    loop over microbatches: under fsdp the gathered output weight, e v D.
    """
    pipelined = work.pipelined or work.microbatches < 3
    if pipelined or work.fsdp == 1 or not cuts_layers(work):
        return 0
    return work.itemsize * work.vocabulary * work.config.model.hidden_size


def loss(work: Workload) -> int:
    """Bytes while the loss of v rows of the output weight is computed.

    The temporaries of its backend (`Head.temporaries`, with xla the weight's gradient among them);
    else that gradient unless frozen, e v D; the weight gathered over fsdp, e v D; the whole
    sequence's hidden state and its gradient, 2 e T D.
    """
    e, D, v, one = work.itemsize, work.config.model.hidden_size, work.vocabulary, head(work)
    gradient = 0 if one.backend == "xla" else waiting_gradient(work)
    weight = e * v * D if work.fsdp > 1 else 0
    return one.temporaries + gradient + weight + 2 * e * work.tokens * D


def beside_loss(work: Workload) -> int:
    """Bytes of units that exist while a pipeline computes the loss: of a chunk's single unit, which
    has no loop, what it stored, written into the ring only after the loss, and its weights gathered
    over fsdp, which its backward reads too; several chunks: weights copied from those of all
    chunks, for forward and for backward."""
    if not work.pipelined:
        return 0
    total, chunks = 0, work.config.parallel.chunks
    copies = 2 if chunks > 1 else work.fsdp > 1
    for group, unit in enumerate(work.units):
        if work.places[group] == 1:
            weights = sum(s.gathered for s in work.shards if s.parameter.group == group) // chunks
            total += unit_activations(work, unit) + copies * work.itemsize * weights
    return total


def scattered(work: Workload) -> int:
    """Bytes while the output weight's gradient is added to its sum, after the layers: itself, and
    over fsdp converted to the dtype of the sums, else with the embedding's float32 gradient, 4 v D.
    If the product waits, also what it reads, and under fsdp arrays of the loss that XLA placed
    before (`packed`): the gathered weight and a chunk of float32 logits.
    """
    count, waiting = work.vocabulary * work.config.model.hidden_size, waiting_gradient(work)
    converted, e = work.gradient_itemsize if work.fsdp > 1 else FLOAT32, work.itemsize
    if waiting and multiplied_last(work):
        if work.fsdp == 1:
            return waiting + (e + converted) * count
        logits = FLOAT32 * head(work).blocks[1] * work.vocabulary
        read = e * work.targets * work.vocabulary
        arrays = [(e * count, 0, 0), (logits, 0, 0), (read, 0, 1), (e * count, 1, 2)]
        return packed([*arrays, (converted * count, 2, 2)]) + waiting - read
    if work.config.lora.rank or (work.fsdp > 1 and waiting == converted * count):
        return waiting
    return waiting + converted * count


def packed(arrays: list[tuple[int, int, int]]) -> int:
    """Bytes of a heap for arrays (bytes, first and last time), as XLA places them: the largest
    first, of equal ones the shortest, each into the smallest gap that holds it while it exists."""
    placed: list[tuple[int, int, int, int]] = []
    for size, first, last in sorted(arrays, key=lambda a: (-a[0], a[2] - a[1])):
        gaps, end = [], 0
        for offset, stop, start, until in sorted(placed):
            if start <= last and first <= until:
                gaps.append((offset - end, end))
                end = max(end, stop)
        offset = min((gap for gap in gaps if gap[0] >= size), default=(0, end))[1]
        placed.append((offset, offset + size, first, last))
    return max(stop for _, stop, _, _ in placed)


def absent(work: Workload) -> tuple[int, int]:
    """Bytes that do not exist (during the loss, during backward of the layers), though
    `parameter_memory` counts them, if there is one microbatch: gradients of the embedding and the
    output, during the loss also of layers that ZeRO-1 does not cut; with a weight lane, of all
    layers until it runs. Without a pipeline also compute weights of the embedding and, after the
    loss, of the output. Likewise in the second of two ticks (`without_loop`): there the output
    weight's first gradient, e v D, waits in the place of the sums. During the loss the first tick's
    last gradients of layers are scattered: converted, beside their shards, the row of the sums, and
    zeros for the next ones."""
    if work.microbatches > 1 and not without_loop(work):
        return 0, 0
    trained = [s for s in work.shards if s.trained]
    outside = [s for s in trained if s.parameter.group is None]
    copies = {s.parameter.kind: work.itemsize * s.computed for s in outside if _is_copied(work, s)}
    if without_loop(work):
        e, first, reduced = work.itemsize, of_first_sublayers(work), work.gradient_itemsize
        sums = sum(_gradient_bytes(work, s) for s in outside) + sum(copies.values())
        sums -= e * work.vocabulary * work.config.model.hidden_size
        each = e + reduced * (reduced != e) + (reduced + FLOAT32) / work.fsdp
        return sums - int(each * (first // e)), sums
    early_shards = [s for s in trained if s.parameter.group is not None and s.zero1_axes]
    early_shards = [] if split_once(work) else early_shards
    every, late = (sum(_gradient_bytes(work, s) for s in shards) for shards in (trained, outside))
    every -= sum(_gradient_bytes(work, s) for s in early_shards)
    late = every if split_once(work) else late
    tied = work.config.model.tied and work.has_output
    if work.pipelined:
        return every, late
    early = 0 if tied else copies.get("embedding", 0)
    return every + early, late + sum(copies.values())


def freed(work: Workload) -> list[int]:
    """Bytes of each group that do not exist once it has run backward: what it stored, but in a ring
    buffer or if a loop over microbatches carries the stacks of several units."""
    if work.pipelined:
        return [0] * len(work.units)
    return [
        0 if work.microbatches > 1 and places > 1 else unit_activations(work, unit) * places
        for unit, places in zip(work.units, work.places, strict=True)
    ]


def parameter_memory(work: Workload) -> dict[str, int]:
    """Bytes of the parameters and of the arrays of their size, under any recompute policy.

    masters: float32 parameters, or bfloat16 ones and remainders, sharded by RULES and ZeRO-1; and
    state that is not trained, in float32.
    optimizer: moments and averages (optim.ema), sharded like the masters. optim.offload moves
    them to the host, and masters as `host_master_bytes` says.
    frozen: base weights of adapters, in the compute dtype; the entries below exclude them.
    weights: masters cast to the compute dtype or quantized, once per step, under ZeRO-1
    gathered over data, and fused (0 if nothing changes them: float32 in float32, or bfloat16 with
    remainders). gradients: float32 accumulators of the weights' size, or the masters' if that is
    larger (key/value heads fewer than tensor). With one microbatch (in a pipeline those of a weight
    lane alone) in the compute dtype, but those of layers that fsdp or ZeRO-1 scatter in
    `parallel.gradient_dtype`, under ZeRO-1 the shards alone. The padding of short chunks is
    included.
    """
    e = work.itemsize
    trained = [shard for shard in work.shards if shard.trained]
    stored = sum(shard.stored for shard in trained)
    copied = sum(
        work.copies(shard) * work.weight_bytes(shard, shard.computed)
        for shard in trained
        if _is_copied(work, shard)
    )
    state = sum(shard.stored for shard in work.shards if info(shard.parameter.variable).state)
    frozen = sum(shard.stored for shard in work.shards) - stored - state
    masters, offload = FLOAT32 * (stored + state), work.config.optim.offload
    if offload:
        masters -= sum(host_master_bytes(work, shard) for shard in trained)
    return {
        "master weights": masters,
        **({"frozen": e * frozen} if frozen else {}),
        "optimizer": 0 if offload else state_bytes(work),
        "compute weights": copied,
        "gradients": sum(_gradient_bytes(work, shard) for shard in trained),
    }


def _is_copied(work: Workload, shard: Shard) -> bool:
    """Whether a step computes with a copy of the parameter."""
    if work.is_quantized(shard):
        return True
    is_cast = work.itemsize != FLOAT32 and not is_halved(work, shard)
    return is_cast or shard.fused or shard.computed != shard.stored


def _gradient_bytes(work: Workload, shard: Shard) -> int:
    """Of a parameter's gradient, as `parameter_memory` says."""
    count, in_layer = max(shard.computed, shard.stored), shard.parameter.group is not None
    if work.accumulates and not (in_layer and split_once(work)):
        return FLOAT32 * count
    if in_layer and shard.zero1_axes:
        return work.gradient_itemsize * shard.stored
    if in_layer and shard.gathered > shard.computed:
        return work.gradient_itemsize * count
    return work.itemsize * count


def device_memory(work: Workload) -> dict[str, int]:
    """Bytes of the fullest device by purpose; their sum is an upper bound of the peak.

    Those of `parameter_memory`; activations, loss: see there. workspace: the part of a layer's
    backward that exceeds the loss's bytes. gradients: with a weight lane that runs once, those that
    exist when the device is fullest. The batch is not included.
    """
    stored, table = activations(work), held_by_ticks(work)
    absent_in_loss, absent_in_layers = absent(work)
    loss_bytes = loss(work) + table - absent_in_loss
    loss_bytes = loss_bytes if split_once(work) else max(0, loss_bytes)
    after = scattered(work) + of_first_sublayers(work) + table
    if not work.accumulates:
        after -= stored
    if split_once(work):  # the weight lane reads no compute weights: measured, half of them less
        after = -parameter_memory(work)["compute weights"] // 2
    after = max(after, loss_bytes + beside_loss(work))
    largest = max(layer(work, freed(work)), scattered_in_branch(work))
    backward = largest + waiting_gradient(work) + table - absent_in_layers
    space = max(backward, after) - max(0, loss_bytes)
    parts = {**parameter_memory(work), "activations": stored, "loss": max(0, loss_bytes)}
    parts["gradients"] += min(0, space)
    return {**parts, "workspace": max(0, space)}
