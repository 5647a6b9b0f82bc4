"""What keeps the loads of experts even, and what is told of them, behind a layer's weights.

Neither losses nor counts are outputs of the layer, which a pipeline would have to carry: losses add
their gradients to those of the weights, and counts are the gradient of a parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.layers.context import Context
from maxmeg.ops.dispatch import capacity_of
from maxmeg.ops.routing import Routing, balance_loss, balance_scores, count_experts, z_loss
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import BATCH_AXES, TENSOR_AXES

# What a step adds up beside each expert's tokens: means of the losses, without coefficients, over
# a step's microbatches; and how many copies were dropped.
TALLIES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
    "expert_dropped",
)


def with_room(counted_E: Float[Array, "... E"]) -> Float[Array, "... N"]:
    """A parameter whose gradient is counts, with room for tallies behind them."""
    return jnp.pad(counted_E, [(0, 0)] * (counted_E.ndim - 1) + [(0, len(TALLIES))])


def balanced(
    routing: Routing, logits_TE: Float[Array, "T E"], rows: int, moe: Any, ctx: Context
) -> Float[Array, "T K"]:
    """The weights, with the gradients of the balance losses and of the layer's counts behind them.

    moe: a layers.moe.Moe; rows: sequences that the tokens are of.
    """
    spec, (experts_TK, weights_TK) = moe.spec, routing
    counts_E = count_experts(experts_TK, logits_TE.shape[1])
    found = losses(routing, logits_TE, counts_E, rows, moe)
    wanted = coefficients(spec)
    # Every device along tensor has the same tokens and loads: each counts for its part.
    part = 1 / collectives.axis_size(TENSOR_AXES)
    if found:
        total = sum(wanted[name] * loss for name, loss in found.items())
        weights_TK = with_loss(weights_TK, part * ctx.share * total)
    tallies = [found[name] * ctx.share if name in found else 0.0 for name in TALLIES]
    tallies[-1] = dropped(experts_TK, rows, moe.pieces(ctx), spec)
    gradient_N = part * jnp.concatenate([counts_E, jnp.stack([*map(jnp.float32, tallies)])])
    for parameter in (moe.bias, moe.load):
        if parameter is not None:
            weights_TK = with_gradient(weights_TK, parameter[...], gradient_N)
    return weights_TK


def coefficients(spec: Any) -> dict[str, float]:
    """Of a layers.moe.MoeSpec: what each loss is multiplied by, those without effect left out."""
    values = (spec.aux_loss, spec.sequence_aux_loss, spec.global_aux_loss, spec.z_loss)
    return {name: value for name, value in zip(TALLIES, values, strict=False) if value}


def losses(
    routing: Routing, logits_TE: Float[Array, "T E"], counts_E: Array, rows: int, moe: Any
) -> dict[str, Float[Array, ""]]:
    """This device's share of those losses that have coefficients, without these."""
    spec, found = moe.spec, {}
    wanted, (tokens, num_experts) = coefficients(spec), logits_TE.shape
    if not wanted:
        return found
    top_k, shards = spec.routing.top_k, collectives.axis_size(BATCH_AXES)
    scores_TE = balance_scores(logits_TE, spec.routing)
    if "load_balancing_loss" in wanted:
        all_E = collectives.sum_over(counts_E, BATCH_AXES)
        found["load_balancing_loss"] = balance_loss(scores_TE, all_E, top_k, tokens * shards)
    if "seq_load_balancing_loss" in wanted:
        length = tokens // rows
        each_B = jax.vmap(
            lambda scores, experts: balance_loss(
                scores, count_experts(experts, num_experts), top_k, length
            )
        )(
            scores_TE.reshape(rows, length, -1),
            routing.experts_TK.reshape(rows, length, -1),
        )
        found["seq_load_balancing_loss"] = jnp.sum(each_B) / (rows * shards)
    if "global_load_balancing_loss" in wanted:
        # The counts of a step are known after its last microbatch, in a pipeline after the first
        # ones are through: these are of the step before, evenly spread before the first step.
        load_E = moe.load[...][:num_experts]
        total = jnp.sum(load_E)
        shares_E = jnp.where(total > 0, load_E / jnp.maximum(total, 1), 1 / num_experts)
        counted_E = shares_E * (top_k * tokens * shards)
        loss = balance_loss(scores_TE, counted_E, top_k, tokens * shards)
        found["global_load_balancing_loss"] = loss
    if "z_loss" in wanted:
        found["z_loss"] = z_loss(logits_TE, tokens * shards)
    return found


def dropped(experts_TK: Int[Array, "T K"], rows: int, pieces: int, spec: Any) -> Float[Array, ""]:
    """Copies beyond the experts' capacity, which is of each of `pieces` of the sequence."""
    if not spec.capacity:
        return jnp.float32(0)
    num_experts, top_k = spec.routing.num_experts, spec.routing.top_k
    cut = experts_TK.reshape(rows, pieces, -1, top_k).swapaxes(0, 1).reshape(pieces, -1, top_k)
    counts = jax.vmap(lambda experts: count_experts(experts, num_experts))(cut)
    limit = capacity_of(cut.shape[1], top_k, num_experts, spec.capacity)
    return jnp.sum(jnp.maximum(counts - limit, 0))


def _first(x, *_):
    return x


with_loss: Any = jax.custom_vjp(_first)  # x; what follows from it has `loss` added to its own loss
with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, slope: (slope, jnp.ones_like(loss)))

with_gradient: Any = jax.custom_vjp(_first)  # x; the second's gradient is as much of the third
with_gradient.defvjp(
    lambda x, parameter, gradient: (x, (parameter, gradient)),
    lambda kept, slope: (
        slope,
        kept[1][: kept[0].shape[-1]].astype(kept[0].dtype),
        jnp.zeros_like(kept[1]),
    ),
)
