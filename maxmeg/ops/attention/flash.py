"""The call of our flash attention kernels, which the Mosaic and the Triton backend share."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.ops.attention.spec import NEGATIVE, Operands, ScoreSpec
from maxmeg.ops.backend import kernel_module


def flash(kernel: Callable, q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """(output, log-sum-exp) by `kernel`, a flash_attention like that of kernels/attention.py; with
    sinks also the log-sum-exp without them.

    A row with a document that is not contiguous, which the kernels do not support, becomes NaN.
    """
    intervals = kernel_module("intervals")
    queries, keys = operands.segments_BL, operands.key_segments_BM
    names = [field.name for field in dataclasses.fields(intervals.FlashSpec)]
    settings = {name: value for name, value in vars(spec).items() if name in names}
    flash_spec = intervals.FlashSpec(**settings, segments=queries is not None)
    ids = {"query_segments_BL": queries, "key_segments_BM": keys}
    call = functools.partial(kernel, spec=flash_spec, offset=operands.offset, **ids)
    out_BLHV, lse_BLH = call(q_BLHK, k_BMGK, v_BMGV)
    if queries is not None:
        keys = queries if keys is None else keys
        invalid_B11 = ~intervals.documents(queries, keys)[2][:, None, None]
        out_BLHV = jnp.where(invalid_B11[..., None], jnp.nan, out_BLHV)
        lse_BLH = jnp.where(invalid_B11, jnp.nan, lse_BLH)
    lse_BLH = jnp.maximum(lse_BLH, NEGATIVE)
    if operands.sinks_H is None:
        return out_BLHV, lse_BLH
    return *with_sinks(out_BLHV, lse_BLH, operands.sinks_H), lse_BLH


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
