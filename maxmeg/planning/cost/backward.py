"""Memory of one device in bytes while a unit of the stack runs backward, beside what forward
stored. Found in the buffers of compiled steps (benchmarks/NOTES.md, 2026-11-24).

Letters: T tokens of a microbatch on a device (B x L), D hidden size, t size of the axis tensor, e
bytes of the compute dtype.
"""

from collections.abc import Sequence

from maxmeg.layers.mixer import Widths
from maxmeg.ops.chunk_scan import GPU_WORKSPACE
from maxmeg.planning.cost import context, experts
from maxmeg.planning.cost.attention import kernels, transposed_stacks
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.workload import Unit, Workload

STREAMS = 2  # residual streams outside of the unit: output of the stack, gradient of the loss
APART = 3  # layers of a unit whose gradients exist, if they run one by one
SCAN_ARRAYS = 3  # float32 arrays of the output of each scan of a unit
TILE = GPU_WORKSPACE // 2  # bytes of temporaries of a scan's gradients, about
TILE_ELEMENT = 64  # bytes of them for each element of a scan's output, at most TILE in all
DECAYS = 2  # float32 arrays of the decays of the delta rule: themselves and their slopes


def layer(work: Workload, freed: Sequence[int]) -> int:
    """Bytes while the largest unit runs backward: its arrays, weights, blocks of scores, and rows
    of experts. Without further rounds all rows exist before the first gradient of experts.

    A group of a single unit has no loop. Under fsdp XLA computes the gradients of its weights last:
    what they read waits until then (`read`), full: also the recomputed streams, and under tensor
    parallelism the whole input and gradient of each sublayer. If `layer_by_layer`, those of the
    first layer alone wait. freed: bytes of each group that do not exist once it has run.
    """
    largest = waiting = of_first_tick(work)
    for group, unit in reversed(list(enumerate(work.units))):
        work = work.of(unit)
        total = arrays(work, unit) + waiting + scores(work, unit) + scans(work, unit)
        total += experts.of_other_layers(work, unit)
        total += work.places[group] * transposed_stacks(work, unit)
        rows = max(experts.working(work, unit), context.working(work, unit))
        gathered = weights(work, group)
        once = unit.sparse and not experts.in_rounds(work, unit)
        largest = max(largest, total + (max(rows, gathered) if once else rows + gathered))
        if work.places[group] == 1:
            waiting += late_reads(work, group)
        waiting -= freed[group]
    return largest


