"""The router of a mixture of experts: choice of experts, weights, and balance losses.

All arithmetic is float32. Formulas: Switch Transformer (Fedus et al., 2021), ST-MoE (Zoph et al.,
2022), DeepSeek-V2 and V3 (groups, loss-free balancing); the order of steps is Megatron-LM's.
Losses cover the tokens of this device. If `counts_E` and `tokens` are those of all devices, the
losses add up over devices to the loss of the global batch.
"""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmeg.ops.random import random_bits, uniform_of
from maxmeg.parallel import collectives

SINKHORN_TOLERANCE = 1e-4  # mean relative change of the column factors
SINKHORN_STEPS = 200
TINY = 1e-20


class Score(enum.Enum):
    softmax = "softmax"
    sigmoid = "sigmoid"
    sqrt_softplus = "sqrt_softplus"


@dataclasses.dataclass(frozen=True)
class RoutingSpec:
    """How experts are chosen and weighted.

    softmax_before_topk: softmax over all experts, else over the chosen ones (softmax only).
    normalize_weights: divide a token's weights by their sum (if top_k > 1). num_groups,
    topk_groups: choose experts from a token's best groups only. A group's score is the sum of its
    `group_score_topk` best scores (0: top_k / topk_groups, as in Megatron-LM). sinkhorn: in
    training, choose by logits that Sinkhorn's algorithm balanced. force_balance: assign experts
    round-robin and ignore the scores (for benchmarks).
    """

    num_experts: int
    top_k: int
    score: Score = Score.softmax
    softmax_before_topk: bool = False
    normalize_weights: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score_topk: int = 0
    sinkhorn: bool = False
    force_balance: bool = False

    def __post_init__(self):
        in_group = self.num_experts // max(self.num_groups, 1)
        if self.num_experts < 1 or not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} must lie in 1..{self.num_experts} (num_experts)")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_groups={self.topk_groups} must lie in 1..{self.num_groups} (num_groups)"
            )
        if self.top_k > self.topk_groups * in_group:
            raise ValueError(
                f"top_k={self.top_k} exceeds the experts of topk_groups={self.topk_groups} groups "
                f"of {in_group}: increase topk_groups or decrease top_k"
            )
        if not 0 <= self.scores_per_group <= in_group:
            raise ValueError(
                f"group_score_topk={self.group_score_topk} exceeds the {in_group} experts per group"
            )
        if self.sinkhorn and self.num_groups > 1:
            raise ValueError("sinkhorn chooses among all experts: use it without groups")
        if self.sinkhorn and self.force_balance:
            raise ValueError("force_balance and sinkhorn exclude each other: set one of them")

    @property
    def scores_per_group(self) -> int:
        return self.group_score_topk or max(1, self.top_k // max(self.topk_groups, 1))


class Routing(NamedTuple):
    """Each token's experts, best first, and their weights."""

    experts_TK: Int[Array, "T K"]
    weights_TK: Float[Array, "T K"]


def all_scores(logits_TE: Float[Array, "T E"], score: Score) -> Float[Array, "T E"]:
    """Scores of all experts in float32; only softmax scores sum to 1."""
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
    axes: tuple[str, ...] = (),
) -> Routing:
    """The chosen experts and their weights, which are differentiable in the logits.

    bias_E: added to the scores when experts are chosen, not to their weights. training: apply
    Sinkhorn's algorithm if spec.sinkhorn, over these tokens and those of the devices along `axes`.
    """
    logits_TE = logits_TE.astype(jnp.float32)
    softmax_last = spec.score is Score.softmax and not spec.softmax_before_topk
    scores_TE = logits_TE if softmax_last else all_scores(logits_TE, spec.score)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.astype(jnp.float32)
    choice_TE = jax.lax.stop_gradient(choice_TE)
    if spec.sinkhorn and training:
        choice_TE = sinkhorn(collectives.gather(jax.lax.stop_gradient(logits_TE), axes, 0))
        choice_TE = collectives.local_part(choice_TE, axes, 0)
    elif spec.num_groups > 1:
        choice_TE = jnp.where(of_kept_groups(choice_TE, spec), choice_TE, -jnp.inf)
    if spec.force_balance:
        experts_TK = round_robin(len(logits_TE), spec.num_experts, spec.top_k)
    else:
        experts_TK = jax.lax.top_k(choice_TE, spec.top_k)[1]
    chosen_TK = scores_of(scores_TE, experts_TK)
    if softmax_last:
        chosen_TK = jax.nn.softmax(chosen_TK, axis=-1)
    if spec.normalize_weights and spec.top_k > 1:
        chosen_TK /= jnp.sum(chosen_TK, axis=-1, keepdims=True) + TINY
    return Routing(experts_TK, chosen_TK * spec.scale)


@jax.custom_vjp
def scores_of(scores_TE: Float[Array, "T E"], experts_TK: Int[Array, "T K"]) -> Array:
    """The score of each chosen expert. Backward compares and sums: it scatters nothing."""
    return jnp.take_along_axis(scores_TE, experts_TK, axis=-1)


