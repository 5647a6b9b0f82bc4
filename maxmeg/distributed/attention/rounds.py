"""Attention in rounds over context: keys of other devices arrive, outputs are merged.

Two kinds of rounds. In a ring the pieces of keys and values travel from device to device. With a
window, a half of a piece needs only the end of the half before it, its halo.

Outputs of the rounds are merged in float32 by their log-sum-exp. Backward stores queries, keys,
values, output and log-sum-exp: with these of all rounds together, the gradients of a round are its
exact contributions. It goes through the rounds in reverse order; keys, and their gradients in
float32, travel back. What the next round needs is sent beside the attention of a round.

Letters beside the legend's: N rows of the pairs of halves of a round, I elements of what travels.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.distributed.halves import (
    Half,
    half_of,
    halos,
    halos_back,
    shifted,
    start_of,
)
from maxmeg.ops.attention.call import attention_with_lse, block_gradients
from maxmeg.ops.attention.flash import sink_gradient, with_sinks
from maxmeg.ops.attention.spec import NEGATIVE, AttentionDropout, Operands, ScoreSpec
from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.mesh import CONTEXT_AXES

Pairs = tuple[tuple[Half, Half], ...]
Result = tuple[jax.Array, jax.Array | None]  # attention, and the largest score of each head


@dataclasses.dataclass(frozen=True)
class KeyValueExpansion:
    """Makes keys and values [B, M, G, .] of what travels [B, M, G, I]: here both, side by side.

    key_size: elements of a key. of_each_head: G are key/value heads. weights: arrays that it needs.
    """

    key_size: int
    of_each_head: typing.ClassVar[bool] = True

    def __call__(self, weights, kv_BMGI: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kv_BMGI[..., : self.key_size], kv_BMGI[..., self.key_size :]

    def of_heads(self, weights, number: Half, count: int):
        """The weights for part `number` of `count` equal parts of the query heads."""
        return weights


class Rows(typing.NamedTuple):
    """segments_BL: of the whole sequence, in its order. key, rows_B, first_head: of dropout."""

    segments_BL: typing.Any = None
    key: typing.Any = None
    rows_B: typing.Any = None
    first_head: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """distance: between neighbours of the ring, in ranks along context. halo: number of tokens that
    a half reads before it; None: pieces travel around the ring. rate: of dropout."""

    spec: ScoreSpec
    backend: str
    expand: KeyValueExpansion
    distance: int
    halo: int | None
    rate: float = 0.0

    @property
    def size(self) -> int:
        """Number of devices of the ring."""
        return collectives.axis_size(CONTEXT_AXES) // self.distance

    @property
    def rank(self) -> jax.Array:
        return typing.cast(jax.Array, collectives.axis_index(CONTEXT_AXES) // self.distance)


@dataclasses.dataclass(frozen=True)
class Round:
    """One attention call: queries of this device and keys that have arrived.

    pairs: (half of the queries, half of the keys) that meet; None: the pieces as they are. source:
    rank that the keys are from. halo: the keys are the `halo` tokens before a half, the queries its
    first ones. by_place: compute the mask from token positions (windows, dropout), not from the
    order of halves. local: queries are also the keys.
    """

    spec: ScoreSpec
    pairs: Pairs | None
    source: jax.Array
    halo: int = 0
    by_place: bool = False
    local: bool = False

    def queries(self, x: jax.Array) -> jax.Array:
        """The part [N, ...] for this call of an array [B, ...] of this device's tokens."""
        if self.pairs is None:
            return x
        halves = [half_of(x, query) for query, _ in self.pairs]
        return jnp.concatenate([half[:, : self.halo or None] for half in halves])

    def keys(self, x: jax.Array) -> jax.Array:
        """The part [N, ...] for this call of an array [B, ...] of tokens that have arrived."""
        if self.pairs is None:
            return x
        return jnp.concatenate([half_of(x, key) for _, key in self.pairs])

    def operands(self, plan: Plan, rows: Rows, count: int, length: int) -> Operands:
        """count: number of rows; length: of a half."""
        pairs = ((0, 0), (1, 1)) if self.pairs is None else self.pairs
        queries = [start_of(plan.rank, query, plan.size, length) for query, _ in pairs]
        keys = [start_of(self.source, key, plan.size, length) - self.halo for _, key in pairs]

        def segments(starts: list) -> jax.Array | None:
            if rows.segments_BL is None:
                return None
            parts = [
                lax.dynamic_slice_in_dim(rows.segments_BL, start, self.halo or length, 1)
                for start in starts
            ]
            return jnp.concatenate(parts, axis=1 if self.pairs is None else 0)

        def of_rows(starts: list) -> jax.Array:
            return jnp.repeat(jnp.stack(starts), count)

        offset, dropout = self.halo, None
        if self.by_place:
            offset = of_rows(queries) - of_rows(keys)
        if plan.rate:
            rows_B, places = jnp.tile(rows.rows_B, len(pairs)), (of_rows(queries), of_rows(keys))
            dropout = AttentionDropout(rows.key, rows_B, rows.first_head, plan.rate, *places)
        others = None if self.local else segments(keys)
        return Operands(offset, segments(queries), others, None, dropout)

    def missing(self, plan: Plan, count: int) -> jax.Array:
        """Whether a row [N, 1, 1] of halos has no keys: nothing is before the sequence."""
        starts = [start_of(plan.rank, half, plan.size, 1) for half in (0, 1)]
        return jnp.repeat(jnp.stack(starts) == 0, count)[:, None, None]

    def split(self, x: jax.Array) -> list[tuple[Half, jax.Array]]:
        """(half of the queries, its part [B, ...]) of the output [N, ...] of this call."""
        if self.pairs is None:
            return [(half, half_of(x, half)) for half in (0, 1)]
        parts = jnp.split(x, len(self.pairs))
        return [(half, part) for (half, _), part in zip(self.pairs, parts, strict=True)]


