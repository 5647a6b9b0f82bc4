"""Time and memory of a step from formulas: a roofline model, nothing is compiled.

The time of one device:

- Matrix products run at `MATMUL_REACHED` of the peak, attention at its own rates. Memory traffic is
  added: norms, residual sums, activation functions (per sublayer each column-parallel output and
  five residual streams; once in forward, twice in backward, once if recomputed), logits, float32
  gradient accumulation, the optimizer.
- A frozen base has no weight gradients; the products of adapters are left out.
- With `train.quantization` the layers' products run at `NARROW_REACHED` of twice that peak (nvfp4:
  four times; blockwise scaling's kernel: `BLOCKWISE_REACHED`), and their operands are read and
  written once more.
- Recomputation adds products (full: the layer's forward; selective: attention).
- A pipeline tick takes the time of its lanes in the busiest chunk; stages with fewer layers wait.
  The bubble is the ticks beyond the ideal.
- Experts have balanced loads. With the kernels (mosaic) they take the time of their products or of
  reading their matrices; XLA multiplies every row by every expert of the device. Permuting rows is
  memory traffic.
- If tensor exceeds the number of key/value heads, several devices project the same head.
- Communication takes time of its own, except what XLA runs beside matrix products. Collectives over
  fsdp are hidden up to the time of the layers' products and attention, but the first gathers of a
  layer never are (as "exposed" in `plan --compile` shows); products of layers with experts by
  kernels count half. Those of ZeRO-1 for layers are hidden up
  to what this leaves of the time of one tick. One direction of the dispatch to experts is hidden up
  to the time of the shared expert.
- Under context parallelism a device has an equal share of every sequence and of its attention.
  Permutes of a ring are hidden up to the time of attention in each round; halos, exchanges and
  gathers are exposed. Merging the rounds' outputs is not counted.

Launch times, stragglers, latency of small messages and unbalanced loads are not modelled.
"""

import dataclasses

from maxmeg.config.parallel import LaneOrder
from maxmeg.config.recompute import POLICIES
from maxmeg.config.schema import Config
from maxmeg.ops.quantized import BLOCK, check_device
from maxmeg.planning.cost import communication, context
from maxmeg.planning.cost.attention import (
    backends,
    fused_attention,
    keeps_attention,
    score_bytes,
    surplus,
)
from maxmeg.planning.cost.communication import traffic
from maxmeg.planning.cost.experts import (
    dispatch_of,
    shared_seconds,
    sparse_share,
    streamed,
    surplus_seconds,
)
from maxmeg.planning.cost.flops import MULTIPLY_ADD, products_and_scores, training_flops
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.memory import activations, activations_by_mode, device_memory, head
from maxmeg.planning.cost.offload import host_memory, offload_seconds
from maxmeg.planning.cost.optimizer import is_halved, newton_schulz_flops, soap_flops, state_bytes
from maxmeg.planning.cost.parameters import parameter_counts
from maxmeg.planning.cost.workload import Shard, Workload, workload
from maxmeg.planning.hardware import (
    ATTENTION_BACKWARD_REACHED,
    ATTENTION_FORWARD_REACHED,
    FLOAT32_SPEED,
    Cluster,
)
from maxmeg.planning.report import Analytic, Traffic

