"""Multi-latent attention (DeepSeek-V2, 2024): keys and values of all heads from one short latent.

The cache holds a latent and one rotary key per token, which all heads share. In decoding, the
up-projections are absorbed into queries and outputs: attention then has one key head, whose values
are the latents.

Sizes: a latent has `kv_rank` elements. A head's queries and keys have a part of size K = `head_dim`
without rotation and a rotary part of size `rotary_size` (names with `rotary`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.distributed.attention.rounds import KeyValueExpansion
from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Widths
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.qk_clip import LARGEST, scale_heads
from maxmeg.ops.broadcast import broadcast
from maxmeg.ops.cache import CacheSize, cached_attention, empty_pages
from maxmeg.ops.random import split
from maxmeg.parallel.collectives import (
    axis_size,
    gather_sequence,
    mark_gathered,
    stored,
    unshard_parameter,
)
from maxmeg.parallel.mesh import CONTEXT_AXES
from maxmeg.parallel.parameter import annotate, info, is_variable, parameter


@dataclasses.dataclass(frozen=True)
class MlaSpec(AttentionSpec):
    """As AttentionSpec, with num_kv_heads = num_heads; head_dim: of a head's part without rotation.

    query_rank 0: queries are one projection. norm: of the latents. bias_qkv: biases of the
    projections to the latents and to the rotary key.
    """

    name = "mla"
    reads = "shard"  # latents are shorter than the residual stream

    query_rank: int = 0
    kv_rank: int = 512
    rotary_size: int = 64
    value_size: int = 128
    norm: NormSpec = NormSpec()

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        norm, base = NormSpec.of(config), super().settings(config, parallel, mixer)
        norm = dataclasses.replace(norm, eps=config.mla.norm_eps or norm.eps)
        changes = {"value_size": config.value_size, "norm": norm}
        return base | changes

    @property
    def key_size(self) -> int:
        return self.head_dim + self.rotary_size

    @property
    def head_output_size(self) -> int:
        return self.value_size

    @property
    def travelling(self) -> tuple[int, int]:
        return 1, self.kv_rank + self.rotary_size

    @property
    def rotated_size(self) -> int:
        return self.rotary_size

    def make(self, key: jax.Array) -> "Mla":
        return Mla(key, self)

    def weights(self) -> int:
        """Includes the weights of the latents' norms, as in Megatron-LM."""
        D, rank, size = self.hidden_size, self.query_rank, self.num_heads * self.key_size
        queries = rank * (D + size + 1) if rank else D * size
        up = self.num_heads * (self.head_dim + self.value_size)
        keys = self.kv_rank * (D + up + 1)
        return queries + keys + D * (self.rotary_size + self.num_heads * self.value_size)

    def widths(self, tensor: int = 1) -> Widths:
        queries, latent = self.num_heads * self.key_size, self.kv_rank + self.rotary_size
        stored = {
            **({"query_down": self.query_rank} if self.query_rank else {}),
            "query_up" if self.query_rank else "query": queries,
            "kv_down": latent,
            "key_up": self.num_heads * self.head_dim,
            "value_up": self.num_heads * self.value_size,
        }
        return self._with_heads(stored, (latent, self.query_rank or self.hidden_size))


@dataclasses.dataclass(frozen=True)
class FromLatents(KeyValueExpansion):
    """Makes keys and values of all heads of latents with their rotary key [B, M, 1, I]. weights:
    (key_up, value_up)."""

    kv_rank: int
    of_each_head = False

    def __call__(self, linears: tuple[Linear, Linear], kv_BM1I: jax.Array, ctx=None):
        latent, k_rotary = jnp.split(kv_BM1I[:, :, 0], [self.kv_rank], axis=-1)
        k_BMI = stored(linears[0](latent, ctx), "key_up")
        v_BMI = stored(linears[1](latent, ctx), "value_up")
        k_BMHK = k_BMI.reshape(*latent.shape[:2], -1, self.key_size - k_rotary.shape[-1])
        heads = k_BMHK.shape[:3]
        k_rotary = broadcast(k_rotary[:, :, None], (*heads, k_rotary.shape[-1]))
        return jnp.concatenate((k_BMHK, k_rotary), axis=-1), v_BMI.reshape(*heads, -1)

    def of_heads(self, linears, number, count: int):
        """The columns of these heads, of weights that are gathered before: where fsdp shards them
        over context, each device needs other heads."""

        def columns(variable):
            axes = info(variable).axes
            if "heads" not in axes:
                return variable
            value, dim = unshard_parameter(variable), axes.index("heads")
            size = value.shape[dim] // count
            heads = lax.dynamic_slice_in_dim(value, number * size, size, dim)
            return mark_gathered(variable.replace(heads))

        return jax.tree.map(columns, linears, is_leaf=is_variable)


