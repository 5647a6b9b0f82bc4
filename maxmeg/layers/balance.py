"""Balance of the experts' loads: auxiliary losses, and the auxiliary values that report loads.

The losses add their gradients to those of the routing weights (`with_loss`), so that no layer and
no stage of a pipeline has to hand on a loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.layers.context import Context
from maxmeg.ops.experts.dispatch import capacity_of
from maxmeg.ops.experts.routing import Routing, balance_loss, balance_scores, count_experts, z_loss
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES, TENSOR_AXES, TOKEN_AXES

LOSSES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)
TOKENS, DROPPED = "expert_tokens", "expert_dropped"  # names of the other auxiliary values


def balanced(
    routing: Routing, logits_TE: Float[Array, "T E"], rows: int, moe: Any, ctx: Context
) -> tuple[Float[Array, "T K"], dict[str, Array]]:
    """The routing weights, which carry the gradients of the balance losses, and auxiliary values.

    The auxiliary values are the tokens of each expert [E], the number of copies that were dropped,
    and each loss without its coefficient, summed over all copies of tokens.

    moe: a layers.moe.Moe; rows: number of sequences.
    """
    spec, (experts_TK, weights_TK) = moe.spec, routing
    counts_E = count_experts(experts_TK, logits_TE.shape[1])
    found = losses(routing, logits_TE, counts_E, rows, moe)
    wanted = coefficients(spec)
    if found:
        total = sum(wanted[name] * loss for name, loss in found.items())
        # Every device along tensor has the same tokens: each adds its part of the gradient.
        part = 1 / collectives.axis_size(TENSOR_AXES)
        weights_TK = with_loss(weights_TK, part * ctx.share * total)
    copies = experts_TK.size * collectives.axis_size(TOKEN_AXES)
    aux = {name: loss * copies for name, loss in found.items()}
    aux |= {TOKENS: counts_E, DROPPED: dropped(experts_TK, rows, moe.pieces(ctx), spec)}
    return weights_TK, aux


def coefficients(spec: Any) -> dict[str, float]:
    """The nonzero coefficients of the losses, from a layers.moe.MoeSpec."""
    values = (spec.aux_loss, spec.sequence_aux_loss, spec.global_aux_loss, spec.z_loss)
    return {name: value for name, value in zip(LOSSES, values, strict=True) if value}


def losses(
    routing: Routing, logits_TE: Float[Array, "T E"], counts_E: Array, rows: int, moe: Any
) -> dict[str, Float[Array, ""]]:
    """This device's share of every loss that has a coefficient, without the coefficient."""
    spec, found = moe.spec, {}
    wanted, (tokens, num_experts) = coefficients(spec), logits_TE.shape
    if not wanted:
        return found
    top_k, shards = spec.routing.top_k, collectives.axis_size(TOKEN_AXES)
    scores_TE = balance_scores(logits_TE, spec.routing)
    if "load_balancing_loss" in wanted:
        all_E = collectives.stored_always(collectives.sum_over(counts_E, TOKEN_AXES))
        found["load_balancing_loss"] = balance_loss(scores_TE, all_E, top_k, tokens * shards)
    if "seq_load_balancing_loss" in wanted:
        experts_BLK = routing.experts_TK.reshape(rows, -1, top_k)
        counts_BE = jax.vmap(lambda experts: count_experts(experts, num_experts))(experts_BLK)
        counts_BE = collectives.stored_always(collectives.sum_over(counts_BE, CONTEXT_AXES))
        length = tokens // rows * collectives.axis_size(CONTEXT_AXES)
        each_B = jax.vmap(lambda scores, counts: balance_loss(scores, counts, top_k, length))(
            scores_TE.reshape(rows, -1, num_experts), counts_BE
        )
        samples = rows * collectives.axis_size(BATCH_AXES)
        found["seq_load_balancing_loss"] = jnp.sum(each_B) / samples
    if "global_load_balancing_loss" in wanted:
        # The counts of a step are known after its last microbatch only: these are the counts of
        # the previous step, or even loads before the first step.
        load_E = moe.load[...]
        total = jnp.sum(load_E)
        shares_E = jnp.where(total > 0, load_E / jnp.maximum(total, 1), 1 / num_experts)
        counted_E = shares_E * (top_k * tokens * shards)
        loss = balance_loss(scores_TE, counted_E, top_k, tokens * shards)
        found["global_load_balancing_loss"] = loss
    if "z_loss" in wanted:
        found["z_loss"] = z_loss(logits_TE, tokens * shards)
    return found


def dropped(experts_TK: Int[Array, "T K"], rows: int, pieces: int, spec: Any) -> Float[Array, ""]:
    """Number of copies beyond the capacity of their experts, which holds for each of `pieces` of
    the sequence."""
    if not spec.capacity:
        return jnp.float32(0)
    num_experts, top_k = spec.routing.num_experts, spec.routing.top_k
    cut = experts_TK.reshape(rows, pieces, -1, top_k).swapaxes(0, 1).reshape(pieces, -1, top_k)
    counts = jax.vmap(lambda experts: count_experts(experts, num_experts))(cut)
    limit = capacity_of(cut.shape[1], top_k, num_experts, spec.capacity)
    return jnp.sum(jnp.maximum(counts - limit, 0))


# with_loss(x, loss) is x; the gradient of `loss` is added to that of the model's own loss.
with_loss: Any = jax.custom_vjp(lambda x, loss: x)
with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, slope: (slope, jnp.ones_like(loss)))
