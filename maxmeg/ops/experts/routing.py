"""Which experts a token goes to, with what weights, and what keeps their loads even.

Scores, selections and losses are float32. Formulas: Switch Transformer (Fedus et al., 2021), ST-MoE
(Zoph et al., 2022), DeepSeek-V2 and V3 (groups, loss-free balance), Megatron-LM's order of steps.
Losses are of tokens on this device; with counts and `tokens` of all devices, their sum over devices
is that of the global batch.
"""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmeg.ops.dropout import random_bits

SINKHORN_TOLERANCE = 1e-4  # of the mean change of the experts' factors
SINKHORN_STEPS = 200
TINY = 1e-20


class Score(enum.Enum):
    softmax = "softmax"
    sigmoid = "sigmoid"
    sqrt_softplus = "sqrt_softplus"


@dataclasses.dataclass(frozen=True)
class RoutingSpec:
    """How experts are chosen and weighed.

    before: softmax is over all experts, else over those chosen; other scores are of each expert by
    itself. normalize: the weights of a token are divided by their sum (where top_k > 1). groups,
    groups_kept: experts lie in groups, of which a token's best may be chosen from; a group is as
    good as the sum of its group_best best scores (0: top_k / groups_kept, as in Megatron-LM).
    sinkhorn: in training the choice is by logits scaled so that loads are even. in_turn: tokens
    take the experts in turn, whatever their scores, so that loads are even (for benchmarks).
    """

    num_experts: int
    top_k: int
    score: Score = Score.softmax
    before: bool = False
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 0
    sinkhorn: bool = False
    in_turn: bool = False

    def __post_init__(self):
        in_group = self.num_experts // max(self.groups, 1)
        if self.num_experts < 1 or not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} must be from 1 to the {self.num_experts} experts")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"groups={self.groups} must divide the {self.num_experts} experts")
        if not 1 <= self.groups_kept <= self.groups:
            raise ValueError(
                f"groups_kept={self.groups_kept} must be from 1 to the {self.groups} groups"
            )
        if self.top_k > self.groups_kept * in_group:
            raise ValueError(
                f"top_k={self.top_k} cannot come from groups_kept={self.groups_kept} groups of "
                f"{in_group} experts: keep more groups or choose fewer experts"
            )
        if not 0 <= self.best_of_group <= in_group:
            raise ValueError(f"group_best={self.group_best} must be at most the {in_group} a group")
        if self.sinkhorn and self.groups > 1:
            raise ValueError("sinkhorn chooses among all experts: use it without groups")
        if self.sinkhorn and self.in_turn:
            raise ValueError("in_turn chooses without scores, sinkhorn by them: use one of them")

    @property
    def best_of_group(self) -> int:
        return self.group_best or max(1, self.top_k // max(self.groups_kept, 1))


class Routing(NamedTuple):
    """Of every token its experts, best first, and their weights."""

    experts_TK: Int[Array, "T K"]
    weights_TK: Float[Array, "T K"]


def all_scores(logits_TE: Float[Array, "T E"], score: Score) -> Float[Array, "T E"]:
    """Scores of every expert; they add up to one for softmax alone."""
    logits_TE = logits_TE.astype(jnp.float32)
    if score is Score.softmax:
        return jax.nn.softmax(logits_TE, axis=-1)
    if score is Score.sigmoid:
        return jax.nn.sigmoid(logits_TE)
    return jnp.sqrt(jax.nn.softplus(logits_TE))


def route(
    logits_TE: Float[Array, "T E"],
    spec: RoutingSpec,
    bias_E: Float[Array, " E"] | None = None,
    training: bool = True,
) -> Routing:
    """The chosen experts and differentiable weights.

    bias_E is added to the scores for the choice alone (loss-free balance). training: Sinkhorn, over
    these tokens, takes part in the choice.
    """
    logits_TE = logits_TE.astype(jnp.float32)
    late = spec.score is Score.softmax and not spec.before
    scores_TE = logits_TE if late else all_scores(logits_TE, spec.score)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.astype(jnp.float32)
    choice_TE = jax.lax.stop_gradient(choice_TE)
    if spec.sinkhorn and training:
        choice_TE = sinkhorn(jax.lax.stop_gradient(logits_TE))
    elif spec.groups > 1:
        choice_TE = jnp.where(of_kept_groups(choice_TE, spec), choice_TE, -jnp.inf)
    if spec.in_turn:
        experts_TK = in_turn(len(logits_TE), spec.num_experts, spec.top_k)
    else:
        experts_TK = jax.lax.top_k(choice_TE, spec.top_k)[1]
    chosen_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=-1)
    if late:
        chosen_TK = jax.nn.softmax(chosen_TK, axis=-1)
    if spec.normalize and spec.top_k > 1:
        chosen_TK /= jnp.sum(chosen_TK, axis=-1, keepdims=True) + TINY
    return Routing(experts_TK, chosen_TK * spec.scale)


