"""Bytes of one device, by formulas over the model's abstract tree; nothing is compiled.

Parameters come from the real model by `jax.eval_shape`, their parts on a device from the one table
of `parallel.rules`: a new layer is counted by itself. Activations and what the loss needs follow
the formulas of `unit_activations`, `activations` and `loss`. Letters: T tokens of a microbatch on
a device (B x L), D width of the residual stream, t size of the axis tensor, e bytes of the compute
dtype.
"""

import dataclasses
import functools
import math
import typing

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from maxmeg.config.model import AttentionBackend, DType, ModelConfig, Recompute
from maxmeg.config.schema import Config, LoraConfig, OptimConfig, Schedule
from maxmeg.config.stages import layers_of_chunks
from maxmeg.config.validate import axis_sizes
from maxmeg.models.lm import language_model
from maxmeg.ops.attention import QUERY_BLOCK
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.mesh import AXES
from maxmeg.parallel.rules import is_frozen, is_variable, logical_axes, storage_axes, zero1_dim
from maxmeg.pipeline.layout import arrange
from maxmeg.planning.loss import FLOAT32, Head

NORMS = {"norm", "norms", "post_norm", "final_norm"}  # names of modules
ITEMSIZE = {DType.float32: 4, DType.bfloat16: 2}


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """An array of the model: its path, kind, and abstract variable; group None: not of the stack.

    kind: the mixer that it belongs to (attention, mlp, ...), norm, embedding, positions, output.
    """

    path: tuple[str, ...]
    kind: str
    group: int | None
    variable: nnx.Variable

    @property
    def axes(self) -> tuple[str | None, ...]:
        return logical_axes(self.variable)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Elements of a parameter on a device: of its master, of the copy that computes (gathered over
    data under ZeRO-1), and of that gathered over fsdp.

    scattered: its gradient is scattered over data. sum_axes: its gradient is summed over these.
    """

    parameter: Parameter
    stored: int
    computed: int
    whole: int
    scattered: bool
    sum_axes: tuple[str, ...]

    @property
    def trained(self) -> bool:
        return not is_frozen(self.parameter.variable)


@dataclasses.dataclass(frozen=True)
class Unit:
    """What repeats in a group: layers, sublayers, and widths, summed. columns: of column-parallel
    products; projected: of query, key and value; inner: of what the MLPs' last products read."""

    repeats: int
    layers: int
    sublayers: int
    columns: int
    projected: int
    inner: int

    @property
    def attends(self) -> bool:
        return self.projected > 0


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Of a schedule: sizes of its rings, and ticks at which each lane is on."""

    slots: int
    outputs: int
    deferred: int
    forward: int
    backward: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """A config on its devices. samples: of a microbatch on a device. places: layers of a chunk,
    by group, the fullest chunk's (units, where kinds of layers alternate)."""

    config: Config
    axes: dict[str, int]
    microbatches: int
    samples: int
    places: tuple[int, ...]
    units: tuple[Unit, ...]
    shards: tuple[Shard, ...]
    lanes: Lanes

    @property
    def layers_of_chunk(self) -> int:
        return sum(u.layers * places for u, places in zip(self.units, self.places, strict=True))

    @property
    def tokens(self) -> int:
        return self.samples * self.config.data.sequence_length

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.config.model.dtype]

    @property
    def pipelined(self) -> bool:
        return self.axes["pipe"] > 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added up in float32."""
        return self.pipelined or self.microbatches > 1

    @property
    def vocabulary(self) -> int:
        """Rows of the output weight on a device."""
        tensor, pipe = self.axes["tensor"], self.axes["pipe"]
        return self.config.model.padded_vocab_size(tensor, pipe) // (tensor * pipe)

    @property
    def hidden_bytes(self) -> int:
        """Of one microbatch's residual stream on a device: e T D / t."""
        width = self.config.model.hidden_size
        return self.itemsize * self.tokens * width // self.axes["tensor"]


