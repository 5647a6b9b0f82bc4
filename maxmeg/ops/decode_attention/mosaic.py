"""Decode attention by our kernel for Hopper (kernels/decode_attention.py). Not yet run on a GPU.

Not chosen by "auto" until it has been measured.
"""

import jax.numpy as jnp

from maxmeg.ops.attention.spec import NEGATIVE, ScoreSpec
from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels
from maxmeg.ops.decode_attention.xla import PagedCache

SUPPORTS = (
    "bfloat16 and float16 on Hopper GPUs, every mask, softcap and sinks, pages of 8, 16, 32 and "
    "multiples of 64 slots, up to 64 queries times heads per key head, "
    "head dims 64, 80, 96, 128, 256, 192 with values of 128"
)


def refuses(q_BLHK, cache: PagedCache, spec: ScoreSpec, sinks_H, bias_NH, device: Device) -> str:
    """Why the kernel cannot run this call; empty if it can."""
    if bias_NH is not None:
        return "relative position bias is not supported"
    if reason := refuses_hopper_kernels(device):
        return reason
    kernel = kernel_module("decode_attention")
    return kernel.decode_refuses(q_BLHK, kernel.Pages(*cache))


def attend(q_BLHK, cache: PagedCache, spec: ScoreSpec, sinks_H, bias_NH=None):
    """Output [B, L, H, V] and log-sum-exp [B, L, H] in float32."""
    kernel = kernel_module("decode_attention")
    masks = kernel.FlashSpec(spec.causal, spec.window, spec.chunk, False, spec.softcap, spec.scale)
    out_BLHV, lse_BLH = kernel.paged_attention(q_BLHK, kernel.Pages(*cache), masks, sinks_H)
    return out_BLHV, jnp.maximum(lse_BLH, NEGATIVE)
