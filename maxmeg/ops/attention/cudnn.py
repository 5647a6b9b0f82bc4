"""Attention by cuDNN's fused kernels, through the function behind jax.nn.dot_product_attention.

Unlike the public function it returns the float32 log-sum-exp and supports values with another head
dim than keys; it is the same in jax 0.10 to 0.12. The kernels multiply the masked weights, zeros,
with the values of a tile: NaN or inf in a value can reach queries that do not see it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fused

from maxmeg.ops.attention.spec import Operands, ScoreSpec
from maxmeg.ops.backend import BLACKWELL, HOPPER, Device, refuses_older_gpus, target_device

SUPPORTS = (
    "bfloat16 and float16 on CUDA GPUs of capability 8.0 and newer, even lengths, causal "
    "attention with equally many queries and keys from position 0 (with a window) or all keys, "
    "log-sum-exp, head dims that are multiples of 8 up to 128, on Hopper up to 256, on Blackwell "
    "192 with values of 128; other values shorter than keys are padded"
)
MLA = (192, 128)  # head dims of queries and keys, and of values
MLA_VERSION = 91000  # of cuDNN, as jax counts it
DETERMINISTIC_VERSION = 91801  # first version with a deterministic backward on Blackwell


def has_capability(capability: str) -> bool:
    """Whether the target GPU has at least this compute capability, such as "9.0"."""
    return target_device().capability >= tuple(map(int, capability.split(".")))


@functools.cache
def compile_for_absent_gpus() -> None:
    """Let jax check the target GPU: without a local GPU it refuses large heads and MLA."""
    fused.check_compute_capability = has_capability


def refuses(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands, device: Device) -> str:
    """Why cuDNN cannot run this call; empty if it can."""
    if reason := refuses_older_gpus(device):
        return reason
    if q_BLHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {q_BLHK.dtype} is neither bfloat16 nor float16"
    if k_BMGK.dtype != q_BLHK.dtype or v_BMGV.dtype != q_BLHK.dtype:
        return f"dtypes {q_BLHK.dtype}, {k_BMGK.dtype} and {v_BMGV.dtype} differ"
    if reason := refuses_heads(q_BLHK.shape[-1], v_BMGV.shape[-1], device):
        return reason
    unsupported = {
        "segment ids (packed documents) are": operands.segments_BL,
        "attention dropout is": operands.dropout,
        "learned sinks are": operands.sinks_H,
    }
    for what, operand in unsupported.items():
        if operand is not None:
            return f"{what} not supported"
    if spec.softcap:
        return f"softcap={spec.softcap} is not supported"
    if spec.chunk:
        return f"chunk={spec.chunk} (chunked local attention) is not supported"
    return refuses_lengths(q_BLHK.shape[1], k_BMGK.shape[1], spec, operands.offset)


def refuses_heads(head_dim: int, value_dim: int, device: Device) -> str:
    """Why the head dims are not supported, by the rules of jax and of NVIDIA's cudnn-frontend."""
    major = device.capability[0]
    if major in (HOPPER, BLACKWELL) and takes_unpadded(head_dim, value_dim):
        return ""
    if value_dim > head_dim:
        return f"head dim {value_dim} of values is more than {head_dim} of keys"
    limit = 256 if major == HOPPER else 128
    if head_dim % 8 or head_dim > limit:
        return f"head dim {head_dim} is not a multiple of 8 up to {limit}"
    return ""


def takes_unpadded(head_dim: int, value_dim: int) -> bool:
    """Whether values with a smaller head dim need no padding."""
    return (head_dim, value_dim) == MLA and fused.check_cudnn_version() >= MLA_VERSION


def refuses_determinism(device: Device) -> str:
    """Why backward cannot be deterministic on the device; empty if it can.

    XLA asks cuDNN for its deterministic algorithm if the flag for deterministic ops is set.
    """
    if not device.is_cuda or device.capability[0] < BLACKWELL:
        return ""
    version = fused.check_cudnn_version()
    if version >= DETERMINISTIC_VERSION:
        return ""
    return (
        f"cuDNN's deterministic backward on Blackwell GPUs needs version {DETERMINISTIC_VERSION}, "
        f"found {version}"
    )


def refuses_lengths(length: int, keys: int, spec: ScoreSpec, offset) -> str:
    if length % 2 or keys % 2:
        return f"{length} queries and {keys} keys: backward needs even lengths"
    square = length == keys and isinstance(offset, int) and offset == 0
    if spec.causal and not square:
        return "causal attention needs queries and keys of one length, from position 0"
    if spec.window and not spec.causal:
        return f"window={spec.window} needs causal attention"
    return ""


def attend(q_BLHK, k_BMGK, v_BMGV, spec: ScoreSpec, operands: Operands):
    """Output [B, L, H, V] and log-sum-exp [B, L, H]."""
    assert not any(array is not None for array in operands[1:])
    spec = dataclasses.replace(spec, scale=spec.scale or q_BLHK.shape[-1] ** -0.5)
    size, padding = v_BMGV.shape[-1], q_BLHK.shape[-1] - v_BMGV.shape[-1]
    if padding and not takes_unpadded(q_BLHK.shape[-1], size):
        v_BMGV = jnp.pad(v_BMGV, ((0, 0), (0, 0), (0, 0), (0, padding)))
    out_BLHV, lse_BHL = fused_attention(spec, q_BLHK, k_BMGK, v_BMGV)
    out_BLHV = out_BLHV[..., :size]
    lse_BLH = jnp.swapaxes(lax.stop_gradient(lse_BHL), 1, 2)
    return out_BLHV, with_gradient(spec, q_BLHK, k_BMGK, lse_BLH)


def fused_attention(spec: ScoreSpec, q_BLHK, k_BMGK, v_BMGV) -> tuple[jax.Array, jax.Array]:
    """Output [B, L, H, V] and log-sum-exp [B, H, L]; backward ignores the latter's cotangent."""
    if jax.default_backend() != "gpu":
        compile_for_absent_gpus()
    out_and_lse: Any = fused.dot_product_attention(
        q_BLHK,
        k_BMGK,
        v_BMGV,
        scale=spec.scale,
        mask_type=fused.MaskType.CAUSAL if spec.causal else fused.MaskType.NO_MASK,
        sliding_window_length=spec.window or None,
        return_residual=True,
    )
    return out_and_lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradient(spec: ScoreSpec, q_BLHK, k_BMGK, lse_BLH) -> jax.Array:
    """The log-sum-exp, differentiable; costs nothing if the result is not used.

    With weights P and cotangent c: dq = scale c (P k) and dk = scale P' (c q): attention with the
    keys as values, and the gradient of its values.
    """
    return lse_BLH


def forward(spec, q_BLHK, k_BMGK, lse_BLH):
    return lse_BLH, (q_BLHK, k_BMGK)


def backward(spec, residuals, slope_BLH):
    q_BLHK, k_BMGK = residuals
    mean_BLHK, transpose = jax.vjp(lambda v: fused_attention(spec, q_BLHK, k_BMGK, v)[0], k_BMGK)
    slope_BLH1 = spec.scale * slope_BLH[..., None]
    (dk_BMGK,) = transpose((slope_BLH1 * q_BLHK).astype(q_BLHK.dtype))
    return (slope_BLH1 * mean_BLHK).astype(q_BLHK.dtype), dk_BMGK, None


with_gradient.defvjp(forward, backward)
