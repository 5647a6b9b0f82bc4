"""Flash attention for Hopper on Mosaic-GPU: backward. Not yet run on a GPU: compiled, interpreted.

Two kernels, each of which writes every gradient exactly once, so that results are deterministic. A
program of `query_gradient` owns queries and loops over the keys that they see. A program of
`key_gradients` owns keys of one key head and loops over the queries that see them, of all query
heads of the group. Both recompute the probabilities from the log-sum-exp: seven matrix products per
block, where one kernel with atomic additions needs five. With out = p v:
dv = p^T do, ds = p (do v^T - delta) with delta = sum(do out) - d lse, dq = ds k, dk = ds^T q.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import mosaic
from .attention_forward import Scores, visible_keys, visits
from .intervals import (
    FlashSpec,
    MaskSides,
    key_ranges,
    mask_sides,
    pad_rows,
    query_ranges,
    visible,
)
from .mosaic import (
    COLUMNS,
    LOG2E,
    MATRIX,
    ROWS,
    WARPGROUP_ROWS,
    pl,
    plgpu,
    spread,
    spread_columns,
)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A program's loop over blocks: length of a block, slots of its rings, consumer warpgroups."""

    block: int
    stages: int
    consumers: int = 2

    @property
    def owned(self) -> int:
        return self.consumers * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Loops over keys, for the gradient of queries, and over queries, for those of keys."""

    keys: Walk
    queries: Walk
    split: bool = False  # gradients of keys and values in two kernels, which need fewer registers


BACKWARD_TILES = {  # by head dims of keys and of values
    (64, 64): BackwardTiles(Walk(128, 4), Walk(64, 4)),
    (80, 80): BackwardTiles(Walk(64, 4), Walk(64, 4)),
    (96, 96): BackwardTiles(Walk(64, 4), Walk(64, 4)),
    (128, 128): BackwardTiles(Walk(64, 4), Walk(64, 3)),
    (192, 128): BackwardTiles(Walk(64, 2), Walk(64, 2), split=True),
    (256, 256): BackwardTiles(Walk(64, 2, consumers=1), Walk(64, 2, consumers=1), split=True),
}


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    scores: Scores
    walk: Walk
    sides: MaskSides
    heads_a_group: int
    shared_bounds: bool
    parts: tuple[bool, bool] = (True, True)  # whether to compute the gradients of keys, of values


class Inputs(NamedTuple):
    """Arrays in global memory; lse in units of log 2, +inf if no key is seen and past the end."""

    q_BLHK: Any
    k_BMGK: Any
    v_BMGV: Any
    slope_BLHV: Any  # the gradient of the output
    lse_BHL: Any
    delta_BHL: Any
    lower_AL: Any
    upper_AL: Any
    ranges: Any


class Stream(NamedTuple):
    """Rings that the producer fills, with two barriers per slot: data arrived, slot free."""

    rings: Any
    ready: Any
    free: Any


class Resident(NamedTuple):
    """Two matrices that each consumer keeps, and a barrier for their arrival."""

    first: Any
    second: Any
    ready: Any


class Span(NamedTuple):
    """Blocks that a program loops over, as in `key_ranges`."""

    first: jax.Array
    first_full: jax.Array
    end_full: jax.Array
    end: jax.Array


class Residuals(NamedTuple):
    """Arrays that forward stores for backward."""

    q_BLHK: Float[Array, "B L H K"]
    k_BMGK: Float[Array, "B M G K"]
    v_BMGV: Float[Array, "B M G V"]
    out_BLHV: Float[Array, "B L H V"]
    lse_BHL: Float[Array, "B H L"]
    lower_AL: Int[Array, "A L"]
    upper_AL: Int[Array, "A L"]


def backward(
    residuals: Residuals,
    slope_BLHV: Float[Array, "B L H V"],
    lse_slope_BHL: Float[Array, "B H L"],
    spec: FlashSpec,
    tiles: BackwardTiles | None = None,
) -> tuple[Float[Array, "B L H K"], Float[Array, "B M G K"], Float[Array, "B M G V"]]:
    """Gradients of queries, keys and values."""
    q, k, v, out, lse_BHL, lower_AL, upper_AL = residuals
    tiles = tiles or BACKWARD_TILES[q.shape[-1], v.shape[-1]]
    lse_BHL, delta_BHL = row_statistics(out, lse_BHL, slope_BLHV, lse_slope_BHL)
    length = max(tiles.keys.owned, tiles.queries.block)  # both divide it
    padding = ((0, 0), (0, 0), (0, -q.shape[1] % length))
    lse_BHL = jnp.pad(lse_BHL, padding, constant_values=math.inf)
    delta_BHL = jnp.pad(delta_BHL, padding)
    bounds = (lower_AL, upper_AL)
    lower_AL, upper_AL = (pad_rows(bound, length) for bound in bounds)
    slope_BLHV = slope_BLHV.astype(q.dtype)
    inputs = Inputs(q, k, v, slope_BLHV, lse_BHL, delta_BHL, lower_AL, upper_AL, None)
    keys, queries = tiles.keys, tiles.queries
    key_spans = key_ranges(*bounds, keys.owned, keys.block, k.shape[1])
    query_spans = query_ranges(*bounds, queries.block, queries.owned, k.shape[1])
    q_grad = query_gradient(inputs._replace(ranges=key_spans), spec, keys)
    inputs = inputs._replace(ranges=query_spans)
    kernel_parts = [(True, False), (False, True)] if tiles.split else [(True, True)]
    k_grad, v_grad = (
        grad for parts in kernel_parts for grad in key_gradients(inputs, spec, queries, parts)
    )
    return q_grad, k_grad, v_grad


def row_statistics(out, lse_BHL, slope_BLHV, lse_slope_BHL) -> tuple[jax.Array, jax.Array]:
    """(log-sum-exp in units of log 2, delta) of every query."""
    product_BLH = jnp.sum(slope_BLHV.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta_BHL = product_BLH.swapaxes(1, 2) - lse_slope_BHL
    is_blind = lse_BHL == -math.inf
    return jnp.where(is_blind, math.inf, lse_BHL * LOG2E), jnp.where(is_blind, 0.0, delta_BHL)


def plan_of(inputs: Inputs, spec: FlashSpec, walk: Walk, key_block: int) -> BackwardPlan:
    return BackwardPlan(
        scores=Scores(spec.scale, spec.softcap),
        walk=walk,
        sides=mask_sides(spec, inputs.k_BMGK.shape[1], key_block),
        heads_a_group=inputs.q_BLHK.shape[2] // inputs.k_BMGK.shape[2],
        shared_bounds=inputs.lower_AL.shape[0] == 1,
    )


def stream_type(walk: Walk, rings: list[Any]) -> Stream:
    ready = plgpu.Barrier(num_barriers=walk.stages, num_arrivals=len(rings))
    free = plgpu.Barrier(num_barriers=walk.stages, num_arrivals=walk.consumers)
    return Stream(tuple(rings), ready, free)


def resident_type(walk: Walk, columns: tuple[int, int], dtype: Any) -> Resident:
    first, second = (
        mosaic.matrix_buffer((walk.consumers, WARPGROUP_ROWS, count), dtype) for count in columns
    )
    return Resident(first, second, plgpu.Barrier(num_barriers=walk.consumers, num_arrivals=2))


def query_gradient(inputs: Inputs, spec: FlashSpec, walk: Walk) -> jax.Array:
    (B, _, H, K), V = inputs.q_BLHK.shape, inputs.v_BMGV.shape[-1]
    dtype, plan = inputs.q_BLHK.dtype, plan_of(inputs, spec, walk, walk.block)

    def flash_query_gradient(*refs: Any) -> None:
        *arrays, grad_BLHK, resident, stream = refs
        query_program(plan, Inputs(*arrays), grad_BLHK, resident, stream)

    rings = [mosaic.matrix_buffer((walk.stages, walk.block, count), dtype) for count in (K, V)]
    return mosaic.launch(
        flash_query_gradient,
        out_type=[jax.ShapeDtypeStruct(inputs.q_BLHK.shape, dtype)],
        grid={"batch": B, "head": H, "program": inputs.ranges.shape[1]},
        warpgroups=walk.consumers + 1,
        scratch_types=[resident_type(walk, (K, V), dtype), stream_type(walk, rings)],
    )(*inputs)[0]


def key_gradients(
    inputs: Inputs, spec: FlashSpec, walk: Walk, parts: tuple[bool, bool] = (True, True)
) -> list[jax.Array]:
    """The gradients of keys and of values; parts: whether to compute each."""
    (B, _, G, K), V = inputs.k_BMGK.shape, inputs.v_BMGV.shape[-1]
    dtype, plan = inputs.k_BMGK.dtype, plan_of(inputs, spec, walk, key_block=1)
    plan = dataclasses.replace(plan, parts=parts)

    def flash_key_gradients(*refs: Any) -> None:
        *others, resident, stream = refs
        arrays, grads = others[: len(inputs)], others[len(inputs) :]
        key_program(plan, Inputs(*arrays), tuple(grads), resident, stream)

    rings = [mosaic.matrix_buffer((walk.stages, walk.block, count), dtype) for count in (K, V)]
    rings += [plgpu.SMEM((walk.stages, walk.block), jnp.float32)] * 2
    outputs = selected(parts, (inputs.k_BMGK, inputs.v_BMGV))
    return mosaic.launch(
        flash_key_gradients,
        out_type=[jax.ShapeDtypeStruct(array.shape, dtype) for array in outputs],
        grid={"batch": B, "head": G, "program": inputs.ranges.shape[1]},
        warpgroups=walk.consumers + 1,
        scratch_types=[resident_type(walk, (K, V), dtype), stream_type(walk, rings)],
    )(*inputs)


def selected(parts: tuple[bool, bool], pair: tuple[Any, Any]) -> tuple:
    return tuple(item for item, is_selected in zip(pair, parts, strict=True) if is_selected)


def probabilities(
    scores: Scores, products: jax.Array, mask: jax.Array | None, lse: Callable[[], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(probabilities, probabilities times the derivative of the soft-cap).

    lse is a function that is called last: loaded earlier, it would take up registers beside the
    bounds of the mask.
    """
    numbers, factor = scores.capped(products)
    derivative = 1 - numbers * numbers if scores.softcap else None
    if mask is not None:
        numbers = jnp.where(mask, numbers, -math.inf)
    weights = jnp.exp2(numbers * factor - lse())
    return weights, weights if derivative is None else weights * derivative