class Mla(Attention):
    """Heads are sharded over tensor; the projections to latents are replicated.

    query_down, query_norm, query_up (query_rank 0: query) compute the queries, [head_dim |
    rotary_size] per head. kv_down computes [kv_rank | rotary_size]; kv_norm normalizes the latent,
    from which key_up and value_up compute keys [head_dim] and values [value_size] per head.
    Names in Hugging Face's DeepSeek: q_a_proj, q_a_layernorm, q_b_proj (q_proj);
    kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj ([head_dim | value_size] per head); o_proj.
    """

    fused_projections = ()

    def __init__(self, key: jax.Array, spec: MlaSpec):
        keys = split(key, 6)
        self.spec: MlaSpec = spec
        D, H, K, V = spec.hidden_size, spec.num_heads, spec.head_dim, spec.value_size
        std, kv_rank, bias = spec.std, spec.kv_rank, spec.bias_qkv
        rank, width, of_key = spec.query_rank, H * spec.key_size, (K, spec.rotary_size)
        down, up = ("embed", "latent"), ("embed", "heads")
        of_latent = kv_rank, spec.rotary_size
        self.query = None if rank else Linear(keys[0], (D, width), up, std, parts=of_key)
        self.query_down = Linear(keys[1], (D, rank), down, std, bias) if rank else None
        self.query_norm = Norm(rank, spec.norm) if rank else None
        self.query_up = Linear(keys[0], (rank, width), up, std, parts=of_key) if rank else None
        self.kv_down = Linear(keys[2], (D, sum(of_latent)), down, std, bias, of_latent)
        self.kv_norm = Norm(kv_rank, spec.norm)
        self.key_up = Linear(keys[3], (kv_rank, H * K), up, std, parts=(K,))
        self.value_up = Linear(keys[4], (kv_rank, H * V), up, std, parts=(V,))
        annotate((self.query_up, self.key_up, self.value_up), reads_width=False)
        self.out = Linear(keys[5], (H * V, D), ("heads", "embed"), spec.out_std, spec.bias_out)
        self.sinks = parameter(jnp.zeros(H), "heads") if spec.sinks else None

    def __call__(
        self, h_BLD: Float[Array, "B l D"], ctx: Context, cache: tuple | None = None
    ) -> tuple[Float[Array, "B L D"], tuple | None, dict]:
        """(partial sums over tensor for the whole sequence, new cache, values of `reported`)."""
        aux, q_BLHI, kv_BLI = {}, self.queries(h_BLD, ctx), self.latents(h_BLD, ctx)
        if cache is None:
            out_BLHV, aux = self.expanded(q_BLHI, kv_BLI, ctx)
        else:
            out_BLHV, cache = self.absorbed(q_BLHI, kv_BLI, ctx, cache)
        return self.out(out_BLHV.reshape(*out_BLHV.shape[:2], -1), ctx), cache, aux

    def queries(self, h_BLD: jax.Array, ctx: Context) -> jax.Array:
        """Queries [B, L, H, key_size] of the whole sequence, their rotary parts rotated."""
        if self.query is not None:
            h_BLD = gather_sequence(h_BLD, ctx.sequence_sharded)
            q_BLI = stored(self.query(h_BLD, ctx), "query")
        else:
            assert self.query_down is not None and self.query_norm is not None and self.query_up
            latent_BLI = self.query_norm(stored(self.query_down(h_BLD, ctx), "query_down"))
            latent_BLI = gather_sequence(latent_BLI, ctx.sequence_sharded)
            q_BLI = stored(self.query_up(latent_BLI, ctx), "query_up")
        spec = self.spec
        q_BLHI = q_BLI.reshape(*q_BLI.shape[:2], -1, spec.key_size)
        q_BLHK, q_rotary = jnp.split(q_BLHI, [spec.head_dim], axis=-1)
        return jnp.concatenate((q_BLHK, self.rotated(q_rotary, ctx)), axis=-1)

    def latents(self, h_BLD: jax.Array, ctx: Context) -> jax.Array:
        """[B, L, kv_rank + rotary_size] of the whole sequence: normalized latents, rotated keys."""
        kv_BLI = stored(self.kv_down(h_BLD, ctx), "kv_down")
        latent, k_rotary = jnp.split(kv_BLI, [self.spec.kv_rank], axis=-1)
        kv_BLI = jnp.concatenate((self.kv_norm(latent), k_rotary), axis=-1)
        kv_BLI = gather_sequence(kv_BLI, ctx.sequence_sharded)
        latent, k_rotary = jnp.split(kv_BLI, [self.spec.kv_rank], axis=-1)
        k_rotary = self.rotated(k_rotary[:, :, None], ctx)[:, :, 0]
        return jnp.concatenate((latent, k_rotary), axis=-1)

    def expanded(self, q_BLHI, kv_BLI, ctx: Context) -> tuple[jax.Array, dict]:
        """`core` of queries [B, L, H, key_size] and latents, with keys and values of each head."""
        linears = self.key_up, self.value_up
        expand = FromLatents(self.spec.key_size, self.spec.kv_rank)
        if axis_size(CONTEXT_AXES) > 1:
            return self.over_context(q_BLHI, kv_BLI[:, :, None], expand, linears, ctx)
        return self.core(q_BLHI, *expand(linears, kv_BLI[:, :, None], ctx), ctx)

    def update(self, aux: dict[str, jax.Array]) -> None:
        clip, spec = self.spec.clip, self.spec
        if clip is None:
            return
        eta_H = clip.shrinkage(aux[LARGEST])
        parts = (eta_H**clip.alpha, spec.head_dim), (eta_H, spec.rotary_size)  # one rotary key
        scale_heads(self.query or self.query_up, *parts)
        scale_heads(self.key_up, (eta_H ** (1 - clip.alpha), spec.head_dim))

    def absorbed(self, q_BLHI, kv_BLI, ctx: Context, cache: tuple):
        """(output, new cache) with the up-projections absorbed. The latents are keys and values of
        one head."""
        assert ctx.cache_places is not None and ctx.segments_BL is None
        spec, size = self.spec, q_BLHI.shape[-1]
        q_BLHK, q_rotary = jnp.split(q_BLHI, [spec.head_dim], axis=-1)
        q_latent = transposed_product(self.key_up, q_BLHK, ctx)
        q_absorbed = jnp.concatenate((q_latent, q_rotary), axis=-1)
        scores = dataclasses.replace(spec.score_spec(), scale=spec.scale or size**-0.5)
        settings = ctx.cache_places, scores, self.sink_logits()
        out, cache = cached_attention(q_absorbed, (kv_BLI[:, :, None],), cache, *settings)
        return product(self.value_up, out[..., : spec.kv_rank], ctx), cache

    def init_cache(self, size: CacheSize) -> tuple[jax.Array, ...]:
        """Pages of latents with their rotary key."""
        weight = self.kv_down.weight[...]
        return (empty_pages(size, 1, weight.shape[-1], weight.dtype),)


