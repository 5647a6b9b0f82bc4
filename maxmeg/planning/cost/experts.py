"""Volume, memory and time of mixture-of-experts dispatch in a layer, by formulas.

Letters as in `memory`, and: n devices of the expert group, K experts per token (top_k), N rows that
the experts of a device multiply, F width of an expert.
"""

import dataclasses
import math

import jax

from maxmeg.config.mixers import ExpertExchange
from maxmeg.distributed.experts.exchange import block_rows
from maxmeg.distributed.experts.nodes import node_rows
from maxmeg.layers.moe import MoeSpec
from maxmeg.ops.experts.choice import BATCHED
from maxmeg.ops.experts.dispatch import capacity_of
from maxmeg.planning.cost.loss import FLOAT32
from maxmeg.planning.cost.workload import Unit, Workload
from maxmeg.planning.hardware import Cluster


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Dispatch of one layer and microbatch on a device.

    tokens: tokens that the device sends: T; T / t if every device along tensor sends its own, to
    experts that are not cut. devices: number of devices that it exchanges with or gathers from.
    num_experts: of the model. local_experts: of a device. width: width of the vectors sent.
    expert_shards: number of devices that an expert is cut over. kind: the dispatcher. buffer: rows
    of a round over the mean load. itemsize: e. backend, reason: of `choose_backend`. capacity:
    capacity factor; 0: dropless. pad: rows are padded to the capacity. nodes: nodes to each of
    which a token is sent once; node_rows: rows sent to each; 1, 0: tokens go to devices directly.
    sent: bytes of a vector that is sent to experts over those of one that they send back.
    """

    tokens: int
    top_k: int
    devices: int
    num_experts: int
    local_experts: int
    width: int
    expert_shards: int
    kind: ExpertExchange
    buffer: float
    itemsize: int
    backend: str = "mosaic"
    reason: str = ""
    capacity: float = 0.0
    pad: bool = False
    nodes: int = 1
    node_rows: int = 0
    sent: float = 1.0

    @property
    def node_vectors(self) -> int:
        """Bytes of the vectors that a device sends to all nodes in a round."""
        return self.nodes * self.node_rows * self.itemsize * self.width

    @property
    def node_labels(self) -> int:
        """Bytes of the experts and weights that are sent with them."""
        return self.nodes * self.node_rows * 2 * FLOAT32 * self.top_k

    @property
    def gathers(self) -> bool:
        return self.devices == 1 or self.kind is ExpertExchange.gather

    @property
    def in_blocks(self) -> bool:
        return self.backend == BATCHED

    @property
    def limit(self) -> int:
        """The most copies that a sending device has for one expert."""
        sizes = self.tokens, self.top_k, self.num_experts
        return capacity_of(*sizes, self.capacity) if self.capacity else self.tokens

    @property
    def block(self) -> int:
        """Rows of a block: of one expert and sending device in a round."""
        sizes = self.tokens, self.top_k, self.num_experts
        return self.limit if self.pad else block_rows(*sizes, self.buffer, self.limit)

    @property
    def max_rows(self) -> int:
        """Rows under the most unbalanced load: min(K, local experts) for every token; in blocks
        `limit` for every expert."""
        if self.in_blocks:
            return self.devices * self.local_experts * self.limit
        tokens = self.devices * self.tokens  # also if they come by nodes, all to one device
        return tokens * min(self.top_k, self.local_experts)

    @property
    def rows(self) -> int:
        """N. Blocks: those of a round. Gather: the most that are possible. Exchange: the rows of
        one round, `buffer` times the mean load, divided evenly over the sending devices."""
        if self.in_blocks:
            return self.devices * self.local_experts * self.block
        if self.gathers:
            return self.max_rows
        round_rows = self.buffer * self.tokens * self.top_k
        return min(self.devices * math.ceil(round_rows / self.devices), self.max_rows)

    @property
    def in_rounds(self) -> bool:
        """Whether unbalanced loads need further rounds."""
        return self.rows < self.max_rows

    @property
    def multiplied(self) -> int:
        """Rows times matrices that a device multiplies, for each of an expert's products."""
        if self.in_blocks:
            return self.rows
        return self.rows * self.local_experts if self.backend == "xla" else self.balanced_rows

    @property
    def balanced_rows(self) -> int:
        """Rows under balanced load, T K."""
        return self.tokens * self.top_k

    @property
    def vectors(self) -> int:
        """Bytes of the vectors in one collective."""
        rows = self.devices * self.tokens if self.gathers else self.rows
        return self.itemsize * rows * self.width

    @property
    def weights(self) -> int:
        """Bytes of gathered routing weights."""
        return FLOAT32 * self.devices * self.balanced_rows

    @property
    def labels(self) -> int:
        """Bytes sent with the vectors. Exchange: weight and, without blocks, expert of each row.
        Gather: experts, weights, and whether a copy is kept or, in blocks, its place."""
        if self.gathers:
            place = FLOAT32 if self.in_blocks else 1
            return 2 * self.weights + place * self.devices * self.balanced_rows
        return (1 if self.in_blocks else 2) * FLOAT32 * self.rows

    @property
    def counts(self) -> int:
        """Bytes of the numbers of copies between all pairs of devices."""
        return 4 * (self.devices // self.nodes) ** 2


def dispatch_of(work: Workload) -> Dispatch:
    """The dispatch of one layer's tokens to its experts."""
    model, parallel = work.config.model, work.config.parallel
    tensor, kind = work.axes["tensor"], parallel.expert_exchange
    spec = MoeSpec.of(model, parallel)
    among = work.axes["expert"] * work.axes["context"]  # devices with other experts and tokens
    local_experts = model.moe.num_experts // (among * parallel.fold)
    width = vector_width(work)
    shards = 1 if parallel.fold > 1 else tensor
    sizes = (local_experts, width, spec.ffn_size // shards)
    matrices = jax.ShapeDtypeStruct(sizes, model.dtype.value)
    backend, reason = spec.products(matrices, work.recipe if in_codes(work) else None, work.device)
    nodes, tokens = spec.nodes, work.tokens // (tensor if folded(work) else 1)
    return Dispatch(
        tokens=tokens,
        top_k=model.moe.top_k,
        devices=among if kind is ExpertExchange.gather else among * parallel.fold,
        num_experts=model.moe.num_experts,
        local_experts=local_experts,
        width=width,
        expert_shards=shards,
        kind=kind,
        buffer=parallel.expert_buffer,
        itemsize=work.itemsize,
        backend=backend,
        reason=reason,
        capacity=model.moe.capacity_factor,
        pad=model.moe.pad_to_capacity,
        nodes=nodes,
        node_rows=node_rows(tokens, nodes, spec.routing, spec.buffer) if nodes > 1 else 0,
        sent=sent_share(work),
    )


def vector_width(work: Workload) -> int:
    """Width of the vectors that experts read and write."""
    model = work.config.model
    return model.moe.latent_size or model.hidden_size


def in_codes(work: Workload) -> bool:
    """Whether experts multiply 8-bit codes, in layers that are not left in 16 bits."""
    recipe, sizes = work.recipe, (vector_width(work), work.config.model.expert_ffn)
    return recipe is not None and not any(n % (recipe.block or 1) for n in sizes)


def sent_share(work: Workload) -> float:
    """Bytes of a vector sent to experts over those of one in the compute dtype: with
    train.quantization.dispatch a byte per number and per scale, in layers with quantized experts.
    """
    recipe, width = work.recipe, vector_width(work)
    if recipe is None or not recipe.dispatch or not in_codes(work):
        return 1.0
    scales = width // recipe.block if recipe.block else 1
    packed = (width + scales) / (work.itemsize * width)
    return 1.0 - work.quantized_share * (1.0 - packed)


def folded(work: Workload) -> bool:
    """Whether each device along tensor sends its own tokens, to experts that are not cut."""
    parallel = work.config.parallel
    return parallel.fold > 1 and parallel.expert_exchange is not ExpertExchange.gather


def axes(work: Workload) -> tuple[str, ...]:
    """Mesh axes along which tokens are sent to experts."""
    names = ("expert", "context", *("tensor",) * folded(work))
    return tuple(name for name in names if work.axes[name] > 1)


def sums(work: Workload, unit: Unit) -> tuple[int, ...]:
    """Number of outputs that each sublayer scatters over tensor: one; for experts one if they
    are cut over tensor, and one for a shared expert."""
    counts = []
    for spec in unit.specs:
        whole = [mixer for mixer in spec.mixers if mixer.writes == "whole"]
        shared = any(mixer.widths().shared_expert for mixer in spec.mixers)
        counts.append(1 if whole else int(not folded(work)) + shared)
    return tuple(counts)


def in_rounds(work: Workload, unit: Unit) -> bool:
    """Whether unbalanced loads of the unit's experts need further rounds."""
    return unit.sparse > 0 and dispatch_of(work).in_rounds


def run_apart(work: Workload, unit: Unit) -> bool:
    """Whether the experts of a unit are at their peak while little else of its backward exists: not
    in a pipeline, and not where a gather brings all rows in one round."""
    if not unit.sparse or work.pipelined:
        return False
    return in_rounds(work, unit) or not dispatch_of(work).gathers


def kept(work: Workload, unit: Unit) -> int:
    """Bytes that the experts of a unit store for backward, beside `unit_activations`.

    The outputs of up and gate: e N (widths), over t if experts are cut over tensor. minimal: also
    the received rows, e N D (in 8 bits: less), and their labels.
    """
    if not unit.sparse or not work.kept:
        return 0
    dispatch = dispatch_of(work)
    size = work.itemsize * dispatch.rows * unit.expert_columns // dispatch.expert_shards
    if "dispatched_tokens" in work.kept and not dispatch.gathers:
        vectors = int(dispatch.sent * (dispatch.node_vectors or dispatch.vectors))
        size += unit.sparse * (vectors + (dispatch.node_labels or dispatch.labels))
    return size


def deferred(work: Workload, unit: Unit) -> int:
    """Bytes that the experts of a unit store for a weight lane: gradients of the last product's
    input, and rows of vectors, e N (F / t + D); full: also up, gate and their inputs, e N
    (widths / t + D). With further rounds, whose loop is not divided between the lanes, also their
    float32 gradients of the device's expert matrices."""
    if not unit.sparse:
        return 0
    dispatch = dispatch_of(work)
    widths = unit.expert_inputs // dispatch.expert_shards + unit.sparse * dispatch.width
    if not work.kept:
        widths += unit.expert_columns // dispatch.expert_shards + unit.sparse * dispatch.width
    sides = (unit.expert_columns + unit.expert_inputs) // dispatch.expert_shards
    rounds = FLOAT32 * dispatch.local_experts * dispatch.width * sides if dispatch.in_rounds else 0
    return work.itemsize * dispatch.rows * widths + rounds


def working(work: Workload, unit: Unit) -> int:
    """Bytes while one layer of experts runs backward.

    With further rounds `in_loop_of_rounds`, and by nodes rows received from nodes, their gradients,
    and their float32 sums. Else gradients of the products and their inputs, 2 e N (widths / t), and
    vectors in expert and device order and their gradients, 3 e N D; under full recomputation
    e N (widths / t + D) more, and in a pipeline float32 gradients of the expert matrices.
    """
    if not unit.sparse:
        return 0
    dispatch, e = dispatch_of(work), work.itemsize
    columns = unit.expert_columns // unit.sparse // dispatch.expert_shards
    matrices = local_matrices(unit, dispatch)
    again = int(not work.kept)
    more = FLOAT32 * matrices // work.axes["fsdp"] * work.pipelined
    if dispatch.in_rounds:
        return 4 * dispatch.node_vectors + in_loop_of_rounds(work, unit)
    return e * dispatch.rows * ((2 + again) * columns + (3 + again) * dispatch.width) + more


def in_loop_of_rounds(work: Workload, unit: Unit) -> int:
    """Bytes while the loop over further rounds runs backward; the first round runs after it.

    Rows: gradients of the columns and of the last product's input, e N (widths / t), and six arrays
    of rows, e N D each. Batched experts: 2 e N (widths / t) and 3 e N D.

    Matrices: float32 sums of their gradients, 2 e (matrices); without fsdp also the matrices (in 8
    bits the codes in both layouts, as large) and the new sums. Tokens: float32 sums, 4 T D.
    """
    dispatch, e = dispatch_of(work), work.itemsize
    widths = (unit.expert_columns + unit.expert_inputs) // unit.sparse // dispatch.expert_shards
    row = widths + 6 * dispatch.width
    if dispatch.in_blocks:
        row = 2 * widths + 3 * dispatch.width
    copies = 2 if work.axes["fsdp"] > 1 else 3 + 2 * work.accumulates
    size = dispatch.rows * row + copies * local_matrices(unit, dispatch)
    return e * size + FLOAT32 * dispatch.tokens * dispatch.width


def local_matrices(unit: Unit, dispatch: Dispatch) -> int:
    """Elements of a device's expert matrices in one layer."""
    sides = (unit.expert_columns + unit.expert_inputs) // unit.sparse // dispatch.expert_shards
    return dispatch.local_experts * dispatch.width * sides


def of_other_layers(work: Workload, unit: Unit) -> int:
    """Bytes of the experts of a unit's layers but one, while that one's run backward.

    full: what they recomputed: their columns, inputs and rows, e N (widths / t + D); with further
    rounds also the rows' outputs and those received back, e N D each, else matrices gathered over
    fsdp. Otherwise, with further rounds under fsdp without tensor parallelism, where gradients of
    weights wait: the float32 sums of the rounds, and what the first round's gradients read:
    e N (widths / t + 2 D).
    """
    if not unit.sparse:
        return 0
    dispatch, others = dispatch_of(work), unit.sparse - 1
    widths = (unit.expert_columns + unit.expert_inputs) // unit.sparse // dispatch.expert_shards
    in_loop = dispatch.in_rounds and not dispatch.in_blocks
    if work.kept:
        waits = work.axes["fsdp"] > 1 and not work.pipelined and work.axes["tensor"] == 1
        if not (in_loop and waits):
            return 0
        read = work.itemsize * dispatch.rows * (widths + 2 * dispatch.width)
        return others * (read + FLOAT32 * local_matrices(unit, dispatch))
    elements = dispatch.rows * (widths + (3 if dispatch.in_rounds else 1) * dispatch.width)
    if work.axes["fsdp"] > 1 and not dispatch.in_rounds:
        elements += local_matrices(unit, dispatch)
    return others * work.itemsize * elements


def product_words(work: Workload) -> str:
    """The backend of the experts' products and why, and what empty or other experts' rows cost;
    empty without experts."""
    if not work.config.model.has("moe"):
        return ""
    dispatch = dispatch_of(work)
    words = dispatch.backend + (f" ({dispatch.reason})" if dispatch.reason else "")
    more = dispatch.multiplied / dispatch.balanced_rows
    return words + (f", {more:.3g} times the FLOPs of the chosen experts" if more > 1 else "")


def streamed(work: Workload, unit: Unit) -> float:
    """Bytes that experts read and write in forward outside of their products: each column twice,
    and vectors in expert order, written and read in both directions."""
    if not unit.sparse:
        return 0.0
    dispatch = dispatch_of(work)
    columns = unit.expert_columns // dispatch.expert_shards
    return work.itemsize * dispatch.rows * (2 * columns + 6 * unit.sparse * dispatch.width)


def surplus_seconds(work: Workload, cluster: Cluster) -> float:
    """Forward seconds of the average layer's experts beyond the FLOPs of the chosen experts.

    XLA multiplies all rows by every expert of the device; rows of blocks, also empty ones, are
    multiplied by one expert. A product takes at least the time to read its matrices.
    """
    total, dispatch = 0.0, dispatch_of(work)
    for unit in work.units:
        matrices = (
            dispatch.width * (unit.expert_columns + unit.expert_inputs) // dispatch.expert_shards
        )
        needed = 2 * dispatch.balanced_rows * matrices / cluster.matmul_rate
        multiplied = needed * dispatch.multiplied / dispatch.balanced_rows
        read = work.itemsize * dispatch.local_experts * matrices / cluster.memory_rate
        total += unit.repeats * max(multiplied - needed, read - needed, 0.0)
    return total / work.config.model.num_layers


def shared_seconds(work: Workload, cluster: Cluster) -> float:
    """Forward seconds of the products of the average layer's shared expert."""
    model = work.config.model
    sides = 3 if model.gated else 2
    products = 2 * work.tokens * sides * model.hidden_size * model.moe.shared_ffn_size
    sparse = sum(unit.repeats * unit.sparse for unit in work.units)
    each = products / work.axes["tensor"] / cluster.matmul_rate
    return sparse * each / model.num_layers
