"""The chunked scan of Mamba-2 for Hopper, forward. Not yet run on a GPU: compiled, interpreted.

Backward (chunk_scan_backward.py) runs it without queries, also against the time, for the states.

A program scans one head of one row of the batch, chunk by chunk, and keeps the state [N, P] in
float32 registers: each of two consumer warpgroups has half of the state's rows N, and half of a
chunk's tokens. A producer warpgroup streams queries, keys, values and sums of decays through rings
in shared memory (TMA). With c the sum of the log decays within the chunk up to a token, and H the
state before it (ops/chunk_tile.py):

    y_s = exp(c_s) q_s^T H + sum_{t <= s} (q_s . k_t) exp(c_s - c_t) v_t
    H'  = exp(c_last) H + sum_t k_t (exp(c_last - c_t) v_t)^T

Products have bfloat16 operands and float32 sums: H, the scaled values and the decayed scores are
rounded for them, the carried state is not. The scores of a chunk never leave registers, and those
above the diagonal blocks are not computed. Decays are differences of sums, masked before exp2.

Letters beside the legend's: N state, P head value, S tokens of a chunk.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import mosaic
from .mosaic import COLUMNS, LOG2E, MATRIX, ROWS, WARPGROUP_ROWS, pl, plgpu, spread, spread_columns

CONSUMERS = 2
STAGES = {(128, 64): 2, (128, 128): 1, (256, 64): 1}  # slots of the rings, by (N, P)
DTYPE = jnp.bfloat16
LAST_COLUMNS = 32  # of the last state that a consumer writes at a time


@dataclasses.dataclass(frozen=True)
class ScanShape:
    """A shape to compile, check and time."""

    batch: int
    length: int
    heads: int
    groups: int
    state: int = 128
    value: int = 64
    documents: bool = False


TUNED_SHAPES = {
    "nemotron-h-8k": ScanShape(1, 8192, 128, 8),
    "nemotron-h-8k-packed": ScanShape(1, 8192, 128, 8, documents=True),
    "wide-states-8k-packed": ScanShape(1, 8192, 32, 2, 256, 64, documents=True),
    "wide-heads-8k-packed": ScanShape(1, 8192, 32, 2, 128, 128, documents=True),
    "mamba2-2.7b-8k": ScanShape(1, 8192, 80, 1),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a program. tiles: of WARPGROUP_ROWS rows of the state, per consumer.

    has_states: write the state before each chunk; is_reverse: from the last chunk to the first.
    """

    stages: int
    tiles: int
    chunks: int
    heads_a_group: int
    has_output: bool
    has_documents: bool
    has_states: bool = False
    is_reverse: bool = False

    @property
    def chunk(self) -> int:
        return CONSUMERS * WARPGROUP_ROWS

    def chunk_of(self, step: Any) -> Any:
        return self.chunks - 1 - step if self.is_reverse else step


class Arrays(NamedTuple):
    """In global memory. first: position of the first token of each token's document, -1 for that
    of the initial state. q, first, y, states: () if not needed."""

    q_BLGN: Any
    k_BLGN: Any
    v_BLHP: Any
    sums_BHL: Any
    state_BHNP: Any
    first_BL: Any
    y_BLHP: Any
    last_BHNP: Any
    states_BCHNP: Any


class Shared(NamedTuple):
    """Rings [slot, S, ...]; buffers of the rounded state [1, N, P] and of scaled values [1, S, P];
    and buffers of each consumer for columns of the last state and for its outputs."""

    k: Any
    v: Any
    sums: Any
    state: Any
    scaled: Any
    last: Any
    q: Any = ()
    y: Any = ()
    first: Any = ()


class Barriers(NamedTuple):
    """ready, free: of a slot. writes, reads: the two buffers that both consumers multiply."""

    ready: Any
    free: Any
    writes: Any
    reads: Any


class Program(NamedTuple):
    plan: Plan
    arrays: Arrays
    shared: Shared
    barriers: Barriers
    batch: jax.Array
    head: jax.Array