def in_turn(tokens: int, num_experts: int, top_k: int) -> Int[Array, "T K"]:
    """Every copy goes to the expert after that of the copy before."""
    copies_N = jnp.arange(tokens * top_k, dtype=jnp.int32)
    return (copies_N % num_experts).reshape(tokens, top_k)


def jittered(
    x_BLD: Float[Array, "B L D"], size: float, key: jax.Array, *coordinates: Int[Array, "..."]
) -> Float[Array, "B L D"]:
    """x times noise from 1 - size to 1 + size (Switch Transformer), drawn as `dropout` draws, so
    that it depends on the layout as little."""
    bits_BLD = random_bits(x_BLD.shape, key, *coordinates) >> 8  # float32 has all of these
    noise_BLD = 1 - size + 2 * size * (bits_BLD.astype(jnp.float32) / 2**24)
    return x_BLD.astype(jnp.float32) * noise_BLD


def of_kept_groups(choice_TE: Float[Array, "T E"], spec: RoutingSpec) -> Bool[Array, "T E"]:
    """Whether an expert lies in one of its token's best groups."""
    tokens, experts = choice_TE.shape
    grouped_TGN = choice_TE.reshape(tokens, spec.groups, -1)
    group_TG = jnp.sum(jax.lax.top_k(grouped_TGN, spec.best_of_group)[0], axis=-1)
    kept_TK = jax.lax.top_k(group_TG, spec.groups_kept)[1]
    is_kept_TG = jnp.any(kept_TK[:, :, None] == jnp.arange(spec.groups), axis=1)
    return jnp.repeat(is_kept_TG, experts // spec.groups, axis=1)


def sinkhorn(logits_TE: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """exp(logits) scaled by rows and columns so that all tokens and all experts weigh the same.

    Until the experts' factors change by less than SINKHORN_TOLERANCE; not differentiated. Rows are
    scaled by their maxima first, which changes neither the order in a row nor overflows.
    """
    cost_TE = jnp.exp(logits_TE - jnp.max(logits_TE, axis=-1, keepdims=True))
    tokens, experts = cost_TE.shape

    def rows(columns_E):
        return 1 / (tokens * (cost_TE @ columns_E + 1e-8))

    def more(state):
        step, _, error = state
        return (step < SINKHORN_STEPS) & (error > SINKHORN_TOLERANCE)

    def again(state):
        step, columns_E, _ = state
        new_E = 1 / (experts * (rows(columns_E) @ cost_TE + 1e-8))
        return step + 1, new_E, jnp.mean(jnp.abs(new_E - columns_E) / jnp.abs(columns_E))

    start = (0, jnp.ones(experts, cost_TE.dtype), jnp.asarray(jnp.inf, cost_TE.dtype))
    columns_E = jax.lax.while_loop(more, again, start)[1]
    return cost_TE * columns_E * rows(columns_E)[:, None]


def count_experts(experts_TK: Int[Array, "T K"], num_experts: int) -> Float[Array, " E"]:
    """How many tokens go to each expert."""
    return jnp.zeros(num_experts, jnp.float32).at[experts_TK.reshape(-1)].add(1.0)


def balance_scores(logits_TE: Float[Array, "T E"], spec: RoutingSpec) -> Float[Array, "T E"]:
    """What the balance losses weigh: shares of every token's scores, which add up to one."""
    scores_TE = all_scores(logits_TE, spec.score)
    return scores_TE / (jnp.sum(scores_TE, axis=-1, keepdims=True) + TINY)


def balance_loss(
    scores_TE: Float[Array, "T E"],
    counts_E: Float[Array, " E"],
    top_k: int,
    tokens: float,
) -> Float[Array, ""]:
    """E / (K tokens^2) sum_e(sum_t scores[t, e] counts[e]); 1 where loads are even.

    counts_E and tokens: of this batch (auxiliary loss), of a sequence (per sequence), or of all
    devices or micro-batches (global), which scores_TE may be a part of.
    """
    weight = scores_TE.shape[1] / (top_k * tokens * tokens)
    return jnp.sum(jnp.sum(scores_TE, axis=0) * jax.lax.stop_gradient(counts_E)) * weight


def z_loss(logits_TE: Float[Array, "T E"], tokens: float) -> Float[Array, ""]:
    """sum(logsumexp^2) / tokens: keeps logits small."""
    sums_T = jax.nn.logsumexp(logits_TE.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.square(sums_T)) / tokens


def updated_bias(
    bias_E: Float[Array, "... E"], counts_E: Float[Array, "... E"], rate: float
) -> Float[Array, "... E"]:
    """Loss-free balance: a step up for experts below the mean load of the global batch, down for
    those above (Wang et al., 2024)."""
    return bias_E + rate * jnp.sign(jnp.mean(counts_E, axis=-1, keepdims=True) - counts_E)
