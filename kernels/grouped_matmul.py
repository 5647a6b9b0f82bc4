"""Grouped matrix products for Hopper: each row times its group's matrix. Not yet run on a GPU.

Rows are sorted by group; groups begin at any row. Two kernels with the loop of kernels/matmul.py:

`grouped_rows` runs through a list of tiles, each with rows of one group. It loads a whole tile, in
which rows of neighbouring groups may lie, and stores only the rows of the group, by copies of 32,
16, ... 1 rows. Rows after the last group are tiles of zeros.

`grouped_weights` sums the outer products of each group's rows. In steps with rows of other groups
it sets these to zero in both operands, so that NaN does not leak to other groups. 8-bit operands
are transposed, and their groups padded with zeros to whole steps; each step's sums are added in
float32, since tensor cores accumulate 8-bit products with fewer bits.

With scales of blocks of 128 along the sum both have the loop of kernels/fp8_blockwise.py, which
adds each step's sums, times both scales.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import fp8_blockwise, mosaic
from .fp8_blockwise import BLOCK, Scales, add_blocks, lengthened, steps_first, store_parts
from .matmul import (
    ATOM_BYTES,
    ATOM_ROWS,
    MULTIPROCESSORS,
    STORE_BYTES,
    Item,
    Tiling,
    Work,
    finish_stores,
    item_count,
    matmul_refuses,
    no_carry,
    ring_type,
    run,
    store,
    store_type,
    tile_place,
    unchanged,
)
from .mosaic import COLUMNS, MATRIX, ROWS, WARPGROUP_ROWS, pl, plgpu, spread, spread_columns

MAX_GROUPS = 256
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MASK_COLUMNS = 64  # set to zero at a time, to save registers
# Narrow buffers for whole tiles leave room for the buffers of partial tiles.
ROWS_TILING = Tiling(columns=256, depth=64, stages=4, store_bytes=64)
FP8_ROWS_TILING = dataclasses.replace(ROWS_TILING, depth=128, right="NK")
WEIGHTS_TILING = Tiling(columns=256, depth=64, stages=4, left="KM")
FP8_WEIGHTS_TILING = Tiling(columns=128, depth=128, stages=4, right="NK", promotes=True)
# With scales of blocks; rows have weights on the right, with a scale for 128 x 128.
BLOCK_ROWS_TILING = dataclasses.replace(fp8_blockwise.WEIGHTS_TILING, store_bytes=64)
BLOCK_WEIGHTS_TILING = fp8_blockwise.ROWS_TILING


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """A shape to compile, check and time."""

    tokens: int
    inner: int
    outer: int
    groups: int


TUNED_SHAPES = {
    "mixtral-8k": GroupedShape(2**13, 4096, 14336, 8),
    "mixtral-64k": GroupedShape(2**16, 4096, 14336, 8),
    "mixtral-down-16k": GroupedShape(2**14, 14336, 4096, 8),
    "deepseek-64k": GroupedShape(2**16, 7168, 2048, 256),
    "deepseek-down-64k": GroupedShape(2**16, 2048, 7168, 256),
    "qwen3-32k": GroupedShape(2**15, 2048, 768, 128),
    "qwen3-down-32k": GroupedShape(2**15, 768, 2048, 128),
}


class RowTile(NamedTuple):
    """A tile of rows from `first` on; the rows of its group are begin <= row < end."""

    group: Any
    first: Any
    begin: Any
    end: Any


def row_tiles(sizes_E: Int[Array, " E"], tokens: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """(RowTiles [at least count, 4], count [1]).

    Group E stands for the rows after the last group. Each tile begins at a whole atom.
    """
    sizes_E = sizes_E.astype(jnp.int32)
    rest = jnp.maximum(tokens - sizes_E.sum(), 0)
    sizes = jnp.append(sizes_E, rest)
    ends = jnp.cumsum(sizes)
    begins = ends - sizes
    firsts = begins // ATOM_ROWS * ATOM_ROWS
    tiles = jnp.where(sizes > 0, pl.cdiv(ends - firsts, rows), 0)
    after = jnp.cumsum(tiles)
    most = (tokens + len(sizes) * (rows + ATOM_ROWS - 2)) // rows
    numbers = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(numbers[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    first = firsts[group] + (numbers - (after - tiles)[group]) * rows
    begin, end = jnp.maximum(begins[group], first), jnp.minimum(ends[group], first + rows)
    return jnp.stack([group, first, begin, end], axis=1), after[-1:]


def whole_atoms(x_TD: jax.Array) -> jax.Array:
    """x with zero rows added up to whole atoms."""
    return jnp.pad(x_TD, ((0, -x_TD.shape[0] % ATOM_ROWS), (0, 0)))


def operands_refuse(x_TD: Any, w_EDF: Any, fp8: bool = False) -> str:
    """Why the kernels cannot compute a product and its gradients; empty if they can."""
    (T, D), (E, _, F), dtype = x_TD.shape, w_EDF.shape, x_TD.dtype
    if {dtype, w_EDF.dtype} not in [{kind} for kind in DTYPES]:
        return f"x is {dtype} and w {w_EDF.dtype}, not both bfloat16 or both float16"
    if E > MAX_GROUPS or not T:
        return f"{T} rows in {E} groups are not at least one row in at most {MAX_GROUPS} groups"
    multiple = ATOM_BYTES if fp8 else ATOM_BYTES // dtype.itemsize
    if D % multiple or F % multiple:
        return f"dimensions {D} and {F} are not multiples of {multiple}"
    return ""


def of_blocks(scales: Any) -> bool:
    """Whether these are scales of blocks, not of whole rows and columns."""
    return bool(scales) and scales[0].ndim == 2


def rows_tiling(dtype: Any, right: str, scales: tuple) -> Tiling:
    tiling = FP8_ROWS_TILING if jnp.dtype(dtype).itemsize == 1 else ROWS_TILING
    return dataclasses.replace(BLOCK_ROWS_TILING if of_blocks(scales) else tiling, right=right)


class RowRefs(NamedTuple):
    """Arrays in global memory; ring, and buffers of whole and partial tiles, in shared memory."""

    x_TD: Any
    w: Any
    # Of rows [T + a tile], of columns [E, whole tiles]; of blocks [K, T + a tile] and [E, K, blocks
    # of whole tiles]; () without scales.
    scales: Any
    tiles: Any
    count: Any
    y_TF: Any
    ring: Any
    buffers: Any
    part_buffers: Any


def grouped_rows(
    x_TD: Float[Array, "T D"],
    w: Float[Array, "E _ _"],
    sizes_E: Int[Array, " E"],
    scales: tuple[jax.Array, ...] = (),
    *,
    right: str = "KN",
    out_dtype: Any = jnp.bfloat16,
    tiling: Tiling | None = None,
) -> Float[Array, "T F"]:
    """Each row times its group's matrix; zeros after the last group.

    right: "KN" for matrices [E, D, F], "NK" for [E, F, D]. scales: float32 factors of the sums: of
    rows [T] and of columns [E, F], or of blocks of 128 [T, D / 128] and [E, F / 128, D / 128].
    ValueError for `matmul_refuses`.
    """
    tiling, tokens = tiling or rows_tiling(x_TD.dtype, right, scales), x_TD.shape[0]
    x_TD = whole_atoms(x_TD)
    if reason := matmul_refuses(x_TD, w, tiling):
        raise ValueError(f"grouped_rows cannot run: {reason}")
    T, F = x_TD.shape[0], w.shape[2 if tiling.right == "KN" else 1]
    tiles, count = row_tiles(sizes_E, T, tiling.rows)  # including the padding
    columns = pl.cdiv(F, tiling.columns)
    programs = min(MULTIPROCESSORS, tiles.shape[0] * columns)
    if scales:
        pad, width = (steps_first, BLOCK) if of_blocks(scales) else (lengthened, 1)
        widths = T + tiling.rows, columns * tiling.columns // width
        scales = tuple(pad(scale, count) for scale, count in zip(scales, widths, strict=True))

    def grouped_rows_kernel(*refs: Any) -> None:
        x_ref, w_ref, *others = refs
        scale_refs, others = others[: len(scales)], others[len(scales) :]
        grouped_rows_program(tiling, RowRefs(x_ref, w_ref, scale_refs, *others), programs)

    part = (tiling.consumers, WARPGROUP_ROWS, STORE_BYTES // jnp.dtype(out_dtype).itemsize)
    return mosaic.launch(
        grouped_rows_kernel,
        out_type=[jax.ShapeDtypeStruct((T, F), out_dtype)],
        grid={"program": programs},
        warpgroups=tiling.consumers + 1,
        scratch_types=[
            ring_type(tiling, x_TD.dtype),
            store_type(tiling, out_dtype),
            plgpu.SMEM(part, out_dtype),
        ],
    )(x_TD, w, *scales, tiles, count)[0][:tokens]


def grouped_rows_program(tiling: Tiling, refs: RowRefs, programs: int) -> None:
    program, groups = lax.axis_index("program"), refs.w.shape[0]
    columns = pl.cdiv(refs.y_TF.shape[1], tiling.columns)
    rows, has_blocks = refs.count[0], of_blocks(refs.scales)
    steps = pl.cdiv(refs.x_TD.shape[1], tiling.depth)

    def place(index: jax.Array) -> tuple[RowTile, jax.Array]:
        row, column = tile_place(index * programs + program, rows, columns)
        return RowTile(*(refs.tiles[row, i] for i in range(4))), column * tiling.columns

    def item(index: jax.Array) -> Item:
        tile, column = place(index)
        is_rest = tile.group == groups
        depth = jnp.where(is_rest, steps * tiling.depth, 0)  # past the end of both: zeros
        w = refs.w.at[jnp.minimum(tile.group, groups - 1)]
        return Item(refs.x_TD, w, tile.first, column, depth, jnp.where(is_rest, 1, steps))

    def epilogue(index: jax.Array, warpgroup: jax.Array, sums: jax.Array, _: tuple) -> tuple:
        tile, column = place(index)
        first = tile.first + warpgroup * WARPGROUP_ROWS
        begin = jnp.maximum(tile.begin - first, 0)
        end = jnp.minimum(tile.end - first, WARPGROUP_ROWS)
        is_whole = end - begin == WARPGROUP_ROWS
        group = jnp.minimum(tile.group, groups - 1)
        change = scaling(refs.scales, group, first, column)

        @pl.when(is_whole)
        def _():
            target = refs.y_TF.at[pl.ds(first, WARPGROUP_ROWS), pl.ds(column, tiling.columns)]
            store(sums, refs.buffers.at[warpgroup], target, change)

        @pl.when((begin < end) & jnp.logical_not(is_whole))
        def _():
            target = refs.y_TF.at[:, pl.ds(column, tiling.columns)]
            store_part(sums, refs.part_buffers.at[warpgroup], target, (first, begin, end), change)

        return ()

    def accumulate(index: jax.Array, span: tuple, warpgroup: jax.Array) -> jax.Array:
        tile, column = place(index)
        group = jnp.minimum(tile.group, groups - 1)
        first = tile.first + warpgroup * WARPGROUP_ROWS
        left, right = refs.scales
        scales = Scales(left, right.at[group], first, column, 0, in_rows=False)
        (sums,) = add_blocks(tiling, refs.ring, span, warpgroup, scales)
        return sums

    count = item_count(rows * columns, program, programs)
    adder = accumulate if has_blocks else None
    run(tiling, refs.ring, Work(count, item, epilogue, finish=finish_stores, accumulate=adder))


def scaling(scales: Any, group: Any, first: jax.Array, column: jax.Array) -> Any:
    """A function of (columns of a consumer's sums, offset of the first column) that scales them."""
    if not scales or of_blocks(scales):
        return unchanged
    row_scale_T, column_scale_EF = scales
    row_scales = mosaic.load(row_scale_T.at[pl.ds(first, WARPGROUP_ROWS)], ROWS)

    def scaled(part: jax.Array, offset: int) -> jax.Array:
        place = pl.ds(column + offset, part.shape[1])
        column_scales = mosaic.load(column_scale_EF.at[group, place], COLUMNS)
        part = part * spread(row_scales, part.shape)
        return part * spread_columns(column_scales, part.shape)

    return scaled


def store_part(sums: jax.Array, buffer: Any, target: Any, rows: tuple, change: Any) -> None:
    """Write rows begin..end of a consumer's tile, whose first row is `first` of `target`."""
    first, begin, end = rows
    width = buffer.shape[-1]
    for column in range(0, sums.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = change(sums[:, column : column + width], column)
        mosaic.store(buffer, part.astype(buffer.dtype))
        plgpu.commit_smem()
        done = begin
        for count in part_sizes():
            copy_rows(buffer, target.at[:, pl.ds(column, width)], (first, done, end - begin), count)
            done = done + ((end - begin) & count)


def part_sizes() -> list[int]:
    """Sizes of copies whose subsets add up to every number below WARPGROUP_ROWS."""
    return [1 << bit for bit in reversed(range((WARPGROUP_ROWS - 1).bit_length()))]


def copy_rows(buffer: Any, target: Any, rows: tuple, count: int) -> None:
    first, done, live = rows

    @pl.when((live & count) != 0)
    def _():
        rows = target.at[pl.ds(first + done, count)]
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(done, count)], rows)


