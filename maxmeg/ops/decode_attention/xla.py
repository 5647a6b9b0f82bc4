"""Decode attention over a paged cache in plain XLA: the reference for all backends.

Memory is O(KEYS_AT_ONCE): a loop gathers a block of each row's pages at a time and updates an
online softmax in float32. Blocks without a key that a row sees change nothing of the row, not by a
bit: its output does not depend on the lengths of the others.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.ops.attention.mask import bounds
from maxmeg.ops.attention.spec import NEGATIVE, ScoreSpec
from maxmeg.ops.attention.xla import bias_buckets
from maxmeg.ops.backend import Device, target_device
from maxmeg.ops.cross_entropy.call import softcapped

KEYS_AT_ONCE = 2**14  # keys in one block, summed over all rows; fewer for more than 16 queries
CPU_KEYS = 128  # largest number of keys of one row in a block on a CPU, so that they stay cached
DTYPES = ("bfloat16", "float16", "float32")
SUPPORTS = f"every option, on every device, in {', '.join(DTYPES)}"


class PagedCache(typing.NamedTuple):
    """Keys and values in a pool of pages.

    Key j of row b is in slot j % slots of page page_table[b, j // slots], for j < lengths_B[b].
    Other entries of the table and other slots may hold anything. On a CPU pages may be uint16, the
    bits of floats: XLA would convert a whole pool of bfloat16 to float32 in every step.
    """

    k_pages: jax.Array  # [pages, slots, G, K]
    v_pages: jax.Array  # [pages, slots, G, V]
    page_table: jax.Array  # [B, pages of a row]
    lengths_B: jax.Array


class Softmax(typing.NamedTuple):
    """An online softmax: largest score, sum of exp(score - largest), and weighted values."""

    largest_BGJL: jax.Array
    total_BGJL: jax.Array
    out_BGJLV: jax.Array


def refuses(q_BLHK, cache: PagedCache, spec: ScoreSpec, sinks_H, bias_NH, device: Device) -> str:
    """Why this call cannot run; empty if it can."""
    dtype = q_BLHK.dtype
    stored = dtype if device.is_cuda or dtype.itemsize != 2 else jnp.uint16
    pools = (dtype if pool.dtype == stored else pool.dtype for pool in cache[:2])
    names = [str(name) for name in (dtype, *pools)]
    if len(set(names)) > 1 or names[0] not in DTYPES:
        return f"dtypes {', '.join(names)} are not one of {', '.join(DTYPES)}"
    return ""


def attend(q_BLHK, cache: PagedCache, spec: ScoreSpec, sinks_H, bias_NH=None):
    """Output [B, L, H, V] and log-sum-exp [B, L, H] in float32.

    A query that sees no key has output 0 and log-sum-exp NEGATIVE, or its sink. NaN and inf in keys
    and values that no query of a row sees do not reach the row.
    """
    (B, L, H, K), (S, G, V) = q_BLHK.shape, cache.v_pages.shape[1:]
    q_BLGJK = q_BLHK.reshape(B, L, G, H // G, K)
    queries_BL = cache.lengths_B[:, None] - L + jnp.arange(L)
    lower_BL, upper_BL = bounds(spec, queries_BL, cache.lengths_B[:, None])
    upper_BL = jnp.maximum(upper_BL, 0)
    keys = KEYS_AT_ONCE // (B * max(1, L // 16))
    keys = keys if target_device().is_cuda else min(keys, CPU_KEYS)
    pages = max(1, min(keys // S, cache.page_table.shape[1]))
    live_B = lower_BL.min(axis=1) < upper_BL.max(axis=1)
    first = jnp.min(jnp.where(live_B, lower_BL.min(axis=1), jnp.iinfo(jnp.int32).max))
    last = jnp.max(jnp.where(live_B, upper_BL.max(axis=1), 0))

    def step(block, carry: Softmax) -> Softmax:
        position_M = block * pages * S + jnp.arange(pages * S)
        blocks = gather(cache, block * pages + jnp.arange(pages))
        k_BMGK, v_BMGV = (with_dtype(x, q_BLHK.dtype) for x in blocks)
        is_visible_BLM = (position_M >= lower_BL[..., None]) & (position_M < upper_BL[..., None])
        is_visible_BM11 = is_visible_BLM.any(axis=1)[..., None, None]
        scores_BGJLM = (spec.scale or K**-0.5) * jnp.einsum(
            "BLGJK,BMGK->BGJLM",
            q_BLGJK,
            k_BMGK,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        scores_BGJLM = softcapped(scores_BGJLM, spec.softcap)
        if bias_NH is not None:
            distances_BLM = position_M - queries_BL[..., None]
            bias_BLMH = bias_NH[bias_buckets(distances_BLM, len(bias_NH), spec)]
            scores_BGJLM += jnp.moveaxis(bias_BLMH, 3, 1).reshape(scores_BGJLM.shape)
        scores_BGJLM = jnp.where(is_visible_BLM[:, None, None], scores_BGJLM, NEGATIVE)
        v_BMGV = jnp.where(is_visible_BM11, v_BMGV.astype(jnp.float32), 0)
        return add_block(carry, scores_BGJLM, v_BMGV)

    shape = (B, G, H // G, L)
    initial = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, V)))
    empty = Softmax(*(x.astype(jnp.float32) for x in initial))
    softmax = lax.fori_loop(first // (pages * S), -(-last // (pages * S)), step, empty)
    return finish(softmax, sinks_H, q_BLHK.dtype)


def gather(cache: PagedCache, columns: jax.Array):
    """Keys [B, M, G, K] and values [B, M, G, V] of these columns of the page table, clipped."""
    pages = cache.page_table.at[:, columns].get(mode="clip")
    blocks = (pool.at[pages].get(mode="clip") for pool in (cache.k_pages, cache.v_pages))
    return [block.reshape(block.shape[0], -1, *block.shape[3:]) for block in blocks]


def with_dtype(x: jax.Array, dtype) -> jax.Array:
    """Floats as the bits of an integer dtype of their size, or back."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def add_block(carry: Softmax, scores_BGJLM, v_BMGV) -> Softmax:
    largest_BGJL = jnp.maximum(carry.largest_BGJL, scores_BGJLM.max(axis=-1))
    shrink_BGJL = jnp.exp(carry.largest_BGJL - largest_BGJL)
    weights_BGJLM = jnp.exp(scores_BGJLM - largest_BGJL[..., None])
    weights_BGJLM = jnp.where(scores_BGJLM == NEGATIVE, 0, weights_BGJLM)
    out_BGJLV = jnp.einsum("BGJLM,BMGV->BGJLV", weights_BGJLM, v_BMGV, precision="highest")
    return Softmax(
        largest_BGJL,
        carry.total_BGJL * shrink_BGJL + weights_BGJLM.sum(axis=-1),
        carry.out_BGJLV * shrink_BGJL[..., None] + out_BGJLV,
    )


def finish(softmax: Softmax, sinks_H, dtype):
    """Output and log-sum-exp, with the sinks."""
    largest_BGJL, total_BGJL, out_BGJLV = softmax
    B, G, J, L = total_BGJL.shape
    if sinks_H is not None:
        sinks_GJ1 = sinks_H.reshape(G, J, 1).astype(jnp.float32)
        largest_BGJL = jnp.maximum(largest_BGJL, sinks_GJ1)
        shrink_BGJL = jnp.exp(softmax.largest_BGJL - largest_BGJL)
        total_BGJL = total_BGJL * shrink_BGJL + jnp.exp(sinks_GJ1 - largest_BGJL)
        out_BGJLV = out_BGJLV * shrink_BGJL[..., None]
    is_blind_BGJL = total_BGJL == 0
    total_BGJL = jnp.where(is_blind_BGJL, 1, total_BGJL)
    lse_BGJL = jnp.where(is_blind_BGJL, NEGATIVE, largest_BGJL + jnp.log(total_BGJL))
    out_BLGJV = jnp.moveaxis(out_BGJLV / total_BGJL[..., None], 3, 1)
    lse_BLGJ = jnp.moveaxis(lse_BGJL, 3, 1)
    return out_BLGJV.reshape(B, L, G * J, -1).astype(dtype), lse_BLGJ.reshape(B, L, G * J)
