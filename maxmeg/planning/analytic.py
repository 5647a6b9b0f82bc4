"""The step's time and memory from formulas, in milliseconds: a roofline, nothing compiled.

The model of time, for one device:

- Products at `MATMUL_REACHED` of the peak, attention at its own rates, and beside them what must
  go through memory: norms, residual sums, activations (each column-parallel output and five
  residual streams a sublayer, forward once, backward twice, and once made again), logits, float32
  sums of gradients, the optimizer.
- A frozen base has no products for gradients of its layers; adapters' own are left out.
- Recomputation adds products (full: the layer's forward once more; selective: attention's).
- A tick of a pipeline lasts as long as its lanes, on every stage; ticks beyond the ideal are the
  bubble. Layers that a stage lacks are waited for.
- Of experts the rows that even loads have: with the kernels (mosaic) their products, or the time
  to read their matrices; with XLA every row by every expert of the device. What moves rows about
  goes through memory.
- Key/value heads fewer than tensor are projected by every device that attends to them.
- Counted as hidden behind the layers' own work, as far as that lasts: gathers and scatters over
  fsdp, and what is sent between stages; and behind the products of shared experts one of the two
  directions in which copies are sent. Everything else is counted as exposed. XLA hides less: in the
  compiled step the first gathers of every layer and the sends between stages have no matrix product
  beside them ("exposed" in `plan --compile`), so the step time is a lower bound.

It does not know kernels' launch times, stragglers, small messages' latency, or uneven loads.
"""

import dataclasses

from maxmeg.config.schema import Config
from maxmeg.planning.cost import communication
from maxmeg.planning.cost.communication import traffic
from maxmeg.planning.cost.experts import shared_seconds, streamed, surplus_seconds
from maxmeg.planning.cost.flops import layer_flops, training_flops
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.memory import (
    activations_by_mode,
    device_memory,
    fused_attention,
    head,
    keeps_attention,
    moments,
)
from maxmeg.planning.cost.workload import Workload, parameter_counts, workload
from maxmeg.planning.hardware import (
    ATTENTION_BACKWARD_REACHED,
    ATTENTION_FORWARD_REACHED,
    Cluster,
)
from maxmeg.planning.report import Analytic, Traffic

BACKWARD_SCORES = 2.5  # attention's backward makes the scores again: five products for two
HIDDEN_FORWARD = (communication.PARAMETERS_FORWARD, communication.SENT_FORWARD)
HIDDEN_BACKWARD = (
    communication.PARAMETERS_BACKWARD,
    communication.LAYER_GRADIENTS,
    communication.SENT_BACKWARD,
)


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for one microbatch on one device, in each lane of a schedule."""

    forward: float
    backward: float
    weight: float


def analyze(config: Config, cluster: Cluster) -> Analytic:
    """What a step of a valid config takes on a cluster: memory, FLOPs, communication, time.

    bubble_fraction: time beyond the ideal over the ideal, of the layers' work (1F1B: (S - 1) / M
    for S stages and M microbatches; V chunks: (S - 1) / (M V)). compute_seconds is that ideal with
    embedding, head and update; communication_seconds what is exposed; step_seconds all three.
    """
    work, model = workload(config, cluster.count), config.model
    carried = traffic(work, cluster)
    lane, lanes = layer_seconds(work, cluster), work.lanes
    layers = work.layers_of_chunk
    units = work.microbatches * config.parallel.chunks
    ideal = units * layers * (lane.forward + lane.backward + lane.weight)
    ticks = lanes.forward * lane.forward + lanes.backward * lane.backward
    bubble = layers * (ticks + lanes.weight * lane.weight) - ideal
    compute = (
        ideal + work.microbatches * ends_seconds(work, cluster) + update_seconds(work, cluster)
    )
    forward = units * layers * lane.forward
    beside = units * layers * shared_seconds(work, cluster) if model.has("moe") else 0.0
    exposed = exposed_seconds(carried, forward, ideal - forward, beside)
    step = compute + bubble + exposed
    length = config.data.sequence_length
    size, axes = config.train.global_batch_size, work.axes
    frozen = config.lora.rank > 0
    flops = training_flops(model, length, size, axes["tensor"], frozen=frozen)
    return Analytic(
        parameters=parameter_counts(model, axes["tensor"], axes["pipe"]),
        memory=device_memory(work),
        activations=activations_by_mode(work),
        capacity=cluster.capacity,
        flops=flops,
        traffic=carried,
        compute_seconds=compute,
        bubble_fraction=bubble / ideal,
        communication_seconds=exposed,
        step_seconds=step,
        tokens_per_second=size * length / step,
        mfu=flops / (step * cluster.count * cluster.gpu.bf16_tflops * 1e12),
    )


def exposed_seconds(
    carried: tuple[Traffic, ...], forward: float, backward: float, shared: float = 0.0
) -> float:
    """Seconds that communication adds to `forward` and `backward` seconds of layers' work, of which
    `shared` and twice that are shared experts'."""

    def total(purposes: tuple[str, ...]) -> float:
        return sum(entry.seconds for entry in carried if entry.purpose in purposes)

    hideable = total(HIDDEN_FORWARD), total(HIDDEN_BACKWARD)
    beyond = max(0.0, hideable[0] - forward) + max(0.0, hideable[1] - backward)
    sent = total((communication.EXCHANGED_FORWARD,)), total((communication.EXCHANGED_BACKWARD,))
    hidden = min(sent[0] / 2, shared) + min(sent[1] / 2, 2 * shared)
    return sum(entry.seconds for entry in carried) - sum(hideable) + beyond - hidden