def grouped_weights(
    x: Float[Array, "_ _"],
    y: Float[Array, "_ _"],
    sizes_E: Int[Array, " E"],
    scales: tuple[jax.Array, ...] = (),
    *,
    out_dtype: Any = jnp.bfloat16,
    tiling: Tiling | None = None,
) -> Float[Array, "E D F"]:
    """x^T y of each group's rows; zeros for an empty group. ValueError for `matmul_refuses`.

    x, y: [T, D] and [T, F]. With scales, float32 factors of the sums, they are 8-bit, [D, T] and
    [F, T], and sizes are multiples of the tiling's depth. scales: [D] and [F], or of blocks of 128
    [T / 128, D] and [T / 128, F].
    """
    tiling = tiling or weights_tiling(scales)
    if not scales:
        x, y = whole_atoms(x), whole_atoms(y)
    if reason := matmul_refuses(x, y, tiling):
        raise ValueError(f"grouped_weights cannot run: {reason}")
    D, F = (array.shape[0 if scales else 1] for array in (x, y))
    sizes_E = sizes_E.astype(jnp.int32)
    starts_E, E = jnp.cumsum(sizes_E) - sizes_E, sizes_E.shape[0]
    if scales:
        starts_E = jnp.where(sizes_E > 0, starts_E, x.shape[1])  # past the end: zeros
        scales = whole_tiles(tiling, scales)
    items = E * pl.cdiv(D, tiling.rows) * pl.cdiv(F, tiling.columns)
    programs = min(MULTIPROCESSORS, items)

    def grouped_weights_kernel(*refs: Any) -> None:
        x_ref, y_ref, *others = refs
        scale_refs, others = others[: len(scales)], others[len(scales) :]
        grouped_weights_program(tiling, WeightRefs(x_ref, y_ref, scale_refs, *others), programs)

    return mosaic.launch(
        grouped_weights_kernel,
        out_type=[jax.ShapeDtypeStruct((E, D, F), out_dtype)],
        grid={"program": programs},
        warpgroups=tiling.consumers + 1,
        scratch_types=[
            ring_type(tiling, x.dtype),
            store_type(tiling, out_dtype),
            plgpu.Barrier(num_barriers=1, num_arrivals=tiling.consumers),
        ],
    )(x, y, *scales, starts_E, sizes_E)[0]


