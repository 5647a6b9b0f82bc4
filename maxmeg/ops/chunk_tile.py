"""The recurrence of `ops.chunk_scan` over a tile: some heads of some chunks, as matrix products.

Let c be the cumulative sum of the log decays within a chunk, up to and including a token. Then

    y_s = exp(c_s) H^T q_s + sum_{t <= s} (q_s . k_t) exp(c_s - c_t) u_t
    H' = exp(c_last) H + sum_t exp(c_last - c_t) k_t u_t^T

with the state H before the chunk, and u = v (Mamba-2: Dao and Gu, 2024), or with the delta rule
(Gated DeltaNet: Yang et al., 2024) u = (1 + A)^-1 beta (v - exp(c) H^T k), where A_st = beta_s
(k_s . k_t) exp(c_s - c_t) for t < s. Everything is float32. Differences of sums are masked before
exp, which overflows for t > s.

Letters beside the legend's: N state, P head value, C chunks of the tile, S and T tokens of a chunk,
J heads of a group, I decays of a head (1, or N: one for each channel).
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SUPPORTS = "every call"
FEW = 4  # chunks that run one after the other in `composed_states`


def refuses(*_: typing.Any) -> str:
    return ""


class Tile(typing.NamedTuple):
    """Arrays of a tile in float32. Its tokens M are a multiple of the chunk. q_BMGN None: only the
    state is wanted.

    docs_BM: number of each token's document, nondecreasing; before_B: that of the state.
    """

    q_BMGN: typing.Any
    k_BMGN: jax.Array
    v_BMHP: jax.Array
    log_decay_BMHI: jax.Array
    beta_BMH: typing.Any
    docs_BM: typing.Any
    before_B: typing.Any


class Masks(typing.NamedTuple):
    """same: [C, G, J, S, T], token t is in the document of token s and not after it. sees, ends:
    token s is in the document of the state before the chunk, of the chunk's last token. goes_on:
    the state before the chunk is in the document of its last token."""

    same_BCGJST: jax.Array
    sees_BCGJSI: typing.Any = None
    ends_BCGJSI: typing.Any = None
    state_docs_BE: typing.Any = None  # of the states before each chunk and after the last


def run_tile(
    tile: Tile, state_BGJNP: jax.Array, chunk: int, in_parallel: bool
) -> tuple[jax.Array | None, jax.Array]:
    """(y [B, M, H, P] or None, state after the tile).

    in_parallel: the chunks of the delta rule run at once (`parallel_states`).
    """
    groups = tile.k_BMGN.shape[2]
    k_BCGSN = chunked(tile.k_BMGN, chunk, groups)[:, :, :, 0]
    values_BCGJSP = chunked(tile.v_BMHP, chunk, groups)
    sums_BCGJSI = jnp.cumsum(chunked(tile.log_decay_BMHI, chunk, groups), axis=-2)
    masks = masks_of(tile, chunk)
    if tile.beta_BMH is None:
        states = states_of(k_BCGSN, values_BCGJSP, sums_BCGJSI, masks, state_BGJNP)
        states_BCGJNP, state_BGJNP = states[:, :-1], states[:, -1]
    else:
        beta_BCGJS1 = chunked(tile.beta_BMH[..., None], chunk, groups)
        scores_BCGJST = decayed_scores(k_BCGSN, k_BCGSN, sums_BCGJSI, masks)
        lower = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
        inverse_BCGJST = inverse(jnp.where(lower, beta_BCGJS1 * scores_BCGJST, 0))
        arrays = k_BCGSN, values_BCGJSP, beta_BCGJS1, sums_BCGJSI, inverse_BCGJST
        run = parallel_states if in_parallel else delta_states
        values_BCGJSP, states_BCGJNP, state_BGJNP = run(*arrays, masks, state_BGJNP)
    if tile.q_BMGN is None:
        return None, state_BGJNP
    q_BCGSN = chunked(tile.q_BMGN, chunk, groups)[:, :, :, 0]
    y_BCGJSP = product(q_BCGSN, masked(jnp.exp(sums_BCGJSI), masks.sees_BCGJSI), states_BCGJNP)
    scores_BCGJST = decayed_scores(q_BCGSN, k_BCGSN, sums_BCGJSI, masks)
    y_BCGJSP += jnp.einsum("BCGJST,BCGJTP->BCGJSP", scores_BCGJST, values_BCGJSP)
    B, C, G, J, S, P = y_BCGJSP.shape
    return jnp.moveaxis(y_BCGJSP, 4, 2).reshape(B, C * S, G * J, P), state_BGJNP


def chunked(x_BMHI: jax.Array, chunk: int, groups: int) -> jax.Array:
    """[B, C, G, J, S, I] of heads in groups."""
    B, M, H, size = x_BMHI.shape
    x = x_BMHI.reshape(B, M // chunk, chunk, groups, H // groups, size)
    return jnp.moveaxis(x, 2, 4)


def masks_of(tile: Tile, chunk: int) -> Masks:
    causal_ST = jnp.tril(jnp.ones((chunk, chunk), bool))
    if tile.docs_BM is None:
        return Masks(causal_ST)
    docs_BCS = tile.docs_BM.reshape(len(tile.docs_BM), -1, chunk)
    states_BE = jnp.concatenate((tile.before_B[:, None], docs_BCS[..., -1]), axis=1)
    same_BCST = (docs_BCS[..., None] == docs_BCS[:, :, None]) & causal_ST
    sees_BCS = docs_BCS == states_BE[:, :-1, None]
    ends_BCS = docs_BCS == docs_BCS[..., -1:]

    def of_heads(x_BCS):
        return x_BCS[:, :, None, None, :, None]

    return Masks(same_BCST[:, :, None, None], of_heads(sees_BCS), of_heads(ends_BCS), states_BE)


def masked(x: jax.Array, mask) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0)


def product(x_BCGSN, factors_BCGJSI, states_BCGJNP) -> jax.Array:
    """[B, C, G, J, S, P]: vectors, multiplied by factors, times states."""
    if factors_BCGJSI.shape[-1] == 1:
        return factors_BCGJSI * jnp.einsum("BCGSN,BCGJNP->BCGJSP", x_BCGSN, states_BCGJNP)
    x_BCGJSN = x_BCGSN[:, :, :, None] * factors_BCGJSI
    return jnp.einsum("BCGJSN,BCGJNP->BCGJSP", x_BCGJSN, states_BCGJNP)


def outer(k_BCGSN, factors_BCGJSI, values_BCGJSP) -> jax.Array:
    """[B, C, G, J, N, P]: sums of products of keys, multiplied by factors, and values."""
    if factors_BCGJSI.shape[-1] == 1:
        scaled_BCGJSP = factors_BCGJSI * values_BCGJSP
        return jnp.einsum("BCGSN,BCGJSP->BCGJNP", k_BCGSN, scaled_BCGJSP)
    k_BCGJSN = k_BCGSN[:, :, :, None] * factors_BCGJSI
    return jnp.einsum("BCGJSN,BCGJSP->BCGJNP", k_BCGJSN, values_BCGJSP)


def decayed_scores(rows_BCGSN, k_BCGSN, sums_BCGJSI, masks: Masks) -> jax.Array:
    """[B, C, G, J, S, T]: sum over n of rows_sn k_tn exp(c_s - c_t), zero where masked."""
    if sums_BCGJSI.shape[-1] > 1:
        return jnp.where(masks.same_BCGJST, by_channel(rows_BCGSN, k_BCGSN, sums_BCGJSI), 0)
    scores_BCGST = jnp.einsum("BCGSN,BCGTN->BCGST", rows_BCGSN, k_BCGSN)
    differences_BCGJST = sums_BCGJSI - jnp.swapaxes(sums_BCGJSI, -1, -2)
    decays_BCGJST = jnp.exp(jnp.where(masks.same_BCGJST, differences_BCGJST, -jnp.inf))
    return scores_BCGST[:, :, :, None] * decays_BCGJST


def by_channel(rows_BCGSN, k_BCGSN, sums_BCGJSN) -> jax.Array:
    """`decayed_scores` of decays per channel, zero above the diagonal.

    exp(c_s) exp(-c_t) would overflow. Of every two neighbouring blocks of 1, 2, 4 ... tokens, the
    products of the second one's rows and the first one's keys are exp(c_s - r) exp(r - c_t), with r
    at the end of the first block: both exponents are at most 0.
    """
    shape, (S, N) = sums_BCGJSN.shape[:4], sums_BCGJSN.shape[4:]
    rows, keys = (x[:, :, :, None] for x in (rows_BCGSN, k_BCGSN))
    diagonal = jnp.sum(rows * keys, axis=-1)[..., None, None]
    blocks, size = jnp.broadcast_to(diagonal, (*shape, S, 1, 1)), 1
    while size < S:
        halves = S // (2 * size), 2, size
        sums = sums_BCGJSN.reshape(*shape, *halves, N)
        middle = sums[..., 0, -1:, :]
        later = rows.reshape(*rows.shape[:4], *halves, N)[..., 1, :, :]
        earlier = keys.reshape(*keys.shape[:4], *halves, N)[..., 0, :, :]
        later = later * jnp.exp(sums[..., 1, :, :] - middle)
        earlier = earlier * jnp.exp(middle - sums[..., 0, :, :])
        corner = jnp.einsum("...SN,...TN->...ST", later, earlier)
        pair = blocks.reshape(*shape, *halves, size)
        first, second = pair[..., 0, :, :], pair[..., 1, :, :]
        top = jnp.concatenate((first, jnp.zeros_like(corner)), axis=-1)
        blocks = jnp.concatenate((top, jnp.concatenate((corner, second), axis=-1)), axis=-2)
        size *= 2
    return blocks[..., 0, :, :]


@jax.custom_vjp
def inverse(lower_ST: jax.Array) -> jax.Array:
    """(1 + A)^-1 of strictly lower triangular matrices A.

    By doubling: with the inverse X of the diagonal blocks of some size, X - X A' X is that of the
    blocks of twice the size, where A' is their lower left quarter. (The series 1 - A + A^2 - ...,
    doubled, would lose all digits where keys repeat: its powers grow like binomials.)
    """
    size, (S, precision) = 1, (lower_ST.shape[-1], lax.Precision.HIGHEST)
    token_S = np.arange(S)  # masks of NumPy are constants of the program
    inverse_ST = jnp.broadcast_to(jnp.eye(S, dtype=lower_ST.dtype), lower_ST.shape)
    while size < S:
        block_S = token_S // size
        in_pair = block_S[:, None] // 2 == block_S // 2
        corner_ST = jnp.where(in_pair & (block_S[:, None] > block_S), lower_ST, 0)
        if size == 1:
            inverse_ST -= corner_ST
        else:
            right_ST = jnp.matmul(corner_ST, inverse_ST, precision=precision)
            inverse_ST -= jnp.matmul(inverse_ST, right_ST, precision=precision)
        size *= 2
    return inverse_ST


def _inverse_forward(lower_ST):
    inverse_ST = inverse(lower_ST)
    return inverse_ST, inverse_ST


def _inverse_backward(inverse_ST, slope_ST):
    """-X^T slope X^T."""
    transposed, precision = jnp.swapaxes(inverse_ST, -1, -2), lax.Precision.HIGHEST
    left_ST = jnp.matmul(transposed, slope_ST, precision=precision)
    return (-jnp.matmul(left_ST, transposed, precision=precision),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def states_of(k_BCGSN, values_BCGJSP, sums_BCGJSI, masks: Masks, state_BGJNP) -> jax.Array:
    """[B, C + 1, G, J, N, P]: the states before each chunk and after the last, without the delta
    rule: sums of earlier chunks' states, decayed. Letters D and E count states."""
    last_BCGJ1I = sums_BCGJSI[..., -1:, :]
    left_BCGJSI = masked(jnp.exp(last_BCGJ1I - sums_BCGJSI), masks.ends_BCGJSI)
    states_BCGJNP = outer(k_BCGSN, left_BCGJSI, values_BCGJSP)
    states_BEGJNP = jnp.concatenate((state_BGJNP[:, None], states_BCGJNP), axis=1)
    totals_BEGJI = jnp.pad(
        jnp.cumsum(last_BCGJ1I[..., 0, :], axis=1), ((0, 0), (1, 0), *((0, 0),) * 3)
    )
    count = totals_BEGJI.shape[1]
    is_before = jnp.tril(jnp.ones((count, count), bool))
    if masks.state_docs_BE is not None:
        docs_BE = masks.state_docs_BE
        is_before = is_before & (docs_BE[:, :, None] == docs_BE[:, None])
    is_before = is_before.reshape(-1, count, count, 1, 1, 1)
    differences = totals_BEGJI[:, :, None] - totals_BEGJI[:, None]
    decays_BDEGJI = jnp.exp(jnp.where(is_before, differences, -jnp.inf))
    if decays_BDEGJI.shape[-1] == 1:
        return jnp.einsum("BDEGJ,BEGJNP->BDGJNP", decays_BDEGJI[..., 0], states_BEGJNP)
    return jnp.einsum("BDEGJN,BEGJNP->BDGJNP", decays_BDEGJI, states_BEGJNP)


