"""The work of one device in a step: its parameters, layers and schedule lanes.

Parameters come from the real model by `jax.eval_shape`, their shards from `parallel.rules`, sizes
of activations from the specs of the mixers. Nothing is compiled.
"""

import collections
import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from maxmeg.config.model import DType, ModelConfig, Position
from maxmeg.config.parallel import LaneOrder, ParallelConfig, Schedule
from maxmeg.config.recompute import POLICIES, kept_names, offloaded_names
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.config.stages import units_of_chunks
from maxmeg.config.validate import axis_sizes
from maxmeg.models.mixers import pattern
from maxmeg.ops.backend import HOPPER, Device, target_device
from maxmeg.ops.quantized import Recipe
from maxmeg.ops.recipes import recipe_of
from maxmeg.parallel.mesh import MESH_AXES, mesh_shape
from maxmeg.parallel.parameter import annotate, info
from maxmeg.parallel.rules import reduction, shard_over_context, storage_axes
from maxmeg.pipeline.layout import arrange
from maxmeg.planning.cost.parameters import Parameter, architecture_key, parameters
from maxmeg.planning.cost.unit import Unit
from maxmeg.weights.fused import can_fuse
from maxmeg.weights.transforms import elements

CONTEXT_SETTINGS = ("context_strategy", "context_inner")  # of mixers, in ParallelConfig
ITEMSIZE = {DType.float32: 4, DType.bfloat16: 2, DType.float16: 2}


@dataclasses.dataclass(frozen=True)
class Shard:
    """Number of elements of a parameter on a device.

    stored: of its master. computed: of its copy in the compute dtype, under ZeRO-1 gathered,
    cut to one key/value head if there are fewer of them than tensor. gathered: of that copy
    gathered over fsdp, along these mesh axes. zero1_axes: its gradient is scattered over these
    mesh axes. sum_axes: its gradient is summed over these. fused: it is part of a weight of several
    projections; first_fused: its first part, or a weight by itself. variable: of the shape that it
    has on all devices.
    """

    parameter: Parameter
    variable: nnx.Variable = dataclasses.field(compare=False)
    stored: int
    computed: int
    gathered: int
    fsdp: tuple[str, ...]
    zero1_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    fused: bool = False
    first_fused: bool = True

    @functools.cached_property
    def trained(self) -> bool:
        return info(self.parameter.variable).is_trained


