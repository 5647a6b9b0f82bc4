"""The inverses that the chunked delta rule needs, for Hopper. Not yet run on a GPU: compiled,
interpreted.

Of every chunk of 64 tokens and every head, (1 + A)^-1 with A_st = beta_s (k_s . k_t) exp(c_s - c_t)
for t < s and c the sums of log decays (ops/chunk_tile.py). A program has one chunk of one head and
one warpgroup. It doubles: with the inverse X of the diagonal blocks of some size, X - X A' X is
that of blocks of twice the size, where A' is their lower left quarter.

Products of bfloat16 alone would lose the inverse of similar keys: each operand is a bfloat16 number
and a bfloat16 remainder, 16 bits together, and a product is three of the tensor cores'. Written are
the inverses in bfloat16, as operands of the scan (delta_scan.py).

Letters as in chunk_scan.py, with S the tokens of a chunk of a warpgroup.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int

from . import chunk_scan, mosaic
from .chunk_scan import DTYPE
from .chunk_scan_backward import decay_of, product
from .mosaic import MATRIX, ROWS, pl, plgpu, spread


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a program, and what chunk_scan_backward.decay_of asks for."""

    heads_a_group: int
    has_documents: bool
    is_keys: bool = False
    is_strict: bool = True

    @property
    def chunk(self) -> int:
        return chunk_scan.WARPGROUP_ROWS


class Shared(NamedTuple):
    """Of the chunk: [1, S, ...]. left, right: the numbers and the remainders [2, S, S] of an
    operand; inverse: the result."""

    k: Any
    sums: Any
    beta: Any
    first: Any
    left: Any
    right: Any
    inverse: Any


class Program(NamedTuple):
    plan: Plan
    shared: Shared
    chunk: jax.Array


def inverses(
    k_BLGN: BFloat16[Array, "B L G N"],
    beta_BHL: Float[Array, "B H L1"],
    sums_BHL: Float[Array, "B H L1"],
    first_BL: Int[Array, "B L1"] | None,
) -> BFloat16[Array, "B C H S S"]:
    """beta, sums (in units of log 2, within chunks) and first tokens (chunk_scan.Arrays) are padded
    to whole chunks."""
    (B, H, L), G, S = beta_BHL.shape, k_BLGN.shape[2], chunk_scan.WARPGROUP_ROWS
    plan = Plan(H // G, first_BL is not None)
    inputs = [k_BLGN, beta_BHL, sums_BHL, *([first_BL] if plan.has_documents else [])]
    row = plgpu.SMEM((1, S), jnp.float32)
    operand = mosaic.matrix_buffer((2, S, S), DTYPE)
    shared_type = Shared(
        k=mosaic.matrix_buffer((1, S, k_BLGN.shape[3]), DTYPE),
        sums=row,
        beta=row,
        first=plgpu.SMEM((1, S), jnp.int32) if plan.has_documents else (),
        left=operand,
        right=operand,
        inverse=mosaic.matrix_buffer((1, S, S), DTYPE),
    )

    def delta_inverse(*refs: Any) -> None:
        *arrays, target, shared, ready = refs
        inverse_program(plan, arrays, target, shared, ready.at[0])

    return mosaic.launch(
        delta_inverse,
        out_type=[jax.ShapeDtypeStruct((B, L // S, H, S, S), DTYPE)],
        grid={"batch": B, "chunk": L // S, "head": H},
        warpgroups=1,
        scratch_types=[shared_type, plgpu.Barrier(num_barriers=1, num_arrivals=len(inputs))],
        reduction_bytes=0,
    )(*inputs)[0]


def inverse_program(plan: Plan, arrays: list, target: Any, shared: Shared, ready: Any) -> None:
    batch, chunk, head = map(lax.axis_index, ("batch", "chunk", "head"))
    group = lax.div(head, jnp.asarray(plan.heads_a_group, head.dtype))
    tokens = pl.ds(chunk * plan.chunk, plan.chunk)
    k_BLGN, beta_BHL, sums_BHL, *first_BL = arrays
    copies = [(k_BLGN.at[batch, tokens, group], shared.k)]
    copies += [(beta_BHL.at[batch, head, tokens], shared.beta)]
    copies += [(sums_BHL.at[batch, head, tokens], shared.sums)]
    copies += [(first.at[batch, tokens], shared.first) for first in first_BL]
    for source, buffer in copies:
        plgpu.copy_gmem_to_smem(source, buffer.at[0], ready)
    plgpu.barrier_wait(ready)
    only, program = jnp.int32(0), Program(plan, shared, chunk)
    decays = chunk_scan.decays_of(plan, shared, only, chunk, chunk_scan.rows_of(0))
    scores = product(shared.k.at[0], shared.k.at[0])
    beta = spread(mosaic.load(shared.beta.at[0], ROWS), scores.shape)
    lower = beta * scores * decay_of(program, only, only, decays, True, only)
    shared.inverse.at[0][...] = inverse(lower, shared).astype(DTYPE)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.inverse.at[0], target.at[batch, chunk, head])
    plgpu.wait_smem_to_gmem(0)


def inverse(lower: jax.Array, shared: Shared) -> jax.Array:
    """(1 + A)^-1 of a strictly lower triangular matrix in registers."""
    row = plgpu.broadcasted_iota(jnp.int32, lower.shape, 0, layout=MATRIX)
    column = plgpu.broadcasted_iota(jnp.int32, lower.shape, 1, layout=MATRIX)
    solved, size = jnp.where(row == column, 1.0, 0.0), 1
    while size < lower.shape[0]:
        block, other = lax.div(row, jnp.int32(size)), lax.div(column, jnp.int32(size))
        is_corner = (block == other + 1) & (lax.rem(block, jnp.int32(2)) == 1)
        corner = jnp.where(is_corner, lower, 0.0)
        if size == 1:
            solved = solved - corner
        else:
            put(shared.left, solved)
            put(shared.right, times(corner, shared.left))
            solved = solved - times(solved, shared.right)
        size *= 2
    return solved


def halves(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix in bfloat16, and what is lacking."""
    rounded = matrix.astype(DTYPE)
    return rounded, (matrix - rounded.astype(jnp.float32)).astype(DTYPE)


def put(buffer: Any, matrix: jax.Array) -> None:
    for i, half in enumerate(halves(matrix)):
        buffer.at[i][...] = half
    plgpu.commit_smem()


def times(left: jax.Array, right: Any) -> jax.Array:
    """The product of a matrix in registers and one of `put`."""
    rounded, rest = halves(left)
    zeros = mosaic.constant(0.0, left.shape, MATRIX)
    pairs = (rest, right.at[0]), (rounded, right.at[1]), (rounded, right.at[0])
    return mosaic.add_products((zeros, *pairs))[0]
