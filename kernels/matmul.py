"""The matrix product loop for Hopper that our kernels share, and a plain product on it.

Not yet run on a GPU: compiled only. A producer warpgroup streams tiles of both operands through a
ring in shared memory (TMA); consumer warpgroups, WARPGROUP_ROWS rows of the result each, multiply
them (WGMMA) and add up in float32 registers. A program does one item of work after another: the
producer is already loading the next while the consumers finish one.

A kernel brings a `Tiling`, a ring (`ring_type` among its scratch), and `Work`: which items there
are, where the operands of each lie, and what to do with the sums of each. `run` does the rest:

    def kernel(left_MK, right_KN, out_MN, ring, buffers):
        run(tiling, ring, Work(count, item, epilogue))

Past an operand's end TMA reads zeros, and past the result's it writes nothing: no size has to be a
multiple of a tile's. But Mosaic makes TMA move atoms of ATOM_ROWS rows by ATOM_BYTES of a row, as
they lie in shared memory: every matrix is whole atoms, and every tile begins with one.
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
from .mosaic import WARPGROUP_AXIS, pl, plgpu

WARPGROUP_ROWS = 64  # M of a WGMMA instruction
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}  # by consumers, of 65,536 a multiprocessor
MULTIPROCESSORS = 132  # of an H100 or H200: programs that work through items
STORE_BYTES = 128  # of a row that go through one buffer, the most that a swizzle spans
ATOM_ROWS, ATOM_BYTES = 8, 128  # of a matrix as it is stored
OPERAND_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One item's tile of the result, one step's depth, slots of the ring; how operands lie.

    left: "MK", or "KM" for one stored transposed; right: "KN" or "NK". The tensor cores take 8-bit
    operands only as "MK" and "NK". store_slots: buffers that a consumer's tile goes through on its
    way out, each WARPGROUP_ROWS rows of store_bytes.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 4
    consumers: int = 2
    left: str = "MK"
    right: str = "KN"
    store_slots: int = 2
    store_bytes: int = STORE_BYTES

    @property
    def rows(self) -> int:
        return self.consumers * WARPGROUP_ROWS


class Ring(NamedTuple):
    """Slots of operands' tiles, and barriers a slot for what has arrived and what was used."""

    left: Any  # [stages, consumers, WARPGROUP_ROWS and depth in the operand's order]
    right: Any  # [stages, columns and depth in the operand's order]
    ready: Any
    free: Any


class Item(NamedTuple):
    """Operands in global memory, first row and column of the tile, and the steps to add up.

    left, right: matrices in the orders of the tiling. depth: where the first step begins. steps:
    at least one, each of the tiling's depth. row, column and depth are whole atoms of the operands
    as they are stored: multiples of ATOM_ROWS, or of ATOM_BYTES along a stored row.
    """

    left: Any
    right: Any
    row: Any
    column: Any
    depth: Any
    steps: Any


def nothing(*_: Any) -> tuple:
    return ()


class Work(NamedTuple):
    """What one program does: `count` items, numbered from 0.

    item(i): where its operands lie; producer and consumers both call it.
    epilogue(i, warpgroup, sums, carry) -> carry: in each consumer, with its [WARPGROUP_ROWS,
    columns] of float32 sums (registers in plgpu.Layout.WGMMA), which begin at the item's row +
    warpgroup * WARPGROUP_ROWS. The carry starts as init(warpgroup); finish(warpgroup, carry) sees
    the last.
    prepare(i, step, warpgroup, left, right): in each consumer, before a step of an item is
    multiplied, its tiles in shared memory. Who changes them calls plgpu.commit_smem, and sees to
    it that the other consumers wait for what it changed of `right`.

    An epilogue that takes the same jnp.where of the sums in two branches makes the compiler move it
    into the loop, where products then no longer overlap ("serialized", says ptxas).
    """

    count: Any
    item: Callable[[Any], Item]
    epilogue: Callable[[Any, Any, jax.Array, Any], Any]
    init: Callable[[Any], Any] = nothing
    finish: Callable[[Any, Any], Any] = nothing
    prepare: Callable[[Any, Any, Any, Any, Any], Any] = nothing


