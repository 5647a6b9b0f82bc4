"""The chunked scan of Mamba-2 for Hopper, backward. Not yet run on a GPU: compiled, interpreted.

With H the state before a chunk, G the gradient of the state after it, c the sums of log decays
within the chunk and W_st = (q_s . k_t) exp(c_s - c_t) for t <= s (chunk_scan.py):

    dv_t = exp(c_last - c_t) k_t^T G + sum_s W_st dy_s
    dk_t = exp(c_last - c_t) G v_t   + sum_s (dy_s . v_t) exp(c_s - c_t) q_s
    dq_s = exp(c_s) H dy_s           + sum_t (dy_s . v_t) exp(c_s - c_t) k_t

Two runs of the forward kernel without queries write H, and against the time G, of every chunk. Then
all chunks are independent. A program has one chunk and some heads of a group, whose gradients of
queries or of keys it adds up in registers: one kernel, run once for the queries' side and once for
that of the keys, which is the same with q and k, v and dy, H and G exchanged.

The decay of token t multiplies what tokens before t pass on to t and later ones. Its gradient is a
sum of such terms only: of pairs within the chunk (sums of rows and of columns of W_st (dy_s . v_t),
in float32), of pairs of a token and H or G, and of H and G. Differences of y . dy and v . dv would
lose them where decays are fast.

Letters as in chunk_scan.py.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import chunk_scan, mosaic
from .chunk_scan import CONSUMERS, DTYPE, Decays, hidden_zero, rows_of
from .mosaic import COLUMNS, MATRIX, ROWS, pl, plgpu, spread, spread_columns

STAGES = {(128, 64): 2, (128, 128): 1, (256, 64): 1}  # slots of the rings, by (N, P)
PROGRAMS = 128  # of a launch, at least, if heads can be divided
COLUMNS_OUT = 16  # of the summed gradient that a consumer writes at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a program. heads: number of heads of a program; parts: of programs that share
    a group and a chunk. width: columns of the summed gradient that a program computes.

    is_strict: a token does not see itself. has_values: gradients of values are wanted.
    """

    stages: int
    heads: int
    parts: int
    width: int
    is_keys: bool
    has_documents: bool
    has_states: bool
    has_values: bool
    is_strict: bool

    @property
    def chunk(self) -> int:
        return CONSUMERS * chunk_scan.WARPGROUP_ROWS


class Arrays(NamedTuple):
    """Of the side whose gradients are computed, and of the other one. wide: queries or keys;
    narrow: gradients of outputs, or values. states: H or G. states, first: () if not needed.

    Results: d_wide [B, L, parts of groups, N], d_narrow: of values, if wanted; pairs: of each
    token, the sum of its row of W (dy . v); states' share: that of its pair with the state.
    """

    wide_BLGN: Any
    other_wide_BLGN: Any
    narrow_BLHP: Any
    other_narrow_BLHP: Any
    states_BCHNP: Any
    sums_BHL: Any
    first_BL: Any
    d_wide_BLGN: Any
    d_narrow_BLHP: Any
    pairs_BHL: Any
    shares_BHL: Any


class Shared(NamedTuple):
    """Matrices of the chunk, rings [slot, ...], and buffers of each consumer for what it writes."""

    wide: Any
    other_wide: Any
    narrow: Any
    other_narrow: Any
    states: Any
    sums: Any
    first: Any
    d_wide: Any
    d_narrow: Any
    numbers: Any


class Barriers(NamedTuple):
    """ready, free: of a slot. resident: the chunk's own matrices have arrived."""

    ready: Any
    free: Any
    resident: Any


class Program(NamedTuple):
    plan: Plan
    arrays: Arrays
    shared: Shared
    barriers: Barriers
    batch: jax.Array
    part: jax.Array
    chunk: jax.Array
    half: jax.Array