@dataclasses.dataclass(frozen=True)
class Lanes:
    """A schedule's ring buffer sizes (slots, deferred), and active ticks of each lane."""

    slots: int
    deferred: int
    forward: int
    backward: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """A config on its devices. samples: samples of a microbatch on a device. places: number of
    units of each group that a chunk has memory for. unit_runs: number that the busiest
    chunk runs.
    device: the GPU, which decides the kernels. length: tokens of a sequence; of an encoder-decoder
    those of the target, or of the side that a unit is of (`of`)."""

    config: Config
    axes: dict[str, int]
    microbatches: int
    samples: int
    places: tuple[int, ...]
    unit_runs: tuple[int, ...]
    units: tuple[Unit, ...]
    shards: tuple[Shard, ...]
    lanes: Lanes
    device: Device
    length: int

    def of(self, unit: Unit) -> "Workload":
        """The same work with the tokens that a unit has."""
        data = self.config.data
        length = data.source_tokens if unit.reads_source else data.sequence_length
        return self if length == self.length else dataclasses.replace(self, length=length)

    @property
    def layers_of_chunk(self) -> int:
        """Number of layers that the busiest chunk runs."""
        return sum(u.layers * runs for u, runs in zip(self.units, self.unit_runs, strict=True))

    @property
    def tokens(self) -> int:
        """Of a microbatch on a device; with their share of each sequence under context."""
        return self.samples * self.length // self.axes["context"]

    @property
    def targets(self) -> int:
        """Most tokens of a microbatch on a device whose logits are computed."""
        length = self.length // self.axes["context"]
        return self.samples * min(length, self.config.data.max_targets)

    @property
    def source_tokens(self) -> int:
        """Tokens of an encoder-decoder's source; 0 without one."""
        return self.samples * self.config.data.source_tokens // self.axes["context"]

    @property
    def fsdp(self) -> int:
        """Number of devices over which matrices are sharded, without those of experts."""
        over_context = self.config.parallel.fsdp_context
        return self.axes["fsdp"] * (self.axes["context"] if over_context else 1)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.config.model.dtype]

    @property
    def quantized_share(self) -> float:
        """Share of the layers whose operands are rounded."""
        model = self.config.model
        unquantized = model.first_layers_bf16 + model.last_layers_bf16
        return (self.recipe is not None) * (1 - unquantized / model.num_layers)

    @property
    def recipe(self) -> Recipe | None:
        return recipe_of(self.config.train.quantization)

    def is_quantized(self, shard: Shard) -> bool:
        """Whether a step rounds the parameter."""
        return shard.parameter.is_quantized(self.recipe)

    def copies(self, shard: Shard) -> int:
        """Number of copies of the parameter that layers compute with (weights/quantized.py)."""
        return self.recipe.copies if self.recipe and self.is_quantized(shard) else 1

    def weight_bytes(self, shard: Shard, count: int) -> int:
        """Bytes of `count` weights that a product reads: of their codes and the scales of blocks,
        or in the compute dtype."""
        recipe = self.recipe if self.is_quantized(shard) else None
        return recipe.weight_bytes(count) if recipe else self.itemsize * count

    @property
    def gradient_itemsize(self) -> int:
        """Of gradients while they are summed over devices."""
        return jnp.dtype(self.config.parallel.gradient_dtype.value).itemsize

    @property
    def pipelined(self) -> bool:
        return self.axes["pipe"] > 1

    @property
    def saved(self) -> frozenset[str]:
        """Names of the stored activations; empty under full recomputation."""
        return kept_names(self.config.model.recompute)

    @property
    def accumulates(self) -> bool:
        """Whether gradients are accumulated in float32."""
        return self.pipelined or self.microbatches > 1

    @property
    def has_output(self) -> bool:
        """Whether the loss reads an output weight of the vocabulary; a classifier's does not."""
        return not self.config.model.head.num_classes

    @property
    def vocabulary(self) -> int:
        """Rows of the output weight on a device; of a classifier, which is not sharded, its
        classes."""
        return self.embedded if self.has_output else self.config.model.head.num_classes

    @property
    def embedded(self) -> int:
        """Rows of the embedding on a device."""
        tensor, pipe = self.axes["tensor"], self.axes["pipe"]
        return self.config.model.padded_vocab_size(tensor, pipe) // (tensor * pipe)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one microbatch's residual stream on a device: e T D / t."""
        width = self.config.model.hidden_size
        return self.itemsize * self.tokens * width // self.axes["tensor"]

    @property
    def carried_bytes(self) -> int:
        """`hidden_bytes` between units: of an encoder-decoder those of both sides, with its tables
        of relative biases."""
        if not (source := self.source_tokens):
            return self.hidden_bytes
        model, tensor = self.config.model, self.axes["tensor"]
        target = self.samples * self.config.data.sequence_length // self.axes["context"]
        is_relative = model.position is Position.relative
        biases = 2 * is_relative * model.relative.buckets * model.attention.num_heads // tensor
        return self.itemsize * model.hidden_size * (source + target) // tensor + 4 * biases

    @property
    def unsaved(self) -> frozenset[str]:
        """Outputs of products that are recomputed though selective recomputation keeps them."""
        return POLICIES["selective"] - self.saved

    @property
    def offloaded(self) -> frozenset[str]:
        """Names of the activations that are stored in host memory."""
        return offloaded_names(self.config.model.recompute)

    @property
    def on_device(self) -> "Workload":
        """The workload with nothing in host memory."""
        optim = dataclasses.replace(self.config.optim, offload=False)
        config = dataclasses.replace(self.config, optim=optim)
        policy = ",".join(sorted(self.saved)) or "full"
        return dataclasses.replace(self, config=config).with_recompute(policy)

    def with_recompute(self, policy: str) -> "Workload":
        model = dataclasses.replace(self.config.model, recompute=policy)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, model=model))

    def with_lanes(self, order: LaneOrder) -> "Workload":
        parallel = dataclasses.replace(self.config.parallel, lanes=order)
        config = dataclasses.replace(self.config, parallel=parallel)
        return dataclasses.replace(self, config=config, lanes=lanes(parallel, self.microbatches))


