"""RETRO's mixers (Borgeaud et al., 2022): tokens attend to the neighbours of the previous chunk.

The L tokens of a sample are cut into chunks of m tokens, and each chunk has k neighbours of r
tokens. The source rows, L / m * k * r of them, are the neighbours of the first chunk, then those of
the second, and so on. Each mixer reshapes its rows so that plain attention runs within a chunk or a
neighbour; segment numbers separate documents and mark padding.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.layers.cross import CrossAttention, CrossSpec

HIDDEN = -1  # segment of queries that see no key
Outputs = tuple[Float[Array, "B L D"], None, dict]


def cut(x_BL: jax.Array, count: int) -> jax.Array:
    """An array [B, L, ...] as [B * count, L / count, ...]."""
    B, L = x_BL.shape[:2]
    return x_BL.reshape(B * count, L // count, *x_BL.shape[2:])


def cut_context(ctx: Context, count: int) -> Context:
    """The context of rows that are cut into `count` parts each."""
    assert ctx.segments_BL is not None
    rows_B, adapters_B = ctx.rows_B, ctx.adapters_B
    if rows_B is not None:
        rows_B = (rows_B[:, None] * count + jnp.arange(count)).ravel()
    return dataclasses.replace(
        ctx,
        positions_BL=cut(ctx.positions_BL, count),
        segments_BL=cut(ctx.segments_BL, count),
        rows_B=rows_B,
        adapters_B=None if adapters_B is None else jnp.repeat(adapters_B, count),
        rotations=None,
        sequence_sharded=False,
    )


@dataclasses.dataclass(frozen=True)
class NeighbourAttentionSpec(AttentionSpec):
    """length: tokens of a neighbour, which attend to each other."""

    length: int = 0

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

    def parts(self, length: int, memory_length: int) -> int:
        return (memory_length if self.of_neighbours else length) // self.chunk_length

    def cross_scores(self, length: int, memory_length: int) -> float:
        parts = max(self.parts(length, memory_length), 1)
        return super().cross_scores(length, memory_length) / parts

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
        shape, shift = h_BLD.shape, 0
        count = self.spec.parts(shape[1], memory_BMD.shape[1])
        if not self.spec.of_neighbours:
            shift = self.spec.chunk_length - 1
            h_BLD, segments_BL = (jnp.roll(x, -shift, axis=1) for x in (h_BLD, segments_BL))
            is_last = jnp.arange(shape[1]) >= shape[1] - shift
            segments_BL = jnp.where(is_last, HIDDEN, segments_BL)
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
        return jnp.roll(y_BLD.reshape(shape), shift, axis=1), None, aux

    def segments(self, ctx: Context, memory_ctx: Context) -> tuple[jax.Array, jax.Array]:
        assert ctx.segments_BL is not None and memory_ctx.segments_BL is not None
        return ctx.segments_BL, memory_ctx.segments_BL