class Decays(NamedTuple):
    """Of a chunk: sums of this consumer's tokens, in units of log 2; factors of its products with
    the state before, and of its values in the state after; the state's own factor; and the first
    token of each token's document, relative to the chunk, or None."""

    sums: jax.Array
    reads: jax.Array
    leaves: jax.Array
    stays: jax.Array
    first: Any


def scan_refuses(q_BLGN: Any, k_BLGN: Any, v_BLHP: Any, supported: tuple = ()) -> str:
    """Why a kernel cannot scan these arrays on any device; empty if it can. supported: its sizes of
    states and of heads, those of this module's kernels by default."""
    supported = supported or tuple(STAGES)
    dtypes = {str(x.dtype) for x in (q_BLGN, k_BLGN, v_BLHP) if x is not None}
    sizes = k_BLGN.shape[-1], v_BLHP.shape[-1]
    if dtypes != {jnp.dtype(DTYPE).name}:
        return f"dtypes {sorted(dtypes)} are not all bfloat16: set the compute dtype to bfloat16"
    if sizes not in supported:
        most = [max(one) for one in zip(*supported, strict=True)]
        return (
            f"state size {sizes[0]} is more than {most[0]} or head dim {sizes[1]} is more than "
            f"{most[1]}"
        )
    return ""


def chunk_sums(log_decay_BLH: jax.Array, chunk: int) -> Float[Array, "B H L"]:
    """Sums within chunks up to each token, in units of log 2, padded to whole chunks."""
    B, L, H = log_decay_BLH.shape
    padded_BLH = jnp.pad(log_decay_BLH * LOG2E, ((0, 0), (0, -L % chunk), (0, 0)))
    chunks_BHCS = jnp.moveaxis(padded_BLH, 2, 1).reshape(B, H, -1, chunk)
    return jnp.cumsum(chunks_BHCS, axis=-1).reshape(B, H, -1)


def first_tokens(docs_BL: jax.Array, chunk: int) -> Int[Array, "B L"]:
    """First token of each token's document, -1 for the first document (docs 0), padded to whole
    chunks by the last document. docs_BL: nondecreasing numbers."""
    docs_BL = jnp.pad(docs_BL, ((0, 0), (0, -docs_BL.shape[1] % chunk)), mode="edge")
    is_first_BL = jnp.diff(docs_BL, axis=1, prepend=0) != 0
    places_L = jnp.arange(docs_BL.shape[1], dtype=jnp.int32)
    return lax.cummax(jnp.where(is_first_BL, places_L, -1), axis=1)


def scan(
    inputs: tuple[Any, ...], beta_BLH: None = None, docs_BL: Int[Array, "B L"] | None = None
) -> tuple[Any, Float[Array, "B H N P"]]:
    """(y [B, L, H, P] in bfloat16, or None without queries; float32 state after the last token).

    inputs: q_BLGN or None, k_BLGN, v_BLHP, log_decay_BLH, state_BHNP. beta_BLH: of the delta rule
    only (delta_scan.py). docs_BL: nondecreasing number of each token's document; the initial state
    belongs to number 0. ValueError for arrays that `scan_refuses`.
    """
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLH, state_BHNP = inputs
    if reason := scan_refuses(q_BLGN, k_BLGN, v_BLHP):
        raise ValueError(f"chunk_scan backend mosaic cannot run: {reason}; use xla")
    S = CONSUMERS * WARPGROUP_ROWS
    sums_BHL = chunk_sums(log_decay_BLH, S)
    first_BL = None if docs_BL is None else first_tokens(docs_BL, S)
    outputs = launch(q_BLGN, k_BLGN, v_BLHP, sums_BHL, state_BHNP, first_BL)
    return None if q_BLGN is None else outputs[0], outputs[-1]