def layer_seconds(work: Workload, cluster: Cluster) -> LayerSeconds:
    """Of the average layer, as the module's docstring says."""
    model, tensor = work.config.model, work.axes["tensor"]
    products, scores = layer_flops(model, work.config.data.sequence_length)
    peak = cluster.gpu.bf16_tflops * 1e12
    products = work.samples * products + repeated_products(work)
    matmul = products / tensor / cluster.matmul_rate
    matmul += surplus_seconds(work, cluster) if model.has("moe") else 0.0
    attention = work.samples * scores / tensor / peak
    streamed = elementwise_bytes(work) / cluster.memory_rate
    forward = matmul + attention / ATTENTION_FORWARD_REACHED + streamed
    again = streamed
    if not work.kept:
        again = forward
    elif not keeps_attention(work.config):
        again += attention / ATTENTION_FORWARD_REACHED
    backward_attention = BACKWARD_SCORES * attention / ATTENTION_BACKWARD_REACHED
    backward = matmul + backward_attention + 2 * streamed + again
    summed = 0.0
    if work.accumulates:
        layers = [s for s in work.shards if s.parameter.group is not None]
        own = sum(s.computed for s in layers if s.trained)
        each = own / (work.layers_of_chunk * work.config.parallel.chunks)
        summed = (2 * FLOAT32 + work.itemsize) * each / cluster.memory_rate
    return LayerSeconds(forward, backward, (0 if work.config.lora.rank else matmul) + summed)


def repeated_products(work: Workload) -> float:
    """Forward FLOPs of the average layer for keys and values that several devices along tensor
    compute, beyond those of one of the devices."""
    total = 0
    for unit in work.units:
        more = unit.columns - dataclasses.replace(unit, kv_copies=1).columns
        total += unit.repeats * 2 * more * work.config.model.hidden_size * work.tokens
    return total / work.config.model.num_layers


def elementwise_bytes(work: Workload) -> float:
    """Bytes that a layer's forward reads and writes outside of its matrix products: five residual
    streams a sublayer (norm 2, sum 3) and each column-parallel output twice, of the average layer;
    on XLA also six passes over the float32 scores, half of them in a causal model."""
    model, tensor = work.config.model, work.axes["tensor"]
    total = 0.0
    for unit in work.units:
        columns = work.itemsize * work.tokens * unit.columns / tensor
        each = 5 * unit.sublayers * work.hidden_bytes + 2 * columns + streamed(work, unit)
        if not fused_attention(work.config):
            pairs = work.tokens * work.config.data.sequence_length
            pairs /= 2 if model.attention.causal else 1
            each += 6 * FLOAT32 * pairs * unit.heads / tensor
        total += unit.repeats * each
    return total / model.num_layers


def ends_seconds(work: Workload, cluster: Cluster) -> float:
    """Of the loss (`Head.products`, `Head.streamed`) and the embedding's gradient, for one
    microbatch."""
    width, rows, loss = work.config.model.hidden_size, work.vocabulary, head(work)
    products = loss.products * 2 * work.tokens * width * rows
    table = 4 * FLOAT32 * width * rows
    return products / cluster.matmul_rate + (loss.streamed + table) / cluster.memory_rate


def update_seconds(work: Workload, cluster: Cluster) -> float:
    """Of the optimizer, once a step: gradient, master and moments read, the latter two written,
    and the weights cast."""
    arrays = 3 + 2 * moments(work.config.optim.optimizer)
    stored = sum(shard.stored for shard in work.shards if shard.trained)
    each = arrays * FLOAT32 + FLOAT32 + work.itemsize
    return stored * each / cluster.memory_rate
