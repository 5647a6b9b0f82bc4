"""Gradients of flash attention for Hopper on Mosaic-GPU. Not yet run on a GPU: compiled, and
interpreted on a CPU.

Two kernels, each of which writes every gradient exactly once, so that results are the same from
run to run: one program of `query_gradient` owns queries and walks the keys that they see, one of
`key_gradients` owns keys of one key head and walks the queries that see them, of all the query
heads of the group. Both make the probabilities again from the log-sum-exp, for seven matrix
products a block where one kernel with atomic additions needs five. Of a softmax out = p v:
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
from .attention_forward import (
    CONSUMER_REGISTERS,
    LOG2E,
    MATRIX,
    PRODUCER_REGISTERS,
    ROWS,
    WARPGROUP_ROWS,
    Scores,
    spread,
    visits,
)
from .intervals import (
    FlashSpec,
    MaskSides,
    key_ranges,
    mask_sides,
    pad_rows,
    query_ranges,
    visible,
)
from .mosaic import WARPGROUP_AXIS, pl, plgpu

COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # a number a column of a matrix in registers


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a program walks over: length of a block, slots of its rings; and who consumes it."""

    block: int
    stages: int
    consumers: int = 2

    @property
    def owned(self) -> int:
        return self.consumers * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Walks over keys, for the gradient of queries, and over queries, for those of keys."""

    keys: Walk
    queries: Walk
    split: bool = False  # keys' and values' gradients one after the other, for want of registers


BACKWARD_TILES = {  # by head dims of queries and keys, and of values
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
    parts: tuple[bool, bool] = (True, True)  # whether keys', and values', gradients are made


class Inputs(NamedTuple):
    """In global memory; lse in units of log 2, +inf where nothing is seen or past the end."""

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
    """Rings that the producer fills, a barrier a slot for what arrived and what was used."""

    rings: Any
    ready: Any
    free: Any


class Own(NamedTuple):
    """Two matrices that each consumer keeps, and a barrier for their arrival."""

    first: Any
    second: Any
    ready: Any


class Span(NamedTuple):
    """Blocks that a program walks."""

    first: jax.Array
    first_full: jax.Array
    end_full: jax.Array
    end: jax.Array


class Residuals(NamedTuple):
    """What backward needs of forward."""

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
    together, apart = [(True, True)], [(True, False), (False, True)]
    k_grad, v_grad = (
        grad
        for parts in (apart if tiles.split else together)
        for grad in key_gradients(inputs, spec, queries, parts)
    )
    return q_grad, k_grad, v_grad


def row_statistics(out, lse_BHL, slope_BLHV, lse_slope_BHL) -> tuple[jax.Array, jax.Array]:
    """(log-sum-exp in units of log 2, delta) of every query."""
    product_BLH = jnp.sum(slope_BLHV.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta_BHL = product_BLH.swapaxes(1, 2) - lse_slope_BHL
    blind = lse_BHL == -math.inf
    return jnp.where(blind, math.inf, lse_BHL * LOG2E), jnp.where(blind, 0.0, delta_BHL)


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


def own_type(walk: Walk, columns: tuple[int, int], dtype: Any) -> Own:
    first, second = (
        mosaic.matrix_buffer((walk.consumers, WARPGROUP_ROWS, count), dtype) for count in columns
    )
    return Own(first, second, plgpu.Barrier(num_barriers=walk.consumers, num_arrivals=2))


def query_gradient(inputs: Inputs, spec: FlashSpec, walk: Walk) -> jax.Array:
    (B, _, H, K), V = inputs.q_BLHK.shape, inputs.v_BMGV.shape[-1]
    dtype, plan = inputs.q_BLHK.dtype, plan_of(inputs, spec, walk, walk.block)

    def flash_query_gradient(*refs: Any) -> None:
        *arrays, grad_BLHK, own, stream = refs
        query_program(plan, Inputs(*arrays), grad_BLHK, own, stream)

    rings = [mosaic.matrix_buffer((walk.stages, walk.block, count), dtype) for count in (K, V)]
    return mosaic.launch(
        flash_query_gradient,
        out_type=[jax.ShapeDtypeStruct(inputs.q_BLHK.shape, dtype)],
        grid={"batch": B, "head": H, "program": inputs.ranges.shape[1]},
        warpgroups=walk.consumers + 1,
        scratch_types=[own_type(walk, (K, V), dtype), stream_type(walk, rings)],
    )(*inputs)[0]


def key_gradients(
    inputs: Inputs, spec: FlashSpec, walk: Walk, parts: tuple[bool, bool] = (True, True)
) -> list[jax.Array]:
    """Those of the gradients of keys and of values that are wanted."""
    (B, _, G, K), V = inputs.k_BMGK.shape, inputs.v_BMGV.shape[-1]
    dtype, plan = inputs.k_BMGK.dtype, plan_of(inputs, spec, walk, key_block=1)
    plan = dataclasses.replace(plan, parts=parts)

    def flash_key_gradients(*refs: Any) -> None:
        *others, own, stream = refs
        arrays, grads = others[: len(inputs)], others[len(inputs) :]
        key_program(plan, Inputs(*arrays), tuple(grads), own, stream)

    rings = [mosaic.matrix_buffer((walk.stages, walk.block, count), dtype) for count in (K, V)]
    rings += [plgpu.SMEM((walk.stages, walk.block), jnp.float32)] * 2
    wanted = wanted_of(parts, (inputs.k_BMGK, inputs.v_BMGV))
    return mosaic.launch(
        flash_key_gradients,
        out_type=[jax.ShapeDtypeStruct(array.shape, dtype) for array in wanted],
        grid={"batch": B, "head": G, "program": inputs.ranges.shape[1]},
        warpgroups=walk.consumers + 1,
        scratch_types=[own_type(walk, (K, V), dtype), stream_type(walk, rings)],
    )(*inputs)


def wanted_of(parts: tuple[bool, bool], pair: tuple[Any, Any]) -> tuple:
    return tuple(item for item, wanted in zip(pair, parts, strict=True) if wanted)


def specialise(plan: BackwardPlan, consume: Any, produce: Any) -> None:
    """Runs `consume(warpgroup)` in the consumers and `produce()` in the producer."""
    warpgroup = lax.axis_index(WARPGROUP_AXIS)

    @pl.when(warpgroup < plan.walk.consumers)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS[plan.walk.consumers], action="increase")
        consume(warpgroup)

    @pl.when(warpgroup == plan.walk.consumers)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce()


def probabilities(
    scores: Scores, products: jax.Array, mask: jax.Array | None, lse: Callable[[], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(probabilities, and the same times the derivative of the capped by the plain score).

    lse comes last, as a call: it and the mask's bounds would take up registers together.
    """
    numbers, factor = scores.capped(products)
    derivative = 1 - numbers * numbers if scores.softcap else None
    if mask is not None:
        numbers = jnp.where(mask, numbers, -math.inf)
    weights = jnp.exp2(numbers * factor - lse())
    return weights, weights if derivative is None else weights * derivative