def ring_type(tiling: Tiling, dtype: Any) -> Ring:
    """Scratch types of a ring of operands of `dtype`."""
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
    """The pair, which stands as in `plain`, as it stands in `order`."""
    return pair if order == plain else pair[::-1]


def run(tiling: Tiling, ring: Ring, work: Work) -> None:
    """All items of this program, in all its warpgroups (consumers + 1)."""
    warpgroup = lax.axis_index(WARPGROUP_AXIS)

    @pl.when(warpgroup < tiling.consumers)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS[tiling.consumers], action="increase")
        consume(tiling, ring, work, warpgroup)

    @pl.when(warpgroup == tiling.consumers)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(tiling, ring, work)


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

    @pl.loop(jnp.maximum(end - tiling.stages, 0), end)  # every barrier ends in a known phase
    def _(position):
        plgpu.barrier_wait(ring.free.at[mosaic.ring_slot(position, tiling.stages)])


def consume(tiling: Tiling, ring: Ring, work: Work, warpgroup: jax.Array) -> None:
    def add_up(index: jax.Array, carry: tuple) -> tuple:
        position, own = carry
        steps = work.item(index).steps
        prepare = functools.partial(work.prepare, index)
        sums = accumulate(tiling, ring, (position, steps), warpgroup, prepare)
        return position + steps, work.epilogue(index, warpgroup, sums, own)

    start = (jnp.int32(0), work.init(warpgroup))
    _, own = lax.fori_loop(0, work.count, add_up, start)
    work.finish(warpgroup, own)


def tiles_at(tiling: Tiling, ring: Ring, position: jax.Array, warpgroup: jax.Array) -> tuple:
    slot = mosaic.ring_slot(position, tiling.stages)
    return ring.left.at[slot, warpgroup], ring.right.at[slot]


def accumulate(
    tiling: Tiling, ring: Ring, span: tuple, warpgroup: jax.Array, prepare: Callable[..., Any]
) -> jax.Array:
    """The sums of an item; span: its first position in the ring, and steps. All are handed back.

    One product is always under way: a slot is free once the next one's product was issued.
    """
    position, steps = span

    def multiply(sums_ref: Any, step: Any) -> None:
        left, right = tiles_at(tiling, ring, position + step, warpgroup)
        plgpu.barrier_wait(ring.ready.at[mosaic.ring_slot(position + step, tiling.stages)])
        prepare(step, warpgroup, left, right)
        left = left if tiling.left == "MK" else mosaic.transposed(left)
        right = right if tiling.right == "KN" else mosaic.transposed(right)
        plgpu.wgmma(sums_ref, left, right)

    def hand_back(place: jax.Array) -> None:
        plgpu.barrier_arrive(ring.free.at[mosaic.ring_slot(place, tiling.stages)])

    def compute(sums_ref: Any) -> jax.Array:
        multiply(sums_ref, jnp.int32(0))

        @pl.loop(1, steps)
        def _(step):
            multiply(sums_ref, step)
            plgpu.wgmma_wait(1)
            hand_back(position + step - 1)

        return sums_ref[...]

    shape = (WARPGROUP_ROWS, tiling.columns)
    sums = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
    hand_back(position + steps - 1)
    return sums


def store_type(tiling: Tiling, dtype: Any, row_bytes: int = 0) -> Any:
    """Scratch type of the buffers that `store` writes through; row_bytes 0: as the tiling says."""
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
    """A consumer's tile to `target` in global memory; `buffers`: the consumer's of `store_type`.

    change(sums, first column): what to write of some columns of the sums; they go through it part
    by part, for want of registers. Returns while the last copies are under way; `finish_stores`
    waits for them.
    """
    slots, _, width = buffers.shape
    parts = range(0, sums.shape[1], width)
    for number, first in enumerate(parts):
        buffer = buffers.at[number % slots]
        late = number == 0 and len(parts) % slots  # the last tile's last copies may read it yet
        plgpu.wait_smem_to_gmem(0 if late else slots - 1, wait_read_only=True)
        buffer[...] = change(sums[:, first : first + width], first).astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target.at[:, pl.ds(first, width)])


