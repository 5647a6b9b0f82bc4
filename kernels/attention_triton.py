"""Flash attention in Pallas-Triton, forward and backward, for Ampere and newer CUDA GPUs.

Not yet run on a GPU: compiled only. Pallas-Triton is deprecated since jax 0.11.

Three kernels, each of which writes every result exactly once, so that results are deterministic. A
program of `forward` or `query_gradient` owns a block of queries of one head and loops over the keys
that they see. A program of `key_gradients` owns a block of keys of one key head and loops over the
queries that see them, of all query heads of the group. The softmax is online (Dao et al., 2022);
backward recomputes its probabilities from the log-sum-exp, as in FlashAttention-2 (Dao, 2023).
Blocks without visible keys are not loaded; blocks with only visible keys are not masked.

With out = p v: dv = p^T do, ds = p (do v^T - delta) with delta = sum(do out) - d lse, dq = ds k,
dk = ds^T q. Triton's blocks are powers of two: a head dim of 80 is split into parts of 64 and 16.

In a partly masked block the weights of unseen keys are exactly zero, so NaN or inf in their values
still reaches the queries of that block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from maxmeg.parallel.collectives import stored

from .intervals import (
    FlashSpec,
    MaskSides,
    key_ranges,
    mask_sides,
    prepare,
    query_ranges,
    visible,
)

plgpu: Any = triton  # its refs behave like arrays, which its types do not say
AnyArray = jax.Array | jax.ShapeDtypeStruct
Parts = tuple[jax.Array, ...]  # parts of a matrix, split by columns
DTYPES = ("bfloat16", "float16", "float32")
LONGEST_HEAD = 256
SMALLEST_PART = 16  # columns of an operand of a tensor core
LOG2E = math.log2(math.e)
UNSEEN = -1e30  # log-sum-exp of a query that sees no key


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries and keys per block, warps per program, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of the kernels. interpreted: run in Pallas' interpreter, on any device, for tests."""

    forward: Tile
    query_gradient: Tile
    key_gradients: Tile
    interpreted: bool = False