def architecture_key(model: ModelConfig) -> tuple:
    """The fields of `model`, hashable; the same for all recompute modes."""
    names = [field.name for field in dataclasses.fields(model)]
    return tuple(Recompute.none if n == "recompute" else getattr(model, n) for n in names)


def parameters(model: ModelConfig, lora: LoraConfig | None = None) -> tuple[Parameter, ...]:
    """Every array of the model and its adapters, the vocabulary padded for one device."""
    return _parameters(architecture_key(model), dataclasses.astuple(lora or LoraConfig()))


@functools.lru_cache(maxsize=64)
def _parameters(key: tuple, adapters: tuple) -> tuple[Parameter, ...]:
    config = Config(model=ModelConfig(*key), lora=LoraConfig(*adapters))
    abstract = jax.eval_shape(lambda: language_model(jax.random.key(0), config))
    found = []
    for path, variable in jax.tree_util.tree_leaves_with_path(abstract, is_leaf=is_variable):
        names = tuple(
            str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path
        )
        stacked = names[0] == "stack"
        kind = names[names.index("mixers") + 1] if "mixers" in names else names[0]
        if NORMS & set(names):
            kind = "norm"
        found.append(Parameter(names, kind, int(names[2]) if stacked else None, variable))
    return tuple(found)


def units(model: ModelConfig) -> tuple[Unit, ...]:
    """The repeated unit of each group of the stack."""
    return _units(parameters(model))


@functools.lru_cache(maxsize=64)
def _units(every: tuple[Parameter, ...]) -> tuple[Unit, ...]:
    groups: dict[int, list[Parameter]] = {}
    for parameter in every:
        if parameter.group is not None:
            groups.setdefault(parameter.group, []).append(parameter)
    found = []
    for _, members in sorted(groups.items()):
        columns, inner = {"attention": 0, "mlp": 0}, 0
        for p in members:
            into, out = p.axes[-2:]
            if into == "embed" and out not in ("embed", "norm"):
                columns[p.kind] += p.variable.shape[-1]
            elif out == "embed" and p.kind == "mlp":
                inner += p.variable.shape[-2]
        sublayers, repeats = 1 + max(int(p.path[4]) for p in members), members[0].variable.shape[0]
        projected = columns["attention"]
        layers = len({p.path[4] for p in members if p.kind == "attention"})
        found.append(Unit(repeats, layers, sublayers, sum(columns.values()), projected, inner))
    return tuple(found)


def parameter_counts(model: ModelConfig, tensor: int = 1, pipe: int = 1) -> dict[str, int]:
    """Number of parameters by kind, the vocabulary padded for `tensor` and `pipe`."""
    return dict(_counts(parameters(model), model.padded_vocab_size(tensor, pipe)))