def launch(
    q_BLGN: Any,
    k_BLGN: jax.Array,
    v_BLHP: jax.Array,
    sums_BHL: jax.Array,
    state_BHNP: jax.Array,
    first_BL: Any,
    states: str = "",
) -> list:
    """[y with queries, state after the last chunk, states with `states`: "before" each chunk or,
    against the time, "after" it, in bfloat16]. sums, first: as in Arrays."""
    (B, L, H, P), (G, N) = v_BLHP.shape, k_BLGN.shape[2:]
    S = CONSUMERS * WARPGROUP_ROWS
    plan = Plan(
        stages=STAGES[N, P],
        tiles=N // S,
        chunks=-(-L // S),
        heads_a_group=H // G,
        has_output=q_BLGN is not None,
        has_documents=first_BL is not None,
        has_states=bool(states),
        is_reverse=states == "after",
    )
    inputs: list = [q_BLGN] if plan.has_output else []
    inputs += [k_BLGN, v_BLHP, sums_BHL, state_BHNP]
    inputs += [first_BL] if plan.has_documents else []
    results: list = [jax.ShapeDtypeStruct(v_BLHP.shape, DTYPE)] if plan.has_output else []
    results += [jax.ShapeDtypeStruct((B, H, N, P), jnp.float32)]
    if plan.has_states:
        results += [jax.ShapeDtypeStruct((B, plan.chunks, H, N, P), DTYPE)]

    def chunk_scan_forward(*refs: Any) -> None:
        *arrays, shared, barriers = refs
        forward_program(plan, named_arrays(plan, arrays), shared, barriers)

    return mosaic.launch(
        chunk_scan_forward,
        out_type=results,
        grid={"batch": B, "head": H},
        warpgroups=CONSUMERS + 1,
        scratch_types=[shared_type(plan, N, P), barriers_type(plan)],
        reduction_bytes=0,
    )(*inputs)


def named_arrays(plan: Plan, refs: list) -> Arrays:
    names = ["q_BLGN"] * plan.has_output + ["k_BLGN", "v_BLHP", "sums_BHL", "state_BHNP"]
    names += ["first_BL"] * plan.has_documents + ["y_BLHP"] * plan.has_output + ["last_BHNP"]
    names += ["states_BCHNP"] * plan.has_states
    return Arrays(**dict.fromkeys(Arrays._fields, ()) | dict(zip(names, refs, strict=True)))


def shared_type(plan: Plan, N: int, P: int) -> Shared:
    S, slots, consumer = plan.chunk, plan.stages, (CONSUMERS, WARPGROUP_ROWS)
    keys = mosaic.matrix_buffer((slots, S, N), DTYPE)
    return Shared(
        k=keys,
        v=mosaic.matrix_buffer((slots, S, P), DTYPE),
        sums=plgpu.SMEM((slots, S), jnp.float32),
        state=mosaic.matrix_buffer((1, N, P), DTYPE),
        scaled=mosaic.matrix_buffer((1, S, P), DTYPE),
        last=mosaic.matrix_buffer((*consumer, min(P, LAST_COLUMNS)), jnp.float32),
        q=keys if plan.has_output else (),
        y=mosaic.matrix_buffer((*consumer, P), DTYPE) if plan.has_output else (),
        first=plgpu.SMEM((slots, S), jnp.int32) if plan.has_documents else (),
    )


def barriers_type(plan: Plan) -> Barriers:
    copies = 3 + plan.has_output + plan.has_documents
    both = plgpu.Barrier(num_barriers=1, num_arrivals=CONSUMERS)
    return Barriers(
        ready=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=copies),
        free=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=CONSUMERS),
        writes=both,
        reads=both,
    )


def forward_program(plan: Plan, arrays: Arrays, shared: Shared, barriers: Barriers) -> None:
    place = lax.axis_index("batch"), lax.axis_index("head")
    program = Program(plan, arrays, shared, barriers, *place)
    mosaic.split_warpgroups(
        CONSUMERS,
        lambda warpgroup: consume(program, warpgroup),
        lambda: produce(program),
    )


