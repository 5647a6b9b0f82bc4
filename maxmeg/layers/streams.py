"""The residual stream of an encoder-decoder, and its norm between both.

x [B, S + L + R, D] holds, on every device, rows of the source, then rows of the target, then R rows
with the tables of relative biases of the device's heads. A sublayer reads and replaces the rows of
one side, so that a pipeline carries all of them from stage to stage; gradients of the tables, which
all layers of a side share, come back with those of the stream.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.random import normal, split
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import TENSOR_AXES

Side = typing.Literal["source", "target"]


class Streams(typing.NamedTuple):
    """The parts of x along its rows."""

    source: jax.Array
    target: jax.Array
    tables: jax.Array

    @classmethod
    def of(cls, x_BLD: Float[Array, "B L D"], ctx: Context) -> "Streams":
        assert ctx.source is not None
        ends = source_context(ctx).sequence.length, ctx.sequence.length
        return cls(*jnp.split(x_BLD, [ends[0], sum(ends)], axis=1))

    def joined(self) -> Float[Array, "B L D"]:
        return jnp.concatenate(self, axis=1)


def source_context(ctx: Context) -> Context:
    """The context of the source's tokens."""
    assert ctx.source is not None
    own = {"positions_BL": ctx.source.positions_BS, "segments_BL": ctx.source.segments_BS}
    return dataclasses.replace(ctx, **own, rotations=None, token_types_BL=None, source=None)


def side_context(streams: Streams, ctx: Context, side: Side, spec: MixerSpec) -> Context:
    """What a mixer of one side reads beside its rows."""
    if spec.reads_memory:
        is_target = side == "target"
        memory_BLD = streams.source if is_target else streams.target
        memory_BMD = collectives.gather_sequence(memory_BLD, ctx.sequence_sharded)
        memory = memory_BMD, source_context(ctx) if is_target else ctx
        ctx = dataclasses.replace(ctx, memory=memory)
    if shape := spec.bias_shape:
        number, heads = int(side == "target"), shape[1] // collectives.axis_size(TENSOR_AXES)
        # The samples' tables are equal: the first one's get the gradients of all samples.
        numbers = streams.tables[0].ravel()[: 2 * shape[0] * heads]
        ctx = dataclasses.replace(ctx, bias_NH=numbers.reshape(2, shape[0], heads)[number])
    return source_context(ctx) if side == "source" else ctx


class RelativeTable(nnx.Module):
    """Relative biases [N, H] of N buckets of distances."""

    def __init__(self, key: jax.Array, shape: tuple[int, int], std: float):
        self.table = nnx.Param(std * normal(key, shape), axes=(None, "heads"))


class RelativeTables(nnx.Module):
    """The tables of both sides."""

    def __init__(self, key: jax.Array, shape: tuple[int, int], std: float):
        source_key, target_key = split(key, 2)
        self.source = RelativeTable(source_key, shape, std)
        self.target = RelativeTable(target_key, shape, std)

    def rows(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B R D"]:
        """The tables of the device's heads, in each sample; partial sums over pipe."""
        B, _, D = x_BLD.shape
        tables = (self.source, self.target)
        numbers = jnp.concatenate([table.table[...].ravel() for table in tables])
        numbers = jnp.pad(numbers, (0, -numbers.size % D)).reshape(1, -1, D).astype(x_BLD.dtype)
        rows_BRD = jnp.broadcast_to(numbers, (B, *numbers.shape[1:]))
        return collectives.counted_once(rows_BRD, (collectives.PIPE_AXIS,))


@dataclasses.dataclass(frozen=True)
class EncoderNormSpec(MixerSpec):
    """The norm after the encoder's last layer."""

    name = "norm"
    reads = writes = "shard"

    norm: NormSpec = NormSpec()

    def make(self, key: jax.Array) -> "EncoderNorm":
        return EncoderNorm(self)

    def weights(self) -> int:
        return 0

    def widths(self, tensor: int = 1) -> Widths:
        return Widths()


class EncoderNorm(Mixer):
    """Its output takes the place of its input."""

    def __init__(self, spec: EncoderNormSpec):
        self.spec, self.layer_norm = spec, Norm(spec.hidden_size, spec.norm)

    def __call__(self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None) -> tuple:
        return self.layer_norm(h_BLD), cache, {}
