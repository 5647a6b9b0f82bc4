"""Products of 8-bit matrices with scales of blocks, for Hopper. Compiled; not yet run on a GPU.

Blockwise scaling (DeepSeek-V3, section 3.3): the product's sum is cut into blocks of 128 numbers,
and an operand has a scale for each row and block, or (weights) for each 128 rows and block. Tensor
cores sum up one block, with fewer bits than float32 has. The sum times both scales is then added in
float32 registers, as DeepGEMM does it.

The loop is that of kernels/matmul.py, with a step for each block; both operands are contiguous
along the sum, as 8-bit tensor cores need it. A consumer multiplies its 64 rows with `PART` columns
at a time: sums of all columns (128 registers) leave no room for more than a part's block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from . import mosaic
from .matmul import (
    ATOM_BYTES,
    ATOM_ROWS,
    MULTIPROCESSORS,
    Item,
    Ring,
    Tiling,
    Work,
    finish_stores,
    item_count,
    matmul_refuses,
    ring_type,
    run,
    store,
    store_type,
    tile_place,
    tiles_at,
)
from .mosaic import COLUMNS, MATRIX, ROWS, WARPGROUP_ROWS, pl, plgpu, spread, spread_columns

BLOCK = 128  # numbers of the sum with one scale, and rows of weights with one scale
PART = 128  # columns whose products are in registers beside the sums
# Those that fit the registers, of the widest tiles: the fewest bytes from the L2 cache.
WEIGHTS_TILING = Tiling(columns=128, depth=BLOCK, stages=4, consumers=3, right="NK")
ROWS_TILING = Tiling(columns=256, depth=BLOCK, stages=4, right="NK")


class Refs(NamedTuple):
    """Arrays in global memory; ring and buffers in shared memory."""

    left_EMK: Any
    right_ENK: Any
    left_scale_EKM: Any  # of blocks along K
    right_scale_EKN: Any  # of blocks along K, and of rows or blocks of rows
    out_EMN: Any
    ring: Any
    buffers: Any


def block_matmul(
    left_EMK: Float[Array, "E M K"],
    right_ENK: Float[Array, "E N K"],
    left_scale_EMK: Float[Array, "E M _"],
    right_scale_ENK: Float[Array, "E _ _"],
    *,
    out_dtype: Any = jnp.bfloat16,
    tiling: Tiling | None = None,
) -> Float[Array, "E M N"]:
    """left times the transpose of right, each of E pairs, summed in float32.

    Scales: float32, of blocks of 128 along K; those of right for each row or for 128 rows. The
    number of columns of the product must be a multiple of 64 (32 for float32). ValueError for
    `matmul_refuses`.
    """
    in_rows = right_scale_ENK.shape[1] == right_ENK.shape[1]
    tiling = tiling or (ROWS_TILING if in_rows else WEIGHTS_TILING)
    E, tokens, _ = left_EMK.shape
    left_EMK = jnp.pad(left_EMK, ((0, 0), (0, -tokens % ATOM_ROWS), (0, 0)))
    M, N = left_EMK.shape[1], right_ENK.shape[1]
    if reason := matmul_refuses(left_EMK, right_ENK, tiling):
        raise ValueError(f"block_matmul cannot run: {reason}")
    if N % (atom := ATOM_BYTES // jnp.dtype(out_dtype).itemsize):
        raise ValueError(f"block_matmul cannot run: {N} columns are not a multiple of {atom}")
    rows, columns = pl.cdiv(M, tiling.rows), pl.cdiv(N, tiling.columns)
    scales = (
        steps_first(left_scale_EMK, rows * tiling.rows),
        steps_first(right_scale_ENK, columns * tiling.columns // (1 if in_rows else BLOCK)),
    )
    programs = min(MULTIPROCESSORS, E * rows * columns)

    def block_matmul_kernel(*refs: Any) -> None:
        program(tiling, Refs(*refs), programs)

    return mosaic.launch(
        block_matmul_kernel,
        out_type=[jax.ShapeDtypeStruct((E, M, N), out_dtype)],
        grid={"program": programs},
        warpgroups=tiling.consumers + 1,
        scratch_types=[ring_type(tiling, left_EMK.dtype), store_type(tiling, out_dtype)],
    )(left_EMK, right_ENK, *scales)[0][:, :tokens]


def steps_first(scale_RK: Float[Array, "*E R K"], rows: int) -> Float[Array, "*E K _"]:
    """Scales of a step lie together, with zeros up to `rows` of them, which tiles past the end
    read."""
    return lengthened(scale_RK.swapaxes(-1, -2), rows)


def lengthened(array: Float[Array, "*S N"], length: int) -> Float[Array, "*S _"]:
    """The array with zeros appended to its last dimension."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, length - array.shape[-1])])