@functools.lru_cache(maxsize=64)
def _counts(every: tuple[Parameter, ...], vocabulary: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in every:
        sizes = zip(parameter.axes, parameter.variable.shape, strict=True)
        count = math.prod(vocabulary if axis == "vocab" else size for axis, size in sizes)
        counts[parameter.kind] = counts.get(parameter.kind, 0) + count
    return counts


def workload(config: Config, num_devices: int) -> Workload:
    """What each of `num_devices` devices does in a step of a valid config."""
    if not config.model.vocab_size:
        raise ValueError(
            "model.vocab_size=0 would be the tokenizer's, and no corpus is read here: set it"
        )
    if config.model.num_experts:
        raise ValueError(
            f"model.num_experts={config.model.num_experts}: what experts need is not planned yet; "
            "train a few steps, or plan the model with num_experts=0"
        )
    axes, model = axis_sizes(config.parallel, num_devices), config.model
    shards = axes["data"] * axes["fsdp"] * axes["expert"]
    samples = config.train.micro_batch_size or config.train.global_batch_size // shards
    microbatches = config.train.global_batch_size // (samples * shards)
    blocks, parallel = units(model), config.parallel
    counts = layers_of_chunks(parallel, model.num_layers, model.layers_of_unit)
    places = _places(tuple(unit.repeats for unit in blocks), parallel.pipe, counts)
    held = tuple(number * parallel.chunks for number in places)
    vocabulary = model.padded_vocab_size(parallel.tensor, parallel.pipe)
    every = parameters(model, config.lora)
    return Workload(
        config,
        axes,
        microbatches,
        samples,
        places,
        blocks,
        _shards(every, tuple(axes.values()), held, vocabulary, parallel.zero1),
        lanes(parallel.schedule, microbatches, parallel.pipe, parallel.chunks),
    )


@functools.lru_cache(maxsize=1024)
def _places(repeats: tuple[int, ...], stages: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    layout = arrange(repeats, stages, counts)
    return tuple(layout.slots(group) for group in range(len(repeats)))


@functools.lru_cache(maxsize=4096)
def _shards(every, axes, places, vocabulary: int, zero1: bool) -> tuple[Shard, ...]:
    """Of every parameter; `places`: layers of each group that a device holds."""
    mesh = typing.cast(Mesh, AbstractMesh(axes, AXES))
    found = []
    for parameter in every:
        variable, shape = parameter.variable, list(parameter.variable.shape)
        for dim, axis in enumerate(parameter.axes):
            if axis == "layers":
                shape[dim] = places[parameter.group] * mesh.shape["pipe"]
            elif axis == "vocab":
                shape[dim] = vocabulary
        variable = variable.replace(jax.ShapeDtypeStruct(tuple(shape), variable.dtype))
        names = storage_axes(variable, mesh, zero1)
        used = {name for dim in names for name in dim}
        scattered = zero1 and zero1_dim(variable, mesh) is not None
        stored = math.prod(shape) // math.prod(mesh.shape[name] for name in used)
        computed = stored * (mesh.shape["data"] if scattered else 1)
        whole = computed * (mesh.shape["fsdp"] if "embed" in parameter.axes else 1)
        summed = AXES if not is_frozen(variable) else ()
        sums = tuple(name for name in summed if name not in used and mesh.shape[name] > 1)
        found.append(Shard(parameter, stored, computed, whole, scattered, sums))
    return tuple(found)


def lanes(schedule: Schedule, microbatches: int, stages: int, chunks: int) -> Lanes:
    """Closed forms of the schedule's table, with M microbatches, S stages, V chunks a stage.

    Ticks: M V + S - 1 forward and as many backward; a weight lane is on for M. Slots: S V + S - 1,
    or M V + 1 if that is less (one is for what idle stages write); GPipe M + 1 and M outputs.
    Deferred units of zero bubble: S, or M + 1. One stage runs all lanes once a microbatch.
    """
    M, S, V = microbatches, stages, chunks
    if S == 1:
        return Lanes(0, 0, 0, M, M, M)
    ticks, slots = M * V + S - 1, min(M * V + 1, S * V + S - 1)
    if schedule is Schedule.gpipe:
        return Lanes(M + 1, M, 0, ticks, ticks, ticks)
    if schedule is Schedule.zero_bubble:
        return Lanes(slots, 0, min(M + 1, S), ticks, ticks, M)
    return Lanes(slots, 0, 0, ticks, ticks, ticks)


def fused_attention(config: Config) -> bool:
    """Whether attention on a GPU is one kernel: our own, where named, or cuDNN's, whose rule is
    `ops.attention_cudnn.refuses`."""
    model = config.model
    if model.attention_backend in (AttentionBackend.mosaic, AttentionBackend.triton):
        return True
    fits = model.dtype is DType.bfloat16 and model.head_size % 8 == 0 and model.head_size <= 128
    plain = not config.data.has_segments and not model.dropout_attention
    fits = fits and config.data.sequence_length % 2 == 0
    plain = plain and not model.attention_softcap and not model.attention_sinks
    return model.attention_backend is not AttentionBackend.xla and fits and plain


def keeps_attention(config: Config) -> bool:
    """Whether backward finds what attention made in forward: recompute none, and a fused one
    or the weights of one block of XLA's."""
    short = config.data.sequence_length <= QUERY_BLOCK
    return config.model.recompute is Recompute.none and (fused_attention(config) or short)


def unit_activations(work: Workload, unit: Unit) -> int:
    """Bytes that one layer keeps for one microbatch.

    full: its input, e T D / t.
    selective: input and output of every sublayer but the last one's output, e T D / t each, and
    the outputs of its column-parallel products (query, key, value, up, gate), e T (their widths
    summed) / t. Norms, activations, rotations and gathered sequences are made again.
    none: that, and of fused attention its output and log-sum-exp, (e T H K + 4 T H) / t with H
    heads of size K;
    on XLA, for a sequence of L <= 512, output and weights, (e T H K + 4 B H L^2) / t.
    """
    model, tensor = work.config.model, work.axes["tensor"]
    if model.recompute is Recompute.full:
        return work.hidden_bytes
    kept = work.itemsize * work.tokens * unit.columns // tensor
    kept += unit.sublayers * work.hidden_bytes
    if unit.attends and keeps_attention(work.config):
        heads = unit.layers * model.num_heads // tensor
        saved = 1 if fused_attention(work.config) else work.config.data.sequence_length
        kept += work.tokens * heads * (work.itemsize * model.head_size + FLOAT32 * saved)
    return kept


def unit_deferred(work: Workload, unit: Unit) -> int:
    """Bytes that one layer of one microbatch keeps for a weight lane.

    Gradients of query, key and value, of what the MLP's last product reads and of the sublayers'
    inputs, e T (width) / t each; and of the sublayers' outputs gathered, e T D each (t = 1: of the
    last one, from which the others' can be made). Where cuDNN's attention is made again its
    output, e T H K / t. full: also what else is made again, the MLP's columns and the outputs of
    all sublayers but the last, e T (width) / t each, and the inputs gathered, e T D each (t = 1:
    none).
    """
    model, tensor = work.config.model, work.axes["tensor"]
    widths, hidden = unit.projected + unit.inner, unit.sublayers
    whole = unit.sublayers if tensor > 1 else 1
    if unit.attends and not keeps_attention(work.config):
        widths += unit.layers * model.num_heads * model.head_size
    if model.recompute is Recompute.full:
        widths += unit.columns - unit.projected
        hidden += unit.sublayers - 1
        whole += unit.sublayers if tensor > 1 else 0
    kept = work.itemsize * work.tokens * widths // tensor
    return kept + (hidden + whole * tensor) * work.hidden_bytes


def activations(work: Workload) -> int:
    """Bytes kept for backward at the fullest.

    Without a pipeline: every layer of one microbatch. With one: the ring, its slots x the layers
    of a chunk; for a schedule with a weight lane also its deferred units (`unit_deferred`); for
    one whose outputs wait for the loss (GPipe) those, e T D / t each.
    """
    layers, lanes = list(zip(work.units, work.places, strict=True)), work.lanes
    chunk = sum(unit_activations(work, unit) * places for unit, places in layers)
    if not work.pipelined:
        return chunk
    deferred = sum(unit_deferred(work, unit) * places for unit, places in layers)
    return lanes.slots * chunk + lanes.deferred * deferred + lanes.outputs * work.hidden_bytes


def activations_by_mode(work: Workload) -> dict[str, int]:
    """`activations` under each recompute mode."""
    found = {}
    for mode in Recompute:
        model = dataclasses.replace(work.config.model, recompute=mode)
        config = dataclasses.replace(work.config, model=model)
        found[mode.value] = activations(dataclasses.replace(work, config=config))
    return found


def head(work: Workload) -> Head:
    model, train = work.config.model, work.config.train
    return Head(
        tokens=work.tokens,
        width=model.hidden_size,
        words=work.vocabulary,
        itemsize=work.itemsize,
        chunk=train.loss_chunk,
        named=train.loss_backend,
        smoothed=train.label_smoothing > 0,
        capped=model.logit_softcap > 0,
    )


def loss(work: Workload) -> int:
    """Bytes while the loss of v rows of the output weight is computed.

    What its backend takes (`Head.temporaries`), the weight's gradient unless frozen, e v D, and
    the weight gathered over fsdp, e v D; the whole sequence's hidden state and its gradient,
    2 e T D.
    """
    e, D, v = work.itemsize, work.config.model.hidden_size, work.vocabulary
    weight = (int(work.axes["fsdp"] > 1) + int(not work.config.lora.rank)) * e * v * D
    return head(work).temporaries + weight + 2 * e * work.tokens * D


def layer(work: Workload) -> int:
    """Bytes while the largest layer runs backward.

    What it makes again under full recomputation; the cotangents of its products and what they
    read, 2 e T (widths / t + D); its weights gathered over fsdp, and their gradients; three blocks
    of scores in float32 where attention runs on XLA.
    """
    config, e, largest = work.config, work.itemsize, 0
    for group, unit in enumerate(work.units):
        total = 2 * e * work.tokens * (unit.columns // work.axes["tensor"])
        total += 2 * e * work.tokens * config.model.hidden_size
        if config.model.recompute is Recompute.full:
            total += total // 2
        if work.axes["fsdp"] > 1:
            own = [(1 + s.trained) * s.whole for s in work.shards if s.parameter.group == group]
            total += e * sum(own) // (work.places[group] * config.parallel.chunks)
        if unit.attends and not fused_attention(config):
            length = config.data.sequence_length
            block = min(QUERY_BLOCK, length)
            rows = work.samples * config.model.num_heads // work.axes["tensor"] * block
            total += 3 * FLOAT32 * rows * length
        largest = max(largest, total)
    return largest


@functools.cache
def moments(optimizer) -> int:
    """Float32 arrays as large as the parameters in the optimizer's state: AdamW 2, SGD 1."""
    shape = (2, 3)
    init = make_optimizer(OptimConfig(optimizer=optimizer)).init
    state = jax.eval_shape(init, jax.ShapeDtypeStruct(shape, "float32"))
    return sum(leaf.shape == shape for leaf in jax.tree.leaves(state))


def device_memory(work: Workload) -> dict[str, int]:
    """Bytes of the fullest device by purpose; their sum bounds what lives at once.

    masters: float32 parameters, sharded as RULES and ZeRO-1 say; optimizer: its moments, alike.
    frozen: the base of adapters in the compute dtype, for which there is nothing else below.
    weights: masters cast to the compute dtype once a step, gathered over data under ZeRO-1 (none
    where neither changes anything). gradients: float32 sums as large as the weights' elements,
    not yet reduced; with one microbatch the gradients themselves, in the compute dtype.
    activations, loss: see there. working: the gradients of one microbatch that are added to the
    sums (in a pipeline each layer's are added at once), and what a layer's backward takes beyond
    what the loss has left.
    Layers that a shorter chunk lacks are held as padding. The batch is left out.
    """
    e = work.itemsize
    trained = [shard for shard in work.shards if shard.trained]
    stored = sum(shard.stored for shard in trained)
    computed = sum(shard.computed for shard in trained)
    copied = sum(s.computed for s in trained if e != FLOAT32 or s.computed != s.stored)
    frozen = sum(shard.stored for shard in work.shards) - stored
    stack = e * computed if work.microbatches > 1 and not work.pipelined else 0
    loss_bytes = loss(work)
    return {
        "masters": FLOAT32 * stored,
        **({"frozen": e * frozen} if frozen else {}),
        "optimizer": FLOAT32 * stored * moments(work.config.optim.optimizer),
        "weights": e * copied,
        "gradients": (FLOAT32 if work.accumulates else e) * computed,
        "activations": activations(work),
        "loss": loss_bytes,
        "working": stack + max(0, layer(work) - loss_bytes),
    }
