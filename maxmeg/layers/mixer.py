"""The protocol of mixers: attention, MLP, experts and other sublayers.

A mixer is a frozen spec and the module that the spec builds. The spec states FLOPs and sizes of
arrays (for planning), and which part of the sequence the mixer reads and writes
(layers/residual.py). `config.layers.MIXERS` maps the name of each mixer to its spec and to the
groups of settings that it reads. `MixerSpec.of` makes the spec from these settings.
"""

import abc
import dataclasses
import typing

import jax
from flax import nnx

from maxmeg.config.layers import GROUPS
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import shared_values
from maxmeg.layers.context import Context, TableMakers
from maxmeg.ops.cache import CacheSize

STREAM = "stream"
Span = typing.Literal["whole", "shard"]  # of the sequence, which is sharded over tensor


@dataclasses.dataclass(frozen=True)
class Widths:
    """Widths (elements per token) of a mixer's arrays, summed over the devices along tensor.

    stored: {name of an activation, as in config.recompute: width} of the outputs of products. A
    device has 1 / tensor of each. A key/value head counts once per device that computes it.
    replicated: the same for outputs that every device along tensor has completely.
    queries_keys_values: width of q, k and v, whose gradients zero bubble keeps for the weight lane.
    normalized: the part of `stored` that is normalized (queries and keys).
    last_input: width of the input of the last product; a weight-gradient lane keeps its gradient.
    gathered: widths of the sequences that the mixer itself gathers over tensor.
    head_outputs: sum of the widths of the outputs of attention heads.
    scanned: width of the output of a scan, whose gated product is in float32.
    """

    stored: dict[str, int] = dataclasses.field(default_factory=dict)
    replicated: dict[str, int] = dataclasses.field(default_factory=dict)
    queries_keys_values: int = 0
    normalized: int = 0
    last_input: int = 0
    gathered: tuple[int, ...] = ()
    head_outputs: int = 0
    scanned: int = 0


@dataclasses.dataclass(frozen=True)
class MixerSpec(abc.ABC):
    """Settings of a mixer.

    std, out_std: standard deviations of the initial input and output weights.
    name: of the parameters in a sublayer. reads_memory: whether it attends to an encoder's output.
    reads_stream: names of further arrays of the residual stream that it reads (`Context.stream`).
    reads: whether the input is the whole sequence or the local shard. writes: whether the output is
    partial sums for the whole sequence or complete sums for the shard.
    """

    name: typing.ClassVar[str]
    reads_memory: typing.ClassVar[bool] = False
    reads_stream: typing.ClassVar[tuple[str, ...]] = ()
    reads: typing.ClassVar[Span] = "whole"
    writes: typing.ClassVar[Span] = "whole"

    hidden_size: int
    std: float = dataclasses.field(default=0.02, kw_only=True)
    out_std: float = dataclasses.field(default=0.02, kw_only=True)

    @classmethod
    def of(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str = "") -> typing.Any:
        """The spec of a model's mixer, by its name in config.layers.MIXERS."""
        return cls(**cls.settings(config, parallel, mixer or cls.name))

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        """Values of fields: a setting of the mixer's groups gives the field of the same name."""
        values = {"hidden_size": config.hidden_size}
        values |= {"std": config.hidden_std, "out_std": config.output_std}
        for group in GROUPS[mixer]:
            values |= shared_values(cls, config.derived(group))
        return values

    def tables(self, dtype: jax.typing.DTypeLike) -> TableMakers:
        """What the mixer reads of `Context.tables`. dtype: of activations."""
        return {}

    def stream(self, x_BLD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        """Arrays that it adds to the residual stream x before the first layer."""
        return {}

    @property
    def bias_shape(self) -> tuple[int, int] | None:
        """Shape [N, H] of the relative biases that it reads, of N buckets and all its heads."""
        return None

    @abc.abstractmethod
    def make(self, key: jax.Array) -> "Mixer":
        """The module, with random float32 weights."""

    @abc.abstractmethod
    def weights(self) -> int:
        """Number of weights that each token is multiplied with, as Megatron-LM counts them."""

    def scores(self, length: int) -> int:
        """Multiplications between the tokens of a sequence, without a causal mask."""
        return 0

    def multiplications(self, length: int, memory_length: int = 0) -> tuple[float, float]:
        """Multiplications in forward of a sequence: (with weights, `scores`). memory_length: of the
        other side, if the mixer `reads_memory`."""
        return length * self.weights(), self.scores(length)

    def halos(self, tensor: int = 1) -> tuple[int, ...]:
        """Sizes of the mixer's halos, in elements per device: for each array, the tokens just
        before or after a chunk, which another device along context holds."""
        return ()

    def state(self, tensor: int = 1) -> int:
        """float32 elements of a device's state of a scan for one sequence, with its decay."""
        return 0

    def widths(self, tensor: int = 1) -> Widths:
        """tensor: number of devices that share the heads."""
        return Widths()


class Mixer(nnx.Module):
    spec: typing.Any  # a MixerSpec

    def __call__(self, h: jax.Array, ctx: Context, cache: typing.Any = None) -> tuple:
        """(output, new cache or None, auxiliary values by name). cache: of all layers of the group
        (ops/cache.py); ctx.cache_places says which part is this layer's. The value STREAM has
        the arrays of the residual stream that it writes beside its output."""
        raise NotImplementedError

    def init_cache(self, size: CacheSize) -> typing.Any:
        """One layer's part of an empty cache; None if the mixer has none."""
        return None

    def update(self, aux: dict[str, jax.Array]) -> None:
        """Set the state, if the mixer has one, from the auxiliary values of a whole step."""
