"""The chunked scan of the gated delta rule for Hopper, forward. Not yet run on a GPU: compiled,
interpreted.

A program scans some columns of one head of one row of the batch, chunk by chunk of 64 tokens. Each
of its consumer warpgroups has 64 columns of the values and of the state [N, P], which it keeps in
float32 registers. Columns do not depend on each other, so that consumers wait for copies only. With
c the sum of the log decays within the chunk up to a token, H the state before it, and X its inverse
(delta_inverse.py, ops/chunk_tile.py):

    u   = X beta (v - exp(c) K H)
    y_s = exp(c_s) q_s^T H + sum_{t <= s} (q_s . k_t) exp(c_s - c_t) u_t
    H'  = exp(c_last) H + sum_t k_t (exp(c_last - c_t) u_t)^T

Backward (delta_scan_backward.py) runs it without queries for u and the states, and against the time
for the gradients of u and of the states. With G the gradient of H', and d of its argument:

    du_t = exp(c_last - c_t) k_t^T G + sum_{s >= t} (q_s . k_t) exp(c_s - c_t) dy_s
    m    = X^T du,  which is dv / beta
    dH   = exp(c_last) G + sum_s q_s (exp(c_s) dy_s)^T - sum_s k_s (exp(c_s) beta_s m_s)^T

Products have bfloat16 operands and float32 sums; the carried state is not rounded.

Letters as in chunk_scan.py, with S the tokens of a chunk of a warpgroup.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import chunk_scan, mosaic
from .chunk_scan import DTYPE, ScanShape, rows_of
from .chunk_scan_backward import decay_of
from .delta_inverse import inverses
from .mosaic import MATRIX, ROWS, pl, plgpu, spread

SIZES = (128, 64), (128, 128)  # (N, P); without queries, P is any multiple of 64
STAGES = {1: 3, 2: 2}  # slots of the rings, by consumers
PROGRAMS = 132  # of a launch, at most, of one consumer each: more share a multiprocessor
TUNED_SHAPES = {
    "qwen3-next-8k-packed": ScanShape(1, 8192, 32, 16, 128, 128, documents=True),
    "small-states-1k": ScanShape(2, 1024, 48, 16, 64, 128),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a program. tiles: of the state's rows.

    is_saved: write u, or m against the time, and every second state; is_reverse: from the last
    chunk to the first, for gradients.
    """

    stages: int
    tiles: int
    chunks: int
    heads_a_group: int
    consumers: int
    has_queries: bool
    has_documents: bool
    is_saved: bool
    is_reverse: bool
    is_strict: bool = False  # of decays: a token sees itself

    @property
    def chunk(self) -> int:
        return chunk_scan.WARPGROUP_ROWS

    @property
    def is_keys(self) -> bool:
        """Whether rows of decays are those of keys (chunk_scan_backward.decay_of)."""
        return self.is_reverse

    @property
    def has_output(self) -> bool:
        return self.has_queries or self.is_saved

    def chunk_of(self, step: Any) -> Any:
        return self.chunks - 1 - step if self.is_reverse else step


class Inputs(NamedTuple):
    """v: values, or gradients of y. beta, sums (in units of log 2, within chunks) and first
    (chunk_scan.Arrays) are padded to an even number of chunks; q, first: None if not needed."""

    q_BLGN: Any
    k_BLGN: Any
    v_BLHP: Any
    beta_BHL: Any
    sums_BHL: Any
    inverse_BCHST: Any
    state_BHNP: Any
    first_BL: Any


class Arrays(NamedTuple):
    """Inputs and results in global memory; () if not needed. out: y, u or m."""

    q_BLGN: Any
    k_BLGN: Any
    v_BLHP: Any
    beta_BHL: Any
    sums_BHL: Any
    inverse_BCHST: Any
    state_BHNP: Any
    first_BL: Any
    out_BLHP: Any
    last_BHNP: Any
    states_BCHNP: Any


class Shared(NamedTuple):
    """Rings [slot, S, ...], of values [slot, consumer, S, S]; and buffers of each consumer for the
    rounded state [N, S], for an operand [S, S], for its output and columns of the last state."""

    q: Any
    k: Any
    v: Any
    beta: Any
    sums: Any
    inverse: Any
    first: Any
    state: Any
    part: Any
    out: Any
    last: Any


class Barriers(NamedTuple):
    """ready, free: of a slot."""

    ready: Any
    free: Any


class Program(NamedTuple):
    plan: Plan
    arrays: Arrays
    shared: Shared
    barriers: Barriers
    batch: jax.Array
    head: jax.Array
    part: jax.Array
    chunk: Any

    def columns(self, consumer: Any) -> Any:
        return rows_of(self.part * self.plan.consumers + consumer)


