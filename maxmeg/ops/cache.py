"""The cache of a model that generates text: what its layers keep of earlier tokens.

Attention keeps keys and values in pages, other mixers a state of fixed size. Every mixer has one
array for all layers of its group: [layers, pages, slots, heads, size] or [layers, lanes, ...]. The
loop over layers carries these arrays, and each layer reads and writes its part in place.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxmeg.ops.attention.spec import ScoreSpec
from maxmeg.ops.backend import target_device
from maxmeg.ops.decode_attention.call import PagedCache, decode_attention, write_pages


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Of the cache on one device. slots: tokens of a page. lanes: requests at a time. source_pages:
    pages of each lane for the source of an encoder-decoder."""

    pages: int
    slots: int
    lanes: int
    source_pages: int = 0


def empty_pages(size: CacheSize, heads: int, head_size: int, dtype) -> jax.Array:
    """[pages, slots, heads, head_size]; on a CPU the bits of bfloat16 (`PagedCache`)."""
    if jnp.dtype(dtype).itemsize == 2 and not target_device().is_cuda:
        dtype = jnp.uint16
    return jnp.zeros((size.pages, size.slots, heads, head_size), dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachePlaces:
    """Where the tokens of a call are in the cache.

    table_BN: the pages of each row. starts_B: number of its tokens in the cache. counts_B: number
    of new tokens, which come first in the row; the others are padding, and 0 is an idle row.
    lanes_B: where the row's states of fixed size are. layer: of the group (set by the stack).
    sources_B: number of tokens of the row's source, if the model is an encoder-decoder.
    """

    table_BN: Int[Array, "B N"]
    starts_B: Int[Array, " B"]
    counts_B: Int[Array, " B"]
    lanes_B: Int[Array, " B"]
    layer: jax.Array | int = 0
    sources_B: Int[Array, " B"] | None = None

    def is_token(self, length: int) -> Bool[Array, "B L"]:
        """True where a row of this length holds a token, False for padding."""
        return jnp.arange(length) < self.counts_B[:, None]


def lane_states(
    states: Shaped[Array, "layers lanes ..."], places: CachePlaces
) -> Shaped[Array, "B ..."]:
    """The state of each row before its new tokens: zeros for a row that begins."""
    rows = states[places.layer, places.lanes_B]
    has_state_B = places.starts_B > 0
    return jnp.where(has_state_B.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0)


def with_lane_states(
    states: Shaped[Array, "layers lanes ..."], rows: Shaped[Array, "B ..."], places: CachePlaces
) -> Shaped[Array, "layers lanes ..."]:
    """`states` with those of the rows after their new tokens; idle rows change none."""
    lanes_B = jnp.where(places.counts_B > 0, places.lanes_B, states.shape[1])
    return states.at[places.layer, lanes_B].set(rows, mode="drop")


def cached_attention(
    q_BLHK: Float[Array, "B L H K"],
    new: tuple[Float[Array, "B M G K"], ...],
    pool: tuple[Shaped[Array, "layers P S G K"], ...],
    places: CachePlaces,
    scores: ScoreSpec,
    sinks_H: jax.Array | None = None,
    bias_NH: jax.Array | None = None,
    lengths_B: Int[Array, " B"] | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(output, pool with the new keys and values): causal attention over each row's tokens.

    new: keys and values of the tokens; one array serves as both; () if all are in the pool.
    lengths_B: number of keys in the pool after them; None: up to those of the L queries.
    """
    number, pages = pool[0].shape[:2]
    table_BN = places.table_BN + places.layer * pages
    flat = [array.reshape(number * pages, *array.shape[2:]) for array in pool]
    if new:
        where = table_BN, places.starts_B, places.counts_B
        flat = [write_pages(a, added, *where) for a, added in zip(flat, new, strict=True)]
    if lengths_B is None:  # padding sees old slots
        lengths_B = jnp.where(places.counts_B > 0, places.starts_B + q_BLHK.shape[1], 0)
    cache = PagedCache(flat[0], flat[-1], table_BN, lengths_B)
    out_BLHV, _ = decode_attention(q_BLHK, cache, scores, sinks_H, bias_NH)
    return out_BLHV, tuple(a.reshape(p.shape) for a, p in zip(flat, pool, strict=True))


def source_attention(
    q_BLHK: Float[Array, "B L H K"],
    new: tuple[Float[Array, "B M G K"], ...],
    pool: tuple[Shaped[Array, "layers lanes P S G K"], ...],
    places: CachePlaces,
    scores: ScoreSpec,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """As `cached_attention`, to the source that the row's lane has pages for."""
    (layers, _, pages), sources_B = pool[0].shape[:3], places.sources_B
    assert sources_B is not None
    table_BN = pages * places.lanes_B[:, None] + jnp.arange(pages, dtype=jnp.int32)
    starts_B = jnp.zeros_like(sources_B)
    source_places = CachePlaces(table_BN, starts_B, sources_B, places.lanes_B, places.layer)
    flat = tuple(array.reshape(layers, -1, *array.shape[3:]) for array in pool)
    out_BLHV, flat = cached_attention(q_BLHK, new, flat, source_places, scores, lengths_B=sources_B)
    return out_BLHV, tuple(a.reshape(p.shape) for a, p in zip(flat, pool, strict=True))