def gradients(
    inputs: tuple[Any, ...],
    beta_BLH: None,
    docs_BL: Int[Array, "B L"] | None,
    slopes: tuple[Float[Array, "B L H P"], Float[Array, "B H N P"]],
) -> tuple[tuple[Array, ...], None]:
    """Gradients of `inputs` (q, k, v, log_decay, state of chunk_scan.scan, with queries), and of
    beta. slopes: those of y and of the last state."""
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLH, state_BHNP = inputs
    S, L = CONSUMERS * chunk_scan.WARPGROUP_ROWS, v_BLHP.shape[1]
    sums_BHL = chunk_scan.chunk_sums(log_decay_BLH, S)
    first_BL = None if docs_BL is None else chunk_scan.first_tokens(docs_BL, S)
    common, d_y_BLHP, d_last_BHNP = (sums_BHL, first_BL), slopes[0].astype(DTYPE), slopes[1]
    _, before_BCHNP = chunk_scan.launch(
        None, k_BLGN, v_BLHP, sums_BHL, state_BHNP, first_BL, "before"
    )
    d_state_BHNP, after_BCHNP = chunk_scan.launch(
        None, q_BLGN, d_y_BLHP, sums_BHL, d_last_BHNP, first_BL, "after"
    )
    d_q_BLGN, *queries = side(q_BLGN, k_BLGN, d_y_BLHP, v_BLHP, before_BCHNP, common)
    d_k_BLGN, d_v_BLHP, *keys = side(
        k_BLGN, q_BLGN, v_BLHP, d_y_BLHP, after_BCHNP, common, "keys and values"
    )
    states = before_BCHNP, after_BCHNP
    d_decay_BLH = decay_gradient(S, common, states, tuple(queries), tuple(keys))[:, :L]
    return (d_q_BLGN, d_k_BLGN, d_v_BLHP, d_decay_BLH, d_state_BHNP), None


def decay_gradient(S: int, common: tuple, states: tuple, queries: tuple, keys: tuple) -> Any:
    """[B, L, H]. states: H and G. queries, keys: (pairs, shares) of each side."""
    sums_BHL, first_BL = common
    before_BCHNP, after_BCHNP = (x_BCHNP.astype(jnp.float32) for x_BCHNP in states)
    wholes_BHC = jnp.sum(before_BCHNP * after_BCHNP, axis=(3, 4)).swapaxes(1, 2)
    chunks = *sums_BHL.shape[:2], -1, S
    stays_BHC = jnp.exp2(sums_BHL.reshape(chunks)[..., -1])
    if first_BL is not None:
        last_first_BC = first_BL.reshape(len(first_BL), -1, S)[..., -1]
        goes_on_BC = last_first_BC < S * jnp.arange(last_first_BC.shape[1])
        stays_BHC = jnp.where(goes_on_BC[:, None], stays_BHC, 0)
    (rows, later), (columns, earlier) = (
        [number_BHL.reshape(chunks) for number_BHL in one] for one in (queries, keys)
    )
    # What t and later tokens read, of pairs less what is from t and later ones too.
    d_BHCS = lax.cumsum(rows - columns + later, axis=3, reverse=True)
    d_BHCS += lax.cumsum(earlier, axis=3) - earlier + (stays_BHC * wholes_BHC)[..., None]
    return d_BHCS.reshape(sums_BHL.shape).swapaxes(1, 2)


