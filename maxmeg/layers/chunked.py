"""RETRO's mixers (Borgeaud et al., 2022): tokens attend to the neighbours of the previous chunk.

The L tokens of a sample are cut into chunks of m tokens, and each chunk has k neighbours of r
tokens. The source rows, L / m * k * r of them, are the neighbours of the first chunk, then those of
the second, and so on. Each mixer reshapes its rows so that plain attention runs within a chunk or a
neighbour; segment numbers separate documents and mark padding. Devices along context hold whole
chunks and their neighbours.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.distributed.halves import halos, stacked_halves
from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.context import Context, Tables
from maxmeg.layers.cross import CrossAttention, CrossSpec
from maxmeg.parallel.collectives import axis_size
from maxmeg.parallel.mesh import CONTEXT_AXES
from maxmeg.parallel.ordering import after

Outputs = tuple[Float[Array, "B L D"], None, dict]


def cut(x_BL: jax.Array, count: int) -> jax.Array:
    """An array [B, L, ...] as [B * count, L / count, ...]."""
    B, L = x_BL.shape[:2]
    return x_BL.reshape(B * count, L // count, *x_BL.shape[2:])


def delayed(x_BL: jax.Array, count: int) -> jax.Array:
    """x [B, L, ...] at the token `count` places before each; zeros before the sequence."""
    if count == 0:
        return x_BL
    if axis_size(CONTEXT_AXES) == 1:
        return jnp.concatenate([jnp.zeros_like(x_BL[:, :count]), x_BL[:, :-count]], axis=1)
    before, halves = (stacked_halves(x) for x in (halos(x_BL, count), x_BL))
    both = jnp.concatenate([before, halves[:, :-count]], axis=1)
    return jnp.concatenate(jnp.split(both, 2), axis=1)


def advanced(x_BL: jax.Array, count: int) -> jax.Array:
    """x [B, L, ...] at the token `count` places after each; zeros after the sequence."""
    return jnp.flip(delayed(jnp.flip(x_BL, axis=1), count), axis=1)  # also if cut over context


def cut_context(ctx: Context, count: int) -> Context:
    """The context of rows that are cut into `count` parts each on this device."""
    assert ctx.segments_BL is not None
    rows_B, adapters_B, length = ctx.rows_B, ctx.adapters_B, ctx.positions_BL.shape[1]
    if rows_B is not None:
        part = length // count
        numbers = ctx.places(length)[:, ::part] // part
        whole_length = ctx.sequence.whole_length // part
        rows_B = (rows_B[:, None] * whole_length + numbers).ravel()
    return dataclasses.replace(
        ctx,
        positions_BL=cut(ctx.positions_BL, count),
        segments_BL=cut(ctx.segments_BL, count),
        rows_B=rows_B,
        adapters_B=None if adapters_B is None else jnp.repeat(adapters_B, count),
        row_lengths_B=None,
        tables=Tables(),
        sequence_sharded=False,
        context_sharded=False,
    )


@dataclasses.dataclass(frozen=True)
class NeighbourAttentionSpec(AttentionSpec):
    """length: tokens of a neighbour, which attend to each other."""

    length: int = 0
    spans_devices = False

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        length = config.retro.neighbour_length
        return super().settings(config, parallel, mixer) | {"length": length}

    def parts(self, length: int, memory_length: int) -> int:
        return length // self.length

    def scores(self, length: int) -> int:
        return length // max(self.length, 1) * super().scores(self.length)

    def make(self, key: jax.Array) -> "NeighbourAttention":
        return NeighbourAttention(key, self)


class NeighbourAttention(Attention):
    """Self-attention within each neighbour."""

    def __call__(self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None) -> Outputs:
        count = h_BLD.shape[1] // self.spec.length
        ctx = cut_context(ctx, count)
        ctx = dataclasses.replace(ctx, positions_BL=ctx.positions_BL % self.spec.length)
        y_BLD, _, aux = super().__call__(cut(h_BLD, count), ctx, cache)
        return y_BLD.reshape(h_BLD.shape), None, aux


@dataclasses.dataclass(frozen=True)
class ChunkedCrossSpec(CrossSpec):
    """chunk_length: tokens of a chunk. of_neighbours: True if the neighbours attend to their chunk
    (the encoder), False if the chunk attends to its neighbours (the decoder)."""

    chunk_length: int = 0
    of_neighbours: bool = False
    spans_devices = False

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        of_neighbours = mixer == "encoder_cross"
        return super().settings(config, parallel, mixer) | {"of_neighbours": of_neighbours}

    def parts(self, length: int, memory_length: int) -> int:
        return (memory_length if self.of_neighbours else length) // self.chunk_length

    def multiplications(self, length: int, memory_length: int = 0) -> tuple[float, float]:
        weights, scores = super().multiplications(length, memory_length)
        return weights, scores / max(self.parts(length, memory_length), 1)

    def halos(self, tensor: int = 1) -> tuple[int, ...]:
        inputs = (self.chunk_length - 1) * self.hidden_size
        return () if self.of_neighbours else (inputs, inputs)  # and as many outputs

    def make(self, key: jax.Array) -> "ChunkedCross":
        return ChunkedCross(key, self)


class ChunkedCross(CrossAttention):
    """Cross attention within each chunk, without a mask but for documents and padding.

    Queries of the target are shifted: the last token of a chunk and all but the last one of the
    next read the chunk's neighbours, which were found by all of the chunk's tokens. The first
    m - 1 tokens read none.
    """

    def __call__(self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None) -> Outputs:
        assert ctx.memory is not None and ctx.segments_BL is not None
        (memory_BMD, memory_ctx), segments_BL = ctx.memory, ctx.segments_BL
        shift = 0 if self.spec.of_neighbours else self.spec.chunk_length - 1
        count = self.spec.parts(h_BLD.shape[1], memory_BMD.shape[1])
        h_BLD = advanced(h_BLD, shift)
        segments_BL = advanced(after(segments_BL, h_BLD), shift)
        ctx = cut_context(dataclasses.replace(ctx, segments_BL=segments_BL), count)
        memory_BMD, memory_ctx = cut(memory_BMD, count), cut_context(memory_ctx, count)
        if not self.spec.of_neighbours:  # kernels need the keys of a document side by side
            segments_BM = jnp.asarray(memory_ctx.segments_BL)
            order_BM = jnp.argsort(segments_BM == 0, axis=1)
            memory_BMD = jnp.take_along_axis(memory_BMD, order_BM[..., None], axis=1)
            segments_BM = jnp.take_along_axis(segments_BM, order_BM, axis=1)
            memory_ctx = dataclasses.replace(memory_ctx, segments_BL=segments_BM)
        ctx = dataclasses.replace(ctx, memory=(memory_BMD, memory_ctx))
        y_BLD, _, aux = super().__call__(cut(h_BLD, count), ctx, cache)
        return delayed(y_BLD.reshape(h_BLD.shape), shift), None, aux

    def segments(self, ctx: Context, memory_ctx: Context) -> tuple[jax.Array, jax.Array]:
        assert ctx.segments_BL is not None and memory_ctx.segments_BL is not None
        return ctx.segments_BL, memory_ctx.segments_BL
