"""Softmax attention: one call, several backends, and the choice between them.

A backend (ops/backend.py) has `refuses(q, k, v, spec, operands, device)`, the reason why it cannot
run a call, and `attend(q, k, v, spec, operands)`, which returns output and log-sum-exp, and may add
an upper bound of each query's scores: with `spec.largest` the largest score itself, with sinks the
log-sum-exp without them. For a backend that adds none, it is the log-sum-exp.
"""

import logging

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from maxmeg.ops import backend as dispatch
from maxmeg.ops.attention import cudnn as attention_cudnn
from maxmeg.ops.attention import mosaic as attention_mosaic
from maxmeg.ops.attention import triton as attention_triton
from maxmeg.ops.attention import xla as attention_xla
from maxmeg.ops.attention.spec import Operands, ScoreSpec, check_shapes
from maxmeg.ops.backend import Device, choose, log_choice

CAUSAL, NOTHING_ELSE = ScoreSpec(), Operands()
BACKENDS = {
    "cudnn": attention_cudnn,
    "mosaic": attention_mosaic,
    "triton": attention_triton,
    "xla": attention_xla,
}
# The order in which "auto" tries backends. cuDNN on one H200, bf16, causal, heads of 128, 2k to 16k
# tokens: 484-673 TFLOP/s forward, 370-579 backward (DESIGN.md, section 10). Our kernels have not
# run on a GPU yet.
GPU_ORDER, OTHER_ORDER = ("cudnn", "xla"), ("xla",)
UNMEASURED = ("mosaic", "triton")
SHORT = attention_xla.QUERY_BLOCK  # keys up to which XLA's scores are too few for a warning
WARNED: set[str] = set()  # reasons for plain XLA on a GPU that this process has warned of
GB = 1e9


def attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: ScoreSpec = CAUSAL,
    operands: Operands = NOTHING_ELSE,
    *,
    backend: str = "auto",
) -> Float[Array, "B L H V"]:
    """Attention with grouped key/value heads, softmax in float32.

    backend: a key of BACKENDS, or "auto" for the first in `preference` that supports the call.
    ValueError if shapes do not fit, or if no backend (or the named one) supports the call.
    """
    return attention_with_lse(q_BLHK, k_BMGK, v_BMGV, spec, operands, backend=backend)[0]


def attention_with_lse(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: ScoreSpec = CAUSAL,
    operands: Operands = NOTHING_ELSE,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "B L H *V"], ...]:
    """As `attention`, and the float32 log-sum-exp [B, L, H] of each query's scores and sink. With
    `spec.largest` also the largest score [B, L, H], or the log-sum-exp without the sink."""
    check_shapes(q_BLHK, k_BMGK, v_BMGV, operands)
    call = (q_BLHK, k_BMGK, v_BMGV, spec, operands)
    device = dispatch.target_device()
    name, reason = choice(call, backend, device)
    if backend == "auto":
        log_choice("attention", name, reason)
        if is_costly(call, name, device):
            warn_of_xla(reason, xla_words(call, reason, device))
    out_BLHV, lse_BLH, *bounds = BACKENDS[name].attend(*call)
    return (out_BLHV, lse_BLH, *(bounds or [lse_BLH])) if spec.largest else (out_BLHV, lse_BLH)


def output_and_largest(
    out_BLHV: Float[Array, "B L H V"],
    lse_BLH: Float[Array, "B L H"],
    largest_BLH: Float[Array, "B L H"] | None = None,
) -> tuple[Float[Array, "B L H V"], Float[Array, " H"] | None]:
    """(output, largest score of each head without gradient) of `attention_with_lse`'s results.

    The second is None unless the call had `spec.largest`. It is exact with the backend xla; others
    return the largest log-sum-exp without sinks, at most log(number of keys) larger.
    """
    if largest_BLH is None:
        return out_BLHV, None
    return out_BLHV, lax.stop_gradient(jnp.max(largest_BLH, axis=(0, 1)))


def dense_mask(call: tuple, *, backend: str = "auto") -> jax.Array | None:
    """`Operands.mask_B1LM` of call = (q, k, v, spec, operands): the mask as the backend reads it,
    None if it reads none. All but the documents may be as in `choice`."""
    module = BACKENDS[choice(call, backend, dispatch.target_device())[0]]
    return module.dense_mask(call) if hasattr(module, "dense_mask") else None