def finish_stores(*_: Any) -> None:
    plgpu.wait_smem_to_gmem(0)


def item_count(total: Any, program: jax.Array, programs: int) -> jax.Array:
    """Of `total` items, those of one of `programs`: it does every `programs`-th."""
    return lax.div(jnp.int32(total) - program + (programs - 1), jnp.int32(programs))


def tile_place(index: jax.Array, rows: Any, columns: int, width: int = 16) -> tuple:
    """(row, column) of the tile that comes `index`-th: down bands `width` tiles high.

    Programs that run together so share tiles of both operands in the L2 cache.
    """
    band = lax.div(index, jnp.int32(width * columns))
    within = lax.rem(index, jnp.int32(width * columns))
    height = jnp.minimum(rows - band * width, width)
    return band * width + lax.rem(within, height), lax.div(within, height)


def whole_rows(count: int) -> bool:
    """Whether so many rows are whole atoms; fewer than one's are one."""
    return count % ATOM_ROWS == 0 or count < ATOM_ROWS


def matmul_refuses(left: Any, right: Any, tiling: Tiling) -> str:
    """Why the loop cannot take these operands (matrices, or stacks of them); empty if it can."""
    if left.dtype != right.dtype or left.dtype not in OPERAND_DTYPES:
        names = ", ".join(map(str, OPERAND_DTYPES))
        return f"operands are {left.dtype} and {right.dtype}, not both one of {names}"
    if left.dtype.itemsize == 1 and (tiling.left, tiling.right) != ("MK", "NK"):
        return f"operands of 8 bits lie as {tiling.left} and {tiling.right}, not as MK and NK"
    columns = ATOM_BYTES // left.dtype.itemsize
    for array in (left, right):
        if not whole_rows(array.shape[-2]) or array.shape[-1] % columns:
            return f"shape {array.shape} is not of {ATOM_ROWS} by {columns} {array.dtype} each"
    return ""


def matmul(
    left: Float[Array, "_ _"],
    right: Float[Array, "_ _"],
    tiling: Tiling | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """left @ right of matrices that lie as the tiling says; ValueError for `matmul_refuses`."""
    tiling = tiling or Tiling()
    if reason := matmul_refuses(left, right, tiling):
        raise ValueError(f"matmul cannot run: {reason}")
    M, K = ordered(tiling.left, "MK", left.shape)
    depth, N = ordered(tiling.right, "KN", right.shape)
    if depth != K:
        raise ValueError(f"left has depth {K} and right {depth}: they must be equal")
    atom = ATOM_BYTES // jnp.dtype(out_dtype).itemsize
    if not whole_rows(M) or N % atom:
        raise ValueError(f"the product is [{M}, {N}], not of {ATOM_ROWS} by {atom} each")
    rows, columns = pl.cdiv(M, tiling.rows), pl.cdiv(N, tiling.columns)
    programs, steps = min(MULTIPROCESSORS, rows * columns), pl.cdiv(K, tiling.depth)

    def matmul_kernel(left_ref: Any, right_ref: Any, out_MN: Any, ring: Ring, buffers: Any) -> None:
        program = lax.axis_index("program")

        def item(index: jax.Array) -> Item:
            row, column = tile_place(index * programs + program, rows, columns)
            place = (row * tiling.rows, column * tiling.columns)
            return Item(left_ref, right_ref, *place, 0, steps)

        def epilogue(index: jax.Array, warpgroup: jax.Array, sums: jax.Array, _: tuple) -> tuple:
            place = item(index)
            first = place.row + warpgroup * WARPGROUP_ROWS
            own = (pl.ds(first, WARPGROUP_ROWS), pl.ds(place.column, tiling.columns))
            store(sums, buffers.at[warpgroup], out_MN.at[own])
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