BACKWARD_SCORES = 2.5  # attention's backward recomputes the scores: five products, forward two
# Share of what is sent along an axis that the other lane's products hide, of compiled steps of
# Llama 3 8B and DeepSeek-V3 (benchmarks/NOTES.md, "Lanes together").
HIDDEN_BESIDE = {"tensor": 0.6, "expert": 0.25}
HIDDEN_BETWEEN_NODES = 0.5  # of experts on several nodes, whose lanes follow each other
HIDDEN_BY_KERNELS = 0.5  # of products; of compiled steps of Mixtral 8x7B ("Lanes and gathers")
HIDDEN_FORWARD = (communication.PARAMETERS_FORWARD,)
HIDDEN_BACKWARD = (communication.PARAMETERS_BACKWARD, communication.LAYER_GRADIENTS)


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for one microbatch on one device, in each lane of a schedule."""

    forward: float
    backward: float
    weight: float


def analyze(config: Config, cluster: Cluster) -> Analytic:
    """Memory, FLOPs, communication and time of a step of a valid config on a cluster."""
    return analyze_work(workload(config, cluster.count, cluster.device), cluster)


def analyze_work(work: Workload, cluster: Cluster) -> Analytic:
    """`analyze` of a workload. ValueError if the GPUs cannot run its products.

    bubble_fraction: time of the layers beyond the ideal, over the ideal (1F1B: (S - 1) / M for S
    stages and M microbatches; V chunks: (S - 1) / (M V)). compute_seconds: that ideal plus
    embedding, head and optimizer. communication_seconds: exposed communication. step_seconds: sum
    of the two, the bubble and `offload_seconds`.
    """
    config, model = work.config, work.config.model
    if work.recipe is not None:
        check_device(work.recipe, cluster.device)
    carried = traffic(work, cluster)
    lane, lanes = layer_seconds(work, cluster), work.lanes
    layers = work.layers_of_chunk
    units = work.microbatches * config.parallel.chunks
    ideal = units * layers * (lane.forward + lane.backward + lane.weight)
    ticks = lanes.forward * lane.forward + lanes.backward * lane.backward
    bubble = layers * (ticks + lanes.weight * lane.weight) - ideal
    compute = ideal + work.microbatches * ends_seconds(work, cluster)
    compute += update_seconds(work, cluster)
    compute += (gathered_bytes(work) + lanes_bytes(work)) / cluster.memory_rate
    products = product_seconds(work, cluster)
    hiding = units * layers * hiding_share(work)
    forward = hiding * products.forward
    backward = hiding * (products.backward + products.weight)
    shared = units * layers * shared_seconds(work, cluster) if model.has("moe") else 0.0
    exposed = exposed_seconds(carried, forward, backward, shared, units)
    exposed -= context.hidden_seconds(work, cluster, BACKWARD_SCORES)
    exposed -= lanes_hide(work, carried)
    offload = offload_seconds(work, cluster, forward, backward)
    step = compute + bubble + exposed + offload
    length = config.data.sequence_length
    size, axes = config.train.global_batch_size, work.axes
    frozen = config.lora.rank > 0
    flops = training_flops(
        model,
        length,
        size,
        axes["tensor"],
        frozen=frozen,
        source_length=config.data.source_tokens,
        max_targets=config.data.max_targets,
    )
    return Analytic(
        parameters=parameter_counts(model),
        memory=device_memory(work),
        activations=activations_by_mode(work),
        capacity=cluster.capacity,
        flops=flops,
        traffic=carried,
        compute_seconds=compute,
        bubble_fraction=bubble / ideal,
        communication_seconds=exposed,
        host_memory=host_memory(work),
        offload_seconds=offload,
        step_seconds=step,
        tokens_per_second=size * length / step,
        devices=cluster.count,
        mfu=flops / (step * cluster.count * cluster.gpu.bf16_tflops * 1e12),
    )


def exposed_seconds(
    carried: tuple[Traffic, ...],
    forward: float,
    backward: float,
    shared: float = 0.0,
    units: int = 1,
) -> float:
    """Seconds that communication adds. forward, backward: seconds of the layers' products, which
    hide communication, in `units` ticks. shared: forward seconds of shared experts; their backward
    takes twice that."""

    def total(purposes: tuple[str, ...]) -> float:
        return sum(entry.seconds for entry in carried if entry.purpose in purposes)

    hideable = total(HIDDEN_FORWARD), total(HIDDEN_BACKWARD)
    beyond = max(0.0, hideable[0] - forward) + max(0.0, hideable[1] - backward)
    once = total((communication.ZERO1_WEIGHTS,)), total((communication.ZERO1_GRADIENTS,))
    free = max(0.0, forward - hideable[0]) / units, max(0.0, backward - hideable[1]) / units
    zero1 = min(once[0], free[0]) + min(once[1], free[1])
    sent = total((communication.EXCHANGED_FORWARD,)), total((communication.EXCHANGED_BACKWARD,))
    hidden = min(sent[0] / 2, shared) + min(sent[1] / 2, 2 * shared)
    return sum(entry.seconds for entry in carried) - sum(hideable) + beyond - hidden - zero1


def lanes_hide(work: Workload, carried: tuple[Traffic, ...]) -> float:
    """Seconds of the layers' communication that products of the other lane hide, where both lanes
    run together: not in the first ticks, before backward begins. HIDDEN_BESIDE of it, or
    HIDDEN_BETWEEN_NODES."""
    lanes, parallel = work.lanes, work.config.parallel
    if parallel.lanes is not LaneOrder.together or work.microbatches == 1:
        return 0.0
    both = max(0, lanes.forward - parallel.pipe * parallel.chunks) / lanes.forward
    share_of = dict(HIDDEN_BESIDE)
    if parallel.experts_cross_nodes:
        share_of["expert"] = HIDDEN_BETWEEN_NODES
    shares = (share_of.get(entry.axis.split(" ")[0].rstrip(","), 0.0) for entry in carried)
    return both * sum(entry.seconds * share for entry, share in zip(carried, shares, strict=True))


def hiding_share(work: Workload) -> float:
    """Share of the products' time that hides communication: all, but in layers with experts by
    kernels, which XLA's scheduler takes as free, HIDDEN_BY_KERNELS."""
    kernels = work.config.model.has("moe") and dispatch_of(work).backend == "mosaic"
    return 1 - kernels * sparse_share(work) * (1 - HIDDEN_BY_KERNELS)