def scan_refuses(q_BLGN: Any, k_BLGN: Any, v_BLHP: Any) -> str:
    """Why the kernels cannot scan these arrays on any device; empty if they can."""
    sizes, value = SIZES, v_BLHP.shape[-1]
    if q_BLGN is None and value % SIZES[0][1] == 0:
        sizes = (*SIZES, (SIZES[0][0], value))
    return chunk_scan.scan_refuses(q_BLGN, k_BLGN, v_BLHP, sizes)


def scan(
    inputs: tuple[Any, ...],
    beta_BLH: Float[Array, "B L H"],
    docs_BL: Int[Array, "B L"] | None = None,
) -> tuple[Any, Float[Array, "B H N P"]]:
    """(y [B, L, H, P] in bfloat16, or None without queries; float32 state after the last token) of
    `inputs` (q, k, v, log_decay, state) as of chunk_scan.scan."""
    if reason := scan_refuses(*inputs[:3]):
        raise ValueError(f"delta_scan backend mosaic cannot run: {reason}; use xla")
    outputs = launch(prepared(inputs, beta_BLH, docs_BL))
    return None if inputs[0] is None else outputs[0], outputs[-1]


def prepared(inputs: tuple[Any, ...], beta_BLH: jax.Array, docs_BL: Any) -> Inputs:
    q_BLGN, k_BLGN, v_BLHP, log_decay_BLH, state_BHNP = inputs
    S = chunk_scan.WARPGROUP_ROWS
    padding = (0, 0), (0, -beta_BLH.shape[1] % (2 * S)), (0, 0)
    sums_BHL = chunk_scan.chunk_sums(jnp.pad(log_decay_BLH, padding), S)
    beta_BHL = jnp.pad(beta_BLH.astype(jnp.float32), padding).swapaxes(1, 2)
    first_BL = None if docs_BL is None else chunk_scan.first_tokens(docs_BL, 2 * S)
    inverse_BCHST = inverses(k_BLGN, beta_BHL, sums_BHL, first_BL)
    return Inputs(q_BLGN, k_BLGN, v_BLHP, beta_BHL, sums_BHL, inverse_BCHST, state_BHNP, first_BL)


def launch(inputs: Inputs, is_saved: bool = False, is_reverse: bool = False) -> list:
    """[y, u or m if there is any; state after the last chunk, or the gradient of the first; of
    every second chunk, if saved, the state before, or its gradient after the next one]."""
    (B, _, H, P), (G, N) = inputs.v_BLHP.shape, inputs.k_BLGN.shape[2:]
    S = chunk_scan.WARPGROUP_ROWS
    consumers = 1 if P % (2 * S) or B * H * (P // S) <= PROGRAMS else 2
    plan = Plan(
        stages=STAGES[consumers],
        tiles=N // S,
        chunks=inputs.inverse_BCHST.shape[1],
        heads_a_group=H // G,
        consumers=consumers,
        has_queries=inputs.q_BLGN is not None,
        has_documents=inputs.first_BL is not None,
        is_saved=is_saved,
        is_reverse=is_reverse,
    )
    results = {"last_BHNP": jax.ShapeDtypeStruct((B, H, N, P), jnp.float32)}
    if plan.has_output:
        results = {"out_BLHP": jax.ShapeDtypeStruct(inputs.v_BLHP.shape, DTYPE), **results}
    if is_saved:
        shape = B, plan.chunks // 2, H, N, P
        results["states_BCHNP"] = jax.ShapeDtypeStruct(shape, DTYPE)
    present = {name: x for name, x in inputs._asdict().items() if x is not None}
    names = [*present, *results]

    def delta_scan(*refs: Any) -> None:
        *arrays, shared, barriers = refs
        named = dict.fromkeys(Arrays._fields, ()) | dict(zip(names, arrays, strict=True))
        scan_program(plan, Arrays(**named), shared, barriers)

    return mosaic.launch(
        delta_scan,
        out_type=[*results.values()],
        grid={"batch": B, "head": H, "part": P // (S * consumers)},
        warpgroups=plan.consumers + 1,
        scratch_types=[shared_type(plan, N), barriers_type(plan)],
        reduction_bytes=0,
    )(*present.values())


def shared_type(plan: Plan, N: int) -> Shared:
    S, slots, consumers = plan.chunk, plan.stages, plan.consumers
    keys, numbers = mosaic.matrix_buffer((slots, S, N), DTYPE), plgpu.SMEM((slots, S), jnp.float32)
    part = mosaic.matrix_buffer((consumers, S, S), DTYPE)
    width = min(S, chunk_scan.LAST_COLUMNS)
    return Shared(
        q=keys if plan.has_queries else (),
        k=keys,
        v=mosaic.matrix_buffer((slots, consumers, S, S), DTYPE),
        beta=numbers,
        sums=numbers,
        inverse=mosaic.matrix_buffer((slots, S, S), DTYPE),
        first=plgpu.SMEM((slots, S), jnp.int32) if plan.has_documents else (),
        state=mosaic.matrix_buffer((consumers, N, S), DTYPE),
        part=part,
        out=part if plan.has_output else (),
        last=mosaic.matrix_buffer((consumers, S, width), jnp.float32),
    )


def barriers_type(plan: Plan) -> Barriers:
    copies = 4 + plan.consumers + plan.has_queries + plan.has_documents
    return Barriers(
        ready=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=copies),
        free=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=plan.consumers),
    )


