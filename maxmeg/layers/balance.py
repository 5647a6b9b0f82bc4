"""Load balancing of experts: auxiliary losses, and the auxiliary values that report loads.

`with_loss` adds the gradients of the losses in the backward pass of the routing weights, so that
layers and pipeline stages need not return a loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.layers.context import Context
from maxmeg.ops.experts.dispatch import count_values
from maxmeg.ops.experts.routing import Routing, balance_loss, balance_scores, z_loss
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES, TOKEN_AXES

LOSSES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)
TOKENS, DROPPED = "expert_tokens", "expert_dropped"  # names of the other auxiliary values
EXPERTS_END = "experts_end"  # a zero that exists once the experts have run


def balanced(
    routing: Routing, logits_TE: Float[Array, "T E"], rows: int, moe: Any, ctx: Context
) -> tuple[Float[Array, "T K"], dict[str, Array]]:
    """(routing weights unchanged, auxiliary values); backward also adds the losses' gradients.

    Auxiliary values: the tokens of each expert [E], and each loss without its coefficient, times
    the number of copies. moe: a layers.moe.Moe; rows: number of sequences.
    """
    spec, (experts_TK, weights_TK) = moe.spec, routing
    counts_E = count_values(experts_TK, logits_TE.shape[1], jnp.float32)
    losses = local_losses(routing, logits_TE, counts_E, rows, moe, ctx)
    if losses:
        weight_of = coefficients(spec)
        total = sum(weight_of[name] * loss for name, loss in losses.items())
        weights_TK = with_loss(weights_TK, ctx.microbatch_weight * total)
    copies = experts_TK.size * collectives.axis_size((*TOKEN_AXES, *ctx.tensor_axes))
    return weights_TK, {TOKENS: counts_E} | {name: loss * copies for name, loss in losses.items()}


def coefficients(spec: Any) -> dict[str, float]:
    """The nonzero loss coefficients of a layers.moe.MoeSpec."""
    values = (spec.aux_loss, spec.sequence_aux_loss, spec.global_aux_loss, spec.z_loss)
    return {name: value for name, value in zip(LOSSES, values, strict=True) if value}


def local_losses(
    routing: Routing,
    logits_TE: Float[Array, "T E"],
    counts_E: Array,
    rows: int,
    moe: Any,
    ctx: Context,
) -> dict[str, Float[Array, ""]]:
    """Local contributions to the losses that have a coefficient, without the coefficient."""
    spec, losses = moe.spec, {}
    names, (tokens, num_experts) = coefficients(spec), logits_TE.shape
    if not names:
        return losses
    axes, row_axes = (*TOKEN_AXES, *ctx.tensor_axes), (*CONTEXT_AXES, *ctx.tensor_axes)
    top_k, shards = spec.routing.top_k, collectives.axis_size(axes)
    scores_TE = balance_scores(logits_TE, spec.routing)
    if "load_balancing_loss" in names:
        total_E = collectives.stored_always(collectives.sum_over(counts_E, axes))
        losses["load_balancing_loss"] = balance_loss(scores_TE, total_E, top_k, tokens * shards)
    if "seq_load_balancing_loss" in names:
        experts_BLK = routing.experts_TK.reshape(rows, -1, top_k)
        counts_BE = counts_of(experts_BLK, num_experts)
        counts_BE = collectives.stored_always(collectives.sum_over(counts_BE, row_axes))
        length = tokens // rows * collectives.axis_size(row_axes)
        losses_B = jax.vmap(lambda scores, counts: balance_loss(scores, counts, top_k, length))(
            scores_TE.reshape(rows, -1, num_experts), counts_BE
        )
        samples = rows * collectives.axis_size(BATCH_AXES)
        losses["seq_load_balancing_loss"] = jnp.sum(losses_B) / samples
    if "global_load_balancing_loss" in names:
        # The counts of a step are known only after its last microbatch: use the previous step's,
        # or uniform loads before the first step.
        load_E = moe.load[...]
        total = jnp.sum(load_E)
        fractions_E = jnp.where(total > 0, load_E / jnp.maximum(total, 1), 1 / num_experts)
        global_E = fractions_E * (top_k * tokens * shards)
        loss = balance_loss(scores_TE, global_E, top_k, tokens * shards)
        losses["global_load_balancing_loss"] = loss
    if "z_loss" in names:
        losses["z_loss"] = z_loss(logits_TE, tokens * shards)
    return losses


def counts_of(experts_BLK: Int[Array, "B L K"], num_experts: int) -> Float[Array, "B E"]:
    """Number of tokens of each sequence that are routed to each expert."""
    return jax.vmap(lambda experts_LK: count_values(experts_LK, num_experts, jnp.float32))(
        experts_BLK
    )


# with_loss(x, loss) returns x; backward adds the gradient of `loss` to that of the model's loss.
with_loss: Any = jax.custom_vjp(lambda x, loss: x)
with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, slope: (slope, jnp.ones_like(loss)))


def progress(aux: list) -> tuple[list, list, list]:
    """(auxiliary values of a unit without EXPERTS_END, arrays that exist once its routers have
    chosen experts, arrays that exist once these have run). No arrays where lanes are apart."""
    timed = [values for mixers in aux for values in mixers.values() if EXPERTS_END in values]
    rest = jax.tree.map(without_end, aux, is_leaf=lambda tree: isinstance(tree, dict))
    return rest, [values[TOKENS] for values in timed], [values[EXPERTS_END] for values in timed]


def without_end(mixers: dict[str, dict]) -> dict[str, dict]:
    return {
        mixer: {name: value for name, value in values.items() if name != EXPERTS_END}
        for mixer, values in mixers.items()
    }
