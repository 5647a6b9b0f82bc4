"""Language modelling: the cross entropy of next tokens and, with MTP layers, of tokens after them.

Multi-token prediction (DeepSeek-V3, 2024): models/mtp.py has the layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Metrics, Objective, Sums, token_loss, token_metrics
from maxmeg.ops.dropout import fold
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.collectives import PIPE_AXIS

FIRST_KEY = 2**30  # seeds the dropout of the MTP layers' embeddings, apart from that of layers


def shifted(batch: Batch, depth: int) -> Batch:
    """The batch [..., L] of the tokens and targets `depth` places later.

    Tokens, positions, targets and mask are zero where that place is beyond the row or in another
    document.
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


def loss(
    model: LM, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """The loss of next tokens, plus, where the batch has their divisors, those of MTP layers."""
    total, sums = token_loss(model, h_BLD, batch, train, ctx)
    if batch.divisors.shape[-1] > 1:
        mtp_total, mtp_sums = mtp_loss(model, h_BLD, batch, train, ctx)
        return total + mtp_total, sums | mtp_sums
    return total, sums


def mtp_loss(
    model: Any, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """The losses of the MTP layers: (this device's share of factor x mean over depths of the
    depths' mean losses, sums over tokens of each depth).

    The sums hold the auxiliary values of each depth's layer as "mtp_aux". Each depth's divisor is
    its own number of targets, so that rows which are shorter by the depth weigh as much. (So does
    Megatron-LM, but with --calculate-per-token-loss, where it divides by the number of all
    targets.) Over pipe every stage computes the same layers, and its part of the vocabulary: the
    balance losses of experts count on one stage alone.
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
    """The sum over pipe of each stage's share. Each stage's cotangent is a share too."""
    return collectives.sum_over(x, (PIPE_AXIS,))


summed.defvjp(lambda x: (summed(x), None), lambda _, d: (collectives.sum_over(d, (PIPE_AXIS,)),))


def metrics(sums: Sums) -> Metrics:
    """The mean cross entropy of next tokens and of each MTP depth, in nats per token."""
    if "mtp_loss_sum" not in sums:
        return token_metrics(sums)
    means_D = sums["mtp_loss_sum"] / jnp.maximum(sums["mtp_tokens"], 1)
    of_depths = {f"mtp_loss/{i + 1}": means_D[i] for i in range(len(means_D))}
    return token_metrics(sums) | of_depths


LANGUAGE_MODELLING = Objective(masks, loss, metrics)