def scan_program(plan: Plan, arrays: Arrays, shared: Shared, barriers: Barriers) -> None:
    batch, head, part = map(lax.axis_index, ("batch", "head", "part"))
    program = Program(plan, arrays, shared, barriers, batch, head, part, None)
    mosaic.split_warpgroups(
        plan.consumers,
        lambda warpgroup: consume(program, warpgroup),
        lambda: produce(program),
    )


def produce(program: Program) -> None:
    plan, arrays, shared, barriers, batch, head = program[:6]
    group = lax.div(head, jnp.asarray(plan.heads_a_group, head.dtype))

    @pl.loop(0, plan.chunks)
    def _(step):
        slot, chunk = mosaic.ring_slot(step, plan.stages), plan.chunk_of(step)
        pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(barriers.free.at[slot]))
        tokens = rows_of(chunk)
        copies = [(arrays.k_BLGN.at[batch, tokens, group], shared.k.at[slot])]
        copies += [(arrays.inverse_BCHST.at[batch, chunk, head], shared.inverse.at[slot])]
        copies += [(arrays.beta_BHL.at[batch, head, tokens], shared.beta.at[slot])]
        copies += [(arrays.sums_BHL.at[batch, head, tokens], shared.sums.at[slot])]
        values = arrays.v_BLHP.at[batch, tokens, head]
        for consumer in range(plan.consumers):
            columns = program.columns(consumer)
            copies += [(values.at[:, columns], shared.v.at[slot, consumer])]
        if plan.has_queries:
            copies += [(arrays.q_BLGN.at[batch, tokens, group], shared.q.at[slot])]
        if plan.has_documents:
            copies += [(arrays.first_BL.at[batch, tokens], shared.first.at[slot])]
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, barriers.ready.at[slot])


def consume(program: Program, warpgroup: jax.Array) -> None:
    plan, arrays, shared, _, batch, head, *_ = program
    tiles = [rows_of(tile) for tile in range(plan.tiles)]
    columns = program.columns(warpgroup)
    initial = arrays.state_BHNP.at[batch, head, :, columns]
    states = tuple(mosaic.load(initial.at[rows], MATRIX) for rows in tiles)
    step = functools.partial(scan_chunk, program, warpgroup, tiles)
    states = lax.fori_loop(0, plan.chunks, step, states)
    last = arrays.last_BHNP.at[batch, head, :, columns]
    chunk_scan.write_states(shared.last.at[warpgroup], last, tiles, states)


def scan_chunk(
    program: Program, warpgroup: jax.Array, tiles: list, step: jax.Array, states: tuple
) -> tuple:
    """Write what a consumer has of a chunk. Returns its columns of the state after it, or of the
    gradient before."""
    plan, arrays, shared, barriers, batch, head, *_ = program
    slot, chunk = mosaic.ring_slot(step, plan.stages), plan.chunk_of(step)
    program = program._replace(chunk=chunk)
    plgpu.barrier_wait(barriers.ready.at[slot])
    hidden = chunk_scan.hidden_zero(shared.sums[slot, 0])
    program, warpgroup = program._replace(part=program.part + hidden), warpgroup + hidden
    rounded, columns = shared.state.at[warpgroup], program.columns(warpgroup)
    if plan.has_output:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for rows, state in zip(tiles, states, strict=True):
        rounded.at[rows][...] = state.astype(DTYPE)
    plgpu.commit_smem()
    if plan.is_saved:
        pair, half = lax.div(chunk, jnp.int32(2)), lax.rem(chunk, jnp.int32(2))
        target = arrays.states_BCHNP.at[batch, pair, head, :, columns]
        pl.when(half == int(plan.is_reverse))(lambda: plgpu.copy_smem_to_gmem(rounded, target))
    add = add_gradients if plan.is_reverse else add_values
    out, states = add(program, slot, warpgroup, tiles, states)
    if plan.has_output:
        buffer = shared.out.at[warpgroup]
        buffer[...] = out.astype(DTYPE)
        plgpu.commit_smem()
        target = arrays.out_BLHP.at[batch, rows_of(chunk), head, columns]
        plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.barrier_arrive(barriers.free.at[slot])
    return states


