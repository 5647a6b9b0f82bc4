"""Cross attention: a decoder's queries read the keys and values of an encoder's output."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.distributed.halves import in_order, whole_rows
from maxmeg.layers.attention import Attention, AttentionSpec, normalized
from maxmeg.layers.context import Context
from maxmeg.layers.linear import project
from maxmeg.ops.attention.call import attention_with_lse, output_and_largest
from maxmeg.ops.cache import CacheSize, source_attention
from maxmeg.parallel.collectives import axis_size, gather_exact, stored


@dataclasses.dataclass(frozen=True)
class CrossSpec(AttentionSpec):
    """As of attention without a causal mask."""

    name = "cross"
    reads_memory = True

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        plain = super().settings(config, parallel, mixer)
        return plain | {"causal": False, "rotary": None, "buckets": 0, "distance": 0}

    def multiplications(self, length: int, memory_length: int = 0) -> tuple[float, float]:
        weights, scores = super().multiplications(length)
        of_memory = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        weights += (memory_length - length) * of_memory
        return weights, scores * memory_length / max(length, 1)

    def make(self, key: jax.Array) -> "CrossAttention":
        return CrossAttention(key, self)


class CrossAttention(Attention):
    """out(attention(query x, key memory, value memory)); heads are sharded over tensor.

    Devices along context gather the keys and values of the whole source.
    """

    fused_projections = (("key", "value"),)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: tuple | None = None
    ) -> tuple[Float[Array, "B L D"], tuple | None, dict]:
        """(partial sums over tensor, new cache, values of `reported`). Without rows of memory, its
        keys and values are in the cache."""
        assert ctx.memory is not None
        (memory_BMD, memory_ctx), (B, L) = ctx.memory, h_BLD.shape[:2]
        new = self.keys_and_values(memory_BMD, memory_ctx) if memory_BMD.size else ()
        q_BLI = stored(self.query(h_BLD, ctx), "query")
        q_BLHK = normalized(q_BLI, self.query_norm, (B, L, -1, self.spec.head_dim))
        if cache is not None:
            assert ctx.cache_places is not None
            settings = ctx.cache_places, self.spec.score_spec()
            out_BLHK, cache = source_attention(q_BLHK, new, cache, *settings)
            return self.out(out_BLHK.reshape(B, L, -1), ctx), cache, {}
        k_BMGK, v_BMGK = new  # pyright: ignore
        operands = self.operands(q_BLHK, ctx)
        if (size := axis_size(ctx.context_axes)) > 1:
            kv_BMGI = gather_exact(jnp.concatenate((k_BMGK, v_BMGK), axis=-1), ctx.context_axes, 1)
            k_BMGK, v_BMGK = jnp.split(in_order(kv_BMGI, size), 2, axis=-1)
        if operands.dropout is not None:
            first = ctx.places(L) - jnp.arange(L)
            dropout = dataclasses.replace(operands.dropout, first_query=first)
            operands = operands._replace(dropout=dropout)
        segments = self.segments(ctx, memory_ctx)
        documents = {"segments_BL": segments[0], "key_segments_BM": segments[1]}
        operands = operands._replace(**documents, mask_B1LM=None)
        call = q_BLHK, k_BMGK, v_BMGK, self.spec.score_spec(ctx), operands
        results = attention_with_lse(*call, backend=self.spec.backend)
        out_BLHK, aux = self.reported(*output_and_largest(*results))
        return self.out(out_BLHK.reshape(B, L, -1), ctx), None, aux

    def keys_and_values(self, memory_BMD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """[B, M, G, K] each."""
        assert self.value is not None
        k_BMI, v_BMI = project((self.key, self.value), memory_BMD, ctx)
        heads = *memory_BMD.shape[:2], -1, self.spec.head_dim
        k_BMGK = normalized(stored(k_BMI, "key"), self.key_norm, heads)
        return k_BMGK, stored(v_BMI, "value").reshape(heads)

    def init_cache(self, size: CacheSize) -> tuple[jax.Array, ...]:
        """Pages of keys and of values of each lane's source: [lanes, pages, slots, G, K]."""
        pages = size.lanes * size.source_pages
        arrays = super().init_cache(dataclasses.replace(size, pages=pages))
        return tuple(array.reshape(size.lanes, -1, *array.shape[1:]) for array in arrays)

    def segments(self, ctx: Context, memory_ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Of queries and keys: a query sees the keys of its own segment."""
        # Padding of the target reads the source too: it sees keys, and nothing reads it.
        queries_BL = jnp.ones(ctx.positions_BL.shape, jnp.int32)
        return queries_BL, whole_rows(jnp.asarray(memory_ctx.segments_BL))
