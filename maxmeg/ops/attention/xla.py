"""Attention in plain XLA: the reference for all backends, on every device.

Memory is O(M x QUERY_BLOCK) in forward and backward: only the scores of one block of queries exist
at a time, and backward recomputes them. If the offset is static, keys that no query of a block sees
are not read.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxmeg.ops.attention.mask import bounds, visible
from maxmeg.ops.attention.spec import NEGATIVE, AttentionDropout, Operands, ScoreSpec
from maxmeg.ops.backend import Device
from maxmeg.ops.cross_entropy.call import softcapped
from maxmeg.ops.dropout import dropout
from maxmeg.parallel import collectives
from maxmeg.parallel.ordering import together

QUERY_BLOCK = 512  # queries whose scores exist at once
PIECES = 16  # at most, of the queries: each is compiled separately, with its own range of keys
SCORE_PASSES = 6  # about so often forward reads or writes the float32 scores; not measured
DTYPES = ("bfloat16", "float16", "float32", "float64")
SUPPORTS = f"every option, on every device, in {', '.join(DTYPES)}"


def refuses(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, device: Device) -> str:
    """Why this call cannot run; empty if it can."""
    names = [str(x.dtype) for x in (q_BLHK, k_BMGK, v_BMGV)]
    if len(set(names)) > 1 or names[0] not in DTYPES:
        return f"dtypes {', '.join(names)} are not one of {', '.join(DTYPES)}"
    return ""


@dataclasses.dataclass(frozen=True)
class Block:
    """Static facts of a block of queries: spec, first key, whether it is the only block."""

    spec: ScoreSpec
    first_key: int = 0
    alone: bool = False


class Rows(typing.NamedTuple):
    """Traced facts of a block of queries. positions_AL: for the mask. places_AL: for dropout."""

    positions_AL: jax.Array
    segments_BL: jax.Array | None
    segments_BM: jax.Array | None
    dropout: AttentionDropout | None
    places_AL: jax.Array | None


def attend(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """Output [B, L, H, V] and log-sum-exp [B, L, H] in float32, and with `spec.largest` the largest
    scores [B, L, H].

    A query that sees no key has output 0 and log-sum-exp NEGATIVE, or its sink. NaN and inf in a
    key or value make every query of the row NaN, also queries that do not see it.
    """
    B, L, H, K = q_BLHK.shape
    G = k_BMGK.shape[2]
    spec = dataclasses.replace(spec, scale=spec.scale or K**-0.5)
    q_BLGJK = q_BLHK.reshape(B, L, G, H // G, K)
    results: list = []
    for start, stop in pieces(L):
        first, last = key_range(start, stop, k_BMGK.shape[1], spec, operands.offset)
        block = Block(spec, first, alone=stop - start == L)
        kv = (k_BMGK[:, first:last], v_BMGV[:, first:last])
        rows = rows_of(operands, start, stop, first, last)
        run = typing.cast(Callable, functools.partial(piece, block))
        inputs = (q_BLGJK[:, start:stop], *kv, (operands.sinks_H, operands.bias_NH))
        if results:  # in sequence, in backward too: else XLA holds the scores of several blocks
            inputs, results[-1] = together((inputs, results[-1]))
        results.append(run(*inputs, rows) if block.alone else recomputed(run, inputs, (rows,)))
    out, *others = (jnp.concatenate(parts, axis=1) for parts in zip(*results, strict=True))
    return out.reshape(B, L, H, -1), *(x.reshape(B, L, H) for x in others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(function: Callable, inputs: tuple, others: tuple):
    """function(*inputs, *others), differentiable in `inputs`; backward stores the arguments only.

    A `jax.checkpoint` within another would follow the outer one's policy; a custom vjp does not.
    `function` must be hashable and close over no traced value.
    """
    return function(*inputs, *others)


def recomputed_forward(function, inputs, others):
    return function(*inputs, *others), (inputs, others)


def recomputed_backward(function, residuals, cotangent):
    inputs, others = residuals
    # Without a barrier XLA merges the recomputation with an equal forward in the same computation.
    inputs, cotangent = together((inputs, cotangent))
    _, transpose = jax.vjp(lambda *arrays: function(*arrays, *others), *inputs)
    return transpose(cotangent), None


recomputed.defvjp(recomputed_forward, recomputed_backward)


def pieces(length: int) -> list[tuple[int, int]]:
    """Ranges (start, stop) of queries: at most PIECES of whole blocks, and a remainder."""
    blocks = length // QUERY_BLOCK
    if not blocks:
        return [(0, length)]
    size = -(-blocks // PIECES) * QUERY_BLOCK
    stops = [*range(size, blocks * QUERY_BLOCK, size), blocks * QUERY_BLOCK]
    stops += [length] if length % QUERY_BLOCK else []
    return list(zip([0, *stops], stops, strict=False))


def key_range(start: int, stop: int, keys: int, spec: ScoreSpec, offset) -> tuple[int, int]:
    """Range of keys that queries start..stop may see; all keys if the offset is traced."""
    if not isinstance(offset, int):
        return 0, keys
    lower, _ = bounds(spec, offset + start, keys)
    _, upper = bounds(spec, offset + stop - 1, keys)
    first = min(int(lower), keys)
    return first, max(int(upper), first)


def computed_pairs(length: int, keys: int, spec: ScoreSpec, offset=0) -> int:
    """Number of pairs of a query and a key whose scores one head computes."""
    ranges = (
        (last - first, *key_range(first, last, keys, spec, offset))
        for first, last in pieces(length)
    )
    return sum(queries * (last - first) for queries, first, last in ranges)


def visible_pairs(length: int, keys: int, spec: ScoreSpec, offset=0) -> int:
    """Number of pairs of a query and a key that the mask of `spec` keeps; all if the offset is
    traced."""
    if not isinstance(offset, int):
        return length * keys
    lower_L, upper_L = bounds(spec, offset + np.arange(length), keys)
    return int(np.maximum(upper_L - lower_L, 0).sum())


def most_keys(length: int, spec: ScoreSpec) -> int:
    """Number of keys of the block of queries with most keys, from position 0."""
    ranges = (key_range(first, last, length, spec, 0) for first, last in pieces(length))
    return max(last - first for first, last in ranges)


def sliced_keys(length: int, spec: ScoreSpec) -> int:
    """Number of keys that all pieces of the queries read, from position 0; 0 if one reads all."""
    ranges = [key_range(first, last, length, spec, 0) for first, last in pieces(length)]
    return sum(last - first for first, last in ranges) if len(ranges) > 1 else 0


def score_bytes(heads: int, pairs: int) -> int:
    """Bytes of the float32 scores of `heads` heads of all samples, each with so many pairs."""
    return 4 * heads * pairs


def rows_of(operands: Operands, start: int, stop: int, first: int, last: int) -> Rows:
    queries, keys = operands.segments_BL, operands.key_segments_BM
    if queries is not None:
        keys = (queries if keys is None else keys)[:, first:last]
        queries = queries[:, start:stop]
    dropout = operands.dropout
    places_AL = None if dropout is None else positions(dropout.first_query, start, stop)
    return Rows(positions(operands.offset, start, stop), queries, keys, dropout, places_AL)


def positions(offset: jax.Array | int, start: int, stop: int) -> jax.Array:
    """Positions [A, L] of the queries start..stop, by an offset as in Operands."""
    offset_AL = jnp.asarray(offset)
    offset_AL = offset_AL[:, start:stop] if offset_AL.ndim == 2 else offset_AL.reshape(-1, 1)
    return offset_AL + jnp.arange(start, stop)


def piece(block: Block, q_BLGJK, k_BMGK, v_BMGV, of_heads: tuple, rows: Rows):
    """`attend` of one piece of the queries, block by block. of_heads: sinks and relative bias."""
    count = q_BLGJK.shape[1] // QUERY_BLOCK
    if count <= 1:
        return attend_block(block, q_BLGJK, k_BMGK, v_BMGV, of_heads, rows)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], count, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    def run(xs):
        q, queries = xs
        attend_one = functools.partial(attend_block, block)
        return recomputed(attend_one, (q, k_BMGK, v_BMGV, of_heads), (rows._replace(**queries),))

    names = "positions_AL", "segments_BL", "places_AL"
    queries = jax.tree.map(split, {name: getattr(rows, name) for name in names})
    results = lax.map(run, (split(q_BLGJK), queries))
    return [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in results]


def attend_block(block: Block, q_BLGJK, k_BMGK, v_BMGV, of_heads: tuple, rows: Rows):
    """Output [B, L, G, J, V] and log-sum-exp [B, L, G, J] of one block of queries, and with
    `spec.largest` their largest scores [B, L, G, J]."""
    spec, (G, J), M = block.spec, q_BLGJK.shape[2:4], k_BMGK.shape[1]
    sinks_H, bias_NH = of_heads
    keys_M = block.first_key + jnp.arange(M)
    segments = rows.segments_BL, rows.segments_BM
    visible_BLM = visible(spec, rows.positions_AL, keys_M, *segments)
    q_BGJLK, k_BGMK = jnp.moveaxis(q_BLGJK, 1, 3), jnp.moveaxis(k_BMGK, 1, 2)
    scores_BGJLM = spec.scale * jnp.einsum(
        "BGJLK,BGMK->BGJLM", q_BGJLK, k_BGMK, preferred_element_type=jnp.float32
    )
    scores_BGJLM = softcapped(scores_BGJLM, spec.softcap)
    if bias_NH is not None:
        buckets_ALM = bias_buckets(keys_M - rows.positions_AL[..., None], len(bias_NH), spec)
        bias_ALMH = bias_rows(bias_NH, buckets_ALM).astype(jnp.float32)
        scores_BGJLM += jnp.moveaxis(bias_ALMH, 3, 1).reshape(-1, G, J, *buckets_ALM.shape[1:])
    scores_BGJLM = jnp.where(visible_BLM[:, None, None], scores_BGJLM, NEGATIVE)
    sinks_GJ = None if sinks_H is None else sinks_H.reshape(G, J).astype(jnp.float32)
    weights_BGJLM, lse_BGJL = softmax(scores_BGJLM, sinks_GJ, block.alone)
    weights_BGJLM = weights_BGJLM.astype(v_BMGV.dtype)
    if rows.dropout is not None:
        weights_BGJLM = drop_weights(weights_BGJLM, rows, block.first_key)
    out_BLGJV = jnp.einsum("BGJLM,BMGV->BLGJV", weights_BGJLM, v_BMGV)
    if block.alone:
        out_BLGJV = collectives.stored(out_BLGJV, "attention_output")
    results = [out_BLGJV, jnp.moveaxis(lse_BGJL, 3, 1)]
    if spec.largest:
        largest_BGJL = jnp.max(lax.stop_gradient(scores_BGJLM), axis=-1, initial=NEGATIVE)
        results.append(jnp.moveaxis(largest_BGJL, 3, 1))
    return results


def bias_buckets(distances: jax.Array, count: int, spec: ScoreSpec) -> jax.Array:
    """The bucket of each distance (key minus query) of T5's bias (Raffel et al., 2019).

    Half of the buckets of a direction have a distance each, the others grow with its logarithm up
    to spec.distance. A causal query sees one direction.
    """
    later, far = 0, jnp.maximum(-distances, 0)
    if not spec.causal:
        count //= 2
        later, far = count * (distances > 0), jnp.abs(distances)
    single, every = count // 2, np.arange(max(spec.distance, 1) + 1)
    ratio = np.log(np.maximum(every, single) / np.float32(single), dtype=np.float32)
    ratio /= np.float32(math.log(spec.distance / single))
    wide = np.minimum(single + (ratio * np.float32(count - single)).astype(int), count - 1)
    buckets = jnp.asarray(np.where(every < single, every, wide), jnp.int32)
    return later + jnp.take(buckets, jnp.minimum(far, spec.distance))


@jax.custom_vjp
def bias_rows(bias_NH: jax.Array, buckets_ALM: jax.Array) -> jax.Array:
    """bias_NH[buckets_ALM]; backward is a product, where a scatter would wait for itself."""
    return jnp.take(bias_NH, buckets_ALM, axis=0)


def bias_rows_backward(residuals, d_ALMH):
    buckets_ALM, like_NH = residuals
    is_bucket_ALMN = jax.nn.one_hot(buckets_ALM, len(like_NH), dtype=d_ALMH.dtype)
    d_NH = jnp.einsum("ALMN,ALMH->NH", is_bucket_ALMN, d_ALMH, preferred_element_type=jnp.float32)
    return d_NH.astype(like_NH.dtype), None


bias_rows.defvjp(lambda bias, at: (bias_rows(bias, at), (at, bias)), bias_rows_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax(scores_BGJLM, sinks_GJ, stored: bool) -> tuple[jax.Array, jax.Array]:
    """(weights of the keys, log-sum-exp that includes the sinks).

    The derivative reads the weights instead of recomputing them. stored: backward may store them.
    """
    return softmax_parts(scores_BGJLM, sinks_GJ, stored)


@softmax.defjvp
def softmax_jvp(stored, primals, tangents):
    (scores_BGJLM, sinks_GJ), (slope_BGJLM, sink_slope_GJ) = primals, tangents
    weights_BGJLM, lse_BGJL = softmax_parts(scores_BGJLM, sinks_GJ, stored)
    slope_BGJL = jnp.sum(weights_BGJLM * slope_BGJLM, axis=-1)
    if sinks_GJ is not None:
        slope_BGJL += jnp.exp(sinks_GJ[..., None] - lse_BGJL) * sink_slope_GJ[..., None]
    change_BGJLM = weights_BGJLM * (slope_BGJLM - slope_BGJL[..., None])
    return (weights_BGJLM, lse_BGJL), (change_BGJLM, slope_BGJL)


def softmax_parts(scores_BGJLM, sinks_GJ, stored: bool) -> tuple[jax.Array, jax.Array]:
    largest_BGJL = jnp.max(scores_BGJLM, axis=-1, initial=NEGATIVE)
    if sinks_GJ is not None:
        largest_BGJL = jnp.maximum(largest_BGJL, sinks_GJ[..., None])
    shifted_BGJLM = jnp.exp(scores_BGJLM - largest_BGJL[..., None])
    shifted_BGJLM = jnp.where(scores_BGJLM > NEGATIVE / 2, shifted_BGJLM, 0)
    total_BGJL = jnp.sum(shifted_BGJLM, axis=-1)
    if sinks_GJ is not None:
        total_BGJL += jnp.exp(sinks_GJ[..., None] - largest_BGJL)
    is_blind_BGJL = total_BGJL == 0
    total_BGJL = jnp.where(is_blind_BGJL, 1, total_BGJL)
    weights_BGJLM = shifted_BGJLM / total_BGJL[..., None]
    lse_BGJL = jnp.where(is_blind_BGJL, NEGATIVE, largest_BGJL + jnp.log(total_BGJL))
    if stored:
        weights_BGJLM = collectives.stored(weights_BGJLM, "attention_weights")
        lse_BGJL = collectives.stored(lse_BGJL, "attention_lse")
    return weights_BGJLM, lse_BGJL


def drop_weights(weights_BGJLM: jax.Array, rows: Rows, key: int) -> jax.Array:
    """Attention weights after dropout. key: index of the first key."""
    B, G, J, L, M = weights_BGJLM.shape
    spec, places_AL = rows.dropout, rows.places_AL
    assert spec is not None and places_AL is not None
    heads_H = spec.first_head + jnp.arange(G * J)
    dropped = dropout(
        weights_BGJLM.reshape(B, G * J, L, M),
        spec.rate,
        spec.key,
        spec.rows_B[:, None, None],
        heads_H[None, :, None],
        places_AL[:, None],
        first=jnp.reshape(spec.first_key, (-1, 1, 1, 1)) + key,
    )
    return dropped.reshape(weights_BGJLM.shape)
