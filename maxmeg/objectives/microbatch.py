"""A batch as layers and losses read it: divisors of the losses, and the context of the layers."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxmeg.config.schema import LossReduction
from maxmeg.layers.context import Context, Source
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import NO_TARGETS, Batch
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES, TOKEN_AXES


def context(batch: Batch, raw_key: jax.Array | None) -> Context:
    """What the layers know about a microbatch. raw_key: of the step's randomness in training, None
    in evaluation."""
    tokens_BS, source = batch.extra.get("encoder_tokens"), None
    if tokens_BS is not None:
        source = Source.of(tokens_BS, batch.extra["encoder_segment_ids"])
    return Context(
        batch.positions,
        batch.segment_ids,
        token_types_BL=batch.extra.get("token_types"),
        tokens_BL=batch.tokens,
        rows_B=batch.rows,
        dropout_key=None if raw_key is None else jax.random.wrap_key_data(raw_key),
        microbatch_weight=batch.microbatch_weight,
        training=raw_key is not None,
        chunks_BC=batch.chunks,
        source=source,
    )


def with_divisors(
    batch: Batch,
    reduction: LossReduction,
    shards: int,
    masks: Sequence[jax.Array],
    scale: jax.Array | float = 1.0,
) -> Batch:
    """The batch [M, B, ...] with the rows' numbers in the global batch, the divisor of the loss of
    each of `masks` [M, B, L], and the weight of each microbatch in means over them.

    Losses and gradients then need only be summed. token_mean: mean over the global batch, weighted
    by the mask; megatron: mean over microbatches and ranks of such means. scale: factor of losses.
    """
    M, B, _ = batch.tokens.shape
    first = collectives.first_index(BATCH_AXES, B)
    rows_MB = jnp.arange(M)[:, None] * B * shards + first + jnp.arange(B)[None]

    def divisors(mask_MBL: jax.Array) -> jax.Array:
        if reduction is LossReduction.token_mean:
            total = collectives.sum_over(jnp.sum(mask_MBL), TOKEN_AXES)
            return jnp.full(M, jnp.maximum(total, NO_TARGETS))
        totals_M = collectives.sum_over(jnp.sum(mask_MBL, axis=(1, 2)), CONTEXT_AXES)
        return jnp.maximum(totals_M, NO_TARGETS) * (M * shards)

    return dataclasses.replace(
        batch,
        rows=rows_MB,
        divisors=jnp.stack([divisors(mask_MBL) for mask_MBL in masks], axis=1) / scale,
        microbatch_weight=jnp.full(M, scale / M),
    )