def weights_tiling(scales: tuple) -> Tiling:
    if of_blocks(scales):
        return BLOCK_WEIGHTS_TILING
    return FP8_WEIGHTS_TILING if scales else WEIGHTS_TILING


def whole_tiles(tiling: Tiling, scales: tuple) -> tuple:
    """The scales as WeightRefs has them."""
    left, right = (
        lengthened(scale, pl.cdiv(scale.shape[-1], size) * size)
        for scale, size in zip(scales, (tiling.rows, tiling.columns), strict=True)
    )
    if not of_blocks(scales):
        return left, right[None]
    return tuple(jnp.pad(scale, ((0, 1), (0, 0))) for scale in (left, right))


class WeightRefs(NamedTuple):
    """Arrays in global memory; ring and buffers; the barrier for changes of the right tile."""

    x: Any
    y: Any
    # Of rows, of columns [1, ...]; of blocks [T / 128 + 1, ...] each, the last zeros, which empty
    # groups read; () without scales.
    scales: Any
    starts_E: Any
    sizes_E: Any
    out_EDF: Any
    ring: Any
    buffers: Any
    masked: Any


class Rows(NamedTuple):
    """Rows begin..end of a group, the first row of its first step (a whole atom), and the steps."""

    begin: Any
    end: Any
    first: Any
    steps: Any