def program(tiling: Tiling, refs: Refs, programs: int) -> None:
    E, M, N = refs.out_EMN.shape
    rows, columns = pl.cdiv(M, tiling.rows), pl.cdiv(N, tiling.columns)
    steps = refs.left_scale_EKM.shape[1]
    in_rows = refs.right_scale_EKN.shape[2] >= refs.right_ENK.shape[1]

    def place(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Number of the pair, and first row and column of the tile."""
        index = index * programs + lax.axis_index("program")
        tiles = jnp.int32(rows * columns)
        row, column = tile_place(lax.rem(index, tiles), rows, columns)
        return lax.div(index, tiles), row * tiling.rows, column * tiling.columns

    def item(index: jax.Array) -> Item:
        pair, row, column = place(index)
        return Item(refs.left_EMK.at[pair], refs.right_ENK.at[pair], row, column, 0, steps)

    def accumulate(index: jax.Array, span: tuple, warpgroup: jax.Array) -> tuple:
        pair, row, column = place(index)
        left, right = refs.left_scale_EKM.at[pair], refs.right_scale_EKN.at[pair]
        first = row + warpgroup * WARPGROUP_ROWS
        scales = Scales(left, right, first, column, 0, in_rows)
        return add_blocks(tiling, refs.ring, span, warpgroup, scales)

    def epilogue(index: jax.Array, warpgroup: jax.Array, sums: tuple, _: tuple) -> tuple:
        pair, row, column = place(index)
        rows = pl.ds(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        target = refs.out_EMN.at[pair].at[rows, pl.ds(column, tiling.columns)]
        store_parts(sums, refs.buffers.at[warpgroup], target)
        return ()

    count = item_count(E * rows * columns, lax.axis_index("program"), programs)
    work = Work(count, item, epilogue, finish=finish_stores, accumulate=accumulate)
    run(tiling, refs.ring, work)


class Scales(NamedTuple):
    """Scales of a consumer's part of a tile, in global memory: matrices with a row for each block
    of the sum.

    row, column: the consumer's first row and first column. step: the block of the first step.
    in_rows: right has a scale for each row of right, else one for 128 rows.
    """

    left_KM: Any
    right_KN: Any
    row: Any
    column: Any
    step: Any
    in_rows: bool


def add_blocks(
    tiling: Tiling, ring: Ring, span: tuple, warpgroup: jax.Array, scales: Scales
) -> tuple[jax.Array, ...]:
    """The scaled sums of a consumer's rows (`Work.accumulate`), in parts of PART columns. Scales
    are read while the copies and products are under way."""
    start, steps = span

    def add(step: jax.Array, sums: tuple) -> tuple:
        left, right = tiles_at(tiling, ring, start + step, warpgroup)
        block = scales.step + step
        row_scale = mosaic.load(scales.left_KM.at[block, pl.ds(scales.row, WARPGROUP_ROWS)], ROWS)
        slot = mosaic.ring_slot(start + step, tiling.stages)
        plgpu.barrier_wait(ring.ready.at[slot])
        added = []
        for number, part in enumerate(sums):
            column = scales.column + number * PART
            read = functools.partial(factors, scales, block, column, row_scale, part.shape)
            products, scale = multiply(left, right.at[pl.ds(number * PART, PART)], read)
            added.append(part + products * scale)
        plgpu.barrier_arrive(ring.free.at[slot])
        return tuple(added)

    zeros = mosaic.constant(0.0, (WARPGROUP_ROWS, PART), MATRIX)
    return lax.fori_loop(0, steps, add, (zeros,) * (tiling.columns // PART))


def multiply(left: Any, right: Any, meanwhile: Callable[[], Any]) -> tuple[jax.Array, Any]:
    """The product [WARPGROUP_ROWS, PART] of tiles in shared memory, once it is done; and what
    `meanwhile` returns, which is called while it is under way."""

    def compute(sums_ref: Any) -> tuple[jax.Array, Any]:
        plgpu.wgmma(sums_ref, left, mosaic.transposed(right))
        other = meanwhile()
        return sums_ref[...], other

    return pl.run_scoped(compute, plgpu.ACC((left.shape[0], right.shape[0]), jnp.float32))


def factors(
    scales: Scales, block: Any, column: Any, row_scale: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """The product of both scales, for each number of a part of the columns."""
    if scales.in_rows:
        columns = mosaic.load(scales.right_KN.at[block, pl.ds(column, shape[1])], COLUMNS)
        return spread(row_scale, shape) * spread_columns(columns, shape)
    scale = scales.right_KN[block, lax.div(column, jnp.int32(BLOCK))]
    return spread(row_scale * scale, shape)


def store_parts(sums: tuple, buffers: Any, target: Any) -> None:
    """`store` of the sums by `add_blocks`."""
    for number, part in enumerate(sums):
        store(part, buffers, target.at[:, pl.ds(number * PART, PART)])