def rounds_of(plan: Plan) -> list[Round]:
    """The rounds of a device."""
    spec, rank, size = plan.spec, plan.rank, plan.size
    if plan.halo is not None:
        same = (0, 0), (1, 1)
        band = Round(dataclasses.replace(spec, merged=True), same, rank, plan.halo)
        return [Round(spec, same, rank, local=True)] + [band] * (plan.halo > 0)
    by_place = bool(spec.window or plan.rate)
    sources = [(rank - n) % size for n in range(size)]
    if not spec.causal:
        pairs = ((0, 0), (0, 1), (1, 0), (1, 1)) if by_place else None
        later = dataclasses.replace(spec, merged=True)
        return [Round(later, pairs, source, by_place=by_place) for source in sources]
    # The order of a piece's tokens is that of the sequence.
    pairs = ((0, 0), (1, 0), (1, 1)) if by_place else None
    first = Round(spec, pairs, rank, by_place=by_place, local=not by_place)
    later = dataclasses.replace(spec, causal=by_place, merged=True)
    rounds = [first]
    for source in sources[1:]:
        # Half 0 of earlier ranks comes before both halves, both of later ranks before half 1.
        other = (source > rank).astype(jnp.int32)
        rounds.append(Round(later, ((1, 0), (other, other)), source, by_place=by_place))
    return rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(plan: Plan, q_BLHK, kv_BLGI, weights, sinks_H, rows: Rows) -> Result:
    """Attention [B, L, H, V] of this device's queries over the whole sequence; with `spec.largest`
    also the largest score of each head, else None."""
    return in_rounds_forward(plan, q_BLHK, kv_BLGI, weights, sinks_H, rows)[0]


def in_rounds_forward(plan: Plan, q_BLHK, kv_BLGI, weights, sinks_H, rows: Rows):
    B, half, rounds = q_BLHK.shape[0], q_BLHK.shape[1] // 2, rounds_of(plan)
    arrived, following, done, totals, highest = kv_BLGI, kv_BLGI, None, [None, None], []
    for turn in rounds:
        arrived = ordering.not_before(following, done)
        if turn is not rounds[-1]:
            following = moved(plan, arrived)
        k_NMGK, v_NMGV = plan.expand(weights, turn.keys(arrived))
        operands = turn.operands(plan, rows, B, half)
        call = turn.queries(q_BLHK), k_NMGK, v_NMGV, turn.spec, operands
        out_NLHV, *scores = attention_with_lse(*call, backend=plan.backend)
        scores = [jnp.maximum(x_NLH, NEGATIVE) for x_NLH in scores]
        if turn.halo:
            scores = [jnp.where(turn.missing(plan, B), NEGATIVE, x_NLH) for x_NLH in scores]
        lse_NLH, *largest = scores
        highest += [jnp.max(x_NLH, axis=(0, 1)) for x_NLH in largest]
        parts, done = [turn.split(x) for x in (out_NLHV, lse_NLH)], lse_NLH
        for (which, out_BLHV), (_, lse_BLH) in zip(*parts, strict=True):
            add(totals, which, out_BLHV.astype(jnp.float32), lse_BLH)
    out_BLHV, lse_BLH = (jnp.concatenate(parts, axis=1) for parts in zip(*totals, strict=True))
    out_BLHV, lse_BLH = with_sinks(out_BLHV, lse_BLH, sinks_H)
    out_BLHV = collectives.stored(out_BLHV.astype(q_BLHK.dtype), "context_output")
    lse_BLH = collectives.stored(lse_BLH, "context_lse")
    largest_H = functools.reduce(jnp.maximum, highest) if highest else None
    residuals = q_BLHK, kv_BLGI, weights, sinks_H, rows, out_BLHV, lse_BLH
    return (out_BLHV, largest_H), residuals