def side(
    wide_BLGN: Any,
    other_wide_BLGN: Any,
    narrow_BLHP: Any,
    other_narrow_BLHP: Any,
    states_BCHNP: Any,
    common: tuple,
    kind: str = "queries",
) -> list:
    """[d_wide, d_narrow if wanted, pairs, shares] (Arrays). states: None for no share of them.
    common: sums, first tokens or None. kind: "queries", "keys" or "keys and values"; "strict " in
    front: a token does not see itself."""
    (B, L, G, N), (H, P) = wide_BLGN.shape, narrow_BLHP.shape[2:]
    sums_BHL, first_BL = common
    chunks = sums_BHL.shape[2] // (CONSUMERS * chunk_scan.WARPGROUP_ROWS)
    possible = [n for n in range(1, H // G + 1) if H // G % n == 0]
    parts = next((n for n in possible if B * chunks * G * n >= PROGRAMS), possible[-1])
    width = min(N, CONSUMERS * chunk_scan.WARPGROUP_ROWS)
    plan = Plan(
        stages=STAGES[N, P],
        heads=H // (G * parts),
        parts=parts,
        width=width,
        is_keys="keys" in kind,
        has_documents=first_BL is not None,
        has_states=states_BCHNP is not None,
        has_values="values" in kind,
        is_strict="strict" in kind,
    )
    inputs = [wide_BLGN, other_wide_BLGN, narrow_BLHP, other_narrow_BLHP]
    inputs += [x for x in (states_BCHNP, sums_BHL, first_BL) if x is not None]
    sum_dtype = DTYPE if parts == 1 else jnp.float32
    results = [jax.ShapeDtypeStruct((B, L, G * parts, N), sum_dtype)]
    results += [jax.ShapeDtypeStruct(narrow_BLHP.shape, DTYPE)] if plan.has_values else []
    results += [jax.ShapeDtypeStruct(sums_BHL.shape, jnp.float32)] * 2

    def chunk_scan_backward(*refs: Any) -> None:
        *arrays, shared, barriers = refs
        side_program(plan, named_arrays(plan, arrays), shared, barriers)

    d_wide, *others = mosaic.launch(
        chunk_scan_backward,
        out_type=results,
        grid={"batch": B, "part": G * parts, "chunk": chunks, "half": N // width},
        warpgroups=CONSUMERS + 1,
        scratch_types=[shared_type(plan, N, P, sum_dtype), barriers_type(plan)],
        reduction_bytes=0,
    )(*inputs)
    if parts > 1:
        d_wide = d_wide.reshape(B, L, G, parts, N).sum(axis=3).astype(DTYPE)
    return [d_wide, *others]


def named_arrays(plan: Plan, refs: list) -> Arrays:
    names = list(Arrays._fields)
    names.remove("first_BL") if not plan.has_documents else None
    names.remove("d_narrow_BLHP") if not plan.has_values else None
    names.remove("states_BCHNP") if not plan.has_states else None
    return Arrays(**dict.fromkeys(Arrays._fields, ()) | dict(zip(names, refs, strict=True)))


def shared_type(plan: Plan, N: int, P: int, sum_dtype: Any) -> Shared:
    S, slots, consumer = plan.chunk, plan.stages, (CONSUMERS, chunk_scan.WARPGROUP_ROWS)
    wide = mosaic.matrix_buffer((1, S, N), DTYPE)
    narrow = mosaic.matrix_buffer((slots, S, P), DTYPE)
    return Shared(
        wide=wide,
        other_wide=wide,
        narrow=narrow,
        other_narrow=narrow,
        states=mosaic.matrix_buffer((slots, N, P), DTYPE) if plan.has_states else (),
        sums=plgpu.SMEM((slots, S), jnp.float32),
        first=plgpu.SMEM((slots, S), jnp.int32) if plan.has_documents else (),
        d_wide=mosaic.matrix_buffer((*consumer, min(plan.width, COLUMNS_OUT)), sum_dtype),
        d_narrow=mosaic.matrix_buffer((*consumer, P), DTYPE) if plan.has_values else (),
        numbers=plgpu.SMEM((CONSUMERS, 2, chunk_scan.WARPGROUP_ROWS), jnp.float32),
    )


def barriers_type(plan: Plan) -> Barriers:
    copies = 3 + plan.has_states + plan.has_documents
    return Barriers(
        ready=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=copies),
        free=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=CONSUMERS),
        resident=plgpu.Barrier(num_barriers=1, num_arrivals=2),
    )


def side_program(plan: Plan, arrays: Arrays, shared: Shared, barriers: Barriers) -> None:
    place = map(lax.axis_index, ("batch", "part", "chunk", "half"))
    program = Program(plan, arrays, shared, barriers, *place)
    mosaic.split_warpgroups(
        CONSUMERS,
        lambda warpgroup: consume(program, warpgroup),
        lambda: produce(program),
    )


def produce(program: Program) -> None:
    plan, arrays, shared, barriers, batch, part, chunk = program[:7]
    group = lax.div(part, jnp.asarray(plan.parts, part.dtype))
    tokens = pl.ds(chunk * plan.chunk, plan.chunk)
    for source, buffer in (
        (arrays.wide_BLGN, shared.wide),
        (arrays.other_wide_BLGN, shared.other_wide),
    ):
        matrix = source.at[batch, tokens, group]
        plgpu.copy_gmem_to_smem(matrix, buffer.at[0], barriers.resident.at[0])

    @pl.loop(0, plan.heads)
    def _(step):
        slot, head = mosaic.ring_slot(step, plan.stages), part * plan.heads + step
        pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(barriers.free.at[slot]))
        copies = [(arrays.narrow_BLHP.at[batch, tokens, head], shared.narrow)]
        copies += [(arrays.other_narrow_BLHP.at[batch, tokens, head], shared.other_narrow)]
        if plan.has_states:
            copies += [(arrays.states_BCHNP.at[batch, chunk, head], shared.states)]
        copies += [(arrays.sums_BHL.at[batch, head, tokens], shared.sums)]
        if plan.has_documents:
            copies += [(arrays.first_BL.at[batch, tokens], shared.first)]
        for source, ring in copies:
            plgpu.copy_gmem_to_smem(source, ring.at[slot], barriers.ready.at[slot])


