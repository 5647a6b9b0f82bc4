"""Speculative decoding: several proposed tokens are checked by one decode step.

They come from earlier occurrences of the newest tokens (`NGrams`), or from the model's MTP layers.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.inference.sampling import Rows, sample
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM

LONGEST = 3  # tokens whose earlier occurrence is looked up


class NGrams:
    """Proposes what followed the newest tokens where they occurred last (Saxena, 2023, prompt
    lookup decoding). Longer matches win."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # place after an n-gram's last occurrence
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        place = len(self.tokens)
        for count in range(1, min(LONGEST, place) + 1):
            self._after[tuple(self.tokens[place - count :])] = place
        self.tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """At most this number of tokens; [] if none of the newest tokens occurred before."""
        for count in range(LONGEST, 0, -1):
            place = self._after.get(tuple(self.tokens[-count:]))
            if place is not None:
                return self.tokens[place : place + most]
        return []


class Newest(typing.NamedTuple):
    """The newest token of each row. later_BX: the token after each of the row. places_B: where in
    it the newest one stands; beyond its end in a row that goes on. steps_B: number of new tokens
    before the newest."""

    later_BX: Int[Array, "B X"]
    places_B: Int[Array, " B"]
    steps_B: Int[Array, " B"]


def mtp_drafts(
    model: LM,
    h_BLD: Float[Array, "B L D"],
    newest: Newest,
    rows: Rows,
    ctx: Context,
    cache: list,
) -> tuple[Int[Array, "B K"], list]:
    """(what the first K MTP layers propose after the newest token, their new cache).

    h_BLD: the model's output; K: length of `cache`. Layer d reads d later tokens, as in training.
    Proposals are sampled by the settings and the random keys of the tokens that they stand for, so
    that they are likely to be taken at any temperature. A cached key may have been computed from a
    proposal that was not taken, or in shared pages from another request's next token: that makes
    proposals worse, but changes no reply.
    """
    rows_B, length = jnp.arange(len(h_BLD)), h_BLD.shape[1]
    later_BX, places_B, steps_B = newest
    later_BX = jnp.pad(later_BX, ((0, 0), (0, max(0, length + len(cache) - later_BX.shape[1]))))
    drafts, caches = [], []
    for d, depth_cache in enumerate(cache):
        later_ctx = dataclasses.replace(ctx, positions_BL=ctx.positions_BL + d + 1)
        embedded_BLD = model.embed_side(later_BX[:, d : d + length], later_ctx)
        h_BLD, new_cache = model.mtp.depths[d].cached(h_BLD, embedded_BLD, ctx, depth_cache)
        newest_BD = h_BLD.at[rows_B, places_B].get(mode="clip")
        logits_BV = model.logits(newest_BD[:, None])[:, 0]
        drafts.append(sample(logits_BV, rows._replace(steps_B=steps_B + d + 1)))
        later_BX = later_BX.at[rows_B, places_B + d + 1].set(drafts[-1], mode="drop")
        caches.append(new_cache)
    return jnp.stack(drafts, axis=1), caches
