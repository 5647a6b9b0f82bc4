"""What each device does in a step: its parameters, its part of the layers, its schedule's lanes.

Parameters come from the real model by `jax.eval_shape`, their parts on a device from the one table
of `parallel.rules`: a new layer is counted by itself. Nothing is compiled.
"""

import collections
import dataclasses
import functools
import math
import typing

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from maxmeg.config.model import DType, ModelConfig, Recompute
from maxmeg.config.schema import Config, LoraConfig, Schedule
from maxmeg.config.stages import layers_of_chunks
from maxmeg.config.validate import axis_sizes
from maxmeg.models.lm import language_model
from maxmeg.parallel.mesh import MESH_AXES, mesh_shape
from maxmeg.parallel.rules import is_frozen, is_variable, logical_axes, storage_axes, zero1_dim
from maxmeg.pipeline.layout import arrange

NORMS = {"norm", "norms", "post_norm", "final_norm", "query_norm", "kv_norm"}  # modules
MIXERS = {"mla": "attention"}
MOE_PARTS = {"experts": "experts", "shared": "shared expert", "shared_gate": "shared expert"}
ITEMSIZE = {DType.float32: 4, DType.bfloat16: 2}


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """An array of the model: its path, kind, and abstract variable; group None: not of the stack.

    kind: the mixer that it belongs to (attention, mlp, ...), of a mixture of experts its part
    (experts, router, shared expert), norm, embedding, positions, output.
    """

    path: tuple[str, ...]
    kind: str
    group: int | None
    variable: nnx.Variable

    @property
    def axes(self) -> tuple[str | None, ...]:
        return logical_axes(self.variable)

    @property
    def mixer(self) -> str:
        """Name of the mixer that it lies in; empty: in none."""
        return self.path[self.path.index("mixers") + 1] if "mixers" in self.path else ""

    @property
    def sublayer(self) -> int:
        return int(self.path[4])


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
    """What repeats in a group: its mixers, a sublayer each ("attention mlp": a parallel block), and
    widths, summed. columns: of column-parallel products and of those to latents, which run on
    shards; projected: of what queries, keys and values are made by; inner: of what the MLPs' last
    products read; whole: of products that each device along tensor makes; expanded: of columns
    those made of latents; read: of sequences that are gathered, one after the other.
    expert_columns, expert_inner: as above, of one expert of each sublayer. shares: experts have one
    beside them that all tokens go to."""

    repeats: int
    mixers: tuple[str, ...]
    columns: int
    projected: int
    inner: int
    whole: int
    expanded: int
    read: tuple[int, ...]
    expert_columns: int
    expert_inner: int
    shares: bool

    @property
    def sublayers(self) -> int:
        return len(self.mixers)

    @property
    def layers(self) -> int:
        return sum("attention" in name or "mla" in name for name in self.mixers)

    @property
    def sparse(self) -> int:
        """Sublayers of experts."""
        return self.mixers.count("moe")

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
    """Every array of the model and its adapters, the vocabulary padded for few devices."""
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
        group = int(names[2]) if stacked else None
        found.append(Parameter(names, kind_of(names), group, variable))
    return tuple(found)


def kind_of(path: tuple[str, ...]) -> str:
    if NORMS & set(path):
        return "norm"
    if "mixers" not in path:
        return path[0]
    mixer, part, *_ = path[path.index("mixers") + 1 :]
    return MOE_PARTS.get(part, "router") if mixer == "moe" else MIXERS.get(mixer, mixer)


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
        columns, inner = collections.Counter[str](), collections.Counter[str]()
        whole = expanded = 0
        read: list[int] = []
        mixers: dict[int, set[str]] = {}
        for p in members:
            mixers.setdefault(p.sublayer, set()).add(p.mixer)
            into, out = p.axes[-2:]
            if into == "embed" and out not in ("embed", "norm"):
                columns[p.kind] += p.variable.shape[-1]
                read += [p.variable.shape[-1]] if out == "latent" else []
                expanded += p.variable.shape[-1] if _expands(p) else 0
            elif into == "embed" and out == "norm":
                whole += p.variable.shape[-1]
            elif out == "embed":
                inner[p.kind] += p.variable.shape[-2]
        names = [" ".join(sorted(mixers[place] - {""})) for place in sorted(mixers)]
        unit = Unit(
            repeats=members[0].variable.shape[0],
            mixers=tuple(names),
            columns=columns.total() - columns["experts"],
            projected=columns["attention"],
            inner=inner["mlp"] + inner["shared expert"],
            whole=whole,
            expanded=expanded,
            read=tuple(read + _streams(members)),
            expert_columns=columns["experts"],
            expert_inner=inner["experts"],
            shares=columns["shared expert"] > 0,
        )
        found.append(unit)
    return tuple(found)


def _streams(members: list[Parameter]) -> list[int]:
    """Width of the residual stream, once for each sublayer that gathers it: those with products
    of it that are cut over tensor, or of experts."""
    places = {p.sublayer: p.variable.shape[-2] for p in members if _reads_stream(p)}
    return list(places.values())


def _reads_stream(p: Parameter) -> bool:
    if p.mixer == "moe":
        return p.path[-1] == "router"
    into, out = p.axes[-2:]
    return into == "embed" and out in ("heads", "kv_heads", "mlp") and not _expands(p)


def _expands(p: Parameter) -> bool:
    """Whether it multiplies latents."""
    return p.mixer == "mla" and p.path[-2] in ("query_up", "key_up", "value_up")


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
    if 1 < config.parallel.expert_tensor < config.parallel.tensor:
        raise ValueError(
            f"parallel.expert_tensor={config.parallel.expert_tensor} between 1 and tensor="
            f"{config.parallel.tensor} is not planned yet: plan with 1, or with 0 for tensor"
        )
    if config.model.mtp_depths:
        raise ValueError(
            f"model.mtp_depths={config.model.mtp_depths}: what predicting further tokens needs is "
            "not planned yet; plan the model with mtp_depths=0"
        )
    axes, model = axis_sizes(config.parallel, num_devices), config.model
    shards = axes["data"] * axes["fsdp"] * axes["expert"]
    samples = config.train.micro_batch_size or config.train.global_batch_size // shards
    microbatches = config.train.global_batch_size // (samples * shards)
    blocks, parallel = units(model), config.parallel
    together = model.layers_of_unit
    counts = layers_of_chunks(parallel, model.num_units * together, together)
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
        _shards(every, mesh_shape(axes, parallel.fold), held, vocabulary, parallel.zero1),
        lanes(parallel.schedule, microbatches, parallel.pipe, parallel.chunks),
    )


@functools.lru_cache(maxsize=1024)
def _places(repeats: tuple[int, ...], stages: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    layout = arrange(repeats, stages, counts)
    return tuple(layout.slots(group) for group in range(len(repeats)))


@functools.lru_cache(maxsize=4096)
def _shards(every, axes, places, vocabulary: int, zero1: bool) -> tuple[Shard, ...]:
    """Of every parameter; `places`: layers of each group that a device holds."""
    mesh = typing.cast(Mesh, AbstractMesh(axes, MESH_AXES))
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
        summed = MESH_AXES if not is_frozen(variable) else ()
        left = (name for name in summed if name not in used and mesh.shape[name] > 1)
        sums = tuple("tensor" if name == "fold" else name for name in left)
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