def _scores_of_backward(residuals, slope_TK):
    experts_TK, num_experts = residuals
    is_chosen_TKE = experts_TK[:, :, None] == jnp.arange(num_experts)
    return jnp.sum(jnp.where(is_chosen_TKE, slope_TK[:, :, None], 0), axis=1), None


scores_of.defvjp(
    lambda scores_TE, experts_TK: (
        scores_of(scores_TE, experts_TK),
        (experts_TK, scores_TE.shape[1]),
    ),
    _scores_of_backward,
)


def round_robin(tokens: int, num_experts: int, top_k: int) -> Int[Array, "T K"]:
    copies_N = jnp.arange(tokens * top_k, dtype=jnp.int32)
    return (copies_N % num_experts).reshape(tokens, top_k)


def jittered(
    x_BLD: Float[Array, "B L D"], size: float, key: jax.Array, *coordinates: Int[Array, "..."]
) -> Float[Array, "B L D"]:
    """x in float32 times noise in [1 - size, 1 + size] (Switch Transformer).

    key, coordinates: as in `dropout`; the noise does not depend on the layout either.
    """
    noise_BLD = uniform_of(random_bits(x_BLD.shape, key, *coordinates))
    return x_BLD.astype(jnp.float32) * (1 + size * noise_BLD)


def of_kept_groups(choice_TE: Float[Array, "T E"], spec: RoutingSpec) -> Bool[Array, "T E"]:
    """Whether each expert is in one of the token's topk_groups best groups."""
    tokens, experts = choice_TE.shape
    grouped = choice_TE.reshape(tokens, spec.num_groups, -1)
    group_scores = jnp.sum(jax.lax.top_k(grouped, spec.scores_per_group)[0], axis=-1)
    best = jax.lax.top_k(group_scores, spec.topk_groups)[1]
    is_kept = jnp.any(best[:, :, None] == jnp.arange(spec.num_groups), axis=1)
    return jnp.repeat(is_kept, experts // spec.num_groups, axis=1)


def sinkhorn(logits_TE: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Sinkhorn's algorithm: exp(logits) with rows and columns scaled to equal sums.

    Stops when the mean relative change of the column factors is below SINKHORN_TOLERANCE. Not
    differentiated. Dividing each row by its maximum first avoids overflow and keeps the order.
    """
    cost_TE = jnp.exp(logits_TE - jnp.max(logits_TE, axis=-1, keepdims=True))
    tokens, experts = cost_TE.shape

    def rows(columns_E):
        return 1 / (tokens * (cost_TE @ columns_E + 1e-8))

    def is_unfinished(state):
        step, _, error = state
        return (step < SINKHORN_STEPS) & (error > SINKHORN_TOLERANCE)

    def iterate(state):
        step, columns_E, _ = state
        new_E = 1 / (experts * (rows(columns_E) @ cost_TE + 1e-8))
        return step + 1, new_E, jnp.mean(jnp.abs(new_E - columns_E) / jnp.abs(columns_E))

    start = (0, jnp.ones(experts, cost_TE.dtype), jnp.asarray(jnp.inf, cost_TE.dtype))
    columns_E = jax.lax.while_loop(is_unfinished, iterate, start)[1]
    return cost_TE * columns_E * rows(columns_E)[:, None]


def balance_scores(logits_TE: Float[Array, "T E"], spec: RoutingSpec) -> Float[Array, "T E"]:
    """Scores of the balance losses, normalized to sum to 1 per token."""
    scores_TE = all_scores(logits_TE, spec.score)
    return scores_TE / (jnp.sum(scores_TE, axis=-1, keepdims=True) + TINY)


def balance_loss(
    scores_TE: Float[Array, "T E"],
    counts_E: Float[Array, " E"],
    top_k: int,
    tokens: float,
) -> Float[Array, ""]:
    """E / (K tokens^2) sum_e(sum_t scores[t, e] counts[e]); 1 for uniform routing.

    counts_E, tokens: of the batch (auxiliary loss), of one sequence (sequence loss), or of all
    devices or microbatches (global loss); scores_TE may cover a part of these tokens.
    """
    weight = scores_TE.shape[1] / (top_k * tokens * tokens)
    return jnp.sum(jnp.sum(scores_TE, axis=0) * jax.lax.stop_gradient(counts_E)) * weight


def z_loss(logits_TE: Float[Array, "T E"], tokens: float) -> Float[Array, ""]:
    """Router z-loss: sum(logsumexp(logits)^2) / tokens."""
    sums_T = jax.nn.logsumexp(logits_TE.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.square(sums_T)) / tokens


def updated_bias(
    bias_E: Float[Array, "... E"], counts_E: Float[Array, "... E"], rate: float
) -> Float[Array, "... E"]:
    """Loss-free balancing (Wang et al., 2024): add rate below the mean load, subtract it above."""
    return bias_E + rate * jnp.sign(jnp.mean(counts_E, axis=-1, keepdims=True) - counts_E)
