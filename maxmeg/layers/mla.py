"""Multi-latent attention (DeepSeek-V2, 2024): keys and values of all heads from one short latent.

A token is remembered by its latent and one rotary key that all heads share. In decoding the
projections up from the latent are absorbed by queries and outputs: attention then has one key
head, and the latents are its values.

Letters beside the legend's: R rank of a latent, N size of the part of a head that rotates (K is
the part that does not), Z = R + N.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.attention import Attention, AttentionSpec, Cache
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Widths
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.decode_attention.call import PagedCache, decode_attention, write_pages
from maxmeg.ops.rope import rotate
from maxmeg.parallel.collectives import gather_sequence, stored, unshard_parameter


@dataclasses.dataclass(frozen=True)
class MlaSpec(AttentionSpec):
    """As AttentionSpec, with as many key heads as query heads; head_dim is the size of the part of
    a head that is not rotated. query_rank 0: queries are one projection. norm: of the latents.
    bias_qkv: of the projections down to the latents and to the rotary key."""

    name = "mla"
    reads = "shard"  # latents are shorter than the residual stream

    query_rank: int = 0
    kv_rank: int = 512
    rotary_size: int = 64
    value_size: int = 128
    norm: NormSpec = NormSpec()

    @property
    def key_size(self) -> int:
        return self.head_dim + self.rotary_size

    @property
    def head_output_size(self) -> int:
        return self.value_size

    def make(self, key: jax.Array) -> "Mla":
        return Mla(key, self)

    def weights(self) -> int:
        """Those of the latents' norms are counted too, as in Megatron-LM."""
        D, rank, size = self.hidden_size, self.query_rank, self.num_heads * self.key_size
        queries = rank * (D + size + 1) if rank else D * size
        up = self.num_heads * (self.head_dim + self.value_size)
        keys = self.kv_rank * (D + up + 1)
        return queries + keys + D * (self.rotary_size + self.num_heads * self.value_size)

    def widths(self, kv_copies: int = 1) -> Widths:
        queries, latent = self.num_heads * self.key_size, self.kv_rank + self.rotary_size
        stored = {
            **({"query_down": self.query_rank} if self.query_rank else {}),
            "query_up" if self.query_rank else "query": queries,
            "kv_down": latent,
            "key_up": self.num_heads * self.head_dim,
            "value_up": self.num_heads * self.value_size,
        }
        return self._with_heads(stored, (latent, self.query_rank or self.hidden_size))


class LatentCache(typing.NamedTuple):
    """Of each token so far its normalized latent and its rotary key, side by side."""

    kv_BMZ: jax.Array

    def paged(self, lengths_B: jax.Array) -> PagedCache:
        """One key head. Its values are the keys themselves: a copy of what they need of them,
        their first R numbers, would be as long as the cache."""
        kv_BM1Z = self.kv_BMZ[:, :, None]
        return Cache(kv_BM1Z, kv_BM1Z).paged(lengths_B)

    def with_first(self, kv_BLZ: jax.Array) -> "LatentCache":
        """An empty cache with the first tokens of all rows."""
        return LatentCache(self.kv_BMZ.at[:, : kv_BLZ.shape[1]].set(kv_BLZ))

    def with_next(self, kv_BLZ: jax.Array, lengths_B: jax.Array) -> "LatentCache":
        """The cache with each row's newest tokens, the last of its lengths_B."""
        pages = self.paged(lengths_B)
        new_BL1Z, table_BN = kv_BLZ[:, :, None], pages.page_table
        kv_PS1Z = write_pages(pages.k_pages, new_BL1Z, table_BN, lengths_B)
        return LatentCache(kv_PS1Z.reshape(self.kv_BMZ.shape))