def produce(program: Program) -> None:
    plan, arrays, shared, barriers, batch, head = program
    group = lax.div(head, jnp.asarray(plan.heads_a_group, head.dtype))

    @pl.loop(0, plan.chunks)
    def _(step):
        slot = mosaic.ring_slot(step, plan.stages)
        pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(barriers.free.at[slot]))
        tokens = pl.ds(plan.chunk_of(step) * plan.chunk, plan.chunk)
        copies = [(arrays.k_BLGN.at[batch, tokens, group], shared.k)]
        copies += [(arrays.v_BLHP.at[batch, tokens, head], shared.v)]
        copies += [(arrays.sums_BHL.at[batch, head, tokens], shared.sums)]
        if plan.has_output:
            copies += [(arrays.q_BLGN.at[batch, tokens, group], shared.q)]
        if plan.has_documents:
            copies += [(arrays.first_BL.at[batch, tokens], shared.first)]
        for source, ring in copies:
            plgpu.copy_gmem_to_smem(source, ring.at[slot], barriers.ready.at[slot])


def rows_of(part: Any) -> Any:
    """The rows of a consumer's tokens in a chunk, or of a tile of the state."""
    return pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)


def consume(program: Program, warpgroup: jax.Array) -> None:
    plan, arrays, shared, _, batch, head = program
    tiles = [rows_of(warpgroup * plan.tiles + tile) for tile in range(plan.tiles)]
    initial = arrays.state_BHNP.at[batch, head]
    states = tuple(mosaic.load(initial.at[rows], MATRIX) for rows in tiles)
    step = functools.partial(scan_chunk, program, warpgroup, tiles)
    states = lax.fori_loop(0, plan.chunks, step, states)
    write_states(shared.last.at[warpgroup], arrays.last_BHNP.at[batch, head], tiles, states)


def write_states(buffer: Any, last: Any, tiles: list, states: tuple) -> None:
    """Write tiles of the last state, some columns at a time."""
    width = buffer.shape[1]
    for rows, state in zip(tiles, states, strict=True):
        for column in range(0, state.shape[1], width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = state[:, column : column + width]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, last.at[rows, pl.ds(column, width)])
    plgpu.wait_smem_to_gmem(0)


def scan_chunk(
    program: Program, warpgroup: jax.Array, tiles: list, step: jax.Array, states: tuple
) -> tuple:
    """Write the outputs of a consumer's tokens of a chunk. Returns its tiles of the state after."""
    plan, _, shared, barriers, *_ = program
    slot, rows, chunk = mosaic.ring_slot(step, plan.stages), rows_of(warpgroup), plan.chunk_of(step)
    plgpu.barrier_wait(barriers.ready.at[slot])
    only = jnp.int32(0)
    if plan.stages == 1:
        slot = only = hidden_zero(shared.sums[0, 0])
    scaled_buffer, state_buffer = shared.scaled.at[only], shared.state.at[only]
    decays = decays_of(plan, shared, slot, chunk, rows)
    values = mosaic.load(shared.v.at[slot, rows], MATRIX).astype(jnp.float32)
    factors = decays.reads if plan.is_reverse else decays.leaves
    values = values * spread(factors, values.shape)
    pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.reads.at[0]))
    scaled_buffer.at[rows][...] = values.astype(DTYPE)
    if plan.has_states:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if plan.has_output or plan.has_states:
        for tile, state in zip(tiles, states, strict=True):
            state_buffer.at[tile][...] = state.astype(DTYPE)
    plgpu.commit_smem()
    if plan.has_states:
        target = program.arrays.states_BCHNP.at[program.batch, chunk, program.head]
        for tile in tiles:
            plgpu.copy_smem_to_gmem(state_buffer.at[tile], target.at[tile])
    plgpu.barrier_arrive(barriers.writes.at[0])
    plgpu.barrier_wait(barriers.writes.at[0])

    def multiply(accumulators: Any) -> None:
        for tile, state_ref in zip(tiles, accumulators, strict=False):
            keys = shared.k.at[slot, :, tile]
            plgpu.wgmma(state_ref, mosaic.transposed(keys), scaled_buffer)
        if plan.has_output:
            plgpu.wgmma(accumulators[-1], shared.q.at[slot, rows], state_buffer)

    sums = [state * decays.stays for state in states]
    if plan.has_output:
        sums += [mosaic.constant(0.0, values.shape, MATRIX)]
    sums = pl.run_state(multiply)(tuple(plgpu.ACC.init(value) for value in sums))
    pl.when(step < plan.chunks - 1)(lambda: plgpu.barrier_arrive(barriers.reads.at[0]))
    if plan.has_output:
        y = sums[-1] * spread(decays.reads, values.shape)
        add = functools.partial(add_scores, program, slot, warpgroup, decays)
        y = lax.fori_loop(0, warpgroup, functools.partial(add, False), y)
        store(program, warpgroup, chunk, add(True, warpgroup, y))
    plgpu.barrier_arrive(barriers.free.at[slot])
    return tuple(sums[: plan.tiles])