def consume(program: Program, warpgroup: jax.Array) -> None:
    plan, arrays, shared, barriers, batch, part, chunk, half = program
    plgpu.barrier_wait(barriers.resident.at[0])
    zeros = mosaic.constant(0.0, (chunk_scan.WARPGROUP_ROWS, plan.width), MATRIX)
    step = functools.partial(add_head, program, warpgroup)
    sums = lax.fori_loop(0, plan.heads, step, zeros)
    buffer = shared.d_wide.at[warpgroup]
    width = buffer.shape[1]
    target = arrays.d_wide_BLGN.at[batch, rows_of(chunk * CONSUMERS + warpgroup), part]
    for column in range(0, plan.width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = sums[:, column : column + width].astype(buffer.dtype)
        plgpu.commit_smem()
        columns = pl.ds(half * plan.width + column, width)
        plgpu.copy_smem_to_gmem(buffer, target.at[:, columns])
    plgpu.wait_smem_to_gmem(0)


def add_head(program: Program, warpgroup: jax.Array, step: jax.Array, sums: jax.Array) -> jax.Array:
    """Add a head's gradients of a consumer's queries or keys, and write its other results."""
    plan, _, shared, barriers, *_, half = program
    slot = mosaic.ring_slot(step, plan.stages)
    plgpu.barrier_wait(barriers.ready.at[slot])
    only = hidden_zero(shared.sums[slot, 0])
    if plan.stages == 1:
        slot = only
    warpgroup = warpgroup + only
    rows = rows_of(warpgroup)
    wide, other_wide = shared.wide.at[only], shared.other_wide.at[only]
    shared = shared._replace(wide=wide, other_wide=other_wide)
    program = program._replace(shared=shared)
    decays = chunk_scan.decays_of(plan, shared, slot, program.chunk, rows)
    share = mosaic.constant(0.0, (chunk_scan.WARPGROUP_ROWS,), ROWS)
    if plan.has_states:
        sums, inner, share = add_state(program, slot, warpgroup, decays, sums)
    if plan.has_values:  # a loop of its own, because both gradients do not fit in registers
        inner = over_blocks(plan, warpgroup, add_values, (program, slot, decays), inner)
        pl.when(half == 0)(lambda: store_values(program, warpgroup, step, inner))
    sums, pairs = over_blocks(
        plan, warpgroup, add_pairs, (program, slot, decays), (sums, share * 0)
    )
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.free.at[slot])
    pl.when(half == 0)(lambda: store(program, warpgroup, step, (pairs, share)))
    return sums


def add_state(
    program: Program, slot: jax.Array, warpgroup: jax.Array, decays: Decays, sums: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add what a consumer's queries or keys get from the state: (sums, what its outputs or values
    get, products of both)."""
    plan, shared, rows = program.plan, program.shared, rows_of(warpgroup)
    factors = decays.leaves if plan.is_keys else decays.reads
    load = functools.partial(mosaic.load, shared.narrow.at[slot, rows], MATRIX)
    narrow, state = load().astype(jnp.float32), shared.states.at[slot]
    scaled = (narrow * spread(factors, narrow.shape)).astype(DTYPE)
    columns = state if plan.width == state.shape[0] else state.at[columns_of(plan, program.half)]
    (sums,) = mosaic.add_products((sums, (scaled, mosaic.transposed(columns))))
    zeros = mosaic.constant(0.0, narrow.shape, MATRIX)
    (inner,) = mosaic.add_products((zeros, (shared.wide.at[rows], state)))
    inner = inner * spread(factors, narrow.shape)
    return sums, inner, jnp.sum(load().astype(jnp.float32) * inner, axis=1)


def columns_of(plan: Plan, half: jax.Array) -> Any:
    return pl.ds(half * plan.width, plan.width)


def over_blocks(plan: Plan, warpgroup: jax.Array, add: Any, fixed: tuple, carry: Any) -> Any:
    """The carry after add(*fixed, warpgroup, is_diagonal, block, carry) of the blocks of the other
    side that a consumer's tokens see."""
    span = (warpgroup + 1, CONSUMERS) if plan.is_keys else (0, warpgroup)
    warpgroup = warpgroup + hidden_zero(fixed[0].shared.sums[fixed[1], 0])
    call = functools.partial(add, *fixed, warpgroup)
    return call(True, warpgroup, lax.fori_loop(*span, functools.partial(call, False), carry))


def product(left: Any, right: Any) -> jax.Array:
    """left right^T of two blocks in shared memory."""

    def multiply(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, left, mosaic.transposed(right))
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[0]), jnp.float32))