def two_products(
    shape: tuple[int, int], left: tuple, right: tuple, meanwhile: Callable[[jax.Array], Any]
) -> tuple[Any, jax.Array]:
    """(meanwhile(left[0] @ right[0]^T), left[1] @ right[1]^T) of matrices in shared memory.

    `meanwhile` computes while the second product is made.
    """

    def compute(first: Any, second: Any) -> tuple[Any, jax.Array]:
        plgpu.wgmma(first, left[0], mosaic.transposed(right[0]))
        plgpu.wgmma(second, left[1], mosaic.transposed(right[1]))
        result = meanwhile(plgpu.wgmma_accumulator_load(first, wait_n=1))
        return result, second[...]

    accumulator = plgpu.ACC(shape, jnp.float32)
    return pl.run_scoped(compute, accumulator, accumulator)


def query_program(
    plan: BackwardPlan, inputs: Inputs, grad_BLHK: Any, own: Own, stream: Stream
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
        mine = load_own(own, warpgroup, sources)
        lse = mosaic.load(inputs.lse_BHL.at[batch, head, rows], ROWS)
        delta = mosaic.load(inputs.delta_BHL.at[batch, head, rows], ROWS)
        lower = mosaic.load(inputs.lower_AL.at[bounds, rows], ROWS) if plan.sides.lower else None
        upper = mosaic.load(inputs.upper_AL.at[bounds, rows], ROWS) if plan.sides.upper else None

        def step(masked: bool, block: jax.Array, grad: jax.Array) -> jax.Array:
            see = functools.partial(keys_seen, plan, block, lower, upper) if masked else nothing
            slot = mosaic.ring_slot(block - span.first, walk.stages)
            return add_query_gradient(plan, mine, stream, slot, (lse, delta, see, grad))

        grad = mosaic.constant(0.0, (WARPGROUP_ROWS, inputs.q_BLHK.shape[-1]), MATRIX)
        for masked, start, stop in visits(plan.sides.lower, plan.sides.upper, span, span.end):
            grad = lax.fori_loop(start, stop, lambda j, g, m=masked: step(m, j, g), grad)
        write((grad * plan.scores.scale,), mine[:1], (grad_BLHK.at[place],))

    specialise(plan, consume, produce)


def add_query_gradient(
    plan: BackwardPlan, mine: tuple[Any, Any], stream: Stream, slot: jax.Array, carry: tuple
) -> jax.Array:
    """The gradient of a consumer's queries with the part of one block of keys added."""
    lse, delta, see, grad = carry
    shape, dtype = (WARPGROUP_ROWS, plan.walk.block), stream.rings[0].dtype
    keys, values = (ring.at[slot] for ring in stream.rings)

    def weigh(products: jax.Array) -> jax.Array:
        return probabilities(plan.scores, products, see(), lambda: spread(lse, shape))[1]

    plgpu.barrier_wait(stream.ready.at[slot])
    slope, weight_slope = two_products(shape, mine, (keys, values), weigh)
    slope = (slope * (weight_slope - spread(delta, shape))).astype(dtype)
    grad = pl.run_state(lambda ref: plgpu.wgmma(ref, slope, keys))(plgpu.ACC.init(grad))
    plgpu.barrier_arrive(stream.free.at[slot])
    return grad


def nothing() -> None:
    """The mask of a block that needs none. Masks are made late: they would take up registers."""


def keys_seen(plan: BackwardPlan, block: jax.Array, lower: Any, upper: Any) -> jax.Array | None:
    """Which keys of a block (columns) each query (row) sees."""
    shape = (WARPGROUP_ROWS, plan.walk.block)
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    begin = block * plan.walk.block
    lower = spread(lower - begin, shape) if plan.sides.lower else None
    upper = spread(upper - begin, shape) if plan.sides.upper else None
    return visible(keys, lower, upper, plan.sides)


def key_program(
    plan: BackwardPlan, inputs: Inputs, grads: tuple[Any, ...], own: Own, stream: Stream
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
        mine = load_own(own, warpgroup, (inputs.k_BMGK.at[place], inputs.v_BMGV.at[place]))

        def step(masked: bool, before: jax.Array, block: jax.Array, carry: tuple) -> tuple:
            see = functools.partial(queries_seeing, plan, inputs, bounds, block, begin)
            slot = mosaic.ring_slot(before + block - span.first, walk.stages)
            return add_key_gradients(plan, mine, stream, slot, see if masked else nothing, carry)

        def walk_head(head: jax.Array, carry: tuple) -> tuple:
            for masked, start, stop in visits(plan.sides.upper, plan.sides.lower, span, span.end):
                carry = lax.fori_loop(
                    start, stop, lambda j, c, m=masked: step(m, head * steps, j, c), carry
                )
            return carry

        shapes = [(WARPGROUP_ROWS, grad.shape[-1]) for grad in grads]
        zeros = tuple(mosaic.constant(0.0, shape, MATRIX) for shape in shapes)
        sums = lax.fori_loop(0, plan.heads_a_group, walk_head, zeros)
        factors = wanted_of(plan.parts, (plan.scores.scale, 1.0))
        sums = tuple(total * factor for total, factor in zip(sums, factors, strict=True))
        targets = tuple(grad.at[place] for grad in grads)
        write(sums, wanted_of(plan.parts, mine), targets)

    specialise(plan, consume, produce)


def add_key_gradients(
    plan: BackwardPlan,
    mine: tuple[Any, Any],
    stream: Stream,
    slot: jax.Array,
    see: Callable[[], jax.Array | None],
    carry: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Gradients of a consumer's keys and values with the part of one block of queries added."""
    shape, dtype = (WARPGROUP_ROWS, plan.walk.block), stream.rings[0].dtype
    queries, slopes, lse_ring, delta_ring = (ring.at[slot] for ring in stream.rings)

    zeros = mosaic.constant(0.0, shape, MATRIX)

    def score(products_ref: Any) -> jax.Array:
        plgpu.wgmma(products_ref, mine[0], mosaic.transposed(queries))
        return products_ref[...]

    plgpu.barrier_wait(stream.ready.at[slot])
    products = pl.run_scoped(score, plgpu.ACC(shape, jnp.float32))

    def lse() -> jax.Array:
        return spread_columns(mosaic.load(lse_ring, COLUMNS), shape)

    weights, slope = probabilities(plan.scores, products, see(), lse)
    weights = weights.astype(dtype)

    keys_too, values_too = plan.parts

    def multiply_slopes(accumulators: Any) -> None:
        if values_too:
            plgpu.wgmma(accumulators[0], weights, slopes)
        if keys_too:
            plgpu.wgmma(accumulators[-1], mine[1], mosaic.transposed(slopes))

    accumulators = [plgpu.ACC.init(carry[-1])] if values_too else []
    accumulators += [plgpu.ACC.init(zeros)] if keys_too else []
    found = pl.run_state(multiply_slopes)(tuple(accumulators))
    grads = found[:1] if values_too else ()
    if keys_too:
        delta = spread_columns(mosaic.load(delta_ring, COLUMNS), shape)
        slope = (slope * (found[-1] - delta)).astype(dtype)
        init = plgpu.ACC.init(carry[0])
        grads = (pl.run_state(lambda ref: plgpu.wgmma(ref, slope, queries))(init), *grads)
    plgpu.commit_smem()  # of the numbers, which threads have read and TMA is to overwrite
    plgpu.barrier_arrive(stream.free.at[slot])
    return tuple(grads)


def queries_seeing(
    plan: BackwardPlan, inputs: Inputs, bounds: Any, block: jax.Array, begin: jax.Array
) -> jax.Array | None:
    """Which queries of a block (columns) see each key (row) from `begin` on."""
    shape = (WARPGROUP_ROWS, plan.walk.block)
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
    rows = pl.ds(block * plan.walk.block, plan.walk.block)

    def bound(array_AL: Any) -> jax.Array:
        return spread_columns(mosaic.load(array_AL.at[bounds, rows], COLUMNS) - begin, shape)

    lower = bound(inputs.lower_AL) if plan.sides.lower else None
    return visible(keys, lower, bound(inputs.upper_AL) if plan.sides.upper else None, plan.sides)


def spread_columns(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(numbers, shape, [1])


def load_own(own: Own, warpgroup: jax.Array, sources: tuple[Any, Any]) -> tuple[Any, Any]:
    """The two matrices that a consumer keeps, from global memory."""
    buffers = (own.first.at[warpgroup], own.second.at[warpgroup])
    for source, buffer in zip(sources, buffers, strict=True):
        plgpu.copy_gmem_to_smem(source, buffer, own.ready.at[warpgroup])
    plgpu.barrier_wait(own.ready.at[warpgroup])
    return buffers


def fetch(walk: Walk, stream: Stream, step: jax.Array, sources: tuple[Any, ...]) -> None:
    """Fills the slot of a step once the consumers have used what it held."""
    slot = mosaic.ring_slot(step, walk.stages)
    pl.when(step >= walk.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))
    for source, ring in zip(sources, stream.rings, strict=True):
        plgpu.copy_gmem_to_smem(source, ring.at[slot], stream.ready.at[slot])


def write(values: tuple, buffers: tuple, targets: tuple) -> None:
    """Registers to global memory through shared memory; TMA drops rows past the end."""
    for value, buffer in zip(values, buffers, strict=True):
        buffer[...] = value.astype(buffer.dtype)
    plgpu.commit_smem()
    for buffer, target in zip(buffers, targets, strict=True):
        plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)
