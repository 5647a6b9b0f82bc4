"""Language modelling: cross entropy of the next token and, with MTP layers, of later tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Metrics, Objective, Sums, token_loss, token_metrics
from maxmeg.ops.random import fold
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.collectives import PIPE_AXIS

FIRST_KEY = 2**30  # random key of the dropout of the first MTP layer's embedding


def shifted(batch: Batch, depth: int) -> Batch:
    """The batch [..., L] with tokens, targets, positions and mask shifted by `depth` tokens.

    They are zero if the shifted token is past the end of the row or in another document.
    """
    length = batch.tokens.shape[-1]

    def later(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[..., depth:], jnp.zeros_like(x[..., :depth])], axis=-1)

    exists = jnp.arange(length) < length - depth
    if batch.segment_ids is not None:
        exists &= later(batch.segment_ids) == batch.segment_ids
    tokens, targets, positions, loss_mask = (
        jnp.where(exists, later(array), 0)
        for array in (batch.tokens, batch.targets, batch.positions, batch.loss_mask)
    )
    return dataclasses.replace(
        batch, tokens=tokens, targets=targets, positions=positions, loss_mask=loss_mask
    )


def masks(model: LM, batch: Batch) -> list[jax.Array]:
    depths = 0 if model.mtp is None else len(model.mtp.depths)
    return [batch.loss_mask, *(shifted(batch, i + 1).loss_mask for i in range(depths))]


@jax.named_scope("loss")
def loss(
    model: LM, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """The loss of the next token, plus that of the MTP layers if batch.divisors includes them."""
    total, sums = token_loss(model, h_BLD, batch, train, ctx)
    if batch.divisors.shape[-1] > 1:
        mtp_total, mtp_sums = mtp_loss(model, h_BLD, batch, train, ctx)
        return total + mtp_total, sums | mtp_sums
    return total, sums


def mtp_loss(
    model: Any, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """(local contribution to factor * mean over depths of their mean losses, sums per depth).

    The sums include the auxiliary values of each MTP layer as "mtp_aux". Each depth is divided by
    its own number of targets, as in Megatron-LM (which divides by the number of all targets with
    --calculate-per-token-loss). All pipeline stages compute the same layers, and their part of the
    vocabulary; the balance losses of experts count on the first stage only.
    """
    factor, depths = model.mtp.factor, model.mtp.depths
    first = collectives.axis_index((PIPE_AXIS,)) == 0
    ctx = dataclasses.replace(ctx, microbatch_weight=jnp.where(first, ctx.microbatch_weight, 0.0))
    x_BLD, total = ctx.shard(h_BLD), jnp.zeros(())
    units, loss_sums, tokens, auxes = sum(model.stack.repeats), [], [], []
    for i, depth in enumerate(depths):
        later = shifted(batch, i + 1)
        key = ctx.dropout_key
        embedding_ctx = dataclasses.replace(
            ctx,
            positions_BL=later.positions,
            dropout_key=key if key is None else fold(key, FIRST_KEY + i),
        )
        later_BLD = summed(model.embed(later, embedding_ctx))
        x_BLD = depth.joined(x_BLD, later_BLD)
        x_BLD, _, aux = model.stack.run_unit(depth.layer, x_BLD, ctx, units + i, prevent_cse=True)
        auxes.append(aux)
        x_BLD = depth.final_norm(x_BLD)
        mask_BL = later.loss_mask
        weights_BL = mask_BL * (factor / len(depths)) / batch.divisors[i + 1]
        h_BLD = collectives.gather_sequence(x_BLD)
        depth_loss, losses_BL = model.token_losses(h_BLD, later.targets, weights_BL, train)
        total += depth_loss
        loss_sums.append(jnp.sum(losses_BL * mask_BL))
        tokens.append(jnp.sum(mask_BL))
    sums = {"mtp_loss_sum": jnp.stack(loss_sums), "mtp_tokens": jnp.stack(tokens)}
    return total, sums | {"mtp_aux": auxes}


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """Sum over pipe. The cotangents of the stages are partial sums, too."""
    return collectives.sum_over(x, (PIPE_AXIS,))


summed.defvjp(lambda x: (summed(x), None), lambda _, d: (collectives.sum_over(d, (PIPE_AXIS,)),))


def metrics(sums: Sums) -> Metrics:
    """Mean cross entropy of the next token and of each MTP depth, in nats per token."""
    if "mtp_loss_sum" not in sums:
        return token_metrics(sums)
    mean_losses = sums["mtp_loss_sum"] / jnp.maximum(sums["mtp_tokens"], 1)
    mtp_losses = {f"mtp_loss/{i + 1}": mean_losses[i] for i in range(len(mean_losses))}
    return token_metrics(sums) | mtp_losses


LANGUAGE_MODELLING = Objective(masks, loss, metrics)
