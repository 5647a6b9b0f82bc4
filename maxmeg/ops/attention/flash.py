"""What our flash attention kernels, Mosaic's and Triton's, share on the way from an op's call."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.ops.attention.guard import guarded
from maxmeg.ops.attention.spec import NEGATIVE, Operands, ScoreSpec
from maxmeg.ops.backend import kernel_module


def flash(kernel: Callable, q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """(output, log-sum-exp) by `kernel`, a flash_attention as that of kernels/attention.py.

    Sinks follow from the log-sum-exp. Where segment ids are given, what is not finite stays in its
    own document, and a row whose documents are not each in one piece, as the kernels need, is NaN.
    """
    intervals = kernel_module("intervals")
    queries, keys = operands.segments_BL, operands.key_segments_BM
    packed = queries is not None
    flash_spec = intervals.FlashSpec(**vars(spec), segments=packed)
    ids = {"query_segments_BL": queries, "key_segments_BM": keys}
    call = functools.partial(kernel, spec=flash_spec, offset=operands.offset, **ids)
    if packed:
        lengths = (q_BLHK.shape[1], k_BMGK.shape[1])
        of_keys = queries if keys is None else keys
        bounds = intervals.visible_intervals(
            flash_spec, *lengths, operands.offset, queries, of_keys
        )
        dead_B = ~intervals.documents(queries, of_keys)[2]
        found = guarded(call, q_BLHK, k_BMGK, v_BMGV, bounds, dead_B)
    else:
        found = call(q_BLHK, k_BMGK, v_BMGV)
    out_BLHV, lse_BLH = found
    return with_sinks(out_BLHV, jnp.maximum(lse_BLH, NEGATIVE), operands.sinks_H)


def with_sinks(
    out_BLHV: Float[Array, "B L H V"],
    lse_BLH: Float[Array, "B L H"],
    sinks_H: Float[Array, " H"] | None,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """Output and log-sum-exp as if each head had one more key of score sinks_H and value 0.

    Learned sinks: Xiao et al. 2023, GPT-OSS.
    """
    if sinks_H is None:
        return out_BLHV, lse_BLH
    sinks_H = sinks_H.astype(lse_BLH.dtype)
    share_BLH = jax.nn.sigmoid(lse_BLH - sinks_H)
    out_BLHV = (out_BLHV * share_BLH[..., None]).astype(out_BLHV.dtype)
    return out_BLHV, jnp.logaddexp(lse_BLH, sinks_H)
