"""The call of our flash attention kernels, which the Mosaic and the Triton backend share.

A kernel masks a key by the weight 0, and 0 x NaN is NaN: in a block that spans two documents, NaN
in one would reach queries of the other. With segment ids, NaN and inf are therefore replaced by 0
before the kernel, and the outputs of the queries that see them are set to NaN after it. These
queries follow from prefix sums, because every query sees an interval of keys.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmeg.ops.attention.spec import NEGATIVE, Operands, ScoreSpec, finite
from maxmeg.ops.backend import kernel_module


def flash(kernel: Callable, q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """(output, log-sum-exp) by `kernel`, a flash_attention like that of kernels/attention.py.

    NaN and inf do not leak across packed documents. A row with a document that is not contiguous,
    which the kernels do not support, becomes NaN.
    """
    intervals = kernel_module("intervals")
    queries, keys = operands.segments_BL, operands.key_segments_BM
    kept = [field.name for field in dataclasses.fields(intervals.FlashSpec)]
    settings = {name: value for name, value in vars(spec).items() if name in kept}
    flash_spec = intervals.FlashSpec(**settings, segments=queries is not None)
    ids = {"query_segments_BL": queries, "key_segments_BM": keys}
    call = functools.partial(kernel, spec=flash_spec, offset=operands.offset, **ids)
    if queries is None:
        out_BLHV, lse_BLH = call(q_BLHK, k_BMGK, v_BMGV)
    else:
        keys = queries if keys is None else keys
        lengths = (q_BLHK.shape[1], k_BMGK.shape[1])
        bounds = intervals.visible_intervals(flash_spec, *lengths, operands.offset, queries, keys)
        invalid_B = ~intervals.documents(queries, keys)[2]
        out_BLHV, lse_BLH = guarded(call, q_BLHK, k_BMGK, v_BMGV, bounds, invalid_B)
    return with_sinks(out_BLHV, jnp.maximum(lse_BLH, NEGATIVE), operands.sinks_H)


def guarded(
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGV: jax.Array,
    bounds: tuple[Int[Array, "A L"], Int[Array, "A L"]],
    invalid_B: Bool[Array, " B"],
) -> tuple[jax.Array, jax.Array]:
    """attend(q, k, v), with NaN for invalid rows and for queries that see NaN or inf.

    bounds: first key that each query sees, and the key after the last one.
    """
    q_BLHK, nonfinite_BLH = finite(q_BLHK)
    k_BMGK, nonfinite_k_BMG = finite(k_BMGK)
    v_BMGV, nonfinite_v_BMG = finite(v_BMGV)
    counts_BMG = jnp.cumsum((nonfinite_k_BMG | nonfinite_v_BMG).astype(jnp.int32), axis=1)
    counts_BMG = jnp.pad(counts_BMG, ((0, 0), (1, 0), (0, 0)))

    def count_before(bound_AL: jax.Array) -> jax.Array:
        bound_BL = jnp.broadcast_to(bound_AL, (q_BLHK.shape[0], bound_AL.shape[1]))
        return jnp.take_along_axis(counts_BMG, bound_BL[..., None], axis=1)

    tainted_BLG = count_before(bounds[1]) > count_before(bounds[0])
    tainted_BLH = jnp.repeat(tainted_BLG, q_BLHK.shape[2] // k_BMGK.shape[2], axis=2)
    tainted_BLH = tainted_BLH | nonfinite_BLH | invalid_B[:, None, None]
    out_BLHV, lse_BLH = attend(q_BLHK, k_BMGK, v_BMGV)
    out_BLHV = jnp.where(tainted_BLH[..., None], jnp.nan, out_BLHV)
    return out_BLHV, jnp.where(tainted_BLH, jnp.nan, lse_BLH)


def with_sinks(
    out_BLHV: Float[Array, "B L H V"],
    lse_BLH: Float[Array, "B L H"],
    sinks_H: Float[Array, " H"] | None,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """Add to each head a key with score sinks_H and value 0 (Xiao et al., 2023; GPT-OSS)."""
    if sinks_H is None:
        return out_BLHV, lse_BLH
    sinks_H = sinks_H.astype(lse_BLH.dtype)
    weight_BLH = jax.nn.sigmoid(lse_BLH - sinks_H)
    out_BLHV = (out_BLHV * weight_BLH[..., None]).astype(out_BLHV.dtype)
    return out_BLHV, jnp.logaddexp(lse_BLH, sinks_H)


def sink_gradient(
    sinks_H: Float[Array, " H"],
    out_BLHV: Float[Array, "B L H V"],
    lse_BLH: Float[Array, "B L H"],
    d_out_BLHV: Float[Array, "B L H V"],
) -> Float[Array, " H"]:
    """Gradient of the sinks, whose values are 0; out and lse include them."""
    share_BLH = jnp.exp(sinks_H.astype(lse_BLH.dtype) - lse_BLH)
    slope_BLH = jnp.sum(d_out_BLHV.astype(jnp.float32) * out_BLHV, axis=-1)
    return -jnp.sum(share_BLH * slope_BLH, axis=(0, 1)).astype(sinks_H.dtype)
