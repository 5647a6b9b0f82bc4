"""Layers and models with a cache, each row in pages of its own."""

import jax
import jax.numpy as jnp

from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.ops.cache import CachePlaces, CacheSize

SLOTS = 4


def size_of(rows: int, length: int) -> CacheSize:
    """A cache for rows of `length` tokens."""
    return CacheSize(rows * -(-length // SLOTS), SLOTS, rows)


def places_of(size: CacheSize, starts_B, counts_B) -> CachePlaces:
    """Rows, the last ones first, with `counts_B` new tokens after `starts_B` of them."""
    rows_B = jnp.arange(size.lanes)[::-1]
    table_BN = jnp.arange(size.pages, dtype=jnp.int32).reshape(size.lanes, -1)[rows_B]
    starts_B, counts_B = (
        jnp.broadcast_to(jnp.asarray(a, jnp.int32), rows_B.shape) for a in (starts_B, counts_B)
    )
    return CachePlaces(table_BN, starts_B, counts_B, rows_B)


def empty(layer, size: CacheSize):
    """The empty cache of a single layer."""
    return jax.tree.map(lambda array: array[None], layer.init_cache(size))


def in_order(pages: jax.Array, length: int) -> jax.Array:
    """The first `length` tokens [rows, length, ...] of a single layer's pages."""
    size = CacheSize(pages.shape[1], SLOTS, pages.shape[1] // -(-length // SLOTS))
    table_BN = places_of(size, 0, 0).table_BN
    return pages[0][table_BN].reshape(size.lanes, -1, *pages.shape[3:])[:, :length]


def context(size: CacheSize, starts_B, length: int, counts_B=None) -> Context:
    """Of `length` tokens of each row, all or the first ones of which count."""
    places = places_of(size, starts_B, length if counts_B is None else counts_B)
    positions_BL = places.starts_B[:, None] + jnp.arange(length)
    return Context(positions_BL, cache_places=places, sequence_sharded=False)


def forward_cached(model: LM, ids_BL: jax.Array, start, cache, size: CacheSize):
    """(logits after the last token, cache)."""
    ctx = context(size, start, ids_BL.shape[1])
    h_BLD, cache, _ = model.hidden(ids_BL, ctx, cache)
    return model.logits(h_BLD[:, -1:])[:, 0], cache