def late_reads(work: Workload, group: int) -> int:
    """Bytes that wait until the end of backward under fsdp, where XLA computes the weight gradients
    of a unit without a loop last: the arrays they are computed from."""
    work, unit = work.of(work.units[group]), work.units[group]
    if work.fsdp == 1:
        return 0
    layers = unit.layers if layer_by_layer(work) else 1
    width = sum(map(read, unit.sublayer_widths[: unit.sublayers // layers]))
    tensor, D = work.axes["tensor"], work.config.model.hidden_size
    recomputed_streams = 0 if work.saved else 1 + 2 * (tensor if tensor > 1 else 0)
    number = (streams(unit) + recomputed_streams * unit.sublayers) // layers
    return work.itemsize * work.tokens * (width + number * D) // tensor


def two_ticks(work: Workload) -> bool:
    """Whether a step under fsdp has two microbatches and no loop over them. False under tensor
    parallelism, where compiled steps did not show what this adds."""
    both = work.microbatches == 2 and not work.pipelined and not work.config.lora.rank
    return both and work.fsdp > 1 == work.axes["tensor"]


def of_first_tick(work: Workload) -> int:
    """Bytes of the first microbatch of `two_ticks` that exist during the second: the gathered
    weights of units without a loop, and what their gradients are computed from (`late_reads`)."""
    if not two_ticks(work):
        return 0
    single = [group for group, places in enumerate(work.places) if places == 1]
    gathered = sum(s.gathered for s in work.shards if s.parameter.group in single)
    return work.itemsize * gathered + sum(late_reads(work, group) for group in single)


def scans(work: Workload, unit: Unit) -> int:
    """Bytes of arrays of the size of each scan's output, three float32 ones together, of all layers
    of a unit. Of a layer that has run: the gated product and its gradient in float32, until the
    gradient of the norm's weight is made, and in the compute dtype the normalized product and the
    gradient of that. Of the others the gated product, its norm, and what forward stored of gate,
    values and outputs, which XLA transposes at the start of the unit.

    Of the delta rule the decays of all layers and the temporaries of one scan, which for Mamba-2
    are less than what the others have by then."""
    tensor, delta = work.axes["tensor"], [w.stored for w in unit.widths if "ssm_beta" in w.stored]
    width = SCAN_ARRAYS * sum(one.scanned for one in unit.widths)
    width += DECAYS * sum(stored["ssm_step"] for stored in delta)
    largest = max((stored["scan_output"] for stored in delta), default=0)
    tile = min(TILE, TILE_ELEMENT * work.tokens * largest // tensor)
    return FLOAT32 * work.tokens * width // tensor + tile


def scores(work: Workload, unit: Unit) -> int:
    """Bytes of two blocks of scores in float32 and one in the compute dtype, and of the keys and
    values copied for each piece of the queries: those of one layer; full: of all, from their
    recomputation on; if larger than the blocks, a gated MLP's columns, which exist beside their
    gradients before its last input; not under tensor parallelism, where whole sequences are at
    their peak before."""
    sizes = [(kernel.block, kernel.slices) for kernel in kernels(work, unit)]
    blocks, slices = zip(*sizes, strict=True) if sizes else ((0,), (0,))
    block = max(blocks) * (2 * FLOAT32 + work.itemsize) // FLOAT32
    if work.saved:
        return block + max(slices)
    width = sum(sum(one.stored.values()) - one.last_input for one in unit.sublayer_widths[-1])
    exists_before = unit.sparse or work.axes["tensor"] > 1
    columns = 0 if exists_before else work.itemsize * work.tokens * width
    return max(block, columns) + sum(slices)


def arrays(work: Workload, unit: Unit) -> int:
    """Bytes of the arrays of the products of a unit.

    What the gradients of its weights read (`gradient_inputs`; full: all that is recomputed), and
    residual streams, e T D / t each (`streams`). full: of the unit's layers that have run also the
    recomputed streams, which gradients of norms read, if these are `delayed`. Little of it exists
    while experts run apart. Under tensor parallelism also whole sequences, e T D each: a gathered
    input (full: those of all sublayers), a gathered gradient, with several samples transposed too,
    and partial sums.
    """
    tensor, D = work.axes["tensor"], work.config.model.hidden_size
    *others, last = unit.sublayer_widths
    run = delayed(work) * (unit.sublayers - unit.sublayers // unit.layers)
    width = 0 if work.saved else (streams(unit) + run) * D + sum(map(recomputed, others))
    if not experts.run_apart(work, unit):
        width += STREAMS * D
        width += streams(unit) * D + gradient_inputs(work, unit) if work.saved else read(last)
        width += unit.kept_columns(work.unsaved)[0] if work.saved else 0
    inputs = 1 if work.saved else max(unit.sublayers, 2)
    gathered = inputs + (work.samples > 1) + 2 if tensor > 1 else 0
    return work.itemsize * work.tokens * (width // tensor + gathered * D)


def streams(unit: Unit) -> int:
    """Number of residual streams and gradients that exist while a unit runs backward: input and
    output of each sublayer, and the output before a norm."""
    return sum(3 if spec.place != "pre" else 2 for spec in unit.specs)


def delayed(work: Workload) -> bool:
    """Whether XLA computes gradients of weights late, to have products beside collectives."""
    devices = work.axes["data"] * work.fsdp * work.axes["tensor"]
    return devices > 1 and not layer_by_layer(work)


def layer_by_layer(work: Workload) -> bool:
    """Whether the gradients of a layer's weights exist before the layer before it runs backward
    (`models.mixers.pattern`)."""
    return work.axes["tensor"] > 1 and not work.lanes.deferred


def scattered_in_branch(work: Workload) -> int:
    """Bytes in the last tick of a pipeline where ZeRO-1 scatters the gradients of a unit that not
    all stages have, in one branch: their float32 sums and the shards, all at once."""
    sizes = [0]
    for group, unit in enumerate(work.units):
        places = work.places[group] * work.config.parallel.chunks
        members = [s for s in work.shards if s.parameter.group == group and s.zero1_axes]
        if work.pipelined and places * work.axes["pipe"] > unit.repeats:
            sizes.append(FLOAT32 * sum(s.computed + s.stored for s in members) // places)
    return max(sizes)


def split_once(work: Workload) -> bool:
    """Whether backward of all layers ends before the first gradient of a weight: zero bubble with
    one microbatch."""
    return work.lanes.deferred > 0 and work.microbatches == 1


def gradient_inputs(work: Workload, unit: Unit) -> int:
    """Width of what the gradients of a unit's weights read, summed over its layers if they are
    delayed: of the sublayers of one layer only one's exist at a time."""
    sizes = [read(widths) for widths in unit.sublayer_widths]
    step = max(len(sizes) // unit.layers, 1)
    layers = [max(sizes[i : i + step]) for i in range(0, len(sizes), step)]
    return sum(layers) if delayed(work) else max(layers)


def read(widths: Sequence[Widths]) -> int:
    """Width of what the weight gradients of a sublayer read: the gradients of its column-parallel
    outputs, the input of its last product (of Mamba-2 among `scans`); of attention and of scans
    also queries, keys and values."""
    return sum(
        sum(width for name, width in one.stored.items() if name != "scan_output")
        + (one.last_input - one.scanned + one.queries_keys_values + one.head_outputs)
        for one in widths
    )


def recomputed(widths: Sequence[Widths]) -> int:
    """Width of the recomputed arrays of a sublayer; queries and keys also before their norm."""
    return sum(
        sum(one.stored.values()) + one.last_input + one.head_outputs + one.normalized
        for one in widths
    )


def weights(work: Workload, group: int) -> int:
    """Bytes of weights gathered over fsdp, of a layer and the next (full: of the whole unit, which
    recomputes first), and of their gradients. Without fsdp and a pipeline, of the unit's row of the
    float32 sums, which XLA reads before it has the gradients that it adds.

    Gradients are scattered one by one: the largest exists (of experts: those of their matrices),
    where parallel.gradient_dtype differs also twice converted (of experts: once). Layers that run
    `layer_by_layer` make all of theirs before the first is scattered. Rounds of experts add to
    theirs in place (`experts.in_loop_of_rounds`). A weight lane makes gradients when no weights are
    gathered.
    """
    e, unit = work.itemsize, work.units[group]
    members = [s for s in work.shards if s.parameter.group == group]
    units = work.places[group] * work.config.parallel.chunks
    layers = min(unit.layers, 2) if work.saved else unit.layers
    gathered = e * sum(s.gathered for s in members) * layers // (unit.layers * units)
    if work.fsdp == 1:
        in_place = unit.sparse or work.pipelined or not work.accumulates
        return 0 if in_place else FLOAT32 * sum(s.computed for s in members if s.trained) // units
    if experts.in_rounds(work, unit) or split_once(work):
        return gathered
    sizes = [s.gathered // units for s in members if s.trained]
    converted = work.gradient_itemsize * (work.gradient_itemsize != e)
    exist = largest = max(sizes, default=0)
    if layer_by_layer(work) and unit.layers > 1:
        exist = sum(sizes) * min(unit.layers, APART) // unit.layers
    elif unit.sparse:
        exist = 3 * largest  # up, gate and out
    gradients = e * exist + (1 if unit.sparse else 2) * converted * largest
    return max(gathered, gradients) if work.lanes.deferred else gathered + gradients
