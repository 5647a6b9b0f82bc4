"""Attention masks as one interval of keys per query, and the blocks that kernels visit.

With causal and windowed attention, local chunks and packed documents, query i sees the keys
lower[i] <= j < upper[i], and neither bound ever decreases from one query to the next. Two int32
arrays of length L are therefore the whole mask: a kernel compares positions with them. Small tables
say which blocks a kernel visits and which of these need no mask.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class FlashSpec:
    """As ops.attention.spec.ScoreSpec; segments: a query sees keys of its own segment only."""

    causal: bool = True
    window: int = 0
    chunk: int = 0
    segments: bool = False
    softcap: float = 0.0
    scale: float = 0.0

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "softcap", "scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")


@dataclasses.dataclass(frozen=True)
class MaskSides:
    """Whether a lower, and an upper, bound can mask keys of a block; known when traced."""

    lower: bool
    upper: bool

    @property
    def any(self) -> bool:
        return self.lower or self.upper


def mask_sides(spec: FlashSpec, key_length: int, key_block: int) -> MaskSides:
    local = bool(spec.window or spec.chunk or spec.segments)
    return MaskSides(lower=local, upper=local or spec.causal or key_length % key_block != 0)


def visible_intervals(
    spec: FlashSpec,
    query_length: int,
    key_length: int,
    offset: Int[Array, "*rows"] | int = 0,
    query_segments_BL: Int[Array, "B L"] | None = None,
    key_segments_BM: Int[Array, "B M"] | None = None,
) -> tuple[Int[Array, "A L"], Int[Array, "A L"]]:
    """(lower, upper) bounds of each query's keys; A is B with segments or an offset per row, else
    1.

    Query i is at position offset + i, key j at j. offset: also one per query [B, L], with which
    positions ascend. Rows must be valid as defined by `documents`.
    """
    offset_AL = jnp.asarray(offset, jnp.int32)
    offset_AL = offset_AL if offset_AL.ndim == 2 else offset_AL.reshape(-1, 1)
    position_AL = offset_AL + jnp.arange(query_length, dtype=jnp.int32)
    lower_AL, upper_AL = jnp.zeros_like(position_AL), jnp.full_like(position_AL, key_length)
    if spec.causal:
        upper_AL = jnp.minimum(upper_AL, position_AL + 1)
    if spec.window:
        lower_AL = jnp.maximum(lower_AL, position_AL - spec.window + 1)
        upper_AL = jnp.minimum(upper_AL, position_AL + spec.window)
    if spec.chunk:
        start_AL = position_AL // spec.chunk * spec.chunk
        lower_AL = jnp.maximum(lower_AL, start_AL)
        upper_AL = jnp.minimum(upper_AL, start_AL + spec.chunk)
    if query_segments_BL is not None and key_segments_BM is not None:
        first_BL, end_BL, _ = documents(query_segments_BL, key_segments_BM)
        lower_AL, upper_AL = jnp.maximum(lower_AL, first_BL), jnp.minimum(upper_AL, end_BL)
    bounds = [jnp.clip(bound, 0, key_length) for bound in (lower_AL, upper_AL)]
    return bounds[0].astype(jnp.int32), bounds[1].astype(jnp.int32)


def prepare(
    spec: FlashSpec,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    offset: Int[Array, "*rows"] | int,
    query_segments_BL: Int[Array, "B L"] | None,
    key_segments_BM: Int[Array, "B M"] | None,
) -> tuple[FlashSpec, Int[Array, "A L"], Int[Array, "A L"]]:
    """(spec with its scale set, lower, upper). Segments of keys default to those of the queries.

    ValueError if the segments do not fit spec.segments or the lengths.
    """
    L, M = q_BLHK.shape[1], k_BMGK.shape[1]
    if spec.segments != (query_segments_BL is not None):
        raise ValueError(f"spec.segments={spec.segments} needs query_segments_BL exactly if true")
    if spec.segments and key_segments_BM is None:
        if L != M:
            raise ValueError(f"{L} queries and {M} keys need key_segments_BM")
        key_segments_BM = query_segments_BL
    spec = dataclasses.replace(spec, scale=spec.scale or q_BLHK.shape[-1] ** -0.5)
    return spec, *visible_intervals(spec, L, M, offset, query_segments_BL, key_segments_BM)


def documents(
    query_segments_BL: Int[Array, "B L"], key_segments_BM: Int[Array, "B M"]
) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Bool[Array, " B"]]:
    """(first key of each query's document, the key after the last, which rows are valid).

    In a valid row all documents are contiguous and have the same order in queries and keys. Ids
    need not be sorted. Sorts instead of comparing, so that no array has L x M elements.
    """
    key_segments_BM = key_segments_BM.astype(jnp.int32)
    order_BM = jnp.argsort(key_segments_BM, axis=1, stable=True).astype(jnp.int32)
    sorted_BM = jnp.take_along_axis(key_segments_BM, order_BM, axis=1)

    def search(side: str) -> jax.Array:
        find = jax.vmap(lambda keys_M, ids_L: jnp.searchsorted(keys_M, ids_L, side=side))
        return find(sorted_BM, query_segments_BL.astype(jnp.int32)).astype(jnp.int32)

    left_BL, right_BL = search("left"), search("right")
    has_keys_BL = right_BL > left_BL

    def key(place_BL: jax.Array) -> jax.Array:
        return jnp.take_along_axis(order_BM, place_BL, axis=1, mode="clip")

    first_BL, end_BL = key(left_BL), key(right_BL - 1) + 1
    is_whole_BL = ~has_keys_BL | (end_BL - first_BL == right_BL - left_BL)
    previous_BL = jax.lax.cummax(jnp.where(has_keys_BL, end_BL, 0), axis=1)
    first_BL = jnp.where(has_keys_BL, first_BL, previous_BL)
    end_BL = jnp.where(has_keys_BL, end_BL, previous_BL)
    is_ordered_BL = (jnp.diff(first_BL, axis=1) >= 0) & (jnp.diff(end_BL, axis=1) >= 0)
    return first_BL, end_BL, jnp.all(is_whole_BL, axis=1) & jnp.all(is_ordered_BL, axis=1)


def pad_rows(bound_AL: jax.Array, block: int) -> jax.Array:
    """Pad to whole blocks of queries with the bound of the last query."""
    return jnp.pad(bound_AL, ((0, 0), (0, -bound_AL.shape[1] % block)), mode="edge")


def key_ranges(
    lower_AL: jax.Array, upper_AL: jax.Array, rows: int, keys: int, key_length: int
) -> Int[Array, "A N 4"]:
    """The blocks of `keys` keys of each block of `rows` queries: first, first full, end full, end.

    Blocks first <= j < end are visited (at least one). In blocks first full <= j < end full every
    query sees every key, so that they need no mask.
    """
    lower_AL, upper_AL = pad_rows(lower_AL, rows), pad_rows(upper_AL, rows)
    return _ranges(
        first=lower_AL[:, ::rows] // keys,
        end=-(-upper_AL[:, rows - 1 :: rows] // keys),
        first_full=-(-lower_AL[:, rows - 1 :: rows] // keys),
        end_full=upper_AL[:, ::rows] // keys,
        count=-(-key_length // keys),
    )


def query_ranges(
    lower_AL: jax.Array, upper_AL: jax.Array, rows: int, keys: int, key_length: int
) -> Int[Array, "A N 4"]:
    """The blocks of `rows` queries of each block of `keys` keys, as in `key_ranges`.

    Keys past the end count as seen: they affect only their own, unused gradients.
    """
    lower_AL, upper_AL = pad_rows(lower_AL, rows), pad_rows(upper_AL, rows)
    begin_N = jnp.arange(-(-key_length // keys), dtype=jnp.int32) * keys
    end_N = jnp.minimum(begin_N + keys, key_length)

    def count(blocks_AT: jax.Array, bound_N: jax.Array, side: str) -> jax.Array:
        """Number of leading blocks with values below (left), or at most (right), each bound."""
        find = jax.vmap(lambda blocks_T: jnp.searchsorted(blocks_T, bound_N, side=side))
        return find(blocks_AT).astype(jnp.int32)

    return _ranges(
        first=count(upper_AL[:, rows - 1 :: rows], begin_N, "right"),
        end=count(lower_AL[:, ::rows], end_N, "left"),
        first_full=count(upper_AL[:, ::rows], end_N, "left"),
        end_full=count(lower_AL[:, rows - 1 :: rows], begin_N, "right"),
        count=lower_AL.shape[1] // rows,
    )


def _ranges(
    first: jax.Array, end: jax.Array, first_full: jax.Array, end_full: jax.Array, count: int
) -> jax.Array:
    first = jnp.clip(first, 0, count - 1)
    end = jnp.clip(end, first + 1, count)
    first_full = jnp.clip(first_full, first, end)
    end_full = jnp.clip(end_full, first_full, end)
    return jnp.stack([first, first_full, end_full, end], axis=-1).astype(jnp.int32)


def visible(positions: Any, lower: Any, upper: Any, sides: MaskSides) -> Any:
    """Mask of the keys at `positions`; None: all are seen. Bounds of other sides are not read."""
    if sides.lower and sides.upper:
        return (positions >= lower) & (positions < upper)
    if sides.upper:
        return positions < upper
    return positions >= lower if sides.lower else None