@functools.lru_cache(maxsize=64)
def _units(key: frozenset, tensor: int, settings: frozenset, ratio: float) -> tuple[Unit, ...]:
    """The repeated unit of each group of the stack. settings: fields of ParallelConfig. ratio:
    as in `Unit`."""
    model, parallel = with_fields(ModelConfig(), dict(key)), ParallelConfig(**dict(settings))
    return tuple(
        Unit(repeats, len(layers), specs, tensor, ratio)
        for (layers, _), (specs, repeats) in zip(
            model.groups, pattern(model, parallel), strict=True
        )
    )


def gpu_here() -> Device:
    """The GPU of this machine; an H100 if it has none."""
    device = target_device()
    return device if device.is_cuda else Device("cuda", (HOPPER, 0))


def workload(config: Config, num_devices: int, device: Device | None = None) -> Workload:
    """The work of a device in a step of a valid config on `num_devices` devices.

    device: None means `gpu_here()`. Raises ValueError for settings that are not planned yet.
    """
    if not config.model.vocab_size:
        raise ValueError(
            "model.vocab_size=0 means that of the tokenizer, which is not read here: set it"
        )
    if 1 < config.parallel.expert_tensor < config.parallel.tensor:
        raise ValueError(
            f"parallel.expert_tensor={config.parallel.expert_tensor} between 1 and tensor="
            f"{config.parallel.tensor} is not planned yet: plan with 1, or with 0 for tensor"
        )
    if config.model.mtp.num_layers:
        raise ValueError(
            f"model.mtp.num_layers={config.model.mtp.num_layers}: MTP layers are not planned yet; "
            "plan the model with mtp.num_layers=0"
        )
    axes, model = axis_sizes(config.parallel, num_devices), config.model
    shards = axes["data"] * axes["fsdp"] * axes["expert"]
    samples = config.train.micro_batch_size or config.train.global_batch_size // shards
    microbatches = config.train.global_batch_size // (samples * shards)
    parallel, key = config.parallel, architecture_key(model)
    settings = frozenset((name, getattr(parallel, name)) for name in CONTEXT_SETTINGS)
    target, source = config.data.sequence_length, config.data.source_tokens
    blocks = _units(key, parallel.tensor, settings, source / target)
    counts = units_of_chunks(model, parallel, tuple(unit.weights for unit in blocks))
    chunks = _units_of_groups(tuple(unit.repeats for unit in blocks), parallel.pipe, counts)
    places = tuple(max(numbers) for numbers in zip(*chunks, strict=True))
    stored = tuple(number * parallel.chunks for number in places)
    sizes = [unit.multiply_adds(source if unit.reads_source else target) for unit in blocks]

    def load(runs: tuple[int, ...]) -> int:
        return sum(number * size for number, size in zip(runs, sizes, strict=True))

    vocabulary = model.padded_vocab_size(parallel.tensor, parallel.pipe)
    zero1, over_context = parallel.zero1, parallel.fsdp_context
    every = parameters(model, config.lora)
    recipe = recipe_of(config.train.quantization)
    multiple = recipe.multiple if recipe else 1
    mesh = mesh_shape(axes, parallel.fold)
    return Workload(
        config,
        axes,
        microbatches,
        samples,
        places,
        max(chunks, key=load),
        blocks,
        _shards(every, mesh, stored, vocabulary, zero1, over_context, multiple),
        lanes(parallel, microbatches),
        device or gpu_here(),
        target,
    )


