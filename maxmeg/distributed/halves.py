"""The two halves of a device's piece of a sequence that is cut over context, and their neighbours.

A piece is two chunks of the sequence (parallel.sequence), here its halves 0 and 1. Devices may form
groups of `count` neighbours along context, in each of which the pieces together are two contiguous
parts of the sequence again.
"""

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.mesh import CONTEXT_AXES
from maxmeg.parallel.sequence import chunk_places

Half = jax.Array | int


def half_of(x: jax.Array, half: Half) -> jax.Array:
    """A half of the tokens of x [B, L, ...]."""
    middle = x.shape[1] // 2
    if isinstance(half, int):
        return x[:, half * middle : (half + 1) * middle]
    return jnp.where(half == 1, x[:, middle:], x[:, :middle])


def stacked_halves(x: jax.Array) -> jax.Array:
    """Both halves as rows [2 B, L / 2, ...] of x [B, L, ...]."""
    return jnp.concatenate((half_of(x, 0), half_of(x, 1)))


def start_of(rank: jax.Array | int, half: Half, size: int, length: int) -> jax.Array:
    """Place in the sequence of the first token of a half of `length` tokens, of `size` ranks."""
    if isinstance(half, int):
        return jnp.asarray(2 * size - 1 - rank if half else rank) * length
    return jnp.where(half == 1, 2 * size - 1 - rank, rank) * length


def in_order(x: jax.Array, count: int) -> jax.Array:
    """Tokens [B, L, ...] of the pieces of `count` neighbours -> in the order of the sequence."""
    B, length, *rest = x.shape
    chunks = x.reshape(B, count, 2, length // (2 * count), *rest)
    both = jnp.concatenate((chunks[:, :, 0], chunks[:, ::-1, 1]), axis=1)
    return both.reshape(x.shape)


def out_of_order(x: jax.Array, count: int) -> jax.Array:
    """The inverse of `in_order`."""
    B, length, *rest = x.shape
    chunks = x.reshape(B, 2, count, length // (2 * count), *rest)
    return jnp.stack((chunks[:, 0], chunks[:, 1, ::-1]), axis=2).reshape(x.shape)


def whole_rows(x: jax.Array, chunks: jax.Array | None = None) -> jax.Array:
    """The whole sequences [..., L], in order, of this device's pieces [..., L / devices].

    chunks: numbers of this device's chunks of each row [.., C], where owners are chosen by row; ..
    is the end of x's dimensions before the last.
    """
    if (size := collectives.axis_size(CONTEXT_AXES)) == 1:
        return x
    rows = collectives.gather(x.reshape(-1, x.shape[-1]), CONTEXT_AXES, 1)
    if chunks is not None:
        chunks_BC = chunks.reshape(-1, chunks.shape[-1])
        rows = chunks_in_order(rows, jnp.tile(chunks_BC, (len(rows) // len(chunks_BC), 1)))
    else:
        rows = in_order(rows, size)
    return rows.reshape(*x.shape[:-1], -1)


def chunks_in_order(x: jax.Array, chunks_BC: jax.Array) -> jax.Array:
    """Gathered tokens [B, M, ...] -> in the order of the sequence. chunks_BC: this device's."""
    order_BC = jnp.argsort(collectives.gather(chunks_BC, CONTEXT_AXES, 1), axis=1)
    pieces = x.reshape(len(x), order_BC.shape[1], -1, *x.shape[2:])
    places = jnp.arange(len(x))[:, None], order_BC
    return pieces.at[places].get(unique_indices=True).reshape(x.shape)


def own_pieces(x: jax.Array, chunks: jax.Array | None = None) -> jax.Array:
    """The inverse of `whole_rows`."""
    if (size := collectives.axis_size(CONTEXT_AXES)) == 1:
        return x
    if chunks is not None:
        length = x.shape[-1] // (chunks.shape[-1] * size)
        places = chunk_places(chunks, length)
        shape = *x.shape[:-1], places.shape[-1]
        return jnp.take_along_axis(x, jnp.broadcast_to(places, shape), axis=-1)
    rows, half = x.reshape(-1, x.shape[-1]), x.shape[-1] // (2 * size)
    rank = collectives.axis_index(CONTEXT_AXES)
    starts = (start_of(rank, number, size, half) for number in (0, 1))
    halves = [lax.dynamic_slice_in_dim(rows, start, half, 1) for start in starts]
    return jnp.concatenate(halves, axis=1).reshape(*x.shape[:-1], -1)


def shifted(x: jax.Array, step: int, distance: int = 1, cyclic: bool = True) -> jax.Array:
    """x of the device `step` places before this one in its ring, whose neighbours are `distance`
    ranks apart along context. Zeros where there is none."""
    ranks = collectives.axis_size(CONTEXT_AXES)
    ends = ((source, source + step * distance) for source in range(ranks))
    pairs = [(source, end % ranks) for source, end in ends if cyclic or 0 <= end < ranks]
    return ordering.permute_in_stage(x, CONTEXT_AXES, pairs)


def halos(x: jax.Array, width: int, distance: int = 1) -> jax.Array:
    """The `width` tokens before each half [B, 2 x width, ...]; zeros before the sequence."""
    half = x.shape[1] // 2
    first, second = (half_of(x, number)[:, half - width :] for number in (0, 1))
    before = shifted(first, 1, distance, cyclic=False)
    after = shifted(ordering.after(second, before), -1, distance, cyclic=False)
    return jnp.concatenate((before, jnp.where(_is_last(distance), first, after)), axis=1)


def halos_back(d_halos: jax.Array, length: int, distance: int = 1) -> jax.Array:
    """The transpose of `halos` of an array of `length` tokens."""
    d_before, d_after, tail = half_of(d_halos, 0), half_of(d_halos, 1), d_halos.shape[2:]
    d_first = shifted(d_before, -1, distance, cyclic=False)
    d_second = shifted(ordering.after(d_after, d_first), 1, distance, cyclic=False)
    d_first += jnp.where(_is_last(distance), d_after, 0)
    rest = jnp.zeros_like(d_halos, shape=(len(d_halos), length // 2 - d_first.shape[1], *tail))
    return jnp.concatenate((rest, d_first, rest, d_second), axis=1)


def _is_last(distance: int) -> jax.Array:
    """Whether this device is the last one of its ring: its halves are neighbours."""
    first = collectives.axis_size(CONTEXT_AXES) - distance
    return jnp.asarray(collectives.axis_index(CONTEXT_AXES) >= first)