def delta_factors(sums_BCGJSI, masks: Masks) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decays of the delta rule, each in [0, 1]: of the state before a chunk when a token reads it,
    of what a token adds until the chunk ends, and of the state over the whole chunk."""
    last_BCGJ1I = sums_BCGJSI[..., -1:, :]
    left_BCGJSI = masked(jnp.exp(last_BCGJ1I - sums_BCGJSI), masks.ends_BCGJSI)
    read_BCGJSI = masked(jnp.exp(sums_BCGJSI), masks.sees_BCGJSI)
    stays_BCGJI = jnp.exp(last_BCGJ1I[..., 0, :])
    if masks.state_docs_BE is not None:
        docs_BE = masks.state_docs_BE
        goes_on = (docs_BE[:, :-1] == docs_BE[:, 1:])[:, :, None, None, None]
        stays_BCGJI = jnp.where(goes_on, stays_BCGJI, 0)
    return read_BCGJSI, left_BCGJSI, stays_BCGJI


def delta_states(
    k_BCGSN, values_BCGJSP, beta_BCGJS1, sums_BCGJSI, inverse_BCGJST, masks: Masks, state_BGJNP
):
    """(corrected values u, states before each chunk, state after the last), chunk by chunk."""
    factors = delta_factors(sums_BCGJSI, masks)
    arrays = k_BCGSN, values_BCGJSP, beta_BCGJS1, *factors, inverse_BCGJST

    def step(state_BGJNP, chunk):
        k, v, beta, read, left, stays, inverse_B1GJST = (x[:, None] for x in chunk)
        predictions = product(k, read, state_BGJNP[:, None])
        values = jnp.einsum("BCGJST,BCGJTP->BCGJSP", inverse_B1GJST, beta * (v - predictions))
        new = (stays[..., None] * state_BGJNP[:, None] + outer(k, left, values))[:, 0]
        return new, (values[:, 0], state_BGJNP)

    chunks = jax.tree.map(functools.partial(jnp.moveaxis, source=1, destination=0), arrays)
    state_BGJNP, outputs = lax.scan(step, state_BGJNP, chunks)
    values_BCGJSP, states_BCGJNP = (jnp.moveaxis(x, 0, 1) for x in outputs)
    return values_BCGJSP, states_BCGJNP, state_BGJNP


def parallel_states(
    k_BCGSN, values_BCGJSP, beta_BCGJS1, sums_BCGJSI, inverse_BCGJST, masks: Masks, state_BGJNP
):
    """`delta_states` in few kernels, with more FLOPs: the `Maps` of all chunks at once."""
    read_BCGJSI, left_BCGJSI, stays_BCGJI = delta_factors(sums_BCGJSI, masks)
    keys_BCGJSN = k_BCGSN[:, :, :, None] * (beta_BCGJS1 * read_BCGJSI)
    keys_BCGJSN = jnp.einsum("BCGJST,BCGJTN->BCGJSN", inverse_BCGJST, keys_BCGJSN)
    values_BCGJSP = beta_BCGJS1 * values_BCGJSP
    values_BCGJSP = jnp.einsum("BCGJST,BCGJTP->BCGJSP", inverse_BCGJST, values_BCGJSP)
    erased_BCGJNN = outer(k_BCGSN, left_BCGJSI, keys_BCGJSN)
    added_BCGJNP = outer(k_BCGSN, left_BCGJSI, values_BCGJSP)
    maps = Maps(stays_BCGJI[..., None], erased_BCGJNN, added_BCGJNP)
    states_BEGJNP = composed_states(maps, state_BGJNP)
    states_BCGJNP = states_BEGJNP[:, :-1]
    values_BCGJSP -= jnp.einsum("BCGJSN,BCGJNP->BCGJSP", keys_BCGJSN, states_BCGJNP)
    return values_BCGJSP, states_BCGJNP, states_BEGJNP[:, -1]


class Maps(typing.NamedTuple):
    """For each chunk the map from the state H before it to the state after it:
    H' = stays * H - erased @ H + added. `stays` is not a part of the matrix `erased`, because
    products on GPUs round their inputs."""

    stays_BCGJI1: jax.Array
    erased_BCGJNN: jax.Array
    added_BCGJNP: jax.Array

    def __call__(self, state: jax.Array) -> jax.Array:
        stays, erased, added = self
        return stays * state + (added - erased @ state)

    def after(self, first: "Maps") -> "Maps":
        """The maps of pairs of chunks, `first` and then these."""
        stays, erased, _ = self
        columns = jnp.swapaxes(first.stays_BCGJI1, -1, -2)
        both = stays * first.erased_BCGJNN + (erased * columns - erased @ first.erased_BCGJNN)
        return Maps(stays * first.stays_BCGJI1, both, self(first.added_BCGJNP))


def composed_states(maps: Maps, state_BGJNP) -> jax.Array:
    """[B, C + 1, G, J, N, P]: the states before each chunk and after the last. Pairs of chunks are
    composed until few are left."""
    count = maps.added_BCGJNP.shape[1]
    if count <= FEW or count % 2:
        states = [state_BGJNP]
        for c in range(count):
            states.append(Maps._make(x[:, c] for x in maps)(states[-1]))
        return jnp.stack(states, axis=1)
    first, second = (Maps._make(x[:, i::2] for x in maps) for i in range(2))
    states = composed_states(second.after(first), state_BGJNP)
    pairs = jnp.stack((states[:, :-1], first(states[:, :-1])), axis=2)
    pairs = pairs.reshape(len(pairs), count, *pairs.shape[3:])
    return jnp.concatenate((pairs, states[:, -1:]), axis=1)