def hidden_zero(number: jax.Array) -> jax.Array:
    """0, for a number that is at most 0, which the compiler does not know. If they were the same
    for every chunk, it would keep the descriptors of all operands of wgmma in registers, and spill.
    """
    return jnp.where(number > 1e30, 1, 0)


def decays_of(plan: Any, shared: Any, slot: jax.Array, chunk: jax.Array, rows: Any) -> Decays:
    end = plan.chunk - 1
    sums = mosaic.load(shared.sums.at[slot, rows], ROWS)
    last = shared.sums[slot, end]
    reads, stays = jnp.exp2(sums), jnp.exp2(last)
    if not plan.has_documents:
        return Decays(sums, reads, jnp.exp2(last - sums), stays, None)
    begin = chunk * plan.chunk
    first, last_first = mosaic.load(shared.first.at[slot, rows], ROWS), shared.first[slot, end]
    return Decays(
        sums,
        jnp.where(first < begin, reads, 0.0),
        jnp.exp2(jnp.where(first == last_first, last - sums, -math.inf)),
        jnp.where(last_first < begin, stays, 0.0),
        first - begin,
    )


def add_scores(
    program: Program,
    slot: jax.Array,
    warpgroup: jax.Array,
    decays: Decays,
    is_diagonal: bool,
    block: jax.Array,
    y: jax.Array,
) -> jax.Array:
    """Add the products of a consumer's queries with a block of keys, times their values."""
    shared, shape = program.shared, (WARPGROUP_ROWS, WARPGROUP_ROWS)
    keys = rows_of(block)

    def score(ref: Any) -> jax.Array:
        queries = shared.q.at[slot, rows_of(warpgroup)]
        plgpu.wgmma(ref, queries, mosaic.transposed(shared.k.at[slot, keys]))
        return ref[...]

    scores = pl.run_scoped(score, plgpu.ACC(shape, jnp.float32))
    key_sums = mosaic.load(shared.sums.at[slot, keys], COLUMNS)
    exponents = spread(decays.sums, shape) - spread_columns(key_sums, shape)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    if is_diagonal:
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
        exponents = jnp.where(column <= row, exponents, -math.inf)
    if decays.first is not None:
        first = spread(decays.first - block * WARPGROUP_ROWS, shape)
        exponents = jnp.where(column >= first, exponents, -math.inf)
    weights = (scores * jnp.exp2(exponents)).astype(DTYPE)
    values = shared.v.at[slot, keys]
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(y))


def store(program: Program, warpgroup: jax.Array, chunk: jax.Array, y: jax.Array) -> None:
    """Write a consumer's outputs; TMA drops tokens past the end."""
    buffer = program.shared.y.at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[...] = y.astype(DTYPE)
    plgpu.commit_smem()
    tokens = rows_of(chunk * CONSUMERS + warpgroup)
    target = program.arrays.y_BLHP.at[program.batch, tokens, program.head]
    plgpu.copy_smem_to_gmem(buffer, target)