def block_gradients(
    call: tuple,
    out_BLHV: Float[Array, "B L H V"],
    lse_BLH: Float[Array, "B L H"],
    d_out_BLHV: Float[Array, "B L H V"],
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "B L H K"], Float[Array, "B M G K"], Float[Array, "B M G V"]]:
    """Gradients of q, k and v through one block of keys, where out and lse are of all blocks.

    call: (q, k, v, spec, operands) of the block, without sinks. With P = exp(score - lse) the
    gradient of a score is P (dO v - dO O).
    """
    q_BLHK, k_BMGK, v_BMGV, spec, operands = call
    module = BACKENDS[choice(call, backend, dispatch.target_device())[0]]
    if hasattr(module, "block_gradients"):
        return module.block_gradients(call, out_BLHV, lse_BLH, d_out_BLHV)

    def attend(q_BLHK, k_BMGK, v_BMGV):
        return module.attend(q_BLHK, k_BMGK, v_BMGV, spec, operands)[:2]

    (block_BLHV, block_lse_BLH), transpose = jax.vjp(attend, q_BLHK, k_BMGK, v_BMGV)
    share_BLH = jnp.exp(block_lse_BLH - lse_BLH)  # of the block in all weights
    d_out_BLHV = d_out_BLHV.astype(jnp.float32)
    change_BLHV = block_BLHV.astype(jnp.float32) - out_BLHV.astype(jnp.float32)
    d_lse_BLH = share_BLH * jnp.sum(d_out_BLHV * change_BLHV, axis=-1)
    d_block_BLHV = (share_BLH[..., None] * d_out_BLHV).astype(block_BLHV.dtype)
    return transpose((d_block_BLHV, d_lse_BLH))


def choice(call: tuple, named: str, device: Device) -> tuple[str, str]:
    """(backend, why "auto" uses none before it) of call = (q, k, v, spec, operands) on a device.

    Arrays may be shapes, and operands any value that is not None: nothing runs. ValueError if the
    named backend cannot run the call.
    """
    return choose("attention", BACKENDS, preference(device), named, call, device)


def preference(device: Device) -> tuple[str, ...]:
    """Backends in the order that "auto" tries."""
    return GPU_ORDER if device.is_cuda else OTHER_ORDER


def is_costly(call: tuple, name: str, device: Device) -> bool:
    """Whether the backend `name` writes many scores to the memory of a GPU."""
    return name == "xla" and device.is_cuda and call[1].shape[1] > SHORT


def warn_of_xla(reason: str, words: str) -> None:
    """Warn with `words` that attention runs in plain XLA on a GPU, once for each reason."""
    if reason not in WARNED:
        WARNED.add(reason)
        logging.getLogger("maxmeg").warning("%s", words)


def xla_words(call: tuple, reason: str, device: Device) -> str:
    """Why a call on a GPU runs in plain XLA, what that costs, and what could run it instead."""
    q_BLHK, k_BMGK, _, spec, operands = call
    (B, L, H), M = q_BLHK.shape[:3], k_BMGK.shape[1]
    computed = attention_xla.computed_pairs(L, M, spec, operands.offset)
    size = attention_xla.score_bytes(B * H, computed)
    ratio = computed / max(attention_xla.visible_pairs(L, M, spec, operands.offset), 1)
    able = [name for name in UNMEASURED if not BACKENDS[name].refuses(*call, device)]
    words = (
        f"attention runs in plain XLA on the GPU, which writes its scores to memory ({reason}). "
        f"In every such layer and microbatch, forward writes and reads a float32 score matrix of "
        f"{size / GB:,.3g} GB per device ({B:,} x {H:,} heads x {L:,} queries x {computed // L:,} "
        f"keys on average) about {attention_xla.SCORE_PASSES} times, and multiplies "
        f"{ratio:.3g} times as many pairs as the mask keeps"
    )
    words += ", and those between documents" * (operands.segments_BL is not None)
    if able:
        words += f". model.attention.backend={' or '.join(able)} can run it in one kernel, but has "
        words += "not run on a GPU yet: compare its loss with auto's"
    return words
