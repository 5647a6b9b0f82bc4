"""Flash attention for Hopper on Mosaic-GPU: forward. Not yet run on a GPU: compiled, interpreted.

A program computes WARPGROUP_ROWS queries of one head per consumer warpgroup. A producer warpgroup
streams blocks of keys and values through rings in shared memory (TMA). The consumers multiply
(WGMMA) and take turns at the tensor cores, so that one computes its softmax while another one
multiplies, as in FlashAttention-3 (Shah et al., 2024). Blocks that no query of the program sees are
not loaded; blocks that all of its queries see are not masked.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import mosaic
from .intervals import FlashSpec, MaskSides, key_ranges, mask_sides, pad_rows, visible
from .mosaic import LOG2E, MATRIX, ROWS, WARPGROUP_ROWS, pl, plgpu, spread


@dataclasses.dataclass(frozen=True)
class Tile:
    """Keys per block, slots of each ring, and consumer warpgroups of a forward program."""

    keys: int
    stages: int
    consumers: int = 2

    @property
    def rows(self) -> int:
        return self.consumers * WARPGROUP_ROWS


FORWARD_TILES = {  # by head dims of keys and of values
    (64, 64): Tile(keys=128, stages=4),
    (80, 80): Tile(keys=128, stages=3),
    (96, 96): Tile(keys=128, stages=3),
    (128, 128): Tile(keys=128, stages=2),
    (192, 128): Tile(keys=64, stages=3),
    (256, 256): Tile(keys=64, stages=2),
}


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores, in units of log 2, of products of queries and keys."""

    scale: float
    softcap: float

    def capped(self, products: jax.Array) -> tuple[jax.Array, float]:
        """(numbers, factor) with score = numbers * factor, for use in one multiply-add."""
        if self.softcap:
            return self.tanh(products), self.softcap * LOG2E
        return products, self.scale * LOG2E

    def tanh(self, products: jax.Array) -> jax.Array:
        """By exp2: the tanh instruction has an error of 2^-11, which a cap of 50 multiplies."""
        power = jnp.exp2(products * (2 * LOG2E * self.scale / self.softcap))
        return 1 - 2 / (1 + power)


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Static facts of a program."""

    scores: Scores
    tile: Tile
    sides: MaskSides
    heads_a_group: int
    shared_bounds: bool  # lower_AL and upper_AL have one row for the whole batch


class ForwardRefs(NamedTuple):
    """Arrays in global memory, then rings, buffers and barriers in shared memory."""

    q_BLHK: Any
    k_BMGK: Any
    v_BMGV: Any
    lower_AL: Any
    upper_AL: Any
    ranges: Any
    out_BLHV: Any
    lse_BHL: Any
    q_buffer: Any
    out_buffer: Any  # empty if q_buffer has the same shape
    k_ring: Any
    v_ring: Any
    lse_buffer: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any


class Place(NamedTuple):
    """A program's row of the batch and of the bounds, its heads, and its blocks of keys."""

    batch: jax.Array
    bounds: jax.Array | int
    head: jax.Array
    group: jax.Array
    program: jax.Array
    first: jax.Array
    first_full: jax.Array
    end_full: jax.Array
    end: jax.Array


