"""Linear + cross entropy in plain XLA over tiles of tokens x words, in constant memory.

Forward works like flash attention with w as keys and values. For a block of tokens it runs through
chunks of words and keeps the largest logit, the sum of exponentials and the rescaled product of the
exponentials with w, which gives the gradient of h at the end. Backward recomputes the logits of a
chunk of words for all tokens from the log-sum-exp; the product with h is the gradient of that chunk
of w, in its own dtype. These are four matrix products (the reference: three), five with label
smoothing and soft-cap, one without gradients; there is no float32 copy of w's gradient. If the
sizes do not divide, the last block or chunk overlaps the previous one, so that nothing is padded.
Letter beside the legend's: C words of a chunk.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.ops.cross_entropy.spec import (
    MASKED,
    CrossEntropySpec,
    Partial,
    combined,
    first_word,
    known_targets,
    losses,
    slope_of_softcap,
    softcapped,
)
from maxmeg.ops.cross_entropy.xla import DTYPES, refuses
from maxmeg.parallel.ordering import zeros_after

__all__ = ["SUPPORTS", "TILES", "Tiles", "linear_cross_entropy", "refuses"]

SUPPORTS = f"every option, on every device, in {', '.join(DTYPES)}"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens and words whose logits exist at a time, in forward and in backward.

    multiple: chunks have a multiple of this many words, whole tiles of the tensor cores. At width
    4,096 forward needs 60 MiB: two float32 products [tokens, D] of 16 MiB, the copy of the words,
    and logits. With a third product (label smoothing and soft-cap) it uses half as many tokens.
    """

    tokens: int = 1024
    words: int = 2048
    backward_tokens: int = 8192
    backward_words: int = 512
    multiple: int = 64

    def blocks(self, tokens: int, products: int) -> "Chunks":
        """Blocks of tokens in forward; products: matrix products in forward and backward."""
        return chunks_of(tokens, self.tokens if products < 5 else max(self.tokens // 2, 1))


TILES = Tiles()


class Chunks(typing.NamedTuple):
    """`count` chunks of `size` rows that cover `total`; the last one overlaps the one before it."""

    total: int
    size: int
    count: int

    def start(self, number: jax.Array) -> jax.Array:
        return jnp.minimum(number * self.size, self.total - self.size)

    def rows(self, array: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, self.start(number), self.size)

    def write(self, array: jax.Array, piece: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, piece, self.start(number), 0)

    def new(self, number: jax.Array) -> jax.Array:
        """Mask of the rows of a chunk that are not in the previous chunk."""
        return self.start(number) + jnp.arange(self.size) >= number * self.size


def chunks_of(total: int, size: int, multiple: int = 1) -> Chunks:
    """Chunks of equal size, at most `size` rounded up to `multiple`."""
    count = -(-total // min(size, total))
    size = min(-(-total // count // multiple) * multiple, total)
    return Chunks(total, size, -(-total // size))


class Online(typing.NamedTuple):
    """State of forward after some chunks of words. out_TD: exponentials times w, without the
    target's; slopes_TD: slopes of the soft-cap times w; None if not needed."""

    partial: Partial
    out_TD: jax.Array | None
    slopes_TD: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_cross_entropy(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec):
    loss, token_loss_T, _, _ = over_tokens(h_TD, w_VD, targets_T, weights_T, spec, False)
    return loss, token_loss_T


def forward(h_TD, w_VD, targets_T, weights_T, spec):
    loss, token_loss_T, logsumexp_T, dh_TD = over_tokens(
        h_TD, w_VD, targets_T, weights_T, spec, True
    )
    return (loss, token_loss_T), (h_TD, w_VD, targets_T, weights_T, logsumexp_T, dh_TD)


def backward(spec, residuals, cotangents):
    h_TD, w_VD, targets_T, weights_T, logsumexp_T, dh_TD = residuals
    scale = cotangents[0]
    dw_VD = over_words(h_TD, w_VD, targets_T, weights_T * scale, logsumexp_T, spec)
    return dh_TD * scale.astype(dh_TD.dtype), dw_VD, None, None


linear_cross_entropy.defvjp(forward, backward)


def over_tokens(h_TD, w_VD, targets_T, weights_T, spec: CrossEntropySpec, gradients: bool):
    """(loss, token losses, log-sum-exp, dh or None), block by block of tokens."""
    T = h_TD.shape[0]
    targets_T = known_targets(targets_T, spec)
    blocks = TILES.blocks(T, 5 if gradients and spec.smoothing and spec.softcap else 4)
    all_words_D = None
    if gradients and spec.smoothing and not spec.softcap:
        real_V = first_word(w_VD) + jnp.arange(w_VD.shape[0]) < spec.vocab_size
        all_words_D = jnp.sum(jnp.where(real_V[:, None], w_VD, 0), axis=0, dtype=jnp.float32)

    def body(number, arrays):
        h, targets, weights = (blocks.rows(x, number) for x in (h_TD, targets_T, weights_T))
        rows = one_block(h, targets, weights, w_VD, spec, all_words_D, gradients)
        return [blocks.write(array, row, number) for array, row in zip(arrays, rows, strict=True)]

    zeros = [jnp.zeros(T, jnp.float32)] * 3 + ([jnp.zeros_like(h_TD)] if gradients else [])
    logsumexp_T, target_T, sum_T, *dh_TD = lax.fori_loop(0, blocks.count, body, zeros)
    loss, token_loss_T = losses(logsumexp_T, target_T, sum_T, weights_T, spec)
    return loss, token_loss_T, logsumexp_T, dh_TD[0] if gradients else None


def one_block(h_TD, targets_T, weights_T, w_VD, spec, all_words_D, gradients: bool) -> list:
    """[log-sum-exp, target's logit, sum of logits] and, with gradients, dh of a block of tokens."""
    part, out_TD, slopes_TD = over_chunks(h_TD, targets_T, w_VD, spec, gradients)
    logsumexp_T, target_T, sum_T = combined(part, spec)
    statistics = [logsumexp_T, target_T, sum_T]
    if out_TD is None:
        return statistics
    slope_T = 1 + 2 * spec.z_loss * logsumexp_T
    dh_TD = out_TD * (slope_T * jnp.exp(part.largest_T - logsumexp_T))[:, None]
    local_T = targets_T - first_word(w_VD)
    is_local_T = (targets_T >= 0) & (local_T >= 0) & (local_T < w_VD.shape[0])
    d_target_T = slope_T * jnp.exp(part.target_T - logsumexp_T) - (1 - spec.smoothing)
    if spec.softcap:
        d_target_T *= slope_of_softcap(part.target_T, spec.softcap)
    words_TD = w_VD[jnp.clip(local_T, 0, w_VD.shape[0] - 1)]
    dh_TD += jnp.where(is_local_T, d_target_T, 0)[:, None] * words_TD
    if spec.smoothing:
        dh_TD -= spec.uniform * (all_words_D if slopes_TD is None else slopes_TD)
    weights_T1 = weights_T[:, None]
    # Cast first: float32 zeros would be merged with the initial value of out_TD, and kept.
    return [*statistics, jnp.where(weights_T1 == 0, 0, (dh_TD * weights_T1).astype(h_TD.dtype))]


def over_chunks(h_TD, targets_T, w_VD, spec: CrossEntropySpec, gradients: bool) -> Online:
    """The statistics of a block of tokens over this device's words."""
    (T, D), V = h_TD.shape, w_VD.shape[0]
    chunks, first = chunks_of(V, TILES.words, TILES.multiple), first_word(w_VD)

    def body(number, online: Online) -> Online:
        w_CD = chunks.rows(w_VD, number)
        ids_C = first + chunks.start(number) + jnp.arange(chunks.size)
        live_C = (ids_C < spec.vocab_size) & chunks.new(number)
        raw_TC = jnp.einsum("TD,CD->TC", h_TD, w_CD, preferred_element_type=jnp.float32)
        return add_chunk(online, raw_TC, w_CD, (ids_C, live_C, targets_T), spec)

    zeros_T = jnp.zeros(T, jnp.float32)
    zeros_TD = jnp.zeros((T, D), jnp.float32) if gradients else None
    has_slopes = spec.smoothing and spec.softcap
    logits_T = zeros_T if spec.smoothing else None
    partial = Partial(zeros_T + MASKED, zeros_T, zeros_T, logits_T)
    start = Online(partial, zeros_TD, zeros_TD if has_slopes else None)
    return lax.fori_loop(0, chunks.count, body, start)


def add_chunk(online: Online, raw_TC, w_CD, words: tuple, spec: CrossEntropySpec) -> Online:
    """`online` after one more chunk; words: (ids, whether each counts, targets)."""
    ids_C, live_C, targets_T = words
    partial, out_TD, slopes_TD = online
    capped_TC = softcapped(raw_TC, spec.softcap)
    logits_TC = jnp.where(live_C, capped_TC, MASKED)
    largest_T = jnp.maximum(partial.largest_T, jnp.max(logits_TC, axis=-1))
    shrink_T = jnp.exp(partial.largest_T - largest_T)
    exp_TC = jnp.exp(logits_TC - largest_T[:, None])
    hit_TC = (ids_C == targets_T[:, None]) & live_C
    total_T = partial.total_T * shrink_T + jnp.sum(exp_TC, axis=-1)
    target_T = partial.target_T + jnp.sum(jnp.where(hit_TC, capped_TC, 0), axis=-1)
    logits_T = partial.logits_T
    if logits_T is not None:
        logits_T += jnp.sum(jnp.where(live_C, capped_TC, 0), axis=-1)
    if out_TD is not None:
        # The target's term is added in float32 at the end: rounded here, it would be lost beside 1.
        other_TC = jnp.where(hit_TC, 0, exp_TC)
        slope_TC = slope_of_softcap(capped_TC, spec.softcap) if spec.softcap else 1.0
        out_TD = out_TD * shrink_T[:, None] + product(other_TC * slope_TC, w_CD)
        if slopes_TD is not None:
            slopes_TD += product(jnp.where(live_C, slope_TC, 0), w_CD)
    return Online(Partial(largest_T, total_T, target_T, logits_T), out_TD, slopes_TD)


def product(numbers_TC, w_CD):
    return jnp.einsum(
        "TC,CD->TD", numbers_TC.astype(w_CD.dtype), w_CD, preferred_element_type=jnp.float32
    )


def over_words(h_TD, w_VD, targets_T, weights_T, logsumexp_T, spec: CrossEntropySpec):
    """dw, chunk by chunk of words."""
    T, V = h_TD.shape[0], w_VD.shape[0]
    chunks, first = chunks_of(V, TILES.backward_words, TILES.multiple), first_word(w_VD)
    blocks = chunks_of(T, TILES.backward_tokens)
    tokens = (h_TD, known_targets(targets_T, spec), weights_T, logsumexp_T)

    def of_chunk(number, dw_VD):
        w_CD = chunks.rows(w_VD, number)
        ids_C = first + chunks.start(number) + jnp.arange(chunks.size)
        gradient = functools.partial(chunk_gradient, w_CD, ids_C, spec)
        if blocks.count == 1:
            return chunks.write(dw_VD, gradient(*tokens, dtype=w_VD.dtype), number)

        def of_block(block, dw_CD):
            h, targets, weights, logsumexp = (blocks.rows(x, block) for x in tokens)
            weights = jnp.where(blocks.new(block), weights, 0)
            return dw_CD + gradient(h, targets, weights, logsumexp, dtype=jnp.float32)

        zeros = jnp.zeros(w_CD.shape, jnp.float32)
        dw_CD = lax.fori_loop(0, blocks.count, of_block, zeros)
        return chunks.write(dw_VD, dw_CD.astype(w_VD.dtype), number)

    zeros_VD = zeros_after(tokens[0], w_VD.shape, w_VD.dtype)
    return lax.fori_loop(0, chunks.count, of_chunk, zeros_VD)


def chunk_gradient(w_CD, ids_C, spec, h_TD, targets_T, weights_T, logsumexp_T, *, dtype):
    """dw of a chunk of words from these tokens."""
    raw_TC = jnp.einsum("TD,CD->TC", h_TD, w_CD, preferred_element_type=jnp.float32)
    d_TC = logit_gradient(raw_TC, ids_C, targets_T, weights_T, logsumexp_T, spec)
    return jnp.einsum("TC,TD->CD", d_TC.astype(h_TD.dtype), h_TD, preferred_element_type=dtype)


def logit_gradient(raw_TC, ids_C, targets_T, weights_T, logsumexp_T, spec: CrossEntropySpec):
    """Gradient of the loss with respect to raw_TC, from the log-sum-exp of the whole vocabulary."""
    real_C = ids_C < spec.vocab_size
    capped_TC = softcapped(raw_TC, spec.softcap)
    slope_T = 1 + 2 * spec.z_loss * logsumexp_T
    # At most 0 except for rounding, which is large when huge logits are recomputed.
    below_TC = jnp.minimum(capped_TC - logsumexp_T[:, None], 0)
    d_TC = jnp.exp(below_TC) * slope_T[:, None] - spec.uniform
    d_TC -= jnp.where(ids_C == targets_T[:, None], 1 - spec.smoothing, 0)
    if spec.softcap:
        d_TC *= slope_of_softcap(capped_TC, spec.softcap)
    counts_TC = real_C & (weights_T[:, None] != 0)
    return jnp.where(counts_TC, d_TC * weights_T[:, None], 0)
