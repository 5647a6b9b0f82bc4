"""The residual stream: arrays by name, which every layer reads and returns.

"target" [B, L, D] holds the tokens that the model predicts. An encoder-decoder also has "source"
[B, S, D], the tokens of its encoder, and with relative positions "tables" [2, N, H], their biases
for the device's heads, float32 so that the gradients of all layers are summed in it.

To add an array, a part of the model (`ends.STREAMERS`) or the `stream` of a mixer's spec returns it
under a new name, as a partial sum over pipe, and layers read it (`MixerSpec.reads_stream`). It goes
through all layers and pipeline stages, and its gradients return the same way; it must be floating.
A layer that writes it returns it with a new value of the same shape and dtype (`mixer.STREAM`). For
backward, each unit stores the arrays that it reads: where a layer reads one slice of a large array,
`Stack.run_unit` has to cut it before jax.checkpoint. `LM.reads` names the arrays that the head
reads: the last stage sends only these to all stages.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.layers.context import Context, Tables
from maxmeg.layers.mixer import Mixer, MixerSpec
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.random import normal, split
from maxmeg.parallel import collectives
from maxmeg.parallel.parameter import parameter

Side = typing.Literal["source", "target"]
Stream = dict[str, jax.Array]


def source_context(ctx: Context) -> Context:
    """The context of the source's tokens."""
    assert ctx.source is not None
    arrays = {"positions_BL": ctx.source.positions_BS, "segments_BL": ctx.source.segments_BS}
    return dataclasses.replace(ctx, **arrays, tables=Tables(), token_types_BL=None, source=None)


def side_context(x: Stream, ctx: Context, side: Side, spec: MixerSpec) -> Context:
    """What a mixer of one side reads beside its rows."""
    if spec.reads_memory:
        is_target = side == "target"
        memory_BLD = x["source" if is_target else "target"]
        memory_BMD = collectives.gather_sequence(memory_BLD, ctx.sequence_sharded)
        memory = memory_BMD, source_context(ctx) if is_target else ctx
        ctx = dataclasses.replace(ctx, memory=memory)
    if spec.bias_shape:
        ctx = dataclasses.replace(ctx, bias_NH=x["tables"][int(side == "target")])
    return source_context(ctx) if side == "source" else ctx


class RelativeTable(nnx.Module):
    """Relative biases [N, H] of N buckets of distances."""

    def __init__(self, key: jax.Array, shape: tuple[int, int], std: float):
        self.table = parameter(std * normal(key, shape), None, "heads")


class RelativeTables(nnx.Module):
    """The tables of both sides."""

    def __init__(self, key: jax.Array, shape: tuple[int, int], std: float):
        source_key, target_key = split(key, 2)
        self.source = RelativeTable(source_key, shape, std)
        self.target = RelativeTable(target_key, shape, std)

    def arrays(self) -> Stream:
        """{"tables": of source and target, float32 [2, N, H]}; partial sums over pipe."""
        tables = jnp.stack([self.source.table[...], self.target.table[...]]).astype(jnp.float32)
        return {"tables": collectives.counted_once(tables, (collectives.PIPE_AXIS,))}


@dataclasses.dataclass(frozen=True)
class EncoderNormSpec(MixerSpec):
    """The norm after the encoder's last layer."""

    name = "norm"
    reads = writes = "shard"

    norm: NormSpec = NormSpec()

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        return {"hidden_size": config.hidden_size, "norm": NormSpec.of(config)}

    def make(self, key: jax.Array) -> "EncoderNorm":
        return EncoderNorm(self)

    def weights(self) -> int:
        return 0


class EncoderNorm(Mixer):
    """Its output takes the place of its input."""

    def __init__(self, spec: EncoderNormSpec):
        self.spec, self.layer_norm = spec, Norm(spec.hidden_size, spec.norm)

    def __call__(self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None) -> tuple:
        return self.layer_norm(h_BLD), cache, {}