def two_products(
    shape: tuple[int, int], left: tuple, right: tuple, overlapped: Callable[[jax.Array], Any]
) -> tuple[Any, jax.Array]:
    """(overlapped(left[0] @ right[0]^T), left[1] @ right[1]^T) of matrices in shared memory.

    `overlapped` runs during the second product.
    """

    def compute(first: Any, second: Any) -> tuple[Any, jax.Array]:
        plgpu.wgmma(first, left[0], mosaic.transposed(right[0]))
        plgpu.wgmma(second, left[1], mosaic.transposed(right[1]))
        result = overlapped(plgpu.wgmma_accumulator_load(first, wait_n=1))
        return result, second[...]

    accumulator = plgpu.ACC(shape, jnp.float32)
    return pl.run_scoped(compute, accumulator, accumulator)


def query_program(
    plan: BackwardPlan, inputs: Inputs, grad_BLHK: Any, resident: Resident, stream: Stream
) -> None:
    walk = plan.walk
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    program = inputs.ranges.shape[1] - 1 - lax.axis_index("program")  # most keys first
    bounds = 0 if plan.shared_bounds else batch
    group = lax.div(head, jnp.asarray(plan.heads_a_group, head.dtype))
    span = Span(*(inputs.ranges[bounds, program, i] for i in range(4)))

    def produce() -> None:
        @pl.loop(0, span.end - span.first)
        def _(step):
            at = (batch, pl.ds((span.first + step) * walk.block, walk.block), group)
            fetch(walk, stream, step, (inputs.k_BMGK.at[at], inputs.v_BMGV.at[at]))

    def consume(warpgroup: jax.Array) -> None:
        rows = pl.ds(program * walk.owned + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        place = (batch, rows, head)
        sources = (inputs.q_BLHK.at[place], inputs.slope_BLHV.at[place])
        tiles = load_resident(resident, warpgroup, sources)
        lse = mosaic.load(inputs.lse_BHL.at[batch, head, rows], ROWS)
        delta = mosaic.load(inputs.delta_BHL.at[batch, head, rows], ROWS)
        lower = mosaic.load(inputs.lower_AL.at[bounds, rows], ROWS) if plan.sides.lower else None
        upper = mosaic.load(inputs.upper_AL.at[bounds, rows], ROWS) if plan.sides.upper else None

        def step(masked: bool, block: jax.Array, grad: jax.Array) -> jax.Array:
            bounds = (plan.sides, block, walk.block, lower, upper)
            mask = functools.partial(visible_keys, *bounds) if masked else no_mask
            slot = mosaic.ring_slot(block - span.first, walk.stages)
            return add_query_gradient(plan, tiles, stream, slot, (lse, delta, mask, grad))

        grad = mosaic.constant(0.0, (WARPGROUP_ROWS, inputs.q_BLHK.shape[-1]), MATRIX)
        for masked, start, stop in visits(plan.sides.lower, plan.sides.upper, span, span.end):
            grad = lax.fori_loop(start, stop, lambda j, g, m=masked: step(m, j, g), grad)
        write((grad * plan.scores.scale,), tiles[:1], (grad_BLHK.at[place],))

    mosaic.split_warpgroups(walk.consumers, consume, produce)


def add_query_gradient(
    plan: BackwardPlan, tiles: tuple[Any, Any], stream: Stream, slot: jax.Array, carry: tuple
) -> jax.Array:
    """Add the terms of one block of keys to the gradient of a consumer's queries."""
    lse, delta, mask, grad = carry
    shape, dtype = (WARPGROUP_ROWS, plan.walk.block), stream.rings[0].dtype
    keys, values = (ring.at[slot] for ring in stream.rings)

    def weights_of(products: jax.Array) -> jax.Array:
        return probabilities(plan.scores, products, mask(), lambda: spread(lse, shape))[1]

    plgpu.barrier_wait(stream.ready.at[slot])
    slope, weight_slope = two_products(shape, tiles, (keys, values), weights_of)
    slope = (slope * (weight_slope - spread(delta, shape))).astype(dtype)
    grad = pl.run_state(lambda ref: plgpu.wgmma(ref, slope, keys))(plgpu.ACC.init(grad))
    plgpu.barrier_arrive(stream.free.at[slot])
    return grad


def no_mask() -> None:
    """The mask of a fully visible block. Masks are functions because early ones fill registers."""


def key_program(
    plan: BackwardPlan, inputs: Inputs, grads: tuple[Any, ...], resident: Resident, stream: Stream
) -> None:
    walk = plan.walk
    batch, group = lax.axis_index("batch"), lax.axis_index("head")
    program = lax.axis_index("program")
    bounds = 0 if plan.shared_bounds else batch
    span = Span(*(inputs.ranges[bounds, program, i] for i in range(4)))
    steps = span.end - span.first

    def produce() -> None:
        @pl.loop(0, steps * plan.heads_a_group)
        def _(step):
            head = group * plan.heads_a_group + lax.div(step, steps)
            rows = pl.ds((span.first + lax.rem(step, steps)) * walk.block, walk.block)
            matrices = (inputs.q_BLHK, inputs.slope_BLHV)
            sources = [matrix.at[batch, rows, head] for matrix in matrices]
            numbers = (inputs.lse_BHL, inputs.delta_BHL)
            sources += [number.at[batch, head, rows] for number in numbers]
            fetch(walk, stream, step, tuple(sources))

    def consume(warpgroup: jax.Array) -> None:
        begin = program * walk.owned + warpgroup * WARPGROUP_ROWS
        place = (batch, pl.ds(begin, WARPGROUP_ROWS), group)
        tiles = load_resident(
            resident, warpgroup, (inputs.k_BMGK.at[place], inputs.v_BMGV.at[place])
        )

        def step(masked: bool, before: jax.Array, block: jax.Array, carry: tuple) -> tuple:
            mask = functools.partial(visible_queries, plan, inputs, bounds, block, begin)
            slot = mosaic.ring_slot(before + block - span.first, walk.stages)
            return add_key_gradients(plan, tiles, stream, slot, mask if masked else no_mask, carry)

        def walk_head(head: jax.Array, carry: tuple) -> tuple:
            for masked, start, stop in visits(plan.sides.upper, plan.sides.lower, span, span.end):
                carry = lax.fori_loop(
                    start, stop, lambda j, c, m=masked: step(m, head * steps, j, c), carry
                )
            return carry

        shapes = [(WARPGROUP_ROWS, grad.shape[-1]) for grad in grads]
        zeros = tuple(mosaic.constant(0.0, shape, MATRIX) for shape in shapes)
        sums = lax.fori_loop(0, plan.heads_a_group, walk_head, zeros)
        factors = selected(plan.parts, (plan.scores.scale, 1.0))
        sums = tuple(total * factor for total, factor in zip(sums, factors, strict=True))
        targets = tuple(grad.at[place] for grad in grads)
        write(sums, selected(plan.parts, tiles), targets)

    mosaic.split_warpgroups(walk.consumers, consume, produce)


def add_key_gradients(
    plan: BackwardPlan,
    tiles: tuple[Any, Any],
    stream: Stream,
    slot: jax.Array,
    mask: Callable[[], jax.Array | None],
    carry: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Add the terms of one block of queries to the gradients of a consumer's keys and values."""
    shape, dtype = (WARPGROUP_ROWS, plan.walk.block), stream.rings[0].dtype
    queries, slopes, lse_ring, delta_ring = (ring.at[slot] for ring in stream.rings)

    zeros = mosaic.constant(0.0, shape, MATRIX)

    def score(products_ref: Any) -> jax.Array:
        plgpu.wgmma(products_ref, tiles[0], mosaic.transposed(queries))
        return products_ref[...]

    plgpu.barrier_wait(stream.ready.at[slot])
    products = pl.run_scoped(score, plgpu.ACC(shape, jnp.float32))

    def lse() -> jax.Array:
        return spread_columns(mosaic.load(lse_ring, COLUMNS), shape)

    weights, slope = probabilities(plan.scores, products, mask(), lse)
    weights = weights.astype(dtype)

    has_keys, has_values = plan.parts

    def multiply_slopes(accumulators: Any) -> None:
        if has_values:
            plgpu.wgmma(accumulators[0], weights, slopes)
        if has_keys:
            plgpu.wgmma(accumulators[-1], tiles[1], mosaic.transposed(slopes))

    accumulators = [plgpu.ACC.init(carry[-1])] if has_values else []
    accumulators += [plgpu.ACC.init(zeros)] if has_keys else []
    products = pl.run_state(multiply_slopes)(tuple(accumulators))
    grads = products[:1] if has_values else ()
    if has_keys:
        delta = spread_columns(mosaic.load(delta_ring, COLUMNS), shape)
        slope = (slope * (products[-1] - delta)).astype(dtype)
        init = plgpu.ACC.init(carry[0])
        grads = (pl.run_state(lambda ref: plgpu.wgmma(ref, slope, queries))(init), *grads)
    plgpu.commit_smem()  # threads have read the numbers that TMA will overwrite
    plgpu.barrier_arrive(stream.free.at[slot])
    return tuple(grads)


def visible_queries(
    plan: BackwardPlan, inputs: Inputs, bounds: Any, block: jax.Array, begin: jax.Array
) -> jax.Array | None:
    """Mask of a block of queries (columns) for each key (row) from `begin` on."""
    shape = (WARPGROUP_ROWS, plan.walk.block)
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
    rows = pl.ds(block * plan.walk.block, plan.walk.block)

    def bound(array_AL: Any) -> jax.Array:
        return spread_columns(mosaic.load(array_AL.at[bounds, rows], COLUMNS) - begin, shape)

    lower = bound(inputs.lower_AL) if plan.sides.lower else None
    return visible(keys, lower, bound(inputs.upper_AL) if plan.sides.upper else None, plan.sides)


def load_resident(
    resident: Resident, warpgroup: jax.Array, sources: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Load the two matrices that a consumer keeps."""
    buffers = (resident.first.at[warpgroup], resident.second.at[warpgroup])
    for source, buffer in zip(sources, buffers, strict=True):
        plgpu.copy_gmem_to_smem(source, buffer, resident.ready.at[warpgroup])
    plgpu.barrier_wait(resident.ready.at[warpgroup])
    return buffers


def fetch(walk: Walk, stream: Stream, step: jax.Array, sources: tuple[Any, ...]) -> None:
    """Fill the slot of a step as soon as the consumers have released it."""
    slot = mosaic.ring_slot(step, walk.stages)
    pl.when(step >= walk.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))
    for source, ring in zip(sources, stream.rings, strict=True):
        plgpu.copy_gmem_to_smem(source, ring.at[slot], stream.ready.at[slot])


def write(values: tuple, buffers: tuple, targets: tuple) -> None:
    """Write registers to global memory through shared memory; TMA drops rows past the end."""
    for value, buffer in zip(values, buffers, strict=True):
        buffer[...] = value.astype(buffer.dtype)
    plgpu.commit_smem()
    for buffer, target in zip(buffers, targets, strict=True):
        plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)
