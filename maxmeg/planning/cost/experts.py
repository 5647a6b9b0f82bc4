"""Volume, memory and time of mixture-of-experts dispatch in a layer, by formulas.

Letters as in `memory`, and: n devices of the expert group, K experts per token (top_k), N rows that
the experts of a device multiply, F width of an expert.
"""

import dataclasses
import math

import jax

from maxmeg.config.parallel import LaneOrder
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

    tokens: tokens that the device sends: T / t, those of its sequence shard; T in a gather.
    devices: number of devices that it exchanges with or gathers from. local_experts: number of
    experts on a device. itemsize: bytes of an element of the computation's dtype. shards: number of
    devices that share the columns of one expert.
    backend, reason: of `choose_backend`. node_rows: rows sent to each node, if each token is sent
    to a node once; 0: tokens go to devices directly. sent: bytes of a vector that is sent to
    experts over those of one that they send back.
    """

    spec: MoeSpec
    tokens: int
    devices: int
    local_experts: int
    itemsize: int
    shards: int = 1
    backend: str = "mosaic"
    reason: str = ""
    node_rows: int = 0
    sent: float = 1.0

    @property
    def width(self) -> int:
        """Width of the vectors that experts read and write."""
        return self.spec.latent_size or self.spec.hidden_size

    @property
    def inputs(self) -> int:
        """Columns that a device holds of an expert's hidden vector (between its two products)."""
        return self.spec.ffn_size // self.shards

    @property
    def columns(self) -> int:
        """Columns that a device holds of an expert's up and gate outputs, counted together."""
        return (1 + self.spec.is_gated) * self.inputs

    @property
    def matrices(self) -> int:
        """Elements of the device's expert matrices."""
        return self.local_experts * self.width * (self.columns + self.inputs)

    @property
    def node_vectors(self) -> int:
        """Bytes of the vectors that a device sends to all nodes in a round."""
        return self.spec.nodes * self.node_rows * self.itemsize * self.width

    @property
    def node_labels(self) -> int:
        """Bytes of the experts and weights that are sent with them."""
        return self.spec.nodes * self.node_rows * 2 * FLOAT32 * self.spec.routing.top_k

    @property
    def gathers(self) -> bool:
        return self.devices == 1 or self.spec.exchange == "gather"

    @property
    def joined(self) -> int:
        """Number of devices along tensor whose received rows are gathered for their experts."""
        return 1 if self.gathers else self.shards

    @property
    def in_blocks(self) -> bool:
        return self.backend == BATCHED

    @property
    def limit(self) -> int:
        """The most copies that a sending device has for one expert."""
        sizes = self.tokens, self.spec.routing.top_k, self.spec.routing.num_experts
        return capacity_of(*sizes, self.spec.capacity) if self.spec.capacity else self.tokens

    @property
    def block(self) -> int:
        """Rows of a block: of one expert and sending device in a round."""
        sizes = self.tokens, self.spec.routing.top_k, self.spec.routing.num_experts
        return self.limit if self.spec.pad else block_rows(*sizes, self.spec.buffer, self.limit)

    @property
    def max_rows(self) -> int:
        """Rows under the most unbalanced load: min(K, local experts) for every token; in blocks
        `limit` for every expert."""
        senders = self.joined * self.devices
        if self.in_blocks:
            return senders * self.local_experts * self.limit
        tokens = senders * self.tokens  # also if they come by nodes, all to one device
        return tokens * min(self.spec.routing.top_k, self.local_experts)

    @property
    def rows(self) -> int:
        """N. Blocks: those of a round. Gather: the most that are possible. Exchange: the rows of
        one round, `buffer` times the mean load, divided evenly over the sending devices."""
        senders = self.joined * self.devices
        if self.in_blocks:
            return senders * self.local_experts * self.block
        if self.gathers:
            return self.max_rows
        round_rows = self.spec.buffer * self.balanced_rows
        return min(senders * math.ceil(round_rows / senders), self.max_rows)

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
        """Rows under balanced load, T K; T K / t if experts are not cut over tensor."""
        return self.joined * self.tokens * self.spec.routing.top_k

    @property
    def vectors(self) -> int:
        """Bytes of the vectors in one collective."""
        rows = self.devices * self.tokens if self.gathers else self.rows // self.joined
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
        return (1 if self.in_blocks else 2) * FLOAT32 * self.rows // self.joined

    @property
    def counts(self) -> int:
        """Bytes of the numbers of copies between all pairs of devices."""
        return 4 * (self.devices // self.spec.nodes) ** 2


def dispatch_of(work: Workload) -> Dispatch:
    """The dispatch of one layer's tokens to its experts."""
    model, parallel = work.config.model, work.config.parallel
    spec, recipe, tensor = MoeSpec.of(model, parallel), work.recipe, work.axes["tensor"]
    among = work.axes["expert"] * work.axes["context"]  # devices with other experts and tokens
    dispatch = Dispatch(
        spec,
        tokens=work.tokens // (1 if spec.exchange == "gather" else tensor),
        devices=among if spec.exchange == "gather" else among * parallel.fold,
        local_experts=spec.routing.num_experts // (among * parallel.fold),
        itemsize=work.itemsize,
        shards=1 if parallel.fold > 1 else tensor,
    )
    width, tokens = dispatch.width, dispatch.tokens
    if recipe and any(size % (recipe.block or 1) for size in (width, spec.ffn_size)):
        recipe = None  # layers that are left in 16 bits
    sizes = (dispatch.local_experts, width, dispatch.inputs)
    matrices = jax.ShapeDtypeStruct(sizes, model.dtype.value)
    backend, reason = spec.products(matrices, recipe, work.device)
    sent = 1.0
    if recipe and recipe.dispatch:  # a byte per number and per scale
        scales = width // recipe.block if recipe.block else 1
        packed = (width + scales) / (work.itemsize * width)
        sent = 1.0 - work.quantized_share * (1.0 - packed)
    rows = node_rows(tokens, spec.nodes, spec.routing, spec.buffer) if spec.nodes > 1 else 0
    return dataclasses.replace(dispatch, backend=backend, reason=reason, node_rows=rows, sent=sent)


def axes(work: Workload) -> tuple[str, ...]:
    """Mesh axes along which tokens are sent to experts."""
    dispatch = dispatch_of(work)
    names = ("expert", "context", *("tensor",) * (dispatch.shards == 1 and not dispatch.gathers))
    return tuple(name for name in names if work.axes[name] > 1)


def sums(work: Workload, unit: Unit) -> tuple[int, ...]:
    """Number of outputs that each sublayer scatters over tensor: one; for experts one if their
    tokens are gathered, and one for a shared expert."""
    counts = []
    for spec in unit.specs:
        shared = any(getattr(mixer, "shared_ffn_size", 0) for mixer in spec.mixers)
        sparse = all(mixer.name == "moe" for mixer in spec.mixers)
        counts.append(int(dispatch_of(work).gathers) + shared if sparse else 1)
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


def stored_bytes(work: Workload, unit: Unit) -> int:
    """Bytes that the experts of a unit store for backward, beside `unit_activations`.

    The outputs of up and gate: e N (widths), over t if experts are cut over tensor. minimal: also
    the received rows, e N D (in 8 bits: less), and their labels.
    """
    if not unit.sparse or not work.saved:
        return 0
    dispatch = dispatch_of(work)
    size = unit.sparse * work.itemsize * dispatch.rows * dispatch.columns
    if "dispatched_tokens" in work.saved and not dispatch.gathers:
        vectors = dispatch.node_vectors or dispatch.joined * dispatch.vectors
        labels = dispatch.node_labels or dispatch.joined * dispatch.labels
        size += unit.sparse * (int(dispatch.sent * vectors) + labels)
    return size


def deferred(work: Workload, unit: Unit) -> int:
    """Bytes that the experts of a unit store for a weight lane: gradients of the last product's
    input, and rows of vectors, e N (F / t + D); full: also up, gate and their inputs, e N
    (widths / t + D). With further rounds, whose loop is not divided between the lanes: gradients of
    the device's expert matrices."""
    if not unit.sparse:
        return 0
    dispatch = dispatch_of(work)
    if dispatch.in_rounds:
        return unit.sparse * work.itemsize * dispatch.matrices
    widths = dispatch.inputs + dispatch.width
    widths += 0 if work.saved else dispatch.columns + dispatch.width
    return unit.sparse * work.itemsize * dispatch.rows * widths


def working(work: Workload, unit: Unit) -> int:
    """Bytes while one layer of experts runs backward.

    With further rounds `in_loop_of_rounds`, and by nodes rows received from nodes, their gradients,
    and their sums. Else gradients of the products and their inputs, 2 e N (widths / t), and vectors
    in expert and device order and their gradients, 3 e N D; under full recomputation
    e N (widths / t + D) more; under fsdp the matrices' gradients, e (matrices).
    """
    if not unit.sparse:
        return 0
    dispatch, repeats = dispatch_of(work), int(not work.saved)
    if dispatch.in_rounds:
        return 4 * dispatch.node_vectors + in_loop_of_rounds(work, dispatch)
    row = (2 + repeats) * dispatch.columns + (3 + repeats) * dispatch.width
    return work.itemsize * dispatch.rows * row


def in_loop_of_rounds(work: Workload, dispatch: Dispatch) -> int:
    """Bytes while a round of the loop over further rounds runs backward.

    Rows: gradients of the columns and of the last product's input, e N (widths / t), and six arrays
    of rows, e N D each. Batched experts: 1.75 e N (widths / t) and 3 e N D. Matrices: gradients, to
    which the rounds add in place, and without fsdp the matrices, cut out of a stack by each lane.
    """
    widths, arrays = dispatch.columns + dispatch.inputs, 3 if dispatch.in_blocks else 6
    row = widths * (7 if dispatch.in_blocks else 4) // 4 + arrays * dispatch.width
    together = work.config.parallel.lanes is LaneOrder.together
    copies = 1 + (1 + together) * (work.fsdp == 1)
    return work.itemsize * (dispatch.rows * row + copies * dispatch.matrices)


def of_other_layers(work: Workload, unit: Unit) -> int:
    """Bytes of the experts of a unit's layers but one, while that one's run backward.

    full: what they recomputed: their columns, inputs and rows, e N (widths / t + D); with further
    rounds also the rows' outputs and those received back, e N D each, else matrices gathered over
    fsdp. Otherwise, with further rounds under fsdp without tensor parallelism, where gradients of
    weights wait: those of the matrices, and what they read: e N (widths / t + 2 D).
    """
    if not unit.sparse:
        return 0
    dispatch, others = dispatch_of(work), unit.sparse - 1
    widths, D, e = dispatch.columns + dispatch.inputs, dispatch.width, work.itemsize
    if work.saved:
        in_loop = dispatch.in_rounds and not (dispatch.in_blocks or work.pipelined)
        if not in_loop or work.axes["fsdp"] == 1 or work.axes["tensor"] > 1:
            return 0
        return others * e * (dispatch.rows * (widths + 2 * D) + dispatch.matrices)
    elements = dispatch.rows * (widths + (3 if dispatch.in_rounds else 1) * D)
    if work.axes["fsdp"] > 1 and not dispatch.in_rounds:
        elements += dispatch.matrices
    return others * e * elements


def product_words(work: Workload) -> str:
    """The backend of the experts' products and why, and what empty or other experts' rows cost;
    empty without experts."""
    if not work.config.model.has("moe"):
        return ""
    dispatch = dispatch_of(work)
    words = dispatch.backend + (f" ({dispatch.reason})" if dispatch.reason else "")
    ratio = dispatch.multiplied / dispatch.balanced_rows
    return words + (f", {ratio:.3g} times the FLOPs of the chosen experts" if ratio > 1 else "")


def streamed(work: Workload, unit: Unit) -> float:
    """Bytes that experts read and write in forward outside of their products: each column twice,
    and vectors in expert order, written and read in both directions."""
    if not unit.sparse:
        return 0.0
    dispatch = dispatch_of(work)
    row = 2 * dispatch.columns + 6 * dispatch.width
    return unit.sparse * work.itemsize * dispatch.rows * row


def surplus_seconds(work: Workload, cluster: Cluster) -> float:
    """Forward seconds of the average layer's experts beyond the FLOPs of the chosen experts.

    XLA multiplies all rows by every expert of the device; rows of blocks, also empty ones, are
    multiplied by one expert. A product takes at least the time to read its matrices.
    """
    dispatch = dispatch_of(work)
    second = 2 * dispatch.matrices / dispatch.local_experts / cluster.matmul_rate  # for a row
    least = second * dispatch.balanced_rows
    read = work.itemsize * dispatch.matrices / cluster.memory_rate
    each = max(second * dispatch.multiplied, read, least) - least
    return sparse_share(work) * each


def shared_seconds(work: Workload, cluster: Cluster) -> float:
    """Forward seconds of the products of the average layer's shared expert."""
    shared = MoeSpec.of(work.config.model, work.config.parallel).shared.weights()
    flops = 2 * work.tokens * shared / work.axes["tensor"]
    return sparse_share(work) * flops / cluster.matmul_rate


def sparse_share(work: Workload) -> float:
    """Layers of experts over all layers."""
    sparse = sum(unit.repeats * unit.sparse for unit in work.units)
    return sparse / work.config.model.num_layers