def add_values(
    program: Program, slot: jax.Array, warpgroup: jax.Array, tiles: list, states: tuple
) -> tuple[jax.Array, tuple]:
    """(y, or u without queries; the state after the chunk)."""
    plan, shared, k = program.plan, program.shared, program.shared.k.at[slot]
    values, part, state = (
        ref.at[warpgroup] for ref in (shared.v.at[slot], shared.part, shared.state)
    )
    decays = chunk_scan.decays_of(plan, shared, slot, program.chunk, rows_of(0))
    shape = (plan.chunk, plan.chunk)
    zeros = mosaic.constant(0.0, shape, MATRIX)
    (predictions,) = mosaic.add_products((zeros, (k, state)))
    v = mosaic.load(values, MATRIX).astype(jnp.float32)
    rest = (v - predictions * spread(decays.reads, shape)) * beta_of(shared, slot, shape)
    part[...] = rest.astype(DTYPE)
    plgpu.commit_smem()
    pairs = [(shared.inverse.at[slot], part)]
    if plan.has_queries:
        q = shared.q.at[slot]
        pairs += [(q, state), (q, mosaic.transposed(k))]
    u, *read = mosaic.add_products(*((zeros, pair) for pair in pairs))
    values[...] = u.astype(DTYPE)
    part[...] = (u * spread(decays.leaves, shape)).astype(DTYPE)
    plgpu.commit_smem()
    sums = [
        (state * decays.stays, (mosaic.transposed(k.at[:, rows]), part))
        for rows, state in zip(tiles, states, strict=True)
    ]
    if plan.has_queries:
        weights = read[1] * decay_of(program, slot, jnp.int32(0), decays, True, jnp.int32(0))
        y = read[0] * spread(decays.reads, shape)
        sums = [*sums, (y, (weights.astype(DTYPE), values))]
    sums = mosaic.add_products(*sums)
    return sums[-1] if plan.has_queries else u, tuple(sums[: plan.tiles])


def add_gradients(
    program: Program, slot: jax.Array, warpgroup: jax.Array, tiles: list, states: tuple
) -> tuple[jax.Array, tuple]:
    """(m, the gradient of the state before the chunk)."""
    plan, shared, k = program.plan, program.shared, program.shared.k.at[slot]
    slopes, part, state = (
        ref.at[warpgroup] for ref in (shared.v.at[slot], shared.part, shared.state)
    )
    decays = chunk_scan.decays_of(plan, shared, slot, program.chunk, rows_of(0))
    shape, q = (plan.chunk, plan.chunk), shared.q.at[slot]
    zeros = mosaic.constant(0.0, shape, MATRIX)
    d_u, scores = mosaic.add_products((zeros, (k, state)), (zeros, (k, mosaic.transposed(q))))
    weights = scores * decay_of(program, slot, jnp.int32(0), decays, True, jnp.int32(0))
    d_u = d_u * spread(decays.leaves, shape)
    (d_u,) = mosaic.add_products((d_u, (weights.astype(DTYPE), slopes)))
    part[...] = d_u.astype(DTYPE)
    plgpu.commit_smem()
    (m,) = mosaic.add_products((zeros, (mosaic.transposed(shared.inverse.at[slot]), part)))
    reads = spread(decays.reads, shape)
    d_y = mosaic.load(slopes, MATRIX).astype(jnp.float32)
    slopes[...] = (d_y * reads).astype(DTYPE)
    part[...] = (m * beta_of(shared, slot, shape) * -reads).astype(DTYPE)
    plgpu.commit_smem()
    sums = mosaic.add_products(
        *(
            (
                state * decays.stays,
                (mosaic.transposed(k.at[:, rows]), part),
                (mosaic.transposed(q.at[:, rows]), slopes),
            )
            for rows, state in zip(tiles, states, strict=True)
        )
    )
    return m, tuple(sums)


def beta_of(shared: Shared, slot: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return spread(mosaic.load(shared.beta.at[slot], ROWS), shape)