def rows_of(begin: jax.Array, size: jax.Array, depth: int) -> Rows:
    first = lax.div(begin, jnp.int32(ATOM_ROWS)) * ATOM_ROWS
    steps = lax.div(begin + size - first + (depth - 1), jnp.int32(depth))
    return Rows(begin, begin + size, first, jnp.maximum(steps, 1))


def grouped_weights_program(tiling: Tiling, refs: WeightRefs, programs: int) -> None:
    program = lax.axis_index("program")
    E, D, F = refs.out_EDF.shape
    rows, columns = pl.cdiv(D, tiling.rows), pl.cdiv(F, tiling.columns)
    has_blocks = of_blocks(refs.scales)

    def place(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        index = index * programs + program
        tiles = jnp.int32(rows * columns)
        row, column = tile_place(lax.rem(index, tiles), rows, columns)
        return lax.div(index, tiles), row * tiling.rows, column * tiling.columns

    def item(index: jax.Array) -> Item:
        group, row, column = place(index)
        rows = rows_of(refs.starts_E[group], refs.sizes_E[group], tiling.depth)
        return Item(refs.x, refs.y, row, column, rows.first, rows.steps)

    def mask(index: Any, step: jax.Array, warpgroup: jax.Array, left: Any, right: Any) -> None:
        group = place(index)[0]
        rows = rows_of(refs.starts_E[group], refs.sizes_E[group], tiling.depth)
        first = rows.first + step * tiling.depth
        bounds = (rows.begin - first, rows.end - first)

        @pl.when((bounds[0] > 0) | (bounds[1] < tiling.depth))
        def _():
            keep_rows(left, bounds)
            for number, column in enumerate(range(0, tiling.columns, MASK_COLUMNS)):
                part = right.at[:, pl.ds(column, MASK_COLUMNS)]
                is_assigned = warpgroup == number % tiling.consumers
                pl.when(is_assigned)(lambda part=part: keep_rows(part, bounds))
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.masked.at[0])
            plgpu.barrier_wait(refs.masked.at[0])

    def accumulate(index: jax.Array, span: tuple, warpgroup: jax.Array) -> tuple:
        group, row, column = place(index)
        step = lax.div(refs.starts_E[group], jnp.int32(BLOCK))
        first = row + warpgroup * WARPGROUP_ROWS
        left, right = refs.scales
        scales = Scales(left, right, first, column, step, in_rows=True)
        return add_blocks(tiling, refs.ring, span, warpgroup, scales)

    def epilogue(index: jax.Array, warpgroup: jax.Array, sums: Any, _: tuple) -> tuple:
        group, row, column = place(index)
        rows = pl.ds(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        target = refs.out_EDF.at[group].at[rows, pl.ds(column, tiling.columns)]
        if has_blocks:
            store_parts(sums, refs.buffers.at[warpgroup], target)
            return ()
        change = scaling(refs.scales, 0, row + warpgroup * WARPGROUP_ROWS, column)
        store(sums, refs.buffers.at[warpgroup], target, change)
        return ()

    count = item_count(E * rows * columns, program, programs)
    prepare = no_carry if refs.scales else mask
    adder = accumulate if has_blocks else None
    work = Work(count, item, epilogue, finish=finish_stores, prepare=prepare, accumulate=adder)
    run(tiling, refs.ring, work)


def keep_rows(tile: Any, bounds: tuple[jax.Array, jax.Array]) -> None:
    """Set the rows of a tile in shared memory outside of [begin, end) to zero."""
    rows = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=MATRIX)
    values = tile[...]
    keep = (rows >= bounds[0]) & (rows < bounds[1])
    tile[...] = jnp.where(keep, values, jnp.zeros_like(values))
