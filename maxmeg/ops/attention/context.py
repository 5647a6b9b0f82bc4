"""Attention over sequences that are cut over context (context parallelism).

A device's piece of the sequence is two chunks, here its halves 0 and 1 (parallel.sequence). Three
ways to the keys of other devices, which combine:
- ring (Liu et al., 2023): pieces of keys and values travel from device to device. The outputs of
  the rounds are merged by their log-sum-exp. A window that is no longer than a half needs only the
  end of the half before it: its halo.
- exchange (DeepSpeed-Ulysses, 2023): an all-to-all gives each device the whole sequence of some
  heads. Inside groups of neighbours, with a ring between the groups, it is a hierarchy.
- gather: every device reads all keys and values.

Letter beside the legend's: I elements of what travels.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from maxmeg.ops.attention.call import attention
from maxmeg.ops.attention.rounds import (
    Expand,
    Plan,
    Rows,
    half_of,
    halo_of,
    in_rounds,
    slice_at,
    start_of,
)
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import CONTEXT_AXES


@dataclasses.dataclass(frozen=True)
class ContextStrategy:
    """gather: instead of a ring. inner: number of neighbours that exchange heads; 1: a ring alone,
    the size of context: an exchange alone."""

    gather: bool = False
    inner: int = 1


def attention_over_context(
    q_BLHK: Float[Array, "B L H K"],
    kv_BLGI: Float[Array, "B L G I"],
    expand: Expand,
    weights: typing.Any,
    spec: ScoreSpec,
    operands: Operands,
    strategy: ContextStrategy,
    backend: str = "auto",
) -> Float[Array, "B L H V"]:
    """Attention of this device's queries over the whole sequence, as ops.attention.call.attention.

    kv: from which expand(weights, kv) makes keys and values. operands: of this device's tokens.
    """
    size, inner = collectives.axis_size(CONTEXT_AXES), strategy.inner
    half = q_BLHK.shape[1] // 2
    segments = operands.segments_BL
    if segments is not None:
        segments = in_order(collectives.gather(segments, CONTEXT_AXES, 1), size)
    if strategy.gather:
        kv_BMGI = collectives.gather_exact(kv_BLGI, CONTEXT_AXES, 1)
        k_BMGK, v_BMGV = expand(weights, in_order(kv_BMGI, size))
        rank = collectives.axis_index(CONTEXT_AXES)
        outputs = []
        for number in range(2):
            first = start_of(rank, number, size, half)
            own = None if segments is None else slice_at(segments, first, half)
            dropout = operands.dropout
            if dropout is not None:
                dropout = dataclasses.replace(dropout, first_query=first)
            others = Operands(first, own, segments, operands.sinks_H, dropout)
            q_half = half_of(q_BLHK, number)
            outputs.append(attention(q_half, k_BMGK, v_BMGV, spec, others, backend=backend))
        return jnp.concatenate(outputs, axis=1)
    sinks, dropout = operands.sinks_H, operands.dropout
    if inner > 1:
        number, heads = collectives.axis_index(CONTEXT_AXES) % inner, q_BLHK.shape[2] // inner
        groups = collectives.inside(CONTEXT_AXES, size // inner)
        q_BLHK = in_order(collectives.exchange(q_BLHK, CONTEXT_AXES, 2, 1, groups), inner)
        kv_BLGI = collectives.after(kv_BLGI, q_BLHK)
        if expand.travels_by_head:
            kv_BLGI = repeated_heads(kv_BLGI, inner)
            kv_BLGI = collectives.exchange(kv_BLGI, CONTEXT_AXES, 2, 1, groups)
        else:
            kv_BLGI = collectives.gather_exact(kv_BLGI, CONTEXT_AXES, 1, size // inner)
            weights = expand.of_heads(weights, number, inner)
        kv_BLGI = in_order(kv_BLGI, inner)
        if sinks is not None:
            sinks = lax.dynamic_slice_in_dim(sinks, number * heads, heads)
        if dropout is not None:
            dropout = dataclasses.replace(dropout, first_head=dropout.first_head + number * heads)
    if inner == size:
        k_BMGK, v_BMGV = expand(weights, kv_BLGI)
        others = Operands(0, segments, None, sinks, dropout)
        out_BLHV = attention(q_BLHK, k_BMGK, v_BMGV, spec, others, backend=backend)
    else:
        half = q_BLHK.shape[1] // 2
        if spec.chunk and half % spec.chunk:  # chunks of positions, as documents
            place_L = jnp.arange(2 * half * (size // inner), dtype=jnp.int32)
            count = -(-place_L.size // spec.chunk)
            chunks_1L = (place_L // spec.chunk)[None]
            segments = chunks_1L if segments is None else segments * count + chunks_1L
            segments = jnp.broadcast_to(segments, (q_BLHK.shape[0], place_L.size))
            spec = dataclasses.replace(spec, chunk=0)
        rows, rate = Rows(segments), 0.0
        if dropout is not None:
            rows = Rows(segments, dropout.key, dropout.rows_B, dropout.first_head)
            rate = dropout.rate
        plan = Plan(spec, backend, expand, inner, halo_of(spec, half), rate)
        out_BLHV = typing.cast(
            jax.Array, in_rounds(plan, q_BLHK, kv_BLGI, weights, sinks, rows)
        )
    if inner > 1:
        pieces = out_of_order(out_BLHV, inner)
        out_BLHV = collectives.exchange(pieces, CONTEXT_AXES, 1, 2, groups)
    return out_BLHV


def repeated_heads(kv_BLGI: jax.Array, count: int) -> jax.Array:
    """Key/value heads repeated until their number is divisible by `count`."""
    repeats = 1
    while kv_BLGI.shape[2] * repeats % count:
        repeats += 1
    return jnp.repeat(kv_BLGI, repeats, axis=2) if repeats > 1 else kv_BLGI


def in_order(x: jax.Array, count: int) -> jax.Array:
    """Pieces of `count` neighbours [B, count x 2 chunks, ...] -> tokens in the sequence's order."""
    B, length, *rest = x.shape
    chunks = x.reshape(B, count, 2, length // (2 * count), *rest)
    both = jnp.concatenate((chunks[:, :, 0], chunks[:, ::-1, 1]), axis=1)
    return both.reshape(x.shape)


def out_of_order(x: jax.Array, count: int) -> jax.Array:
    """The inverse of `in_order`."""
    B, length, *rest = x.shape
    chunks = x.reshape(B, 2, count, length // (2 * count), *rest)
    return jnp.stack((chunks[:, 0], chunks[:, 1, ::-1]), axis=2).reshape(x.shape)
