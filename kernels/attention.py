"""Flash attention for Hopper, forward and backward. Not yet run on a GPU.

Tested without one: the kernels compile for H100s within the shared memory, and without register
spills except in some gradients (up to 48 bytes per thread with local masks, 288 at head dim 256).
The interpreter, with wgmma replaced, gives the right outputs and gradients on a CPU and finds no
race. Not tested: results and speed of the machine code.

In a partly masked block the weights of unseen keys are exactly zero, so NaN or inf in their values
still reaches the queries of that block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.parallel.collectives import stored

from .attention_backward import Residuals, backward
from .attention_forward import FORWARD_TILES, forward
from .intervals import FlashSpec, prepare

AnyArray = jax.Array | jax.ShapeDtypeStruct
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A shape to compile, check and time; value_dim 0: head_dim."""

    batch: int
    length: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int = 0
    spec: FlashSpec = FlashSpec()
    documents: int = 0  # per row, for spec.segments


TUNED_SHAPES = {
    **{
        f"{name}-{length // 1024}k": AttentionShape(2**15 // length, length, *heads)
        for name, heads in {
            "gpt": (16, 16, 64),
            "llama": (32, 8, 128),
            "mha": (16, 16, 128),
        }.items()
        for length in (2048, 4096, 8192, 16384)
    },
    "llama-8k-packed": AttentionShape(
        4, 8192, 32, 8, 128, spec=FlashSpec(segments=True), documents=8
    ),
    "mistral-16k-window": AttentionShape(2, 16384, 32, 8, 128, spec=FlashSpec(window=4096)),
    "llama4-16k-chunks": AttentionShape(2, 16384, 40, 8, 128, spec=FlashSpec(chunk=8192)),
    "bert-512-full": AttentionShape(64, 512, 16, 16, 64, spec=FlashSpec(causal=False)),
    "phi-2k": AttentionShape(16, 2048, 32, 32, 80),
    "phi3-4k": AttentionShape(8, 4096, 32, 32, 96),
    "deepseek-4k": AttentionShape(1, 4096, 128, 128, 192, 128),
    "gemma-4k-softcap": AttentionShape(4, 4096, 16, 8, 256, spec=FlashSpec(softcap=50.0)),
}


def flash_refuses(q_BLHK: AnyArray, k_BMGK: AnyArray, v_BMGV: AnyArray) -> str:
    """Why the kernels do not support these arrays on any device; empty if they do."""
    head_dims = (q_BLHK.shape[-1], v_BMGV.shape[-1])
    dtypes = {q_BLHK.dtype, k_BMGK.dtype, v_BMGV.dtype}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"dtypes {sorted(map(str, dtypes))} are not all bfloat16 or all float16"
    if head_dims not in FORWARD_TILES:
        return f"head dims (query, value) {head_dims} are none of {sorted(FORWARD_TILES)}"
    if q_BLHK.shape[2] % k_BMGK.shape[2]:
        return f"query heads={q_BLHK.shape[2]} are not a multiple of key heads={k_BMGK.shape[2]}"
    return ""


def flash_attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: FlashSpec,
    *,
    offset: Int[Array, "*rows"] | int = 0,
    query_segments_BL: Int[Array, "B L"] | None = None,
    key_segments_BM: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """(output, float32 log-sum-exp of the scores), both differentiable.

    Query i is at position offset + i. Rows must be valid (intervals.documents). A query that sees
    no key gets zeros and -inf. ValueError for arrays that `flash_refuses`, and by `prepare`.
    """
    if reason := flash_refuses(q_BLHK, k_BMGK, v_BMGV):
        raise ValueError(f"attention backend mosaic cannot run: {reason}")
    segments = (query_segments_BL, key_segments_BM)
    spec, lower_AL, upper_AL = prepare(spec, q_BLHK, k_BMGK, offset, *segments)
    outputs: Any = attend(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec)
    out_BLHV, lse_BHL = outputs
    return out_BLHV, lse_BHL.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(
    q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec: FlashSpec
) -> tuple[jax.Array, jax.Array]:
    return forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec)


def attend_forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec):
    out_BLHV, lse_BHL = forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec)
    out_BLHV, lse_BHL = stored(out_BLHV, "attention_output"), stored(lse_BHL, "attention_lse")
    residuals = Residuals(q_BLHK, k_BMGK, v_BMGV, out_BLHV, lse_BHL, lower_AL, upper_AL)
    return (out_BLHV, lse_BHL), residuals


def attend_backward(spec, residuals, slopes):
    none = np.zeros(residuals.lower_AL.shape, jax.dtypes.float0)
    d_out_BLHV, d_lse_BHL = slopes
    return *backward(residuals, d_out_BLHV, d_lse_BHL, spec), none, none


attend.defvjp(attend_forward, attend_backward)
