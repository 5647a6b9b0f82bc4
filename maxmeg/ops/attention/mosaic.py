"""Attention by our flash attention kernels for Hopper (kernels/attention.py). Not yet run on a GPU.

Not chosen by "auto" until it has been measured. Gradients are deterministic.
"""

import jax
import jax.numpy as jnp

from maxmeg.ops.attention.flash import flash
from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import Device, kernel_module, refuses_hopper_kernels

SUPPORTS = (
    "bfloat16 and float16 on Hopper GPUs, every mask, contiguous documents, softcap, sinks, "
    "any lengths and offset, head dims 64, 80, 96, 128, 256, 192 with values of 128"
)
ROWS = 8  # rows of the blocks that TMA copies


def refuses(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, device: Device) -> str:
    """Why the kernels cannot run this call; empty if they can."""
    if reason := refuses_hopper_kernels(device):
        return reason
    if operands.dropout is not None:
        return "attention dropout is not supported"
    if operands.bias_NH is not None:
        return "relative position bias is not supported"
    return kernel_module("attention").flash_refuses(q_BLHK, k_BMGK, v_BMGV)


def attend(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """As `flash`, with log-sum-exps [B, L, H] in float32."""
    L, M = q_BLHK.shape[1], k_BMGK.shape[1]
    if L % ROWS or M % ROWS:
        operands = padded_documents(operands, q_BLHK.shape[:2], M)
        if jnp.ndim(operands.offset) == 2:
            padding = (0, 0), (0, -L % ROWS)
            operands = operands._replace(offset=jnp.pad(operands.offset, padding, mode="edge"))
        q_BLHK, k_BMGK, v_BMGV = (pad_rows(x, 0) for x in (q_BLHK, k_BMGK, v_BMGV))
    kernel = kernel_module("attention").flash_attention
    results = flash(kernel, q_BLHK, k_BMGK, v_BMGV, spec, operands)
    return tuple(x[:, :L] for x in results)


def pad_rows(x: jax.Array, value) -> jax.Array:
    """x [B, L, ...] with L padded to a multiple of ROWS."""
    widths = [(0, 0), (0, -x.shape[1] % ROWS)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=value)


def padded_documents(operands: Operands, queries: tuple[int, int], keys: int) -> Operands:
    """Operands with segment ids in which the padding is a separate last document."""
    B, L = queries
    segments_BL, segments_BM = operands.segments_BL, operands.key_segments_BM
    if segments_BL is None:
        segments_BL, segments_BM = jnp.zeros((B, L), jnp.int32), jnp.zeros((B, keys), jnp.int32)
    segments_BM = jnp.asarray(segments_BL if segments_BM is None else segments_BM)
    segments_BL = jnp.asarray(segments_BL)
    last = jnp.maximum(jnp.max(segments_BL), jnp.max(segments_BM)) + 1
    return operands._replace(
        segments_BL=pad_rows(segments_BL, last), key_segments_BM=pad_rows(segments_BM, last)
    )
