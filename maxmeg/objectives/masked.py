"""Masked language modelling: cross entropy of masked tokens and, with a head for pairs of segments,
of their order, as Megatron-LM trains BERT."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.layers.stream import Stream
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Metrics, Objective, Sums, token_loss, token_metrics
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import TENSOR_AXES


def has_pairs(model: LM) -> bool:
    return model.bert.pair is not None


def first_tokens(batch: Batch) -> jax.Array:
    """float32 [..., L], 1 for the first token of each row."""
    assert batch.segment_ids is not None
    return jnp.float32((batch.positions == 0) & (batch.segment_ids > 0))


def masks(model: LM, batch: Batch) -> list[jax.Array]:
    return [batch.loss_mask, *([first_tokens(batch)] if has_pairs(model) else [])]


def loss_inputs(
    model: LM, x: Stream, head_inputs: list[jax.Array], batch: Batch, ctx: Context
) -> tuple[list[jax.Array], Sums]:
    """([output of the layers for the first token of each row, zero where a device along context
    does not have it], no auxiliary values)."""
    if not has_pairs(model):
        return [], {}
    first_BL = ctx.shard(first_tokens(batch)).astype(x["target"].dtype)
    first_B1D = jnp.einsum("BL,BLD->BD", first_BL, x["target"])[:, None]
    return [collectives.sum_over(first_B1D, TENSOR_AXES)], {}


def targets_only(h_BLD: jax.Array, batch: Batch) -> tuple[jax.Array, Batch]:
    """Return the hidden states [B, P, D] of P tokens of each row, the masked ones among them, and
    the batch with their targets and mask [B, P]. P = batch.max_targets, at most L."""
    count = min(batch.max_targets, h_BLD.shape[1])
    places_BP = jax.lax.top_k(batch.loss_mask, count)[1]
    targets_BP, mask_BP = (
        jnp.take_along_axis(x_BL, places_BP, axis=1) for x_BL in (batch.targets, batch.loss_mask)
    )
    h_BPD = jnp.take_along_axis(h_BLD, places_BP[..., None], axis=1)
    return h_BPD, dataclasses.replace(batch, targets=targets_BP, loss_mask=mask_BP)


@jax.named_scope("loss")
def loss(
    model: typing.Any,
    h_BLD: jax.Array,
    batch: Batch,
    train: TrainConfig,
    ctx: Context,
    *first_B1D: jax.Array,
) -> tuple[jax.Array, Sums]:
    """(local contribution to the mean loss of masked tokens plus that of pairs, local sums).

    All devices that share a vocabulary compute the loss of the pairs; each counts its part.
    """
    h_BPD, masked = targets_only(h_BLD, batch)
    total, sums = token_loss(model, h_BPD, masked, train, ctx)
    for x_B1D in first_B1D:
        here_B = first_tokens(batch).sum(axis=1)
        logits_B2, labels_B = model.bert.pair_logits(model.normed(x_B1D)), pair_labels(batch)
        chosen_B = jnp.take_along_axis(logits_B2, labels_B[:, None], axis=1)[:, 0]
        losses_B = here_B * (jax.nn.logsumexp(logits_B2, axis=1) - chosen_B)
        if batch.divisors.shape[-1] > 1:
            copies = collectives.axis_size(collectives.VOCAB_AXES)
            total += jnp.sum(losses_B) / batch.divisors[1] / copies
        right_B = here_B * (jnp.argmax(logits_B2, axis=1) == labels_B)
        sums |= {"pair_loss_sum": jnp.sum(losses_B), "pairs": jnp.sum(here_B)}
        sums |= {"pairs_right": jnp.sum(right_B)}
    return total, sums


def pair_labels(batch: Batch) -> jax.Array:
    """int32 [B], 1 where the two segments of a row are swapped. ValueError without them."""
    if "is_swapped" not in batch.extra:
        raise ValueError(
            "the model has a head for pairs of segments, and the batch has no array is_swapped: "
            "add it, or set model.bert.pair_head=false"
        )
    return batch.extra["is_swapped"].astype(jnp.int32)


def metrics(sums: Sums) -> Metrics:
    """Mean cross entropy of masked tokens and of the order of pairs, and the share of pairs whose
    order is predicted right."""
    if "pairs" not in sums:
        return token_metrics(sums)
    pairs = jnp.maximum(sums["pairs"], 1)
    means = {"pair_loss": sums["pair_loss_sum"] / pairs}
    return token_metrics(sums) | means | {"pair_accuracy": sums["pairs_right"] / pairs}


MASKED = Objective(masks, loss_inputs=loss_inputs, loss=loss, metrics=metrics)