def lanes_bytes(work: Workload) -> float:
    """Bytes of stored activations that lanes together move once more: of a microbatch in each tick
    of forward (compiled steps of Llama 3 8B: benchmarks/NOTES.md, "Lanes and gathers")."""
    lanes = work.lanes
    if work.config.parallel.lanes is not LaneOrder.together or work.microbatches == 1:
        return 0.0
    return lanes.forward * activations(work) / (lanes.slots + lanes.deferred)


def gathered_bytes(work: Workload) -> int:
    """Bytes that ZeRO-1 moves once a step for the layers, beside its collectives: gathered weights
    are copied into the array of all, and gradients written in float32 before they are scattered."""
    cut = (s for s in layer_shards(work) if s.trained and s.zero1_axes)
    each = 3 * work.itemsize + FLOAT32
    return each * sum(max(0, shard.computed - shard.stored) for shard in cut)


def layer_seconds(work: Workload, cluster: Cluster) -> LayerSeconds:
    """Seconds of the average layer."""
    products = product_seconds(work, cluster)
    streamed = elementwise_bytes(work) / cluster.memory_rate
    summed = 0.0
    if work.accumulates:
        elements = of_one_layer(work, [s.computed for s in layer_shards(work) if s.trained])
        summed = (2 * FLOAT32 + work.itemsize) * elements / cluster.memory_rate
    turned = transposed_bytes(work) / cluster.memory_rate
    return LayerSeconds(
        products.forward + streamed + turned,
        products.backward + 3 * streamed + repeated_share(work) * turned,
        products.weight + summed,
    )


def layer_shards(work: Workload) -> list[Shard]:
    return [shard for shard in work.shards if shard.parameter.group is not None]


def of_one_layer(work: Workload, numbers: list[int]) -> float:
    """The sum of numbers of all layers of the stack, for the average layer."""
    stored = sum(u.layers * places for u, places in zip(work.units, work.places, strict=True))
    return sum(numbers) / (stored * work.config.parallel.chunks)


def transposed_bytes(work: Workload) -> float:
    """Bytes that are read and written where the average layer's forward transposes the codes of
    weights, which our kernel for blockwise scaling needs (ops/block_matmul.py)."""
    recipe = work.recipe
    if not (recipe and recipe.block == BLOCK and recipe.multiplies_codes_on(work.device)):
        return 0.0
    return 2 * of_one_layer(work, [s.gathered for s in layer_shards(work) if work.is_quantized(s)])


def product_seconds(work: Workload, cluster: Cluster) -> LayerSeconds:
    """Seconds of the average layer's matrix products and attention."""
    model, tensor = work.config.model, work.axes["tensor"]
    data = work.config.data
    sums = products_and_scores(model, data.sequence_length, data.source_tokens)
    products, scores = (MULTIPLY_ADD * total / model.num_layers for total in sums)
    cut = work.axes["context"]
    products = work.samples * products / cut + repeated_products(work)
    recipe = work.recipe
    second = 1 / cluster.matmul_rate  # per FLOP
    if recipe and recipe.multiplies_codes_on(work.device):
        rate = cluster.narrow_rate(recipe.speed)
        rate = cluster.blockwise_rate if recipe.block == BLOCK else rate
        share = work.quantized_share
        second = share / rate + (1 - share) * second
    matmul = products / tensor * second
    matmul += surplus_seconds(work, cluster) if model.has("moe") else 0.0
    attention = surplus(work) * work.samples * scores / tensor / cut
    attention /= cluster.gpu.bf16_tflops * 1e12
    forward_attention = attention / ATTENTION_FORWARD_REACHED
    backward = matmul + BACKWARD_SCORES * attention / ATTENTION_BACKWARD_REACHED
    backward += repeated_share(work) * matmul
    backward += repeated_attention(work) * forward_attention
    return LayerSeconds(
        matmul + forward_attention, backward, 0.0 if work.config.lora.rank else matmul
    )