def forward(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    lower_AL: Int[Array, "A L"],
    upper_AL: Int[Array, "A L"],
    spec: FlashSpec,
    tile: Tile | None = None,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B H L"]]:
    """(output, log-sum-exp); zeros and -inf for a query that sees no key. spec.scale is set."""
    B, L, H, K = q_BLHK.shape
    M, G, V = v_BMGV.shape[1:]
    tile, dtype = tile or FORWARD_TILES[K, V], q_BLHK.dtype
    ranges = key_ranges(lower_AL, upper_AL, tile.rows, tile.keys, M)
    programs = ranges.shape[1]
    plan = ForwardPlan(
        scores=Scores(spec.scale, spec.softcap),
        tile=tile,
        sides=mask_sides(spec, M, tile.keys),
        heads_a_group=H // G,
        shared_bounds=lower_AL.shape[0] == 1,
    )

    def barriers(count: int, arrivals: int = 1) -> Any:
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

    def flash_forward(*refs: Any) -> None:
        forward_program(plan, ForwardRefs(*refs))

    out_BLHV, lse_BHL = mosaic.launch(
        flash_forward,
        out_type=[
            jax.ShapeDtypeStruct((B, L, H, V), dtype),
            jax.ShapeDtypeStruct((B, H, programs * tile.rows), jnp.float32),
        ],
        grid={"batch": B, "head": H, "program": programs},
        warpgroups=tile.consumers + 1,
        scratch_types=[
            mosaic.matrix_buffer((tile.consumers, WARPGROUP_ROWS, K), dtype),
            [mosaic.matrix_buffer((tile.consumers, WARPGROUP_ROWS, V), dtype)] * (K != V),
            mosaic.matrix_buffer((tile.stages, tile.keys, K), dtype),
            mosaic.matrix_buffer((tile.stages, tile.keys, V), dtype),
            plgpu.SMEM((tile.consumers, WARPGROUP_ROWS), jnp.float32),
            barriers(tile.consumers),
            barriers(tile.stages),
            barriers(tile.stages),
            barriers(tile.stages, tile.consumers),
            barriers(tile.stages, tile.consumers),
            barriers(tile.consumers),
        ],
    )(
        q_BLHK,
        k_BMGK,
        v_BMGV,
        pad_rows(lower_AL, tile.rows),
        pad_rows(upper_AL, tile.rows),
        ranges,
    )
    return out_BLHV, lse_BHL[:, :, :L]


def forward_program(plan: ForwardPlan, refs: ForwardRefs) -> None:
    place = forward_place(plan, refs)
    mosaic.split_warpgroups(
        plan.tile.consumers,
        lambda warpgroup: consume(plan, refs, place, warpgroup),
        lambda: produce(plan, refs, place),
    )


def forward_place(plan: ForwardPlan, refs: ForwardRefs) -> Place:
    """Late queries come first: with a causal mask they see the most keys."""
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    program = refs.ranges.shape[1] - 1 - lax.axis_index("program")
    bounds = 0 if plan.shared_bounds else batch
    blocks = [refs.ranges[bounds, program, i] for i in range(4)]
    group = lax.div(head, jnp.asarray(plan.heads_a_group, head.dtype))
    return Place(batch, bounds, head, group, program, *blocks)


def produce(plan: ForwardPlan, refs: ForwardRefs, place: Place) -> None:
    tile = plan.tile

    def fetch(source: Any, ring: Any, ready: Any, free: Any, step: jax.Array) -> None:
        slot = mosaic.ring_slot(step, tile.stages)
        pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        keys = pl.ds((place.first + step) * tile.keys, tile.keys)
        block = source.at[place.batch, keys, place.group]
        plgpu.copy_gmem_to_smem(block, ring.at[slot], ready.at[slot])

    @pl.loop(0, place.end - place.first)
    def _(step):
        fetch(refs.k_BMGK, refs.k_ring, refs.k_ready, refs.k_free, step)
        fetch(refs.v_BMGV, refs.v_ring, refs.v_ready, refs.v_free, step)


def consume(plan: ForwardPlan, refs: ForwardRefs, place: Place, warpgroup: jax.Array) -> None:
    tile, value_dim = plan.tile, refs.v_ring.shape[-1]
    first_row = place.program * tile.rows + warpgroup * WARPGROUP_ROWS
    rows = pl.ds(first_row, WARPGROUP_ROWS)
    q_tile, ready = refs.q_buffer.at[warpgroup], refs.q_ready.at[warpgroup]
    plgpu.copy_gmem_to_smem(refs.q_BLHK.at[place.batch, rows, place.head], q_tile, ready)
    lower = mosaic.load(refs.lower_AL.at[place.bounds, rows], ROWS) if plan.sides.lower else None
    upper = mosaic.load(refs.upper_AL.at[place.bounds, rows], ROWS) if plan.sides.upper else None
    pl.when(warpgroup == tile.consumers - 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
    plgpu.barrier_wait(ready)
    products = first_products(plan, refs, q_tile, warpgroup)

    def step(masked: bool, block: jax.Array, carry: tuple) -> tuple:
        products, out, *statistics = carry
        mask = visible_keys(plan.sides, block, tile.keys, lower, upper) if masked else None
        weights, shrink, *statistics = online_softmax(plan.scores, products, mask, *statistics)
        out = out * spread(shrink, out.shape)
        position = block - place.first
        products, out = multiply(plan, refs, q_tile, warpgroup, position, (weights, out))
        return products, out, *statistics

    carry = (
        products,
        mosaic.constant(0.0, (WARPGROUP_ROWS, value_dim), MATRIX),
        mosaic.constant(-math.inf, (WARPGROUP_ROWS,), ROWS),
        mosaic.constant(0.0, (WARPGROUP_ROWS,), ROWS),
    )
    last = place.end - 1
    for masked, start, stop in visits(plan.sides.lower, plan.sides.upper, place, last):
        carry = lax.fori_loop(start, stop, lambda j, c, m=masked: step(m, j, c), carry)
    products, out, *statistics = carry
    mask = None
    if plan.sides.any:
        mask = visible_keys(plan.sides, last, tile.keys, lower, upper)
    weights, shrink, maximum, total = online_softmax(plan.scores, products, mask, *statistics)
    out = out * spread(shrink, out.shape)
    out = last_values(plan, refs, warpgroup, last - place.first, (weights, out))
    store(refs, place, warpgroup, rows, (out, maximum, total))


def visits(head: bool, tail: bool, span: Any, last: jax.Array) -> list[tuple[bool, Any, Any]]:
    """(masked, start, stop) of the loops over the blocks of a span before `last`.

    head, tail: whether blocks before, and after, the fully visible blocks can exist.
    """
    start = jnp.minimum(span.first_full, last) if head else span.first
    stop = jnp.minimum(span.end_full, last) if tail else last
    loops = [(True, span.first, start)] if head else []
    loops += [(False, start, stop)]
    return [*loops, (True, stop, last)] if tail else loops


def visible_keys(
    sides: MaskSides, block: jax.Array, size: int, lower: Any, upper: Any
) -> jax.Array | None:
    """Mask of a block of `size` keys (columns) for each query (row)."""
    shape = (WARPGROUP_ROWS, size)
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    begin = block * size
    lower = spread(lower - begin, shape) if sides.lower else None
    upper = spread(upper - begin, shape) if sides.upper else None
    return visible(keys, lower, upper, sides)


def online_softmax(
    scores: Scores, products: jax.Array, mask: Any, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(weights, factor for the earlier sums, maximum, total), in units of log 2."""
    products, factor = scores.capped(products)
    if mask is not None:
        products = jnp.where(mask, products, -math.inf)
    new_maximum = jnp.maximum(maximum, products.max(axis=1) * factor)
    base = new_maximum
    if mask is not None:  # a row without visible keys so far must not compute inf - inf
        base = jnp.where(new_maximum == -math.inf, 0.0, new_maximum)
    shrink = jnp.exp2(maximum - base)
    weights = jnp.exp2(products * factor - spread(base, products.shape))
    return weights, shrink, new_maximum, total * shrink + weights.sum(axis=1)


def first_products(
    plan: ForwardPlan, refs: ForwardRefs, q_tile: Any, warpgroup: jax.Array
) -> jax.Array:
    plgpu.barrier_wait(refs.k_ready.at[0])
    plgpu.barrier_wait(refs.turn.at[warpgroup])

    def compute(products_ref: Any) -> jax.Array:
        plgpu.wgmma(products_ref, q_tile, mosaic.transposed(refs.k_ring.at[0]))
        pass_turn(plan, refs, warpgroup)
        return products_ref[...]

    shape = (WARPGROUP_ROWS, plan.tile.keys)
    products = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
    plgpu.barrier_arrive(refs.k_free.at[0])
    return products


def multiply(
    plan: ForwardPlan,
    refs: ForwardRefs,
    q_tile: Any,
    warpgroup: jax.Array,
    step: jax.Array,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """(products with the next block's keys, output with this block's values), issued together."""
    weights, out = carry
    slot = mosaic.ring_slot(step, plan.tile.stages)
    next_slot = mosaic.ring_slot(step + 1, plan.tile.stages)
    weights = weights.astype(refs.v_ring.dtype)
    plgpu.barrier_wait(refs.k_ready.at[next_slot])
    plgpu.barrier_wait(refs.v_ready.at[slot])
    plgpu.barrier_wait(refs.turn.at[warpgroup])

    def compute(accumulators: Any) -> None:
        products_ref, out_ref = accumulators
        plgpu.wgmma(products_ref, q_tile, mosaic.transposed(refs.k_ring.at[next_slot]))
        plgpu.wgmma(out_ref, weights, refs.v_ring.at[slot])
        pass_turn(plan, refs, warpgroup)

    zeros = mosaic.constant(0.0, (WARPGROUP_ROWS, plan.tile.keys), MATRIX)
    products, out = pl.run_state(compute)((plgpu.ACC.init(zeros), plgpu.ACC.init(out)))
    plgpu.barrier_arrive(refs.k_free.at[next_slot])
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return products, out


def last_values(
    plan: ForwardPlan,
    refs: ForwardRefs,
    warpgroup: jax.Array,
    step: jax.Array,
    carry: tuple[jax.Array, jax.Array],
) -> jax.Array:
    weights, out = carry
    slot = mosaic.ring_slot(step, plan.tile.stages)
    weights = weights.astype(refs.v_ring.dtype)
    plgpu.barrier_wait(refs.v_ready.at[slot])
    plgpu.barrier_wait(refs.turn.at[warpgroup])

    def compute(out_ref: Any) -> None:
        plgpu.wgmma(out_ref, weights, refs.v_ring.at[slot])
        pass_turn(plan, refs, warpgroup)

    return pl.run_state(compute)(plgpu.ACC.init(out))


def pass_turn(plan: ForwardPlan, refs: ForwardRefs, warpgroup: jax.Array) -> None:
    """Let the next consumer use the tensor cores."""
    next_consumer = lax.rem(warpgroup + 1, jnp.asarray(plan.tile.consumers, warpgroup.dtype))
    plgpu.barrier_arrive(refs.turn.at[next_consumer])


def store(
    refs: ForwardRefs, place: Place, warpgroup: jax.Array, rows: Any, carry: tuple[jax.Array, ...]
) -> None:
    """Write output and log-sum-exp, through q_buffer if it fits; TMA drops rows past the end."""
    out, maximum, total = carry
    inverse = 1 / jnp.where(total == 0.0, 1.0, total)
    out = out * spread(inverse, out.shape)
    buffer = (refs.out_buffer or [refs.q_buffer])[0].at[warpgroup]
    buffer[...] = out.astype(buffer.dtype)
    refs.lse_buffer.at[warpgroup][...] = maximum * (1 / LOG2E) + jnp.log(total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, refs.out_BLHV.at[place.batch, rows, place.head])
    plgpu.copy_smem_to_gmem(
        refs.lse_buffer.at[warpgroup], refs.lse_BHL.at[place.batch, place.head, rows]
    )
    plgpu.wait_smem_to_gmem(0)
