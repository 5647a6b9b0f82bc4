"""Flash attention for Hopper, forward and backward. Not yet run on a GPU: compiled and interpreted.

Never to be chosen by backend="auto" before it has run on one. What is proved without: the kernels
compile for H100s within their shared memory, and without register spills except for some gradients
(up to 48 bytes a thread under local masks, 288 at head dim 256); the interpreter runs them on a
CPU, wgmma replaced, and finds attention, its gradients and no race; and a model of the same loops
agrees with plain attention to float32. What is not: the machine code's results, and its speed.

A block that the mask cuts is multiplied by weights of exactly zero where a key is not seen, so a
value that is not finite there still reaches the queries of that block.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.parallel.collectives import stored

from .attention_backward import Residuals, backward
from .attention_forward import FORWARD_TILES, forward
from .intervals import FlashSpec, visible_intervals

AnyArray = jax.Array | jax.ShapeDtypeStruct
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A shape to compile, check and time; value_dim 0: as head_dim."""

    batch: int
    length: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int = 0
    spec: FlashSpec = FlashSpec()
    documents: int = 0  # packed in a row, for spec.segments


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
    """Why the kernels cannot take these arrays, whatever the device; empty if they can."""
    head_dims = (q_BLHK.shape[-1], v_BMGV.shape[-1])
    dtypes = {q_BLHK.dtype, k_BMGK.dtype, v_BMGV.dtype}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"dtypes {sorted(map(str, dtypes))} are not all bfloat16 or all float16"
    if head_dims not in FORWARD_TILES:
        return f"head dims (query, value) {head_dims} are none of {sorted(FORWARD_TILES)}"
    if q_BLHK.shape[2] % k_BMGK.shape[2]:
        return f"query heads={q_BLHK.shape[2]} are no multiple of key heads={k_BMGK.shape[2]}"
    return ""


def flash_attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: FlashSpec,
    *,
    offset: Int[Array, ""] | int = 0,
    query_segments_BL: Int[Array, "B L"] | None = None,
    key_segments_BM: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """(output, float32 log-sum-exp of the scores); both can be differentiated through.

    Query i sits at position offset + i. Documents must be `sound` (intervals.documents); without
    ids of keys they are the queries'. A query that sees no key gets zeros and -inf. ValueError for
    arrays that `flash_refuses`, and where ids and spec.segments do not fit.
    """
    if reason := flash_refuses(q_BLHK, k_BMGK, v_BMGV):
        raise ValueError(f"attention backend mosaic cannot run: {reason}")
    if spec.segments != (query_segments_BL is not None):
        raise ValueError(f"spec.segments={spec.segments} needs query_segments_BL exactly if true")
    L, M = q_BLHK.shape[1], k_BMGK.shape[1]
    if spec.segments and key_segments_BM is None:
        if L != M:
            raise ValueError(f"{L} queries and {M} keys need key_segments_BM of their own")
        key_segments_BM = query_segments_BL
    spec = dataclasses.replace(spec, scale=spec.scale or q_BLHK.shape[-1] ** -0.5)
    ids = (query_segments_BL, key_segments_BM)
    lower_AL, upper_AL = visible_intervals(spec, L, M, offset, *ids)
    out_BLHV, lse_BHL = attend(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec)
    return out_BLHV, lse_BHL.swapaxes(1, 2)


def attend_plainly(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGV: jax.Array,
    lower_AL: jax.Array,
    upper_AL: jax.Array,
    spec: FlashSpec,
) -> tuple[jax.Array, jax.Array]:
    return forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec)


def attend_forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec):
    found = forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec)
    out_BLHV, lse_BHL = stored(found[0], "attention_output"), stored(found[1], "attention_lse")
    residuals = Residuals(q_BLHK, k_BMGK, v_BMGV, out_BLHV, lse_BHL, lower_AL, upper_AL)
    return (out_BLHV, lse_BHL), residuals


def attend_backward(spec, residuals, slopes):
    none = np.zeros(residuals.lower_AL.shape, jax.dtypes.float0)
    d_out_BLHV, d_lse_BHL = slopes
    return *backward(residuals, d_out_BLHV, d_lse_BHL, spec), none, none


attend = jax.custom_vjp(attend_plainly, nondiff_argnums=(5,))
attend.defvjp(attend_forward, attend_backward)