def add_values(
    program: Program,
    slot: jax.Array,
    decays: Decays,
    warpgroup: jax.Array,
    is_diagonal: bool,
    block: jax.Array,
    slope: jax.Array,
) -> jax.Array:
    """Add what a consumer's values get from a block's gradients of outputs."""
    shared, rows, others = program.shared, rows_of(warpgroup), rows_of(block)
    decay = decay_of(program, slot, warpgroup, decays, is_diagonal, block)
    weights = product(shared.wide.at[rows], shared.other_wide.at[others]) * decay
    weights, others = weights.astype(DTYPE), shared.other_narrow.at[slot, others]
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, others))(plgpu.ACC.init(slope))


def add_pairs(
    program: Program,
    slot: jax.Array,
    decays: Decays,
    warpgroup: jax.Array,
    is_diagonal: bool,
    block: jax.Array,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Add what a consumer's queries or keys get from a block of the other side's, and the products
    of pairs."""
    plan, shared, (sums, pairs) = program.plan, program.shared, carry
    rows, others = rows_of(warpgroup), rows_of(block)
    dots = product(shared.narrow.at[slot, rows], shared.other_narrow.at[slot, others])
    dots = dots * decay_of(program, slot, warpgroup, decays, is_diagonal, block)
    scores = product(shared.wide.at[rows], shared.other_wide.at[others])
    pairs = pairs + jnp.sum(scores * dots, axis=1)
    dots, wide = dots.astype(DTYPE), shared.other_wide.at[others]
    wide = wide if plan.width == wide.shape[1] else wide.at[:, columns_of(plan, program.half)]
    sums = pl.run_state(lambda ref: plgpu.wgmma(ref, dots, wide))(plgpu.ACC.init(sums))
    return sums, pairs


def decay_of(
    program: Any,
    slot: jax.Array,
    warpgroup: jax.Array,
    decays: Decays,
    is_diagonal: bool,
    block: jax.Array,
) -> jax.Array:
    """exp(c_s - c_t) of a consumer's tokens (rows) and a block's (columns), 0 where masked.

    program: a Program, or one of the delta rule's kernels.
    """
    plan, shared, others = program.plan, program.shared, rows_of(block)
    rows_a_warpgroup = chunk_scan.WARPGROUP_ROWS
    shape = (rows_a_warpgroup, rows_a_warpgroup)
    exponents = spread(decays.sums, shape) - spread_columns(
        mosaic.load(shared.sums.at[slot, others], COLUMNS), shape
    )
    if plan.is_keys:
        exponents = -exponents
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
    row = row + hidden_zero(shared.sums[slot, 0])  # or the masks of all heads stay in registers
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    if is_diagonal:
        earlier, later = (row, column) if plan.is_keys else (column, row)
        is_seen = earlier < later if plan.is_strict else earlier <= later
        exponents = jnp.where(is_seen, exponents, -math.inf)
    if plan.has_documents and plan.is_keys:
        begin = program.chunk * plan.chunk + warpgroup * rows_a_warpgroup
        first = mosaic.load(shared.first.at[slot, others], COLUMNS) - begin
        exponents = jnp.where(row >= spread_columns(first, shape), exponents, -math.inf)
    elif plan.has_documents:
        first = spread(decays.first - block * rows_a_warpgroup, shape)
        exponents = jnp.where(column >= first, exponents, -math.inf)
    return jnp.exp2(exponents)


def store(program: Program, warpgroup: jax.Array, step: jax.Array, numbers: tuple) -> None:
    """Write a consumer's pairs and shares of a head."""
    plan, arrays, shared, _, batch, part, chunk = program[:7]
    rows, head = rows_of(chunk * CONSUMERS + warpgroup), part * plan.heads + step
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, number in enumerate(numbers):
        shared.numbers.at[warpgroup, i][...] = number
    plgpu.commit_smem()
    for i, target in enumerate((arrays.pairs_BHL, arrays.shares_BHL)):
        plgpu.copy_smem_to_gmem(shared.numbers.at[warpgroup, i], target.at[batch, head, rows])


def store_values(program: Program, warpgroup: jax.Array, step: jax.Array, slope: jax.Array) -> None:
    """Write the gradients of a consumer's values of a head; TMA drops tokens past the end."""
    plan, arrays, shared, _, batch, part, chunk = program[:7]
    rows, head = rows_of(chunk * CONSUMERS + warpgroup), part * plan.heads + step
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.d_narrow.at[warpgroup][...] = slope.astype(DTYPE)
    plgpu.commit_smem()
    target = arrays.d_narrow_BLHP.at[batch, rows, head]
    plgpu.copy_smem_to_gmem(shared.d_narrow.at[warpgroup], target)
