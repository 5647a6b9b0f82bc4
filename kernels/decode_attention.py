"""Decode attention over a paged cache, for Hopper on Mosaic-GPU. Not yet run on a GPU: compiled,
interpreted.

The queries of a row that share a key/value head are the rows of one matrix. A program of one
warpgroup reads a part of the row's keys (split keys, as in FlashDecoding): it copies pages into
rings in shared memory (TMA), some blocks ahead of the block that it multiplies (WGMMA). Two
programs share a multiprocessor, so that one computes while the other one waits for copies. The
parts are merged outside of the kernel by their log-sum-exps.

Blocks of keys that no query sees are not read. In partly visible blocks, values that no query sees
are overwritten with zeros, because zero weights times NaN are NaN.

Letters in this file: R queries times heads of a group, C parts of a row's keys.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from . import mosaic
from .attention_forward import (
    ForwardPlan,
    Scores,
    Tile,
    online_softmax,
    visible_keys,
    visits,
)
from .intervals import FlashSpec, MaskSides, key_ranges, visible_intervals
from .mosaic import LOG2E, MATRIX, ROWS, WARPGROUP_ROWS, pl, plgpu, spread

AnyArray = jax.Array | jax.ShapeDtypeStruct
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
ROW_TILE = 8  # copies of queries and results have a multiple of this many rows
MULTIPROCESSORS = 132  # of an H100 and an H200
PART_COST = 4  # cost of starting and ending a program, in blocks read
PARTS = 128  # at most, per row
PART_BLOCKS = 128  # at most, per part, so that a long row does not finish after short ones
CLEARED_COLUMNS = 64  # at a time: more do not fit in the registers at head dim 256
DECODE_TILES = {  # by head dims of keys and of values
    (64, 64): Tile(keys=64, stages=6, consumers=1),
    (80, 80): Tile(keys=64, stages=5, consumers=1),
    (96, 96): Tile(keys=64, stages=4, consumers=1),
    (128, 128): Tile(keys=64, stages=3, consumers=1),
    (192, 128): Tile(keys=64, stages=5, consumers=1),
    (256, 256): Tile(keys=64, stages=3, consumers=1),
}
ALONE = ((192, 128), (256, 256))  # one program of these fits on a multiprocessor, two of others


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """A shape to compile, check and time; every row has `length` keys; value_dim 0: head_dim."""

    batch: int
    length: int
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    value_dim: int = 0
    page: int = 64
    queries: int = 1
    spec: FlashSpec = FlashSpec()

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim


TUNED_SHAPES = {
    **{
        f"llama-{batch}x{length // 1024}k": DecodeShape(batch, length)
        for batch, length in ((1, 131072), (8, 32768), (64, 8192), (256, 1024), (256, 4096))
    },
    "llama-64x8k-page16": DecodeShape(64, 8192, page=16),
    "llama-64x8k-page128": DecodeShape(64, 8192, page=128),
    "llama-64x8k-draft": DecodeShape(64, 8192, queries=4),
    "mistral-64x32k-window": DecodeShape(64, 32768, spec=FlashSpec(window=4096)),
    "llama4-64x32k-chunks": DecodeShape(64, 32768, 40, 8, spec=FlashSpec(chunk=8192)),
    "gpt-64x2k": DecodeShape(64, 2048, 16, 16, 64),
    "phi-64x2k": DecodeShape(64, 2048, 32, 32, 80),
    "phi3-64x4k": DecodeShape(64, 4096, 32, 32, 96),
    "deepseek-8x4k": DecodeShape(8, 4096, 128, 128, 192, 128),
    "gemma-64x4k-softcap": DecodeShape(64, 4096, 16, 8, 256, spec=FlashSpec(softcap=50.0)),
}


class Pages(NamedTuple):
    """As ops.decode_attention.xla.PagedCache."""

    k_pages: Any  # [pages, slots, G, K]
    v_pages: Any  # [pages, slots, G, V]
    page_table: Any  # [B, pages of a row]
    lengths_B: Any


class DecodeRefs(NamedTuple):
    """Arrays in global memory, then buffers, rings and barriers in shared memory."""

    q_BGRK: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    lower_BR: Any
    upper_BR: Any
    spans_B6: Any
    out_BCGRV: Any
    lse_BCGR: Any
    q_buffer: Any
    k_ring: Any
    v_ring: Any
    out_buffer: Any  # shares memory with the rings
    lse_buffer: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any


class Part(NamedTuple):
    """A program's row, part and group; its blocks of keys, as in `key_ranges`; and the positions
    low <= j < high that any query of the row sees."""

    row: jax.Array
    part: jax.Array
    group: jax.Array
    first: jax.Array
    first_full: jax.Array
    end_full: jax.Array
    end: jax.Array
    low: jax.Array
    high: jax.Array


def decode_refuses(q_BLHK: AnyArray, pages: Pages) -> str:
    """Why the kernel does not support these arrays on any device; empty if it does."""
    (L, H, K), (S, G), V = q_BLHK.shape[1:], pages[0].shape[1:3], pages[1].shape[3]
    dtypes = {q_BLHK.dtype, pages[0].dtype, pages[1].dtype}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"dtypes {sorted(map(str, dtypes))} are not all bfloat16 or all float16"
    if (K, V) not in DECODE_TILES:
        return f"head dims (query, value) {K, V} are none of {sorted(DECODE_TILES)}"
    if H % G:
        return f"query heads={H} are not a multiple of key heads={G}"
    if L * (H // G) > WARPGROUP_ROWS:
        return f"{L} queries of {H // G} heads per key head are more than {WARPGROUP_ROWS} rows"
    keys = DECODE_TILES[K, V].keys
    if S % ROW_TILE or (S % keys and keys % S):
        return f"pages have {S} slots: supported are 8, 16, 32 and multiples of {keys}"
    return ""


def paged_attention(
    q_BLHK: Float[Array, "B L H K"], pages: Pages, spec: FlashSpec, sinks_H: Any = None
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """(output, float32 log-sum-exp of scores and sink) of the last queries of each row.

    A query that sees no key gets zeros and -inf. ValueError for arrays that `decode_refuses`.
    """
    if reason := decode_refuses(q_BLHK, pages):
        raise ValueError(f"decode attention backend mosaic cannot run: {reason}")
    B, L, H, K = q_BLHK.shape
    G = pages.k_pages.shape[2]
    spec = dataclasses.replace(spec, scale=spec.scale or K**-0.5)
    q_BGRK = jnp.moveaxis(q_BLHK.reshape(B, L, G, H // G, K), 1, 2).reshape(B, G, -1, K)
    padded_BGRK = jnp.pad(q_BGRK, ((0, 0), (0, 0), (0, -q_BGRK.shape[2] % ROW_TILE), (0, 0)))
    parts = attend_parts(padded_BGRK, pages, spec, L, H // G)
    out_BCGRV, lse_BCGR = (array[:, :, :, : L * (H // G)] for array in parts)
    if sinks_H is not None:
        sinks_H = jnp.tile(sinks_H.reshape(G, 1, H // G), (1, L, 1)).reshape(G, -1)
    out_BGRV, lse_BGR = merge_parts(out_BCGRV, lse_BCGR, sinks_H)
    out_BLGJV = jnp.moveaxis(out_BGRV.reshape(B, G, L, H // G, -1), 1, 2)
    lse_BLGJ = jnp.moveaxis(lse_BGR.reshape(B, G, L, H // G), 1, 2)
    return out_BLGJV.reshape(B, L, H, -1).astype(q_BLHK.dtype), lse_BLGJ.reshape(B, L, H)


def merge_parts(
    out_BCGRV: jax.Array, lse_BCGR: jax.Array, sinks_GR: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Merge the outputs of parts of the keys; a part with log-sum-exp -inf may hold anything."""
    largest_BGR = lse_BCGR.max(axis=1)
    if sinks_GR is not None:
        largest_BGR = jnp.maximum(largest_BGR, sinks_GR.astype(jnp.float32))
    base_BGR = jnp.where(largest_BGR == -math.inf, 0.0, largest_BGR)
    weights_BCGR = jnp.exp(lse_BCGR - base_BGR[:, None])
    total_BGR = weights_BCGR.sum(axis=1)
    if sinks_GR is not None:
        total_BGR += jnp.exp(sinks_GR.astype(jnp.float32) - base_BGR)
    weights_BCGR /= jnp.where(total_BGR == 0, 1.0, total_BGR)[:, None]
    values_BCGRV = jnp.where(weights_BCGR[..., None] > 0, out_BCGRV, 0.0)
    return (values_BCGRV * weights_BCGR[..., None]).sum(axis=1), base_BGR + jnp.log(total_BGR)


