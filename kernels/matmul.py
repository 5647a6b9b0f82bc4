"""The matrix product loop for Hopper that our kernels share, and a plain product with it.

Not yet run on a GPU: compiled only. A producer warpgroup streams tiles of both operands through a
ring in shared memory (TMA). Consumer warpgroups multiply them (WGMMA), WARPGROUP_ROWS rows of the
result each, and accumulate in float32 registers. A program runs one item of work after another; the
producer loads the next item while the consumers finish one.

A kernel provides a `Tiling`, a ring (`ring_type` in its scratch types), and `Work`: the number of
items, the operands of each item, and what to do with its sums. `run` does the rest:

    def kernel(left_MK, right_KN, out_MN, ring, buffers):
        run(tiling, ring, Work(count, item, epilogue))

TMA reads zeros past the end of an operand and writes nothing past the end of the result, so sizes
need not be multiples of the tile. But Mosaic lets TMA move atoms of ATOM_ROWS rows by ATOM_BYTES of
a row: every matrix must consist of whole atoms, and every tile must begin at one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from . import mosaic
from .mosaic import WARPGROUP_ROWS, pl, plgpu

MULTIPROCESSORS = 132  # of an H100 or H200: number of persistent programs
STORE_BYTES = 128  # of a row that go through one buffer: the largest span of a swizzle
ATOM_ROWS, ATOM_BYTES = 8, 128  # of a matrix in memory
OPERAND_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile of the result per item, depth per step, slots of the ring, and layouts of the operands.

    left: "MK", or "KM" if it is stored transposed; right: "KN" or "NK". 8-bit operands must be "MK"
    and "NK". store_slots: buffers through which a consumer writes its tile, each WARPGROUP_ROWS
    rows of store_bytes. promotes: add each step's sums in float32 registers, for 8-bit operands.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 4
    consumers: int = 2
    left: str = "MK"
    right: str = "KN"
    store_slots: int = 2
    store_bytes: int = STORE_BYTES
    promotes: bool = False

    @property
    def rows(self) -> int:
        return self.consumers * WARPGROUP_ROWS


class Ring(NamedTuple):
    """Slots for tiles of the operands, with two barriers per slot: data arrived, slot free."""

    left: Any  # [stages, consumers, WARPGROUP_ROWS and depth in the operand's order]
    right: Any  # [stages, columns and depth in the operand's order]
    ready: Any
    free: Any


class Item(NamedTuple):
    """Operands in global memory, first row and column of the tile, and the steps to sum.

    left, right: matrices in the layouts of the tiling. depth: start of the first step. steps: at
    least one, each of the tiling's depth. row, column and depth must be multiples of ATOM_ROWS, or
    of ATOM_BYTES along a stored row.
    """

    left: Any
    right: Any
    row: Any
    column: Any
    depth: Any
    steps: Any


def no_carry(*_: Any) -> tuple:
    return ()


class Work(NamedTuple):
    """The work of one program: `count` items, numbered from 0.

    item(i): operands of item i; called by the producer and by the consumers.
    epilogue(i, warpgroup, sums, carry) -> carry: called in each consumer with its float32 sums
    [WARPGROUP_ROWS, columns] (registers in layout MATRIX), whose first row is the item's row +
    warpgroup * WARPGROUP_ROWS. The first carry is init(warpgroup); finish(warpgroup, carry) gets
    the last one.
    prepare(i, step, warpgroup, left, right): called in each consumer before it multiplies the tiles
    of a step, which are in shared memory. If it changes them, it must call plgpu.commit_smem and
    make the other consumers wait for changes of `right`.
    accumulate(i, span, warpgroup): replaces the loop `accumulate`, and prepare; epilogue gets what
    it returns. It must wait for each slot, and release it.

    An epilogue with the same jnp.where of the sums in two branches makes the compiler move it into
    the loop, where products no longer overlap (ptxas reports "serialized").
    """

    count: Any
    item: Callable[[Any], Item]
    epilogue: Callable[[Any, Any, Any, Any], Any]
    init: Callable[[Any], Any] = no_carry
    finish: Callable[[Any, Any], Any] = no_carry
    prepare: Callable[[Any, Any, Any, Any, Any], Any] = no_carry
    accumulate: Callable[[Any, tuple, Any], Any] | None = None


def ring_type(tiling: Tiling, dtype: Any) -> Ring:
    left = ordered(tiling.left, "MK", (WARPGROUP_ROWS, tiling.depth))
    right = ordered(tiling.right, "KN", (tiling.depth, tiling.columns))
    copies = tiling.consumers + 1
    return Ring(
        mosaic.matrix_buffer((tiling.stages, tiling.consumers, *left), dtype),
        mosaic.matrix_buffer((tiling.stages, *right), dtype),
        plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=copies),
        plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=tiling.consumers),
    )


def ordered(order: str, plain: str, pair: tuple) -> tuple:
    """The pair, which is in the order `plain`, in the order `order`."""
    return pair if order == plain else pair[::-1]


def run(tiling: Tiling, ring: Ring, work: Work) -> None:
    """Run all items of this program in its consumers + 1 warpgroups."""
    mosaic.split_warpgroups(
        tiling.consumers,
        lambda warpgroup: consume(tiling, ring, work, warpgroup),
        lambda: produce(tiling, ring, work),
    )


def produce(tiling: Tiling, ring: Ring, work: Work) -> None:
    def load(item: Item, before: jax.Array, step: jax.Array) -> None:
        position = before + step
        slot = mosaic.ring_slot(position, tiling.stages)
        pl.when(position >= tiling.stages)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        ready, depth = ring.ready.at[slot], pl.ds(item.depth + step * tiling.depth, tiling.depth)
        for consumer in range(tiling.consumers):
            rows = pl.ds(item.row + consumer * WARPGROUP_ROWS, WARPGROUP_ROWS)
            source = item.left.at[ordered(tiling.left, "MK", (rows, depth))]
            plgpu.copy_gmem_to_smem(source, ring.left.at[slot, consumer], ready)
        columns = pl.ds(item.column, tiling.columns)
        source = item.right.at[ordered(tiling.right, "KN", (depth, columns))]
        plgpu.copy_gmem_to_smem(source, ring.right.at[slot], ready)

    def stream(index: jax.Array, position: jax.Array) -> jax.Array:
        item = work.item(index)
        pl.loop(0, item.steps)(lambda step: load(item, position, step))
        return position + item.steps

    end = lax.fori_loop(0, work.count, stream, jnp.int32(0))

    @pl.loop(jnp.maximum(end - tiling.stages, 0), end)  # leave every barrier in a known phase
    def _(position):
        plgpu.barrier_wait(ring.free.at[mosaic.ring_slot(position, tiling.stages)])


def consume(tiling: Tiling, ring: Ring, work: Work, warpgroup: jax.Array) -> None:
    def add_up(index: jax.Array, carry: tuple) -> tuple:
        position, state = carry
        steps = work.item(index).steps
        span, prepare = (position, steps), functools.partial(work.prepare, index)
        if work.accumulate:
            sums = work.accumulate(index, span, warpgroup)
        else:
            sums = accumulate(tiling, ring, span, warpgroup, prepare)
        return position + steps, work.epilogue(index, warpgroup, sums, state)

    start = (jnp.int32(0), work.init(warpgroup))
    _, state = lax.fori_loop(0, work.count, add_up, start)
    work.finish(warpgroup, state)


def tiles_at(tiling: Tiling, ring: Ring, position: jax.Array, warpgroup: jax.Array) -> tuple:
    slot = mosaic.ring_slot(position, tiling.stages)
    return ring.left.at[slot, warpgroup], ring.right.at[slot]


def accumulate(
    tiling: Tiling, ring: Ring, span: tuple, warpgroup: jax.Array, prepare: Callable[..., Any]
) -> jax.Array:
    """The sums of an item; span: its first position in the ring, and its number of steps.

    One product is always in flight: a slot is released after the next slot's product was issued.
    """
    position, steps = span

    def multiply(sums_ref: Any, step: Any) -> None:
        left, right = tiles_at(tiling, ring, position + step, warpgroup)
        plgpu.barrier_wait(ring.ready.at[mosaic.ring_slot(position + step, tiling.stages)])
        prepare(step, warpgroup, left, right)
        left = left if tiling.left == "MK" else mosaic.transposed(left)
        right = right if tiling.right == "KN" else mosaic.transposed(right)
        plgpu.wgmma(sums_ref, left, right)

    def release(place: jax.Array) -> None:
        plgpu.barrier_arrive(ring.free.at[mosaic.ring_slot(place, tiling.stages)])

    def compute(sums_ref: Any) -> jax.Array:
        multiply(sums_ref, jnp.int32(0))

        @pl.loop(1, steps)
        def _(step):
            multiply(sums_ref, step)
            plgpu.wgmma_wait(1)
            release(position + step - 1)

        return sums_ref[...]

    shape = (WARPGROUP_ROWS, tiling.columns)
    if tiling.promotes:

        def add(step: jax.Array, sums: jax.Array) -> jax.Array:
            def compute_step(sums_ref: Any) -> jax.Array:
                multiply(sums_ref, step)
                return sums_ref[...]

            part = pl.run_scoped(compute_step, plgpu.ACC(shape, jnp.float32))
            release(position + step)
            return sums + part

        return lax.fori_loop(0, steps, add, mosaic.constant(0.0, shape, mosaic.MATRIX))
    sums = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
    release(position + steps - 1)
    return sums


def store_type(tiling: Tiling, dtype: Any, row_bytes: int = 0) -> Any:
    """Scratch type of the buffers of `store`; row_bytes 0: tiling.store_bytes."""
    columns = (row_bytes or tiling.store_bytes) // jnp.dtype(dtype).itemsize
    shape = (tiling.consumers, tiling.store_slots, WARPGROUP_ROWS, columns)
    return mosaic.matrix_buffer(shape, dtype)


def unchanged(tile: jax.Array, _: int) -> jax.Array:
    return tile


def store(
    sums: jax.Array,
    buffers: Any,
    target: Any,
    change: Callable[[jax.Array, int], jax.Array] = unchanged,
) -> None:
    """Write a consumer's tile to `target` in global memory through `buffers` (`store_type`).

    change(sums, first column): values to write for some columns of the sums; called part by part to
    save registers. Returns before the last copies are done; `finish_stores` waits for them.
    """
    slots, _, width = buffers.shape
    parts = range(0, sums.shape[1], width)
    for number, first in enumerate(parts):
        buffer = buffers.at[number % slots]
        is_in_use = number == 0 and len(parts) % slots  # by the last copies of the previous tile
        plgpu.wait_smem_to_gmem(0 if is_in_use else slots - 1, wait_read_only=True)
        buffer[...] = change(sums[:, first : first + width], first).astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target.at[:, pl.ds(first, width)])


def finish_stores(*_: Any) -> None:
    plgpu.wait_smem_to_gmem(0)


def item_count(total: Any, program: jax.Array, programs: int) -> jax.Array:
    """Number of items of one program, which runs every `programs`-th of `total` items."""
    return lax.div(jnp.int32(total) - program + (programs - 1), jnp.int32(programs))


def tile_place(index: jax.Array, rows: Any, columns: int, width: int = 16) -> tuple:
    """(row, column) of tile `index`, in column order within bands of `width` rows of tiles.

    Programs that run at the same time share tiles of both operands in the L2 cache.
    """
    band = lax.div(index, jnp.int32(width * columns))
    within = lax.rem(index, jnp.int32(width * columns))
    height = jnp.minimum(rows - band * width, width)
    return band * width + lax.rem(within, height), lax.div(within, height)


def whole_rows(count: int) -> bool:
    """Whether `count` rows are whole atoms; fewer than ATOM_ROWS rows are one atom."""
    return count % ATOM_ROWS == 0 or count < ATOM_ROWS


def matmul_refuses(left: Any, right: Any, tiling: Tiling) -> str:
    """Why the loop does not support these (stacked) matrices; empty if it does."""
    if left.dtype != right.dtype or left.dtype not in OPERAND_DTYPES:
        names = ", ".join(map(str, OPERAND_DTYPES))
        return f"operands are {left.dtype} and {right.dtype}, not both one of {names}"
    if left.dtype.itemsize == 1 and (tiling.left, tiling.right) != ("MK", "NK"):
        return f"8-bit operands are {tiling.left} and {tiling.right}, not MK and NK"
    columns = ATOM_BYTES // left.dtype.itemsize
    for array in (left, right):
        if not whole_rows(array.shape[-2]) or array.shape[-1] % columns:
            return (
                f"shape {array.shape} is not a multiple of {ATOM_ROWS} by {columns} {array.dtype}"
            )
    return ""


def matmul(
    left: Float[Array, "_ _"],
    right: Float[Array, "_ _"],
    tiling: Tiling | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """left @ right, in the layouts of the tiling; ValueError for `matmul_refuses`."""
    tiling = tiling or Tiling()
    if reason := matmul_refuses(left, right, tiling):
        raise ValueError(f"matmul cannot run: {reason}")
    M, K = ordered(tiling.left, "MK", left.shape)
    depth, N = ordered(tiling.right, "KN", right.shape)
    if depth != K:
        raise ValueError(f"left has depth {K} and right {depth}: they must be equal")
    atom = ATOM_BYTES // jnp.dtype(out_dtype).itemsize
    if not whole_rows(M) or N % atom:
        raise ValueError(f"the product [{M}, {N}] is not a multiple of {ATOM_ROWS} by {atom}")
    rows, columns = pl.cdiv(M, tiling.rows), pl.cdiv(N, tiling.columns)
    programs, steps = min(MULTIPROCESSORS, rows * columns), pl.cdiv(K, tiling.depth)

    def matmul_kernel(left_ref: Any, right_ref: Any, out_MN: Any, ring: Ring, buffers: Any) -> None:
        program = lax.axis_index("program")

        def item(index: jax.Array) -> Item:
            row, column = tile_place(index * programs + program, rows, columns)
            place = (row * tiling.rows, column * tiling.columns)
            return Item(left_ref, right_ref, *place, 0, steps)

        def epilogue(index: jax.Array, warpgroup: jax.Array, sums: jax.Array, _: tuple) -> tuple:
            tile = item(index)
            first = tile.row + warpgroup * WARPGROUP_ROWS
            place = (pl.ds(first, WARPGROUP_ROWS), pl.ds(tile.column, tiling.columns))
            store(sums, buffers.at[warpgroup], out_MN.at[place])
            return ()

        count = item_count(rows * columns, program, programs)
        run(tiling, ring, Work(count, item, epilogue, finish=finish_stores))

    return mosaic.launch(
        matmul_kernel,
        out_type=[jax.ShapeDtypeStruct((M, N), out_dtype)],
        grid={"program": programs},
        warpgroups=tiling.consumers + 1,
        scratch_types=[ring_type(tiling, left.dtype), store_type(tiling, out_dtype)],
    )(left, right)[0]