def in_rounds_backward(plan: Plan, residuals, slopes):
    q_BLHK, kv_BLGI, weights, sinks_H, rows, out_BLHV, lse_BLH = residuals
    d_out_BLHV, _ = slopes
    B, half, rounds = q_BLHK.shape[0], q_BLHK.shape[1] // 2, rounds_of(plan)
    d_q, d_weights, done = jnp.zeros(q_BLHK.shape, jnp.float32), None, None
    d_kv: jax.Array | None = None
    arrived = following = kv_BLGI if len(rounds) == 1 else moved_before(plan, kv_BLGI)
    for number, turn in reversed(list(enumerate(rounds))):
        arrived = ordering.not_before(following if number else kv_BLGI, done)
        if number > 1:
            following = moved_before(plan, arrived)
        if d_kv is not None:
            d_kv = moved_back(plan, ordering.after(d_kv, following), kv_BLGI)
        (k_NMGK, v_NMGV), pull = jax.vjp(plan.expand, weights, turn.keys(arrived))
        operands = turn.operands(plan, rows, B, half)
        call = turn.queries(q_BLHK), k_NMGK, v_NMGV, turn.spec, operands
        out, lse, d_out = (turn.queries(x) for x in (out_BLHV, lse_BLH, d_out_BLHV))
        if turn.halo:  # the weights of its keys are then exp(score - lse) = 0
            lse = jnp.where(turn.missing(plan, B), -NEGATIVE, lse)
        d_query, *d_keys = block_gradients(call, out, lse, d_out, backend=plan.backend)
        d_w, d_arrived = pull(tuple(d_keys))
        d_q += transposed(turn.queries, d_q, d_query)
        d_weights = added(d_weights, d_w)
        d_arrived = transposed(turn.keys, arrived, d_arrived)
        d_kv, done = d_arrived if d_kv is None else d_kv + d_arrived, d_query
    d_weights = jax.tree.map(lambda w, g: g.astype(w.dtype), weights, d_weights)
    d_sinks = None
    if sinks_H is not None:
        d_sinks = sink_gradient(sinks_H, out_BLHV, lse_BLH, d_out_BLHV)
    assert d_kv is not None
    return d_q.astype(q_BLHK.dtype), d_kv.astype(kv_BLGI.dtype), d_weights, d_sinks, None


in_rounds.defvjp(in_rounds_forward, in_rounds_backward)


def add(totals: list, which: Half, out_BLHV: jax.Array, lse_BLH: jax.Array) -> None:
    """Merge the output of queries of a half, its first ones, into those of the halves."""
    for half in (0, 1):
        if isinstance(which, int) and which != half:
            continue
        if totals[half] is None:
            totals[half] = out_BLHV, lse_BLH
            continue
        total, total_lse = totals[half]
        missing = ((0, 0), (0, total.shape[1] - out_BLHV.shape[1]), (0, 0))
        part_lse = jnp.pad(lse_BLH, missing, constant_values=NEGATIVE)
        if not isinstance(which, int):
            part_lse = jnp.where(which == half, part_lse, NEGATIVE)
        part = jnp.pad(out_BLHV, (*missing, (0, 0)))
        lse = jnp.logaddexp(total_lse, part_lse)
        share, part_share = (jnp.exp(x - lse)[..., None] for x in (total_lse, part_lse))
        totals[half] = share * total + part_share * part, lse


def moved(plan: Plan, kv_BLGI: jax.Array) -> jax.Array:
    """What arrives for the next round: the piece of the rank before, or halos."""
    if plan.halo is None:
        return shifted(kv_BLGI, 1, plan.distance)
    return halos(kv_BLGI, plan.halo, plan.distance)


def moved_before(plan: Plan, arrived: jax.Array) -> jax.Array:
    """What had arrived in the round before; of the first round: in the last one."""
    return shifted(arrived, -1, plan.distance) if plan.halo is None else moved(plan, arrived)


def moved_back(plan: Plan, d_arrived: jax.Array, kv_BLGI: jax.Array) -> jax.Array:
    """The transpose of `moved`."""
    if plan.halo is None:
        return shifted(d_arrived, -1, plan.distance)
    return halos_back(d_arrived, kv_BLGI.shape[1], plan.distance)


def transposed(function, x: jax.Array, slope: jax.Array) -> jax.Array:
    """The transpose, in float32, of a linear function of arrays like x."""
    transpose = jax.linear_transpose(function, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return transpose(slope.astype(jnp.float32))[0]


def added(total, tree):
    """Sum of trees in float32; total None: there is none yet."""
    tree = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return tree if total is None else jax.tree.map(jnp.add, total, tree)