def repeated_share(work: Workload) -> float:
    """Share of the products' outputs that backward computes again: none, all, or those that a list
    of activations leaves out."""
    if not work.saved:
        return 1.0
    columns = [
        [unit.repeats * sum(unit.kept_columns(names)) for unit in work.units]
        for names in (work.unsaved, POLICIES["selective"])
    ]
    return sum(columns[0]) / max(sum(columns[1]), 1)


def repeated_attention(work: Workload) -> float:
    """Share of the attention layers whose attention backward computes again."""
    rings = not context.keeps_rounds(work)
    total = count = 0.0
    for unit in work.units:
        plain = not keeps_attention(work, unit)
        layers, share = unit.repeats * unit.layers, context.in_rounds(work, unit)
        total += layers * (share * rings + (1 - share) * plain)
        count += layers
    return total / count


def repeated_products(work: Workload) -> float:
    """Forward FLOPs of the average layer for keys and values that several devices along tensor
    compute, beyond the first device's."""
    total = 0
    for unit in work.units:
        copied = unit.columns - dataclasses.replace(unit, tensor=1).columns
        total += unit.repeats * 2 * copied * work.config.model.hidden_size * work.of(unit).tokens
    return total / work.config.model.num_layers


def elementwise_bytes(work: Workload) -> float:
    """Bytes that the average layer's forward reads and writes outside of its matrix products: five
    residual streams per sublayer (norm 2, sum 3) and each column-parallel output twice; also
    the scores of plain XLA or the mask of cuDNN (`score_bytes`)."""
    model, tensor, total = work.config.model, work.axes["tensor"], 0.0
    for unit in work.units:
        work = work.of(unit)
        columns = work.itemsize * work.tokens * unit.columns / tensor
        each = 5 * unit.sublayers * work.hidden_bytes + 2 * columns + streamed(work, unit)
        if recipe := work.recipe:
            operands = columns + unit.sublayers * work.hidden_bytes
            each += work.quantized_share * recipe.passes(work.device) * operands
        total += unit.repeats * each
    return total / model.num_layers + score_bytes(work)


def score_traffic(work: Workload) -> float:
    """Bytes of attention scores, or of a mask, that are written and read in a step: in forward and
    when it is recomputed once, in backward twice."""
    layers = work.microbatches * work.layers_of_chunk * work.config.parallel.chunks
    return 4 * layers * score_bytes(work)


def attention_words(work: Workload, cluster: Cluster) -> str:
    """The backends of attention, and the traffic and time of their scores or masks."""
    words, moved = backends(work), score_traffic(work)
    if not moved:
        return words
    cost = f"{moved / 1e9:,.0f} GB per GPU and step, {moved / cluster.memory_rate:,.3g} s"
    what = "mask is" if fused_attention(work) else "scores are"
    return f"{words}; its {what} written and read: {cost}"


def ends_seconds(work: Workload, cluster: Cluster) -> float:
    """Seconds of the loss (`Head`) and of the embedding's gradient, for one microbatch."""
    width, rows, loss = work.config.model.hidden_size, work.vocabulary, head(work)
    products = loss.products * 2 * work.targets * width * rows
    table = 4 * FLOAT32 * width * work.embedded
    return products / cluster.matmul_rate + (loss.streamed + table) / cluster.memory_rate


def update_seconds(work: Workload, cluster: Cluster) -> float:
    """Seconds of the optimizer, once per step: it reads gradients, masters and moments, writes
    masters and moments, and casts the weights. Those of Newton-Schulz iterations too, and of SOAP's
    products and decompositions."""
    moved = 2 * state_bytes(work) + sum(
        3 * FLOAT32 * shard.stored
        + (0 if is_halved(work, shard) else (FLOAT32 + work.itemsize) * shard.stored)
        for shard in work.shards
        if shard.trained
    )
    products = newton_schulz_flops(work) / cluster.matmul_rate
    products += soap_flops(work) / (cluster.matmul_rate * FLOAT32_SPEED)
    return moved / cluster.memory_rate + products
