"""Linear + cross entropy for Hopper with our matrix product loop. Not yet run on a GPU.

`statistics` multiplies h with w and reduces the logits, which never leave the registers, to each
token's maximum, sum of exponentials, target's logit and, optionally, sum. A program loops over the
tiles of a part of the words for one tile of tokens; the parts are combined outside of the kernel.
`logit_gradient` multiplies again and writes the gradient of the logits of a range of words, which
it computes from the log-sum-exp in registers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import mosaic
from .matmul import (
    MULTIPROCESSORS,
    Item,
    Ring,
    Tiling,
    Work,
    finish_stores,
    item_count,
    matmul_refuses,
    ring_type,
    run,
    store,
    store_type,
    tile_place,
)
from .mosaic import LOG2E, MATRIX, ROWS, WARPGROUP_ROWS, pl, plgpu, spread

MASKED = -1e30  # logit of padding
DTYPES = ("bfloat16", "float16")
STATISTICS_TILING = GRADIENT_TILING = Tiling(right="NK")
STORED_BYTES = 64  # of a row of the gradient at a time: more would spill registers
PART = 64  # columns whose exponentials are in registers at a time
SPLITS = 8  # parts of the words with which concurrent tiles of tokens about fit in the L2 cache


@dataclasses.dataclass(frozen=True)
class Logits:
    """Soft-cap, and the loss's weights of logsumexp^2, of the target's logit and of all logits."""

    softcap: float = 0.0
    z_loss: float = 0.0
    target_share: float = 1.0
    uniform: float = 0.0

    def capped(self, products: jax.Array) -> jax.Array:
        """By exp2: the tanh instruction has an error of 2^-11, which a cap of 30 multiplies."""
        if not self.softcap:
            return products
        power = jnp.exp2(products * (2 * LOG2E / self.softcap))
        return self.softcap - (2 * self.softcap) / (1 + power)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape to compile, check and time."""

    tokens: int
    words: int
    width: int
    logits: Logits = Logits()


TUNED_SHAPES = {
    "llama-8k": Shape(8192, 131_072, 4096),
    "llama-8k-128256": Shape(8192, 128_256, 4096),
    "gpt2-8k": Shape(8192, 50_304, 768),
    "gemma-4k-softcap": Shape(4096, 256_000, 2048, Logits(softcap=30.0)),
    "gpt2-8k-smoothing": Shape(8192, 50_304, 1600, Logits(0.0, 1e-4, 0.9, 0.1 / 50_257)),
    "gemma-2k-everything": Shape(2000, 256_000, 3072, Logits(30.0, 1e-4, 0.9, 0.1 / 256_000)),
}


class Online(NamedTuple):
    """Each token's target (a row of w), and its statistics over the words so far."""

    target: jax.Array
    largest: jax.Array
    total: jax.Array
    of_target: jax.Array
    sum: Any  # None if not needed


WORDS = 64  # of the logits' gradient that TMA writes at a time


def cross_entropy_refuses(h_TD: Any, w_VD: Any) -> str:
    """Why the kernels do not support these arrays; empty if they do."""
    if str(h_TD.dtype) not in DTYPES:
        return f"dtype {h_TD.dtype} is neither of {', '.join(DTYPES)}"
    if w_VD.shape[0] % WORDS:
        return f"{w_VD.shape[0]} words are not a multiple of {WORDS}: pad the vocabulary"
    return matmul_refuses(h_TD, w_VD, STATISTICS_TILING)


def split_count(rows: int, columns: int) -> int:
    """Number of parts of the `columns` tiles of words, for `rows` tiles of tokens: close to SPLITS,
    with few idle multiprocessors at the end."""

    def steps(splits: int) -> int:
        return pl.cdiv(rows * splits, MULTIPROCESSORS) * pl.cdiv(columns, splits)

    choices = range(1, min(columns, MULTIPROCESSORS) + 1)
    fewest = min(map(steps, choices))
    good = [splits for splits in choices if steps(splits) <= 1.05 * fewest]
    splits = min(good, key=lambda splits: abs(splits - SPLITS))
    return pl.cdiv(columns, pl.cdiv(columns, splits))  # no part is empty