def product(linear: Linear, x_BLHI: jax.Array, ctx: Context) -> jax.Array:
    """[B, L, H, O]: the inputs of each head times its columns of a weight without bias."""
    H, lora = x_BLHI.shape[2], linear.lora
    y_BLHO = jnp.einsum("BLHI,IHO->BLHO", x_BLHI, of_heads(linear.weight, H))
    if lora is None:
        return y_BLHO
    low_BLHR = jnp.einsum("BLHI,IR->BLHR", x_BLHI, unshard_parameter(lora.a))
    low_BLHR = lora.scale * lora.chosen(low_BLHR, ctx)
    return y_BLHO + jnp.einsum("BLHR,RHO->BLHO", low_BLHR, of_heads(lora.b, H))


def transposed_product(linear: Linear, y_BLHO: jax.Array, ctx: Context) -> jax.Array:
    """[B, L, H, I]: the outputs of each head times its transposed columns, as in `product`."""
    H, lora = y_BLHO.shape[2], linear.lora
    x_BLHI = jnp.einsum("BLHO,IHO->BLHI", y_BLHO, of_heads(linear.weight, H))
    if lora is None:
        return x_BLHI
    low_BLHR = jnp.einsum("BLHO,RHO->BLHR", y_BLHO, of_heads(lora.b, H))
    low_BLHR = lora.scale * lora.chosen(low_BLHR, ctx)
    return x_BLHI + jnp.einsum("BLHR,IR->BLHI", low_BLHR, unshard_parameter(lora.a))


def of_heads(weight: nnx.Param, num_heads: int) -> jax.Array:
    """[input, heads, output of a head]."""
    array = unshard_parameter(weight)
    return array.reshape(array.shape[0], num_heads, -1)