# By bytes per element and largest head dim. They fit in the 99 KiB of shared memory that a program
# has on every GPU of capability 8.x. Not tuned.
TILES = {
    (2, 64): Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    (2, 128): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    (2, 192): Tiles(Tile(128, 32, 8, 2), Tile(64, 16, 4, 1), Tile(32, 32, 4, 1)),
    (2, 256): Tiles(Tile(64, 32, 4, 2), Tile(64, 16, 4, 1), Tile(32, 32, 4, 1)),
    (4, 64): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 128): Tiles(Tile(32, 16, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
    (4, 256): Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a kernel."""

    spec: FlashSpec
    tile: Tile
    sides: MaskSides
    lengths: tuple[int, int]  # of queries and keys
    heads_a_group: int
    bounds: int  # rows of lower_AL and upper_AL: 1 or the batch size


class Block(NamedTuple):
    """A block of queries or keys in global memory: row of the batch, head, first position."""

    batch: jax.Array
    head: jax.Array
    start: jax.Array


class Inputs(NamedTuple):
    """Arrays of backward; lse in units of log 2, +inf for queries that see no key."""

    q_BLHK: Any
    k_BMGK: Any
    v_BMGV: Any
    slope_BLHV: Any  # the gradient of the output
    lse_BHL: Any
    delta_BHL: Any
    lower_AL: Any
    upper_AL: Any
    ranges: Any


class Rows(NamedTuple):
    """Numbers per query of a block: log-sum-exp, delta, and the interval of its keys."""

    lse: Any
    delta: Any
    lower: Any
    upper: Any


def flash_refuses(q_BLHK: AnyArray, k_BMGK: AnyArray, v_BMGV: AnyArray) -> str:
    """Why the kernels do not support these arrays on any device; empty if they do."""
    dtypes = {str(array.dtype) for array in (q_BLHK, k_BMGK, v_BMGV)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"dtypes {sorted(dtypes)} are not one of {', '.join(DTYPES)}"
    head_dims = (q_BLHK.shape[-1], v_BMGV.shape[-1])
    if max(head_dims) > LONGEST_HEAD:
        return f"head dims (query, value) {head_dims} exceed {LONGEST_HEAD}"
    if q_BLHK.shape[2] % k_BMGK.shape[2]:
        return f"query heads={q_BLHK.shape[2]} are not a multiple of key heads={k_BMGK.shape[2]}"
    return ""


def flash_attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    spec: FlashSpec,
    *,
    offset: Int[Array, "*rows"] | int = 0,
    query_segments_BL: Int[Array, "B L"] | None = None,
    key_segments_BM: Int[Array, "B M"] | None = None,
    tiles: Tiles | None = None,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B L H"]]:
    """(output, float32 log-sum-exp of the scores), both differentiable.

    Query i is at position offset + i. Rows must be valid (intervals.documents). A query that sees
    no key gets zeros and UNSEEN. ValueError for arrays that `flash_refuses`, and by `prepare`.
    """
    if reason := flash_refuses(q_BLHK, k_BMGK, v_BMGV):
        raise ValueError(f"attention backend triton cannot run: {reason}")
    segments = (query_segments_BL, key_segments_BM)
    spec, *bounds = prepare(spec, q_BLHK, k_BMGK, offset, *segments)
    qkv = [pad_head_dim(array) for array in (q_BLHK, k_BMGK, v_BMGV)]
    outputs: Any = attend(*qkv, *bounds, spec, tiles or tiles_of(*qkv[1:]))
    out_BLHV, lse_BHL = outputs
    return out_BLHV[..., : v_BMGV.shape[-1]], lse_BHL.swapaxes(1, 2)


def pad_head_dim(x: jax.Array) -> jax.Array:
    """x with the head dim padded with zeros to a multiple of SMALLEST_PART."""
    missing = -x.shape[-1] % SMALLEST_PART
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def tiles_of(k_BMGK: AnyArray, v_BMGV: AnyArray) -> Tiles:
    longest = max(k_BMGK.shape[-1], v_BMGV.shape[-1])
    size = k_BMGK.dtype.itemsize
    return next(tiles for (a, b), tiles in TILES.items() if a == size and longest <= b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec: FlashSpec, tiles: Tiles
) -> tuple[jax.Array, jax.Array]:
    return forward(q_BLHK, k_BMGK, v_BMGV, (lower_AL, upper_AL), spec, tiles)


def attend_forward(q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, spec, tiles):
    out_BLHV, lse_BHL = forward(q_BLHK, k_BMGK, v_BMGV, (lower_AL, upper_AL), spec, tiles)
    out_BLHV, lse_BHL = stored(out_BLHV, "attention_output"), stored(lse_BHL, "attention_lse")
    residuals = (q_BLHK, k_BMGK, v_BMGV, out_BLHV, lse_BHL, lower_AL, upper_AL)
    return (out_BLHV, lse_BHL), residuals


def attend_backward(spec, tiles, residuals, slopes):
    q_BLHK, k_BMGK, v_BMGV, out_BLHV, lse_BHL, *bounds = residuals
    slope_BLHV, lse_slope_BHL = slopes
    product_BLH = jnp.sum(slope_BLHV.astype(jnp.float32) * out_BLHV.astype(jnp.float32), axis=-1)
    delta_BHL = product_BLH.swapaxes(1, 2) - lse_slope_BHL
    is_blind = lse_BHL == UNSEEN
    inputs = Inputs(
        *(q_BLHK, k_BMGK, v_BMGV, slope_BLHV.astype(q_BLHK.dtype)),
        lse_BHL=jnp.where(is_blind, math.inf, lse_BHL * LOG2E),
        delta_BHL=jnp.where(is_blind, 0.0, delta_BHL),
        lower_AL=bounds[0],
        upper_AL=bounds[1],
        ranges=None,
    )
    no_slope = np.zeros(bounds[0].shape, jax.dtypes.float0)
    gradients = (query_gradient(inputs, spec, tiles), *key_gradients(inputs, spec, tiles))
    return *gradients, no_slope, no_slope


attend.defvjp(attend_forward, attend_backward)


def plan_of(q_BLHK, k_BMGK, lower_AL, spec: FlashSpec, tile: Tile, key_block: int) -> Plan:
    L, M = q_BLHK.shape[1], k_BMGK.shape[1]
    return Plan(
        spec=spec,
        tile=tile,
        sides=mask_sides(spec, M, key_block),
        lengths=(L, M),
        heads_a_group=q_BLHK.shape[2] // k_BMGK.shape[2],
        bounds=lower_AL.shape[0],
    )


def launch(body: Callable, plan: Plan, grid: tuple, out_shape: list, interpreted: bool) -> Callable:
    """Run body(plan, *inputs, *outputs) on whole arrays at each point of `grid`, fastest first."""
    tile = plan.tile
    return pl.pallas_call(
        functools.wraps(body)(functools.partial(body, plan)),
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpreted,
        name=body.__name__,
    )


def forward(
    q_BLHK: Float[Array, "B L H K"],
    k_BMGK: Float[Array, "B M G K"],
    v_BMGV: Float[Array, "B M G V"],
    bounds: tuple[Int[Array, "A L"], Int[Array, "A L"]],
    spec: FlashSpec,
    tiles: Tiles,
) -> tuple[Float[Array, "B L H V"], Float[Array, "B H L"]]:
    """(output, log-sum-exp); spec.scale is set, head dims are multiples of SMALLEST_PART."""
    (B, L, H, _), (M, _, V), tile = q_BLHK.shape, v_BMGV.shape[1:], tiles.forward
    ranges = key_ranges(*bounds, tile.rows, tile.keys, M)
    plan = plan_of(q_BLHK, k_BMGK, bounds[0], spec, tile, tile.keys)
    shapes = [
        jax.ShapeDtypeStruct((B, L, H, V), q_BLHK.dtype),
        jax.ShapeDtypeStruct((B, H, L), jnp.float32),
    ]
    call = launch(triton_flash_forward, plan, (ranges.shape[1], H, B), shapes, tiles.interpreted)
    return tuple(call(q_BLHK, k_BMGK, v_BMGV, *bounds, ranges))


def query_gradient(inputs: Inputs, spec: FlashSpec, tiles: Tiles) -> jax.Array:
    (B, _, H, _), tile = inputs.q_BLHK.shape, tiles.query_gradient
    M = inputs.k_BMGK.shape[1]
    ranges = key_ranges(inputs.lower_AL, inputs.upper_AL, tile.rows, tile.keys, M)
    plan = plan_of(inputs.q_BLHK, inputs.k_BMGK, inputs.lower_AL, spec, tile, tile.keys)
    shapes = [jax.ShapeDtypeStruct(inputs.q_BLHK.shape, inputs.q_BLHK.dtype)]
    grid = (ranges.shape[1], H, B)
    call = launch(triton_flash_query_gradient, plan, grid, shapes, tiles.interpreted)
    return call(*inputs._replace(ranges=ranges))[0]


def key_gradients(inputs: Inputs, spec: FlashSpec, tiles: Tiles) -> list[jax.Array]:
    (B, M, G, _), tile = inputs.k_BMGK.shape, tiles.key_gradients
    ranges = query_ranges(inputs.lower_AL, inputs.upper_AL, tile.rows, tile.keys, M)
    plan = plan_of(inputs.q_BLHK, inputs.k_BMGK, inputs.lower_AL, spec, tile, key_block=1)
    pair = (inputs.k_BMGK, inputs.v_BMGV)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pair]
    grid = (ranges.shape[1], G, B)
    call = launch(triton_flash_key_gradients, plan, grid, shapes, tiles.interpreted)
    return list(call(*inputs._replace(ranges=ranges)))


def columns(head_dim: int) -> list[tuple[int, int]]:
    """(first, count) of the column parts of a head, longest first; counts are powers of two."""
    sizes = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return list(zip(starts, sizes, strict=True))


def within(block: Block, count: int, length: int | None) -> Any:
    """Column mask of the rows of a block before `length`; None: all rows exist."""
    if length is None or length % count == 0:
        return None
    return (block.start + jnp.arange(count, dtype=jnp.int32) < length)[:, None]


def load_matrix(ref: Any, block: Block, count: int, length: int | None = None) -> Parts:
    """Rows of a [B, L, H, K] array, zeros past `length`; None: no row is past it."""
    exists = within(block, count, length)
    options = {} if exists is None else {"mask": exists, "other": 0.0}
    rows = pl.ds(block.start, count)
    return tuple(
        plgpu.load(ref.at[block.batch, rows, block.head, pl.ds(first, size)], **options)
        for first, size in columns(ref.shape[-1])
    )


def store_matrix(ref: Any, block: Block, parts: Parts, length: int) -> None:
    rows = pl.ds(block.start, parts[0].shape[0])
    exists = within(block, parts[0].shape[0], length)
    for (first, size), part in zip(columns(ref.shape[-1]), parts, strict=True):
        place = ref.at[block.batch, rows, block.head, pl.ds(first, size)]
        plgpu.store(place, part.astype(ref.dtype), mask=exists)


def load_numbers(place: Any, start: jax.Array, length: int, past: float) -> jax.Array:
    """One number per query; `past` for queries past the end."""
    (count,) = place.shape
    if length % count == 0:
        return plgpu.load(place)
    exists = start + jnp.arange(count, dtype=jnp.int32) < length
    return plgpu.load(place, mask=exists, other=past)


def dot(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """a b, or a b^T, in float32; float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, contracted, precision, jnp.float32)


def product(a: Parts, b: Parts) -> jax.Array:
    """a b^T."""
    products = [dot(*pair, transposed=True) for pair in zip(a, b, strict=True)]
    return functools.reduce(jnp.add, products)


def accumulate(sums: Parts, weights: jax.Array, parts: Parts) -> Parts:
    weights = weights.astype(parts[0].dtype)
    return tuple(sum_ + dot(weights, part) for sum_, part in zip(sums, parts, strict=True))


def zeros(count: int, head_dim: int) -> Parts:
    return tuple(jnp.zeros((count, size), jnp.float32) for _, size in columns(head_dim))


def scaled(spec: FlashSpec, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """(scores in units of log 2, derivative of the soft-cap; None: 1)."""
    if not spec.softcap:
        return products * (spec.scale * LOG2E), None
    # The tanh instruction has an error of 2^-11, which a cap of 50 multiplies.
    power = jnp.exp2(products * (2 * LOG2E * spec.scale / spec.softcap))
    tanh = 1 - 2 / (1 + power)
    return tanh * (spec.softcap * LOG2E), 1 - tanh * tanh


def walk(span: tuple, cut: tuple[bool, bool], step: Callable, carry: Any) -> Any:
    """Run step(masked, index, carry) over the blocks of `span`, as in `key_ranges`.

    cut: whether blocks before, and after, the full ones can need a mask.
    """
    first, first_full, end_full, end = span
    if cut[0]:
        carry = lax.fori_loop(first, first_full, functools.partial(step, True), carry)
    carry = lax.fori_loop(first_full, end_full, functools.partial(step, False), carry)
    if cut[1]:
        carry = lax.fori_loop(end_full, end, functools.partial(step, True), carry)
    return carry


def span_of(ranges: Any, bounds: Any, index: Any) -> tuple:
    return tuple(ranges[bounds, index, n] for n in range(4))


def program_block(plan: Plan, count: int, backwards: bool) -> tuple[Block, jax.Array, Any]:
    """(block of this program, its index, row of its bounds).

    backwards: start with the last queries, which see the most keys under a causal mask, so that
    the longest programs do not start last.
    """
    index, head, batch = (pl.program_id(axis) for axis in range(3))
    if backwards:
        index = -(-plan.lengths[0] // count) - 1 - index
    return Block(batch, head, index * count), index, jnp.minimum(batch, plan.bounds - 1)


def load_bounds(plan: Plan, lower_AL: Any, upper_AL: Any, bounds: Any, start: Any) -> tuple:
    rows = pl.ds(start, plan.tile.rows)
    pair = (lower_AL.at[bounds, rows], upper_AL.at[bounds, rows])
    return tuple(load_numbers(place, start, plan.lengths[0], 0) for place in pair)


def triton_flash_forward(plan: Plan, *refs: Any) -> None:
    q_BLHK, k_BMGK, v_BMGV, lower_AL, upper_AL, ranges, out_BLHV, lse_BHL = refs
    tile, (L, M) = plan.tile, plan.lengths
    owned, index, bounds = program_block(plan, tile.rows, plan.spec.causal)
    q = load_matrix(q_BLHK, owned, tile.rows, L)
    lower, upper = load_bounds(plan, lower_AL, upper_AL, bounds, owned.start)

    def step(masked: bool, number: jax.Array, carry: tuple) -> tuple:
        sums, largest, total = carry
        block = Block(owned.batch, owned.head // plan.heads_a_group, number * tile.keys)
        length = M if masked else None  # a full block ends before the last key
        k = load_matrix(k_BMGK, block, tile.keys, length)
        scores, _ = scaled(plan.spec, product(q, k))
        if masked:
            positions = block.start + jnp.arange(tile.keys, dtype=jnp.int32)[None]
            is_visible = visible(positions, lower[:, None], upper[:, None], plan.sides)
            scores = jnp.where(is_visible, scores, -math.inf)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(largest - new)
        v = load_matrix(v_BMGV, block, tile.keys, length)
        sums = accumulate(tuple(sum_ * shrink[:, None] for sum_ in sums), weights, v)
        return sums, new, total * shrink + jnp.sum(weights, axis=1)

    start = jnp.full((tile.rows,), UNSEEN, jnp.float32)  # finite: unseen keys give 2^-inf, not NaN
    carry = (zeros(tile.rows, v_BMGV.shape[-1]), start, jnp.zeros((tile.rows,), jnp.float32))
    cut = (plan.sides.lower, plan.sides.upper)
    sums, largest, total = walk(span_of(ranges, bounds, index), cut, step, carry)
    is_blind = total == 0
    total = jnp.where(is_blind, 1.0, total)
    lse = jnp.where(is_blind, UNSEEN, largest * (1 / LOG2E) + jnp.log(total))
    store_matrix(out_BLHV, owned, tuple(sum_ / total[:, None] for sum_ in sums), L)
    exists = owned.start + jnp.arange(tile.rows, dtype=jnp.int32) < L
    place = lse_BHL.at[owned.batch, owned.head, pl.ds(owned.start, tile.rows)]
    plgpu.store(place, lse, mask=exists)


def load_rows(plan: Plan, inputs: Inputs, block: Block, bounds: Any) -> Rows:
    rows = (block.batch, block.head, pl.ds(block.start, plan.tile.rows))
    numbers = ((inputs.lse_BHL, math.inf), (inputs.delta_BHL, 0.0))
    loaded = [load_numbers(x.at[rows], block.start, plan.lengths[0], past) for x, past in numbers]
    return Rows(*loaded, *load_bounds(plan, inputs.lower_AL, inputs.upper_AL, bounds, block.start))


def score_slopes(
    plan: Plan, products: tuple[jax.Array, jax.Array], rows: Rows, positions: Any
) -> tuple[jax.Array, jax.Array]:
    """(probabilities, gradient of the loss with respect to scale q k); products: (q k, do v).

    rows broadcast along the queries of the products, positions (None: all seen) along the keys.
    """
    scores, inner = scaled(plan.spec, products[0])
    if positions is not None:
        is_visible = visible(positions, rows.lower, rows.upper, plan.sides)
        scores = jnp.where(is_visible, scores, -math.inf)
    weights = jnp.exp2(scores - rows.lse)
    slopes = weights * (products[1] - rows.delta)
    return weights, slopes if inner is None else slopes * inner


def triton_flash_query_gradient(plan: Plan, *refs: Any) -> None:
    inputs, grad_BLHK, tile = Inputs(*refs[:-1]), refs[-1], plan.tile
    owned, index, bounds = program_block(plan, tile.rows, plan.spec.causal)
    q = load_matrix(inputs.q_BLHK, owned, tile.rows, plan.lengths[0])
    slope = load_matrix(inputs.slope_BLHV, owned, tile.rows, plan.lengths[0])
    rows = Rows(*(number[:, None] for number in load_rows(plan, inputs, owned, bounds)))

    def step(masked: bool, number: jax.Array, sums: Parts) -> Parts:
        block = Block(owned.batch, owned.head // plan.heads_a_group, number * tile.keys)
        length = plan.lengths[1] if masked else None
        k = load_matrix(inputs.k_BMGK, block, tile.keys, length)
        v = load_matrix(inputs.v_BMGV, block, tile.keys, length)
        positions = block.start + jnp.arange(tile.keys, dtype=jnp.int32)[None] if masked else None
        _, slopes = score_slopes(plan, (product(q, k), product(slope, v)), rows, positions)
        return accumulate(sums, slopes, k)

    cut = (plan.sides.lower, plan.sides.upper)
    carry = zeros(tile.rows, grad_BLHK.shape[-1])
    sums = walk(span_of(inputs.ranges, bounds, index), cut, step, carry)
    store_matrix(grad_BLHK, owned, tuple(sum_ * plan.spec.scale for sum_ in sums), plan.lengths[0])


def triton_flash_key_gradients(plan: Plan, *refs: Any) -> None:
    inputs, (k_grad_BMGK, v_grad_BMGV) = Inputs(*refs[:-2]), refs[-2:]
    tile, (L, M) = plan.tile, plan.lengths
    owned, index, bounds = program_block(plan, tile.keys, backwards=False)
    k = load_matrix(inputs.k_BMGK, owned, tile.keys, M)
    v = load_matrix(inputs.v_BMGV, owned, tile.keys, M)
    span = span_of(inputs.ranges, bounds, index)
    keys = owned.start + jnp.arange(tile.keys, dtype=jnp.int32)[:, None]

    def step(head: jax.Array, masked: bool, number: jax.Array, sums: tuple) -> tuple:
        """Products are [keys, queries], so that none of them needs to be transposed."""
        block = Block(owned.batch, head, number * tile.rows)
        q = load_matrix(inputs.q_BLHK, block, tile.rows, L)
        slope = load_matrix(inputs.slope_BLHV, block, tile.rows, L)
        rows = Rows(*(number[None] for number in load_rows(plan, inputs, block, bounds)))
        products = (product(k, q), product(v, slope))
        weights, slopes = score_slopes(plan, products, rows, keys if masked else None)
        return accumulate(sums[0], slopes, q), accumulate(sums[1], weights, slope)

    def walk_head(number: jax.Array, sums: tuple) -> tuple:
        head = owned.head * plan.heads_a_group + number
        # The first queries that see a block are those whose upper bound cuts it.
        cut = (plan.sides.upper, plan.sides.lower)
        return walk(span, cut, functools.partial(step, head), sums)

    sums = (zeros(tile.keys, k_grad_BMGK.shape[-1]), zeros(tile.keys, v_grad_BMGV.shape[-1]))
    sums = lax.fori_loop(0, plan.heads_a_group, walk_head, sums)
    store_matrix(k_grad_BMGK, owned, tuple(sum_ * plan.spec.scale for sum_ in sums[0]), M)
    store_matrix(v_grad_BMGV, owned, sums[1], M)