def statistics(
    h_TD: Float[Array, "T D"],
    w_VD: Float[Array, "V D"],
    targets_T: Int[Array, " T"],
    real: Int[Array, ""],
    logits: Logits,
    tiling: Tiling | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """(largest logit, sum of exp(logit - largest), target's logit, sum of logits or None).

    targets_T: rows of w, negative for none. real: number of words that are not padding. The sum of
    logits is computed if logits.uniform is not 0.
    """
    (T, D), V, tiling = h_TD.shape, w_VD.shape[0], tiling or STATISTICS_TILING
    rows, columns = pl.cdiv(T, tiling.rows), pl.cdiv(V, tiling.columns)
    splits, numbers = split_count(rows, columns), 4 if logits.uniform else 3
    each = pl.cdiv(columns, splits)

    def cross_entropy_statistics(
        h_ref: Any, w_ref: Any, target_ref: Any, real_ref: Any, out: Any, ring: Ring, buffer: Any
    ) -> None:
        row, split = lax.axis_index("row") * tiling.rows, lax.axis_index("split")
        first, end = split * each, real_ref[0]

        def rows_of(warpgroup: jax.Array) -> Any:
            return pl.ds(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        def item(index: jax.Array) -> Item:
            column = (first + index) * tiling.columns
            return Item(h_ref, w_ref, row, column, 0, pl.cdiv(D, tiling.depth))

        def init(warpgroup: jax.Array) -> Online:
            target = mosaic.load(target_ref.at[rows_of(warpgroup)], ROWS)
            zeros = mosaic.constant(0.0, (WARPGROUP_ROWS,), ROWS)
            lowest = mosaic.constant(MASKED, (WARPGROUP_ROWS,), ROWS)
            return Online(target, lowest, zeros, zeros, zeros if numbers == 4 else None)

        def epilogue(index: Any, warpgroup: Any, sums: jax.Array, online: Online) -> Online:
            return add_words(logits, sums, (first + index) * tiling.columns, end, online)

        def finish(warpgroup: jax.Array, online: Online) -> None:
            for number, value in enumerate(online[1 : 1 + numbers]):
                buffer.at[warpgroup, number][...] = value
            plgpu.commit_smem()
            for number in range(numbers):
                target = out.at[split, number, rows_of(warpgroup)]
                plgpu.copy_smem_to_gmem(buffer.at[warpgroup, number], target)
            plgpu.wait_smem_to_gmem(0)

        count = jnp.minimum(columns - first, each)
        run(tiling, ring, Work(count, item, epilogue, init, finish))

    shape = (splits, numbers, rows * tiling.rows)
    partial = mosaic.launch(
        cross_entropy_statistics,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        grid={"row": rows, "split": splits},
        warpgroups=tiling.consumers + 1,
        scratch_types=[
            ring_type(tiling, h_TD.dtype),
            plgpu.SMEM((tiling.consumers, numbers, WARPGROUP_ROWS), jnp.float32),
        ],
    )(h_TD, w_VD, whole_tiles(targets_T, tiling.rows, -1), real.reshape(1))[0]
    largest_ST, total_ST, *sums = (partial[:, number, :T] for number in range(numbers))
    largest_T = jnp.max(largest_ST, axis=0)
    total_T = jnp.sum(total_ST * jnp.exp(largest_ST - largest_T), axis=0)
    target_T, *sum_T = (jnp.sum(number_ST, axis=0) for number_ST in sums)
    return largest_T, total_T, target_T, sum_T[0] if sum_T else None


def whole_tiles(rows_T: jax.Array, size: int, filling: float) -> jax.Array:
    return jnp.pad(rows_T, (0, -rows_T.shape[0] % size), constant_values=filling)


def numbered(shape: tuple[int, ...]) -> jax.Array:
    """The column index of each element."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)


def add_words(logits: Logits, sums: jax.Array, first: Any, end: Any, online: Online) -> Online:
    """`online` after one tile of words; first: its first word; words from `end` on are padding."""
    largest, total, of_target, every = online[1:]
    for place in range(0, sums.shape[1], PART):
        part = sums[:, place : place + PART]
        column, capped = numbered(part.shape), logits.capped(part)
        live = column < end - (first + place)
        hit = column == spread(online.target - (first + place), part.shape)
        of_target += jnp.where(hit, capped, 0.0).sum(axis=1)
        if every is not None:
            every += jnp.where(live, capped, 0.0).sum(axis=1)
        capped = jnp.where(live, capped, MASKED)
        previous, largest = largest, jnp.maximum(largest, capped.max(axis=1))
        power = jnp.exp2((capped - spread(largest, part.shape)) * LOG2E)
        total = total * jnp.exp2((previous - largest) * LOG2E) + power.sum(axis=1)
    return Online(online.target, largest, total, of_target, every)


def logit_gradient(
    h_TD: Float[Array, "T D"],
    w_VD: Float[Array, "V D"],
    rows: tuple[Array, Array, Array],
    span: tuple[Array, Array, int],
    logits: Logits,
    tiling: Tiling | None = None,
) -> Float[Array, "T C"]:
    """Gradient of the loss with respect to the products of h with some words, in h's dtype.

    rows: each token's target (a row of w, negative for none), weight and log-sum-exp. span: (number
    of words that are not padding, first word, number of words, a multiple of 8).
    """
    (T, D), dtype, tiling = h_TD.shape, h_TD.dtype, tiling or GRADIENT_TILING
    real, start, words = span
    row_tiles, columns = pl.cdiv(T, tiling.rows), pl.cdiv(words, tiling.columns)
    programs, steps = min(MULTIPROCESSORS, row_tiles * columns), pl.cdiv(D, tiling.depth)

    def cross_entropy_gradient(
        h_ref: Any,
        w_ref: Any,
        target_ref: Any,
        numbers_ref: Any,
        span_ref: Any,
        out_TC: Any,
        scratch: tuple,
    ) -> None:
        program, (ring, buffers) = lax.axis_index("program"), scratch
        end, begin = span_ref[0], span_ref[1]

        def place(index: jax.Array) -> tuple:
            row, column = tile_place(index * programs + program, row_tiles, columns)
            return row * tiling.rows, column * tiling.columns

        def item(index: jax.Array) -> Item:
            row, column = place(index)
            return Item(h_ref, w_ref, row, begin + column, 0, steps)

        def epilogue(index: Any, warpgroup: Any, sums: jax.Array, _: tuple) -> tuple:
            row, column = place(index)
            tokens = pl.ds(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            target = mosaic.load(target_ref.at[tokens], ROWS)
            weight, logsumexp = (mosaic.load(numbers_ref.at[n, tokens], ROWS) for n in range(2))

            def change(part: jax.Array, first: int) -> jax.Array:
                word = begin + column + first
                rows = (target - word, weight, logsumexp)
                return gradient_of(logits, part, end - word, rows)

            target_CT = out_TC.at[tokens, pl.ds(column, tiling.columns)]
            store(sums, buffers.at[warpgroup], target_CT, change)
            return ()

        count = item_count(row_tiles * columns, program, programs)
        run(tiling, ring, Work(count, item, epilogue, finish=finish_stores))

    target_T, weight_T, logsumexp_T = rows
    numbers = jnp.stack([whole_tiles(x, tiling.rows, 0.0) for x in (weight_T, logsumexp_T)])
    return mosaic.launch(
        cross_entropy_gradient,
        out_type=[jax.ShapeDtypeStruct((T, words), dtype)],
        grid={"program": programs},
        warpgroups=tiling.consumers + 1,
        scratch_types=[(ring_type(tiling, dtype), store_type(tiling, dtype, STORED_BYTES))],
    )(h_TD, w_VD, whole_tiles(target_T, tiling.rows, -1), numbers, jnp.stack([real, start]))[0]


def gradient_of(
    logits: Logits, part: jax.Array, end: jax.Array, rows: tuple[jax.Array, jax.Array, jax.Array]
) -> jax.Array:
    """Gradient of the loss with respect to some columns of the products, zero from `end` on.

    rows: (target relative to the first of these columns, weight, log-sum-exp).
    """
    target, weight, logsumexp = rows
    capped, shape = logits.capped(part), part.shape
    column = numbered(shape)
    # At most 0 except for rounding, which is large when huge logits are recomputed.
    power = jnp.exp2(jnp.minimum(capped - spread(logsumexp, shape), 0.0) * LOG2E)
    if logits.z_loss:
        power = power * spread(1 + 2 * logits.z_loss * logsumexp, shape)
    if logits.uniform:
        power = power - logits.uniform
    slope = power - jnp.where(column == spread(target, shape), logits.target_share, 0.0)
    if logits.softcap:
        slope = slope * (1 - capped * capped * (1 / logits.softcap**2))
    weight = spread(weight, shape)
    return jnp.where((column < end) & (weight != 0.0), slope * weight, 0.0)