def programs_at_once(head_dim: int, value_dim: int) -> int:
    """Number of programs that a GPU runs at a time."""
    return MULTIPROCESSORS * (1 if (head_dim, value_dim) in ALONE else 2)


def part_count(programs: int, blocks: int, at_once: int) -> int:
    """Number of parts per row with the least time, if all rows have the greatest length."""

    def cost(parts: int) -> int:
        return -(-programs * parts // at_once) * (-(-blocks // parts) + PART_COST)

    fewest = min(max(1, -(-blocks // PART_BLOCKS)), PARTS)
    return min(range(fewest, max(fewest, min(blocks, PARTS)) + 1), key=cost)


def visible_spans(
    spec: FlashSpec, lengths_B: jax.Array, queries: int, keys: int, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(lower_BL, upper_BL) of the queries, and [B, 6] the fields `first` to `high` of Part."""

    def row(length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        lower_1L, upper_1L = visible_intervals(spec, queries, capacity, length - queries)
        lower_1L, upper_1L = (jnp.minimum(bound, length) for bound in (lower_1L, upper_1L))
        blocks_4 = key_ranges(lower_1L, upper_1L, queries, keys, capacity)[0, 0]
        low, high = lower_1L.min(), upper_1L.max()
        blocks_4 = jnp.where(low < high, blocks_4, 0)
        return lower_1L[0], upper_1L[0], jnp.append(blocks_4, jnp.stack([low, high]))

    return jax.vmap(row)(lengths_B)


def attend_parts(
    q_BGRK: Float[Array, "B G R K"], pages: Pages, spec: FlashSpec, queries: int, heads: int
) -> tuple[Float[Array, "B C G R V"], Float[Array, "B C G 64"]]:
    """(output, log-sum-exp) of each part of each row's keys. spec.scale is set.

    Row r of a group is head r % heads of query r // heads; rows past the last one are not used.
    """
    (B, G, R, K), (S, V), N = q_BGRK.shape, pages.v_pages.shape[1::2], pages[2].shape[1]
    tile, dtype = DECODE_TILES[K, V], q_BGRK.dtype
    lower_BL, upper_BL, spans_B6 = visible_spans(spec, pages.lengths_B, queries, tile.keys, N * S)
    query_of_row = jnp.minimum(jnp.arange(WARPGROUP_ROWS) // heads, queries - 1)
    reach = min(limit for limit in (N * S, spec.window, spec.chunk) if limit)
    parts = part_count(B * G, -(-reach // tile.keys), programs_at_once(K, V))
    sides = MaskSides(lower=bool(spec.window or spec.chunk), upper=True)
    plan = ForwardPlan(Scores(spec.scale, spec.softcap), tile, sides, heads, False)
    copies = max(1, tile.keys // S)
    rings = [mosaic.matrix_buffer((tile.stages, tile.keys, dim), dtype) for dim in (K, V)]
    results = [
        mosaic.matrix_buffer((WARPGROUP_ROWS, V), jnp.float32),
        plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32),
    ]

    def decode_attention(*refs: Any) -> None:
        *arrays, shared, barriers = refs
        rings, results = shared
        decode_program(plan, DecodeRefs(*arrays, *rings, *results, *barriers))

    out_BCGRV, lse_BCGR = mosaic.launch(
        decode_attention,
        out_type=[
            jax.ShapeDtypeStruct((B, parts, G, R, V), jnp.float32),
            jax.ShapeDtypeStruct((B, parts, G, WARPGROUP_ROWS), jnp.float32),
        ],
        grid={"row": B, "part": parts, "group": G},
        warpgroups=1,
        scratch_types=[
            mosaic.matrix_buffer((WARPGROUP_ROWS, K), dtype),
            plgpu.RefUnion(rings, results),
            [
                plgpu.Barrier(num_barriers=1),
                *[plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies)] * 2,
            ],
        ],
        reduction_bytes=0,
    )(
        q_BGRK,
        pages.k_pages,
        pages.v_pages,
        pages.page_table,
        lower_BL[:, query_of_row],
        upper_BL[:, query_of_row],
        spans_B6,
    )
    return out_BCGRV, lse_BCGR


def decode_program(plan: ForwardPlan, refs: DecodeRefs) -> None:
    part = program_part(refs)

    @pl.when(part.first < part.end)
    def _():
        attend(plan, refs, part)

    @pl.when(part.first >= part.end)
    def _():
        store_lse(refs, part, mosaic.constant(-math.inf, (WARPGROUP_ROWS,), ROWS))


def program_part(refs: DecodeRefs) -> Part:
    """The row's blocks, divided evenly over its parts."""
    row, part, group = (lax.axis_index(name) for name in ("row", "part", "group"))
    first, first_full, end_full, end, low, high = (refs.spans_B6[row, i] for i in range(6))
    parts = jnp.asarray(refs.out_BCGRV.shape[1], first.dtype)
    size = lax.div(end - first + parts - 1, parts)
    begin = jnp.minimum(first + part * size, end)
    stop = jnp.minimum(begin + size, end)
    first_full, end_full = (jnp.clip(bound, begin, stop) for bound in (first_full, end_full))
    return Part(row, part, group, begin, first_full, end_full, stop, low, high)


def attend(plan: ForwardPlan, refs: DecodeRefs, part: Part) -> None:
    rows = refs.q_buffer.at[pl.ds(0, refs.q_BGRK.shape[2])]
    plgpu.copy_gmem_to_smem(refs.q_BGRK.at[part.row, part.group], rows, refs.q_ready)
    for stage in range(plan.tile.stages):
        block = part.first + stage
        pl.when(block < part.end)(lambda b=block: fetch(plan, refs, part, b))
    lower = mosaic.load(refs.lower_BR.at[part.row], ROWS) if plan.sides.lower else None
    upper = mosaic.load(refs.upper_BR.at[part.row], ROWS)
    plgpu.barrier_wait(refs.q_ready)

    def step(masked: bool, block: jax.Array, carry: tuple) -> tuple:
        out, *statistics = carry
        slot = mosaic.ring_slot(block - part.first, plan.tile.stages)
        plgpu.barrier_wait(refs.k_ready.at[slot])
        products = key_products(refs.q_buffer, refs.k_ring.at[slot])
        mask = None
        if masked:
            mask = visible_keys(plan.sides, block, plan.tile.keys, lower, upper)
        weights, shrink, *statistics = online_softmax(plan.scores, products, mask, *statistics)
        plgpu.barrier_wait(refs.v_ready.at[slot])
        v_tile = refs.v_ring.at[slot]
        if masked:
            clear_unseen(v_tile, block * plan.tile.keys, part)
        out = add_values(out * spread(shrink, out.shape), weights.astype(v_tile.dtype), v_tile)
        plgpu.commit_smem()  # all warps must have read a slot before it is filled again
        later = block + plan.tile.stages
        pl.when(later < part.end)(lambda: fetch(plan, refs, part, later))
        return out, *statistics

    carry = (
        mosaic.constant(0.0, refs.out_buffer.shape, MATRIX),
        mosaic.constant(-math.inf, (WARPGROUP_ROWS,), ROWS),
        mosaic.constant(0.0, (WARPGROUP_ROWS,), ROWS),
    )
    for masked, start, stop in visits(plan.sides.lower, plan.sides.upper, part, part.end):
        carry = lax.fori_loop(start, stop, lambda j, c, m=masked: step(m, j, c), carry)
    out, maximum, total = carry
    inverse = 1 / jnp.where(total == 0.0, 1.0, total)
    refs.out_buffer[...] = out * spread(inverse, out.shape)
    store_lse(refs, part, maximum * (1 / LOG2E) + jnp.log(total), with_out=True)


def fetch(plan: ForwardPlan, refs: DecodeRefs, part: Part, block: jax.Array) -> None:
    """Start the copies of a block's keys and values. Pages that no query sees are replaced by the
    nearest visible page, whose keys are masked."""
    keys, slots = plan.tile.keys, refs.k_pages.shape[1]
    slot = mosaic.ring_slot(block - part.first, plan.tile.stages)
    rows = min(keys, slots)
    page_size = jnp.asarray(slots, block.dtype)
    first_page, last_page = lax.div(part.low, page_size), lax.div(part.high - 1, page_size)
    places = []
    for start in range(0, keys, rows):
        position = block * keys + start
        number = jnp.clip(lax.div(position, page_size), first_page, last_page)
        page = refs.page_table[part.row, number]
        places.append((page, pl.ds(lax.rem(position, page_size), rows), pl.ds(start, rows)))
    for source, ring, ready in (
        (refs.k_pages, refs.k_ring, refs.k_ready),
        (refs.v_pages, refs.v_ring, refs.v_ready),
    ):
        for page, within, target in places:
            tile = source.at[page, within, part.group]
            plgpu.copy_gmem_to_smem(tile, ring.at[slot, target], ready.at[slot])


def key_products(q_tile: Any, k_tile: Any) -> jax.Array:
    def compute(products_ref: Any) -> jax.Array:
        plgpu.wgmma(products_ref, q_tile, mosaic.transposed(k_tile))
        return products_ref[...]

    shape = (WARPGROUP_ROWS, k_tile.shape[0])
    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def add_values(out: jax.Array, weights: jax.Array, v_tile: Any) -> jax.Array:
    def compute(out_ref: Any) -> None:
        plgpu.wgmma(out_ref, weights, v_tile)

    return pl.run_state(compute)(plgpu.ACC.init(out))


def clear_unseen(v_tile: Any, begin: jax.Array, part: Part) -> None:
    """Zero the values at positions that no query sees; begin: position of the first value."""
    keys, columns = v_tile.shape
    width = columns if columns % CLEARED_COLUMNS else CLEARED_COLUMNS
    position = plgpu.broadcasted_iota(jnp.int32, (keys, width), 0, layout=MATRIX) + begin
    is_visible = (position >= part.low) & (position < part.high)
    for first in range(0, columns, width):
        piece = v_tile.at[:, pl.ds(first, width)]
        values = mosaic.load(piece, MATRIX)
        piece[...] = jnp.where(is_visible, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def store_lse(refs: DecodeRefs, part: Part, lse: jax.Array, with_out: bool = False) -> None:
    """Write the log-sum-exps, and the output in out_buffer if `with_out`."""
    refs.lse_buffer[...] = lse
    plgpu.commit_smem()
    place = (part.row, part.part, part.group)
    plgpu.copy_smem_to_gmem(refs.lse_buffer, refs.lse_BCGR.at[place])
    if with_out:
        rows = refs.out_buffer.at[pl.ds(0, refs.out_BCGRV.shape[3])]
        plgpu.copy_smem_to_gmem(rows, refs.out_BCGRV.at[place])
    plgpu.wait_smem_to_gmem(0)