@functools.lru_cache(maxsize=1024)
def _units_of_groups(repeats: tuple[int, ...], stages: int, counts: tuple[int, ...]) -> tuple:
    """Number of units of each group, for every chunk."""
    layout = arrange(repeats, stages, counts)
    chunks = [layout.layers(group).reshape(len(counts), -1) >= 0 for group in range(len(repeats))]
    return tuple(zip(*(places.sum(axis=1).tolist() for places in chunks), strict=True))


@functools.lru_cache(maxsize=4096)
def _shards(
    every, axes, places, vocabulary: int, zero1: bool, over_context: bool, multiple: int
) -> tuple[Shard, ...]:
    """The shard of every parameter. places: number of units of each group on a device. multiple:
    of sizes of quantized matrices."""
    mesh = typing.cast(Mesh, AbstractMesh(axes, MESH_AXES))
    shards, groups = [], collections.defaultdict(list)
    for parameter in every:
        variable = padded(parameter, places, mesh.shape["pipe"], vocabulary)
        shape = variable.shape
        if parameter.kind == "output":
            annotate(variable, sizes=tuple(shape))
        if over_context:
            shard_over_context(variable)
        names = storage_axes(variable, mesh, zero1)
        sharded = {name for dim in names for name in dim}
        place = reduction(variable, mesh, zero1)
        stored = math.prod(shape) // math.prod(mesh.shape[name] for name in sharded)
        computed = elements(place, stored, mesh)
        fsdp = info(variable).fsdp_axes if "embed" in parameter.axes else ()
        fsdp = tuple(axis for axis in fsdp if mesh.shape[axis] > 1)
        gathered = computed * math.prod(mesh.shape[axis] for axis in fsdp)
        summed = place.sum_axes if info(variable).is_trained else ()
        left = (name for name in summed if mesh.shape[name] > 1)
        sums = tuple("tensor" if name == "fold" else name for name in left)
        if parameter.projections is not None:
            groups[parameter.projections].append((len(shards), variable, place.cut))
        sizes = parameter, variable, stored, computed, gathered
        scattered = place.cut.axes if place.cut is not None else ()
        shards.append(Shard(*sizes, fsdp, scattered, sums))
    for group in groups.values():
        numbers, variables, cuts = zip(*group, strict=True)
        if can_fuse(variables, set(cuts), mesh, multiple):
            for i in numbers:
                shards[i] = dataclasses.replace(shards[i], fused=True, first_fused=i == numbers[0])
    return tuple(shards)


def padded(
    parameter: Parameter, places: tuple[int, ...], stages: int, vocabulary: int
) -> nnx.Variable:
    """The parameter's variable with the shape that it has on all devices. places: see `_shards`."""
    sizes = {"vocab": vocabulary}
    if parameter.group is not None:
        sizes["layers"] = places[parameter.group] * stages
    dims = zip(parameter.axes, parameter.variable.shape, strict=True)
    shape = tuple(sizes.get(axis or "", size) for axis, size in dims)
    return parameter.variable.replace(jax.ShapeDtypeStruct(shape, parameter.variable.dtype))


def lanes(parallel: ParallelConfig, microbatches: int) -> Lanes:
    """Closed forms of the schedule's table with M microbatches, S stages, V chunks per stage.

    Active ticks: M V + S - 1 in forward and in backward, M in a weight lane. Slots: the smaller of
    S V + S - 1 (one more with the lanes together) and M V + 1 (one for the writes of idle stages).
    Deferred units of zero bubble: the smaller of S and M + 1. A single stage runs every lane once
    per microbatch.
    """
    M, S, V = microbatches, parallel.pipe, parallel.chunks
    delay = int(parallel.lanes is LaneOrder.together and M > 1)
    if S == 1:
        return Lanes(1 + delay, 0, M, M, M)
    ticks, slots = M * V + S - 1, min(M * V + 1, S * V + S - 1 + delay)
    if parallel.schedule is Schedule.zero_bubble:
        return Lanes(slots, min(M + 1, S), ticks, ticks, M)
    return Lanes(slots, 0, ticks, ticks, ticks)
