"""Self-attention: multi-head, grouped-query or multi-query, with a key/value cache for decoding."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.attention import AttentionDropout, Operands, ScoreSpec, attention
from maxmeg.ops.rope import RotarySpec, rotate
from maxmeg.parallel.collectives import SEQUENCE_AXIS, axis_index

DROPOUT_PLACE = 0


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """rotary None: no rotation; qk_norm None: none, else over each "head", or all "heads" of a
    token together, or "l2": each head without a weight.

    causal, window, chunk, softcap and scale as in ops.attention.ScoreSpec. sinks: a learned logit
    a head in the denominator of its softmax.
    std and out_std are the deviations of the initial input and output weights.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec | None = RotarySpec()
    qk_norm: NormSpec | None = None
    qk_norm_over: str = "head"
    bias_qkv: bool = False
    bias_out: bool = False
    dropout: float = 0.0
    causal: bool = True
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    sinks: bool = False
    backend: str = "auto"
    std: float = 0.02
    out_std: float = 0.02


def qk_norm(spec: AttentionSpec, num_heads: int, axis: str) -> Norm | None:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm_over == "heads":
        return Norm(num_heads * spec.head_dim, spec.qk_norm, axis, over=(SEQUENCE_AXIS,))
    return Norm(spec.head_dim, spec.qk_norm, "head_dim", weighted=spec.qk_norm_over == "head")


def normalized(x_BLI: jax.Array, norm: Norm | None, heads: tuple[int, ...]) -> jax.Array:
    """x [B, L, heads x K] as [B, L, heads, K], normalized before or after that."""
    if norm is None:
        return x_BLI.reshape(heads)
    return norm(x_BLI).reshape(heads) if norm.over else norm(x_BLI.reshape(heads))


class Cache(typing.NamedTuple):
    """Keys and values of the tokens so far."""

    k_BMGK: jax.Array
    v_BMGK: jax.Array


class Attention(nnx.Module):
    """out(attention(query x, key x, value x)); heads are sharded over tensor."""

    def __init__(self, key: jax.Array, spec: AttentionSpec):
        keys = jax.random.split(key, 4)
        self.spec = spec
        D, K = spec.hidden_size, spec.head_dim
        H, G, std = spec.num_heads, spec.num_kv_heads, spec.std
        self.query = Linear(keys[0], (D, H * K), ("embed", "heads"), std, spec.bias_qkv)
        self.key = Linear(keys[1], (D, G * K), ("embed", "kv_heads"), std, spec.bias_qkv)
        self.value = Linear(keys[2], (D, G * K), ("embed", "kv_heads"), std, spec.bias_qkv)
        self.out = Linear(keys[3], (H * K, D), ("heads", "embed"), spec.out_std, spec.bias_out)
        self.sinks = nnx.Param(jnp.zeros(H), axes=("heads",)) if spec.sinks else None
        self.query_norm = qk_norm(spec, H, "heads")
        self.key_norm = qk_norm(spec, G, "kv_heads")

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: Cache | None = None
    ) -> tuple[Float[Array, "B L D"], Cache | None, dict]:
        """Partial sums over tensor, the cache with this call's keys and values, no auxiliary."""
        heads = (*h_BLD.shape[:2], -1, self.spec.head_dim)
        q_BLHK = normalized(self.query(h_BLD), self.query_norm, heads)
        k_BLGK = normalized(self.key(h_BLD), self.key_norm, heads)
        v_BLGK = self.value(h_BLD).reshape(heads)
        if self.spec.rotary is not None:
            q_BLHK = rotate(q_BLHK, ctx.positions_BL, self.spec.rotary)
            k_BLGK = rotate(k_BLGK, ctx.positions_BL, self.spec.rotary)
        offset = 0
        if cache is not None:
            assert ctx.cache_offset is not None
            offset = ctx.cache_offset
            cache = Cache(
                lax.dynamic_update_slice_in_dim(cache.k_BMGK, k_BLGK, offset, axis=1),
                lax.dynamic_update_slice_in_dim(cache.v_BMGK, v_BLGK, offset, axis=1),
            )
            k_BLGK, v_BLGK = cache.k_BMGK, cache.v_BMGK
        out_BLHK = self.core(q_BLHK, k_BLGK, v_BLGK, offset, ctx)
        return self.out(out_BLHK.reshape(*h_BLD.shape[:2], -1)), cache, {}

    def core(self, q_BLHK, k_BMGK, v_BMGK, offset, ctx: Context) -> jax.Array:
        spec, drop = self.spec, None
        if spec.dropout and ctx.dropout_key is not None:
            first = axis_index((SEQUENCE_AXIS,)) * q_BLHK.shape[2]
            drop = AttentionDropout(ctx.key(DROPOUT_PLACE), ctx.rows(), first, spec.dropout)
        scores = ScoreSpec(spec.causal, spec.window, spec.chunk, spec.softcap, spec.scale)
        sinks_H = None if self.sinks is None else self.sinks[...]
        operands = Operands(offset, ctx.segments_BL, None, sinks_H, drop)
        return attention(q_BLHK, k_BMGK, v_BMGK, scores, operands, backend=spec.backend)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `batch` sequences of `length` tokens, in the weights' dtype."""
        weight = self.key.weight[...]
        shape = (batch, length, weight.shape[-1] // self.spec.head_dim, self.spec.head_dim)
        return Cache(jnp.zeros(shape, weight.dtype), jnp.zeros(shape, weight.dtype))
