"""The protocol of mixers: attention, MLPs, experts, and whatever else a sublayer adds up.

A mixer is a frozen spec and the module that the spec makes. The spec answers what the rest of the
program asks: its FLOPs and the sizes of its arrays (planning), and which part of the sequence it
reads and writes (layers/residual.py). `models.mixers.MIXERS` has the function that makes each spec
from a ModelConfig, and `config.layers.MIXERS` the groups of settings that it reads.
"""

import abc
import dataclasses
import typing

import jax
from flax import nnx

from maxmeg.layers.context import Context

Span = typing.Literal["whole", "shard"]  # of the sequence, where it is cut over tensor


@dataclasses.dataclass(frozen=True)
class Widths:
    """Sizes of a mixer's arrays per token, summed over the devices along tensor.

    stored: {name of an activation, as in config.recompute: width} of the outputs of products. A
    device has 1 / tensor of each, cut along heads, channels or tokens. A key/value head counts once
    for every device that computes it.
    replicated: the same for outputs of which every device along tensor has all.
    queries_keys_values: the part of `stored` whose gradients a weight lane keeps.
    last_input: width of the input of the last product, whose gradient a weight lane keeps.
    gathered: widths of the sequences that the mixer itself gathers over tensor.
    heads, head_outputs: number of attention heads, and the summed widths of their outputs.
    expert_columns, expert_input: widths of one expert's column-parallel products, and of the input
    of its last product. shared_expert: whether one expert is applied to all tokens.
    """

    stored: dict[str, int] = dataclasses.field(default_factory=dict)
    replicated: dict[str, int] = dataclasses.field(default_factory=dict)
    queries_keys_values: int = 0
    last_input: int = 0
    gathered: tuple[int, ...] = ()
    heads: int = 0
    head_outputs: int = 0
    expert_columns: int = 0
    expert_input: int = 0
    shared_expert: bool = False


@dataclasses.dataclass(frozen=True)
class MixerSpec(abc.ABC):
    """Settings of a mixer.

    name: of the mixer's parameters in a sublayer. reads, writes: whether the module's input is the
    whole sequence or this device's shard of it, and whether its output is partial sums of the whole
    sequence or complete sums of the shard.
    """

    name: typing.ClassVar[str]
    reads: typing.ClassVar[Span] = "whole"
    writes: typing.ClassVar[Span] = "whole"

    hidden_size: int

    @abc.abstractmethod
    def make(self, key: jax.Array) -> "Mixer":
        """The module, with random weights in float32."""

    @abc.abstractmethod
    def weights(self) -> int:
        """Number of weights that each token is multiplied by, as Megatron-LM counts them."""

    def scores(self, length: int) -> int:
        """Multiplications between tokens of a sequence of `length`, without a causal mask."""
        return 0

    @abc.abstractmethod
    def widths(self, kv_copies: int = 1) -> Widths:
        """Sizes of the arrays. kv_copies: devices along tensor that compute the same key/value
        head."""


class Mixer(nnx.Module):
    """A mixer's module."""

    spec: typing.Any  # its MixerSpec

    def __call__(self, h: jax.Array, ctx: Context, cache: typing.Any = None) -> tuple:
        """Output, the new cache (None without one), auxiliary values by name."""
        raise NotImplementedError

    def init_cache(self, batch: int, length: int) -> typing.Any:
        """An empty cache for `batch` sequences of `length` tokens; None: the mixer has none."""
        return None

    def update(self, aux: dict[str, jax.Array]) -> None:
        """Set the state from the auxiliary values of a whole step; most mixers have no state."""
