"""Attention by our Pallas-Triton kernels (kernels/attention_triton.py). Not yet run on a GPU.

Not chosen by "auto" until it has been measured. Gradients are deterministic. Pallas-Triton is
deprecated since jax 0.11.
"""

import functools
import importlib.util
from typing import Any

import jax

from maxmeg.ops.attention.flash import flash
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device, kernel_module, refuses_missing_kernels, refuses_older_gpus

PALLAS = "jax.experimental.pallas.triton"
SUPPORTS = (
    "bfloat16, float16 and (exact but slow) float32 on CUDA GPUs of capability 8.0 and newer if "
    "jax has Pallas-Triton, every mask, contiguous documents, softcap, sinks, "
    "any lengths and offset, head dims up to 256"
)


def refuses(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_older_gpus(device):
        return reason
    if importlib.util.find_spec(PALLAS) is None:
        return f"jax {jax.__version__} has no Pallas-Triton ({PALLAS})"
    if reason := refuses_missing_kernels():
        return reason
    if operands.dropout is not None:
        return "attention dropout is not supported"
    if operands.bias_NH is not None:
        return "relative position bias is not supported"
    return kernel_module("attention_triton").flash_refuses(q_BLHK, k_BMGK, v_BMGV)


def attend(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, tiles: Any = None):
    """Output [B, L, H, V] and log-sum-exp [B, L, H] in float32; tiles None: by the shape."""
    kernel = functools.partial(kernel_module("attention_triton").flash_attention, tiles=tiles)
    return flash(kernel, q_BLHK, k_BMGK, v_BMGV, spec, operands)
