"""Linear + cross entropy in plain XLA over tiles of tokens x words, in memory that does not grow.

Forward works like flash attention whose keys and values are both w: for a block of tokens, a chunk
of words after the other, it keeps the largest logit, the sum of exponentials and, rescaled, the
exponentials' product with w, which is the gradient with respect to h but for numbers known at the
end. Backward makes the logits of a chunk of words for all tokens again from the log-sum-exp, and
its product with h is the weight's gradient of that chunk, whole, in its own dtype. That is four
matrix products (the reference: three) and no float32 copy of the weight's gradient; five where
label smoothing meets a soft-cap, one without gradients. The last block or chunk overlaps the one
before where they do not divide: nothing is padded or copied.
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

__all__ = ["SUPPORTS", "TILES", "Tiles", "linear_cross_entropy", "refuses"]

SUPPORTS = f"every option, on every device, in {', '.join(DTYPES)}"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens and words whose logits exist at once, in forward and in backward.

    multiple: of words in a chunk, for rows that tensor cores take whole. At width 4,096 forward
    needs 60 MiB: two float32 products of the tokens, 16 MiB each, the words' copy, and logits.
    With a third product, where label smoothing meets a soft-cap, it takes half as many tokens.
    """

    tokens: int = 1024
    words: int = 2048
    backward_tokens: int = 8192
    backward_words: int = 512
    multiple: int = 64

    def blocks(self, tokens: int, products: int) -> "Chunks":
        """Blocks of tokens in forward, for so many products in forward and backward."""
        return chunks_of(tokens, self.tokens if products < 5 else max(self.tokens // 2, 1))


TILES = Tiles()


class Chunks(typing.NamedTuple):
    """`count` pieces of `size` rows that cover `total`; the last begins early enough to fit."""

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
        """Which rows of a piece no piece before held."""
        return self.start(number) + jnp.arange(self.size) >= number * self.size


def chunks_of(total: int, size: int, multiple: int = 1) -> Chunks:
    """Pieces of equal size, at most `size` rounded up to `multiple`."""
    count = -(-total // min(size, total))
    size = min(-(-total // count // multiple) * multiple, total)
    return Chunks(total, size, -(-total // size))


class Online(typing.NamedTuple):
    """What forward knows of its tokens after some chunks of words. out: exponentials times w,
    without the target's; slopes: the soft-cap's slopes times w; None where not needed."""

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
    """(loss, token losses, log-sum-exp, dh or None), a block of tokens after the other."""
    T = h_TD.shape[0]
    targets_T = known_targets(targets_T, spec)
    blocks = TILES.blocks(T, 5 if gradients and spec.smoothing and spec.softcap else 4)
    all_words_D = None
    if gradients and spec.smoothing and not spec.softcap:
        real_V = first_word(w_VD) + jnp.arange(w_VD.shape[0]) < spec.vocab_size
        all_words_D = jnp.sum(jnp.where(real_V[:, None], w_VD, 0), axis=0, dtype=jnp.float32)

    def body(number, found):
        h, targets, weights = (blocks.rows(x, number) for x in (h_TD, targets_T, weights_T))
        rows = one_block(h, targets, weights, w_VD, spec, all_words_D, gradients)
        return [blocks.write(array, row, number) for array, row in zip(found, rows, strict=True)]

    zeros = [jnp.zeros(T, jnp.float32)] * 3 + ([jnp.zeros_like(h_TD)] if gradients else [])
    logsumexp_T, target_T, sum_T, *dh_TD = lax.fori_loop(0, blocks.count, body, zeros)
    loss, token_loss_T = losses(logsumexp_T, target_T, sum_T, weights_T, spec)
    return loss, token_loss_T, logsumexp_T, dh_TD[0] if gradients else None


def one_block(h_TD, targets_T, weights_T, w_VD, spec, all_words_D, gradients: bool) -> list:
    """[log-sum-exp, target's logit, sum of logits] and, with gradients, dh of a block of tokens."""
    part, out_TD, slopes_TD = over_chunks(h_TD, targets_T, w_VD, spec, gradients)
    logsumexp_T, target_T, sum_T = combined(part, spec)
    found = [logsumexp_T, target_T, sum_T]
    if out_TD is None:
        return found
    slope_T = 1 + 2 * spec.z_loss * logsumexp_T
    dh_TD = out_TD * (slope_T * jnp.exp(part.largest_T - logsumexp_T))[:, None]
    here_T = targets_T - first_word(w_VD)
    mine_T = (targets_T >= 0) & (here_T >= 0) & (here_T < w_VD.shape[0])
    of_target_T = slope_T * jnp.exp(part.target_T - logsumexp_T) - (1 - spec.smoothing)
    if spec.softcap:
        of_target_T *= slope_of_softcap(part.target_T, spec.softcap)
    words_TD = w_VD[jnp.clip(here_T, 0, w_VD.shape[0] - 1)]
    dh_TD += jnp.where(mine_T, of_target_T, 0)[:, None] * words_TD
    if spec.smoothing:
        dh_TD -= spec.uniform * (all_words_D if slopes_TD is None else slopes_TD)
    weights_T1 = weights_T[:, None]
    # Cast first: float32 zeros would be shared with those that `out` starts from, and kept.
    return [*found, jnp.where(weights_T1 == 0, 0, (dh_TD * weights_T1).astype(h_TD.dtype))]


def over_chunks(h_TD, targets_T, w_VD, spec: CrossEntropySpec, gradients: bool) -> Online:
    """A block of tokens over this device's words."""
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
    both = spec.smoothing and spec.softcap
    logits_T = zeros_T if spec.smoothing else None
    partial = Partial(zeros_T + MASKED, zeros_T, zeros_T, logits_T)
    nothing = Online(partial, zeros_TD, zeros_TD if both else None)
    return lax.fori_loop(0, chunks.count, body, nothing)


def add_chunk(online: Online, raw_TC, w_CD, words: tuple, spec: CrossEntropySpec) -> Online:
    """`online` after one more chunk; words: numbers, whether each counts, and the targets."""
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
        # The target's share is added in float32 at the end: rounded here it would drown in 1.
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
    """dw, a chunk of words after the other."""
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

    return lax.fori_loop(0, chunks.count, of_chunk, jnp.zeros_like(w_VD))


def chunk_gradient(w_CD, ids_C, spec, h_TD, targets_T, weights_T, logsumexp_T, *, dtype):
    """Of a chunk of words, from the tokens given."""
    raw_TC = jnp.einsum("TD,CD->TC", h_TD, w_CD, preferred_element_type=jnp.float32)
    d_TC = logit_gradient(raw_TC, ids_C, targets_T, weights_T, logsumexp_T, spec)
    return jnp.einsum("TC,TD->CD", d_TC.astype(h_TD.dtype), h_TD, preferred_element_type=dtype)


def logit_gradient(raw_TC, ids_C, targets_T, weights_T, logsumexp_T, spec: CrossEntropySpec):
    """Of the loss with respect to `raw`, from the log-sum-exp of the whole vocabulary."""
    real_C = ids_C < spec.vocab_size
    capped_TC = softcapped(raw_TC, spec.softcap)
    slope_T = 1 + 2 * spec.z_loss * logsumexp_T
    # Never above 0 but by rounding, of which huge logits have much when they are made again.
    below_TC = jnp.minimum(capped_TC - logsumexp_T[:, None], 0)
    d_TC = jnp.exp(below_TC) * slope_T[:, None] - spec.uniform
    d_TC -= jnp.where(ids_C == targets_T[:, None], 1 - spec.smoothing, 0)
    if spec.softcap:
        d_TC *= slope_of_softcap(capped_TC, spec.softcap)
    counted_TC = real_C & (weights_T[:, None] != 0)
    return jnp.where(counted_TC, d_TC * weights_T[:, None], 0)
