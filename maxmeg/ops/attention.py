"""Softmax attention: a chunked XLA reference, cuDNN on GPUs, and the choice between them."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.ops.dropout import dropout
from maxmeg.ops.recompute import recomputed
from maxmeg.parallel.collectives import stored_attention

NEGATIVE = -1e30  # finite, so that a row that sees nothing stays finite
QUERY_BLOCK = 512  # queries whose scores exist at once in the XLA backend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionDropout:
    """Rate and where the local heads and rows lie in the global batch and model."""

    key: jax.Array
    rows_B: jax.Array
    first_head: jax.Array | int
    rate: float = dataclasses.field(metadata={"static": True})


def attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGK: Float[Array, "B M G K"],
    *,
    offset: Int[Array, ""] | int | None = 0,
    segments_BL: Int[Array, "B L"] | None = None,
    dropout_spec: AttentionDropout | None = None,
    backend: str = "auto",
) -> Float[Array, "B L H K"]:
    """Attention with grouped key/value heads, scores scaled by 1/sqrt(K), softmax in float32.

    Query i sits at position offset + i and sees keys 0..offset + i; offset=None: all keys.
    With `segments_BL` a query sees keys of its own segment only (L equals M then).
    backend: "xla", "cudnn" (raises where it cannot run) or "auto".
    """
    if q_BLHK.shape[2] % k_BMGK.shape[2]:
        raise ValueError(
            f"query heads={q_BLHK.shape[2]} must be a multiple of key heads={k_BMGK.shape[2]}"
        )
    reason = cudnn_refuses(q_BLHK, k_BMGK, offset, segments_BL, dropout_spec)
    if backend == "cudnn" and reason:
        raise ValueError(f"attention backend cudnn cannot run: {reason}; use auto or xla")
    if backend == "auto":
        backend = "xla" if reason else "cudnn"
        log_choice(backend, reason)
    if backend == "cudnn":
        return jax.nn.dot_product_attention(
            q_BLHK, k_BMGK, v_BMGK, is_causal=offset is not None, implementation="cudnn"
        )
    return xla_attention(q_BLHK, k_BMGK, v_BMGK, offset, segments_BL, dropout_spec)


def cudnn_refuses(q_BLHK, k_BMGK, offset, segments_BL, dropout_spec) -> str:
    """Why cuDNN cannot compute this attention here; empty if it can."""
    head_dim = q_BLHK.shape[-1]
    if target_platform() not in ("cuda", "gpu"):
        return f"the device is {target_platform()}, not a CUDA GPU"
    if q_BLHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {q_BLHK.dtype} is neither bfloat16 nor float16"
    if head_dim % 8 or head_dim > 128:
        return f"head dim {head_dim} is not a multiple of 8 up to 128"
    if segments_BL is not None:
        return "segment ids (packed documents) are not supported"
    if dropout_spec is not None:
        return "attention dropout is not supported"
    causal_square = q_BLHK.shape[1] == k_BMGK.shape[1] and isinstance(offset, int) and offset == 0
    if offset is not None and not causal_square:
        return "causal attention needs queries and keys of one length, from position 0"
    return ""


def target_platform() -> str:
    """Platform of the mesh in force, real or compiled for ahead of time, else the default's."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(device, "platform", None)
    return kind or jax.default_backend()


@functools.cache
def log_choice(backend: str, reason: str) -> None:
    because = f" ({reason})" if reason else ""
    logging.getLogger("maxmeg").info("attention backend: %s%s", backend, because)


def xla_attention(q_BLHK, k_BMGK, v_BMGK, offset, segments_BL, dropout_spec) -> jax.Array:
    """Reference: memory O(L x QUERY_BLOCK); blocks of keys after a causal block are skipped."""
    B, L, H, K = q_BLHK.shape
    M, G = k_BMGK.shape[1:3]
    q_BLGJK = q_BLHK.reshape(B, L, G, H // G, K)
    block = max(QUERY_BLOCK, -(-L // 16))  # at most 16 unrolled blocks
    triangle = isinstance(offset, int) and offset == 0 and L == M
    outs = []
    for start in range(0, L, block):
        stop = min(start + block, L)
        keys = stop if triangle else M
        attend = functools.partial(xla_block, start, block >= L)
        inputs = (q_BLGJK[:, start:stop], k_BMGK[:, :keys], v_BMGK[:, :keys])
        others = (offset, segments_BL, dropout_spec)
        outs.append(recomputed(attend, inputs, others) if block < L else attend(*inputs, *others))
    return jnp.concatenate(outs, axis=1).reshape(B, L, H, K)


def xla_block(start: int, alone: bool, q_BLGJK, k_BMGK, v_BMGK, offset, segments_BL, dropout_spec):
    """Attention of the queries from `start` on over the first M keys; alone: the only block."""
    L, (M, K) = q_BLGJK.shape[1], (k_BMGK.shape[1], k_BMGK.shape[3])
    scores_BGJLM = jnp.einsum(
        "BLGJK,BMGK->BGJLM", q_BLGJK, k_BMGK, preferred_element_type=jnp.float32
    )
    scores_BGJLM *= K**-0.5
    visible = jnp.ones((1, L, M), bool)
    if offset is not None:
        queries = offset + jnp.arange(start, start + L)
        visible = (jnp.arange(M)[None, :] <= queries[:, None])[None]
    if segments_BL is not None:
        same = segments_BL[:, start : start + L, None] == segments_BL[:, None, :M]
        visible = visible & same
    scores_BGJLM = jnp.where(visible[:, None, None], scores_BGJLM, NEGATIVE)
    weights_BGJLM = stored_softmax(scores_BGJLM) if alone else jax.nn.softmax(scores_BGJLM)
    weights_BGJLM = weights_BGJLM.astype(v_BMGK.dtype)
    if dropout_spec is not None:
        weights_BGJLM = drop_weights(weights_BGJLM, start, dropout_spec)
    out_BLGJK = jnp.einsum("BGJLM,BMGK->BLGJK", weights_BGJLM, v_BMGK)
    return stored_attention(out_BLGJK) if alone else out_BLGJK


@jax.custom_jvp
def stored_softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last dimension whose derivative reads the stored result, not another."""
    return stored_attention(jax.nn.softmax(scores))


@stored_softmax.defjvp
def stored_softmax_jvp(primals, tangents):
    weights, slope = stored_attention(jax.nn.softmax(primals[0])), tangents[0]
    return weights, weights * (slope - jnp.sum(weights * slope, axis=-1, keepdims=True))


def drop_weights(weights_BGJLM: jax.Array, start: int, spec: AttentionDropout) -> jax.Array:
    B, G, J, L, M = weights_BGJLM.shape
    weights_BHLM = weights_BGJLM.reshape(B, G * J, L, M)
    heads_H = spec.first_head + jnp.arange(G * J)
    dropped = dropout(
        weights_BHLM,
        spec.rate,
        spec.key,
        spec.rows_B[:, None, None],
        heads_H[None, :, None],
        (start + jnp.arange(L))[None, None, :],
    )
    return dropped.reshape(weights_BGJLM.shape)
