"""Attention over sequences that are cut over context (context parallelism).

Three ways to the keys of other devices, which combine:
- ring (Liu et al., 2023): pieces of keys and values travel from device to device, or only the halos
  that a window needs (ops.attention.rounds).
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

from maxmeg.distributed.attention.context_choice import (
    ContextShape,
    ContextStrategy,
    chosen,
    halo_of,
    inner_size,
    repeated,
)
from maxmeg.distributed.attention.rounds import KeyValueExpansion, Plan, Result, Rows, in_rounds
from maxmeg.distributed.halves import (
    chunks_in_order,
    in_order,
    out_of_order,
    whole_rows,
)
from maxmeg.ops.attention.call import attention_with_lse, output_and_largest
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import log_choice
from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.mesh import CONTEXT_AXES, TENSOR_AXES
from maxmeg.parallel.sequence import chunk_places


class ContextCall(typing.NamedTuple):
    """Queries [B, L, H, K] of this device, and what makes its keys and values: expand(weights, kv)
    of kv [B, L, G, I], which can travel. operands: of this device's tokens. chunks_BC: as in
    layers.context.Context; only for gather."""

    q_BLHK: jax.Array
    kv_BLGI: jax.Array
    expand: KeyValueExpansion
    weights: typing.Any
    spec: ScoreSpec
    operands: Operands
    backend: str = "auto"
    chunks_BC: jax.Array | None = None


def attention_over_context(call: ContextCall, strategy: ContextStrategy) -> Result:
    """Attention [B, L, H, V] of this device's queries over the whole sequence; with `spec.largest`
    the largest score of each head that this device has computed, else None."""
    segments, shape = call.operands.segments_BL, shape_of(call)
    if call.operands.bias_NH is not None:  # which the others do not move
        assert strategy.name in ("auto", "gather")
        strategy = ContextStrategy("gather")
    strategy, reason = chosen(strategy, shape, call.spec)
    log_choice("context strategy", strategy.name, reason)
    if strategy.name == "gather":
        return over_gathered(call)
    assert call.chunks_BC is None, strategy
    if segments is not None:
        call = call._replace(operands=call.operands._replace(segments_BL=whole_rows(segments)))
    inner = inner_size(strategy, shape)
    return over_ring(call, 1) if inner == 1 else exchanged(call, inner)


def shape_of(call: ContextCall) -> ContextShape:
    (B, L, H, K), (G, travelling) = call.q_BLHK.shape, call.kv_BLGI.shape[2:]
    context, expand = collectives.axis_size(CONTEXT_AXES), call.expand
    value = travelling - K if expand.of_each_head else K
    return ContextShape(
        rows=B,
        length=L * context,
        heads=H,
        kv_heads=G,
        travelling=travelling,
        head_size=K + value,
        bytes=call.q_BLHK.dtype.itemsize,
        context=context,
        tensor=collectives.axis_size(TENSOR_AXES),
        of_each_head=expand.of_each_head,
    )


def over_gathered(call: ContextCall) -> Result:
    """Attention over gathered keys and values; kernels skip those that no query sees."""
    size, rank = collectives.axis_size(CONTEXT_AXES), collectives.axis_index(CONTEXT_AXES)
    (B, L), chunks_BC, operands = call.q_BLHK.shape[:2], call.chunks_BC, call.operands
    kv_BMGI = collectives.gather_exact(call.kv_BLGI, CONTEXT_AXES, 1)
    if chunks_BC is None:
        kv_BMGI = in_order(kv_BMGI, size)
        chunks_BC = jnp.broadcast_to(jnp.stack([rank, 2 * size - 1 - rank]), (B, 2))
    else:
        kv_BMGI = chunks_in_order(kv_BMGI, chunks_BC)
    offset_BL = chunk_places(chunks_BC, L // chunks_BC.shape[1]) - jnp.arange(L)
    segments_BM, dropout = operands.segments_BL, operands.dropout
    if segments_BM is not None:
        segments_BM = whole_rows(segments_BM, call.chunks_BC)
    if dropout is not None:
        dropout = dataclasses.replace(dropout, first_query=offset_BL)
    operands = operands._replace(offset=offset_BL, key_segments_BM=segments_BM, dropout=dropout)
    kv = call.expand(call.weights, kv_BMGI)
    results = attention_with_lse(call.q_BLHK, *kv, call.spec, operands, backend=call.backend)
    return output_and_largest(*results)


def exchanged(call: ContextCall, inner: int) -> Result:
    """Attention of a part of the heads, over the pieces of `inner` neighbours."""
    nodes = collectives.axis_size(CONTEXT_AXES) // inner
    groups, operands = collectives.inside(CONTEXT_AXES, nodes), call.operands
    number, heads = collectives.axis_index(CONTEXT_AXES) % inner, call.q_BLHK.shape[2] // inner
    q_BLHK = in_order(collectives.exchange(call.q_BLHK, CONTEXT_AXES, 2, 1, groups), inner)
    kv_BLGI, weights = ordering.after(call.kv_BLGI, q_BLHK), call.weights
    if call.expand.of_each_head:
        kv_BLGI = repeated_heads(kv_BLGI, inner)
        kv_BLGI = collectives.exchange(kv_BLGI, CONTEXT_AXES, 2, 1, groups)
    else:
        kv_BLGI = collectives.gather_exact(kv_BLGI, CONTEXT_AXES, 1, nodes)
        weights = call.expand.of_heads(weights, number, inner)
    if operands.sinks_H is not None:
        sinks_H = lax.dynamic_slice_in_dim(operands.sinks_H, number * heads, heads)
        operands = operands._replace(sinks_H=sinks_H)
    if operands.dropout is not None:
        first_head = operands.dropout.first_head + number * heads
        dropout = dataclasses.replace(operands.dropout, first_head=first_head)
        operands = operands._replace(dropout=dropout)
    kv_BLGI = in_order(kv_BLGI, inner)
    call = call._replace(q_BLHK=q_BLHK, kv_BLGI=kv_BLGI, weights=weights, operands=operands)
    if nodes > 1:
        out_BLHV, largest_H = over_ring(call, inner)
    else:
        settings = call.spec, operands
        arrays = q_BLHK, *call.expand(weights, kv_BLGI)
        results = attention_with_lse(*arrays, *settings, backend=call.backend)
        out_BLHV, largest_H = output_and_largest(*results)
    out_BLHV = collectives.exchange(out_of_order(out_BLHV, inner), CONTEXT_AXES, 1, 2, groups)
    return out_BLHV, padded_heads(largest_H, number * heads, heads * inner)


def padded_heads(largest_H: jax.Array | None, first, count: int) -> jax.Array | None:
    """The numbers of the heads from `first` on among `count` heads, -inf for the others."""
    if largest_H is None:
        return None
    return lax.dynamic_update_slice(jnp.full(count, -jnp.inf), largest_H, (first,))


def repeated_heads(kv_BLGI: jax.Array, count: int) -> jax.Array:
    """Key/value heads repeated until their number is divisible by `count`."""
    heads = kv_BLGI.shape[2]
    repeats = repeated(heads, count) // heads
    return jnp.repeat(kv_BLGI, repeats, axis=2) if repeats > 1 else kv_BLGI


def over_ring(call: ContextCall, distance: int) -> Result:
    """Attention in rounds; distance: between neighbours of the ring, in ranks along context."""
    spec, segments, dropout = call.spec, call.operands.segments_BL, call.operands.dropout
    B, half = call.q_BLHK.shape[0], call.q_BLHK.shape[1] // 2
    if spec.chunk and half % spec.chunk:  # the chunks of the mask then count as documents
        length = half * 2 * collectives.axis_size(CONTEXT_AXES) // distance
        chunks_L = jnp.arange(length, dtype=jnp.int32) // spec.chunk
        count, spec = -(-length // spec.chunk), dataclasses.replace(spec, chunk=0)
        segments = chunks_L if segments is None else segments * count + chunks_L
        segments = jnp.broadcast_to(segments, (B, length))
    rows, rate = Rows(segments), 0.0
    if dropout is not None:
        rows = Rows(segments, dropout.key, dropout.rows_B, dropout.first_head)
        rate = dropout.rate
    plan = Plan(spec, call.backend, call.expand, distance, halo_of(spec, half), rate)
    arrays = call.q_BLHK, call.kv_BLGI, call.weights, call.operands.sinks_H, rows
    return typing.cast(Result, in_rounds(plan, *arrays))
