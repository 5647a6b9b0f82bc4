"""Language modelling: cross entropy of the next token and, with MTP layers, of later tokens."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.config.schema import TrainConfig
from maxmeg.distributed.halves import own_pieces, whole_rows
from maxmeg.layers.context import Context
from maxmeg.layers.stream import Stream
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Metrics, Objective, Sums, token_loss, token_metrics
from maxmeg.ops.random import fold
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import NO_TARGETS, Batch
from maxmeg.parallel.trainable import fixed, joined, trained
from maxmeg.pipeline.last_stage import is_piped, on_last_stage

FIRST_KEY = 2**30  # random key of the dropout of the first MTP layer's embedding


def shifted(batch: Batch, depth: int) -> Batch:
    """The batch [..., L] with tokens, targets, positions and mask shifted by `depth` tokens.

    They are zero if the shifted token is past the end of the row or in another document.
    """
    arrays = [batch.tokens, batch.targets, batch.positions, batch.loss_mask]
    arrays += [] if batch.segment_ids is None else [batch.segment_ids]
    # Bits, so that one collective moves them all.
    bits = [lax.bitcast_convert_type(array, jnp.int32) for array in arrays]
    rows = whole_rows(jnp.stack(bits), batch.chunks)
    rows_ahead = jnp.concatenate([rows[..., depth:], jnp.zeros_like(rows[..., :depth])], axis=-1)
    exists = jnp.arange(rows.shape[-1]) < rows.shape[-1] - depth
    if batch.segment_ids is not None:
        exists &= rows_ahead[-1] == rows[-1]
    rows_ahead = own_pieces(jnp.where(exists, rows_ahead[:4], 0), batch.chunks)
    tokens, targets, positions, loss_mask = (
        lax.bitcast_convert_type(part, array.dtype)
        for part, array in zip(rows_ahead, arrays, strict=False)
    )
    return dataclasses.replace(
        batch, tokens=tokens, targets=targets, positions=positions, loss_mask=loss_mask
    )


def masks(model: LM, batch: Batch) -> list[jax.Array]:
    mtp_masks = [shifted(batch, i + 1).loss_mask for i in range(len(model.mtp.depths))]
    return [batch.loss_mask, *mtp_masks]


def head_inputs(model: LM, batch: Batch, ctx: Context) -> list[jax.Array]:
    """Embeddings of the tokens that each MTP layer reads, as partial sums over pipe; none in
    evaluation, where batch.divisors has only that of the main loss."""
    embeddings = []
    for i in range(batch.divisors.shape[-1] - 1):
        tokens, key = shifted(batch, i + 1), ctx.dropout_key
        embedding_ctx = dataclasses.replace(
            ctx,
            positions_BL=tokens.positions,
            dropout_key=key if key is None else fold(key, FIRST_KEY + i),
        )
        embeddings.append(model.embed_side(tokens.tokens, embedding_ctx))
    return embeddings


def loss_inputs(
    model: typing.Any, x: Stream, embeddings: list[jax.Array], batch: Batch, ctx: Context
) -> tuple[list[jax.Array], Sums]:
    """([normed output of each MTP layer for the sequence shard], {"mtp_aux": auxiliary values}).
    embeddings: as from `head_inputs`."""
    if not embeddings:
        return [], {}

    def run(params, inputs, constants):
        (x, embeddings), (fixed_parts, ctx) = inputs, constants
        final_norm, depths = joined(params, fixed_parts)
        x_BLD = x["target"] if final_norm is None else final_norm(x["target"])
        outputs, auxes = [], []
        for i, (depth, later_BLD) in enumerate(zip(depths, embeddings, strict=True)):
            x = x | {"target": depth.joined(x_BLD, later_BLD)}
            layer = sum(model.stack.repeats) + i
            x, aux = model.stack.run_unit(depth.layer, x, ctx, layer, prevent_cse=not is_piped())
            x_BLD = depth.final_norm(x["target"])
            outputs.append(x_BLD)
            auxes.append(aux)
        return outputs, auxes

    parts = (model.final_norm, list(model.mtp.depths))
    outputs, auxes = on_last_stage(run, trained(parts), (x, embeddings), (fixed(parts), ctx))
    return outputs, {"mtp_aux": auxes}


@jax.named_scope("loss")
def loss(
    model: typing.Any,
    h_BLD: jax.Array,
    batch: Batch,
    train: TrainConfig,
    ctx: Context,
    *outputs_BLD: jax.Array,
) -> tuple[jax.Array, Sums]:
    """(local contribution to the loss of the next token plus factor * mean over MTP layers of their
    mean losses, sums per layer).

    Each MTP layer is divided by its own number of targets, as in Megatron-LM (which divides by the
    number of all targets with --calculate-per-token-loss).
    """
    total, sums = token_loss(model, h_BLD, batch, train, ctx)
    loss_sums, counts = [], []
    for i, x_BLD in enumerate(outputs_BLD):
        tokens = shifted(batch, i + 1)
        mask_BL = tokens.loss_mask
        weights_BL = mask_BL * (model.mtp.factor / len(outputs_BLD)) / batch.divisors[i + 1]
        h_BLD = collectives.gather_sequence(x_BLD)
        depth_loss, losses_BL = model.token_losses(h_BLD, tokens.targets, weights_BL, train)
        total += depth_loss
        loss_sums.append(jnp.sum(losses_BL * mask_BL))
        counts.append(jnp.sum(mask_BL))
    if outputs_BLD:
        sums |= {"mtp_loss_sum": jnp.stack(loss_sums), "mtp_tokens": jnp.stack(counts)}
    return total, sums


def metrics(sums: Sums) -> Metrics:
    """Mean cross entropy of the next token and of each MTP depth, in nats per token."""
    if "mtp_loss_sum" not in sums:
        return token_metrics(sums)
    means = sums["mtp_loss_sum"] / jnp.maximum(sums["mtp_tokens"], NO_TARGETS)
    return token_metrics(sums) | {f"mtp_loss/{i + 1}": means[i] for i in range(len(means))}


LANGUAGE_MODELLING = Objective(masks, head_inputs, loss_inputs, loss, metrics)