class Mla(Attention):
    """Heads are sharded over tensor, the projections down to latents are whole on every device.

    query_down, query_norm, query_up (without a query_rank: query) make queries, a head's [K | N]
    in a row; kv_down makes [R | N], kv_norm normalizes R, of which key_up makes keys, a head's K
    in a row, and value_up values. In Hugging Face's DeepSeek: q_a_proj, q_a_layernorm, q_b_proj
    (q_proj); kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj (a head's [K | V] in a row); o_proj.
    """

    def __init__(self, key: jax.Array, spec: MlaSpec):
        keys = jax.random.split(key, 6)
        self.spec: MlaSpec = spec
        D, H, R, N = spec.hidden_size, spec.num_heads, spec.kv_rank, spec.rotary_size
        K, V, std = spec.head_dim, spec.value_size, spec.std
        rank, width = spec.query_rank, H * (K + N)
        down, up = ("embed", "latent"), ("embed", "heads")
        self.query = None if rank else Linear(keys[0], (D, width), up, std)
        self.query_down = Linear(keys[1], (D, rank), down, std, spec.bias_qkv) if rank else None
        self.query_norm = Norm(rank, spec.norm) if rank else None
        self.query_up = Linear(keys[0], (rank, width), up, std) if rank else None
        self.kv_down = Linear(keys[2], (D, R + N), down, std, spec.bias_qkv)
        self.kv_norm = Norm(R, spec.norm)
        self.key_up = Linear(keys[3], (R, H * K), up, std)
        self.value_up = Linear(keys[4], (R, H * V), up, std)
        self.out = Linear(keys[5], (H * V, D), ("heads", "embed"), spec.out_std, spec.bias_out)
        self.sinks = nnx.Param(jnp.zeros(H), axes=("heads",)) if spec.sinks else None

    def __call__(
        self, h_BLD: Float[Array, "B l D"], ctx: Context, cache: LatentCache | None = None
    ) -> tuple[Float[Array, "B L D"], LatentCache | None, dict]:
        """Of this device's part of the sequence: partial sums over tensor for the whole of it, the
        cache with this call's tokens, no auxiliary."""
        q_BLHI, kv_BLZ = self.queries(h_BLD, ctx), self.latents(h_BLD, ctx)
        if cache is None:
            out_BLHV = self.expanded(q_BLHI, kv_BLZ, ctx)
        elif isinstance(ctx.cache_offset, int):
            assert ctx.cache_offset == 0 and ctx.segments_BL is None
            out_BLHV, cache = self.expanded(q_BLHI, kv_BLZ, ctx), cache.with_first(kv_BLZ)
        else:
            out_BLHV, cache = self.absorbed(q_BLHI, kv_BLZ, ctx, cache)
        return self.out(out_BLHV.reshape(*out_BLHV.shape[:2], -1), ctx), cache, {}

    def queries(self, h_BLD: jax.Array, ctx: Context) -> jax.Array:
        """[B, L, H, K + N] of the whole sequence, the last N rotated."""
        if self.query is not None:
            h_BLD = gather_sequence(h_BLD, ctx.sequence_sharded)
            q_BLI = stored(self.query(h_BLD, ctx), "query")
        else:
            assert self.query_down is not None and self.query_norm is not None and self.query_up
            low_BLR = self.query_norm(stored(self.query_down(h_BLD, ctx), "query_down"))
            low_BLR = gather_sequence(low_BLR, ctx.sequence_sharded)
            q_BLI = stored(self.query_up(low_BLR, ctx), "query_up")
        spec = self.spec
        q_BLHI = q_BLI.reshape(*q_BLI.shape[:2], -1, spec.head_dim + spec.rotary_size)
        q_BLHK, q_BLHN = jnp.split(q_BLHI, [spec.head_dim], axis=-1)
        return jnp.concatenate((q_BLHK, self.rotated(q_BLHN, ctx)), axis=-1)

    def latents(self, h_BLD: jax.Array, ctx: Context) -> jax.Array:
        """[B, L, Z] of the whole sequence: normalized latents and rotated keys."""
        down_BLZ = stored(self.kv_down(h_BLD, ctx), "kv_down")
        low_BLR, k_BLN = jnp.split(down_BLZ, [self.spec.kv_rank], axis=-1)
        kv_BLZ = jnp.concatenate((self.kv_norm(low_BLR), k_BLN), axis=-1)
        kv_BLZ = gather_sequence(kv_BLZ, ctx.sequence_sharded)
        low_BLR, k_BLN = jnp.split(kv_BLZ, [self.spec.kv_rank], axis=-1)
        return jnp.concatenate((low_BLR, self.rotated(k_BLN[:, :, None], ctx)[:, :, 0]), axis=-1)

    def rotated(self, x_BLHN: jax.Array, ctx: Context) -> jax.Array:
        rotary = self.spec.rotary
        return x_BLHN if rotary is None else rotate(x_BLHN, ctx.positions_BL, rotary)

    def expanded(self, q_BLHI: jax.Array, kv_BLZ: jax.Array, ctx: Context) -> jax.Array:
        """Attention of queries [B, L, H, K + N] with every head's own keys and values."""
        heads = q_BLHI.shape[:3]
        low_BLR, k_BLN = jnp.split(kv_BLZ, [self.spec.kv_rank], axis=-1)
        k_BLHK = stored(self.key_up(low_BLR, ctx), "key_up").reshape(*heads, -1)
        v_BLHV = stored(self.value_up(low_BLR, ctx), "value_up").reshape(*heads, -1)
        k_BLHN = jnp.broadcast_to(k_BLN[:, :, None], (*heads, k_BLN.shape[-1]))
        return self.core(q_BLHI, jnp.concatenate((k_BLHK, k_BLHN), axis=-1), v_BLHV, ctx)

    def absorbed(self, q_BLHI, kv_BLZ, ctx: Context, cache: LatentCache):
        """Output and new cache for tokens that follow ctx.cache_offset others in their row."""
        assert ctx.cache_offset is not None and ctx.segments_BL is None
        spec, (B, L, H, size) = self.spec, q_BLHI.shape
        lengths_B = jnp.broadcast_to(ctx.cache_offset + L, (B,)).astype(jnp.int32)
        cache = cache.with_next(kv_BLZ, lengths_B)
        q_BLHK, q_BLHN = jnp.split(q_BLHI, [spec.head_dim], axis=-1)
        key_RHK = matrix(self.key_up).reshape(spec.kv_rank, H, -1)
        q_BLHR = jnp.einsum("BLHK,RHK->BLHR", q_BLHK, key_RHK)
        q_BLHZ = jnp.concatenate((q_BLHR, q_BLHN), axis=-1)
        scores = dataclasses.replace(self.scores(), scale=spec.scale or size**-0.5)
        out_BLHZ, _ = decode_attention(q_BLHZ, cache.paged(lengths_B), scores, self.sink_logits())
        value_RHV = matrix(self.value_up).reshape(spec.kv_rank, H, -1)
        return jnp.einsum("BLHR,RHV->BLHV", out_BLHZ[..., : spec.kv_rank], value_RHV), cache

    def init_cache(self, batch: int, length: int) -> LatentCache:
        """An empty cache for `batch` sequences of `length` tokens, in the weights' dtype."""
        weight = self.kv_down.weight[...]
        return LatentCache(jnp.zeros((batch, length, weight.shape[-1]), weight.dtype))


def matrix(linear: Linear) -> jax.Array:
    """What a projection without bias multiplies by, its adapter's product added."""
    weight, lora = unshard_parameter(linear.weight), linear.lora
    if lora is None:
        return weight
    return weight + ((lora.scale * unshard_parameter(lora.a)) @ unshard_parameter(lora.b))
