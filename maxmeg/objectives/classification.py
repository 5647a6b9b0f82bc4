"""Classification: cross entropy of the classes of texts or words, or of the choices of a question.

A text's class is the target of one of its tokens, so that rows hold any number of texts.
"""

import functools

import jax
import jax.numpy as jnp

from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.objectives.objective import Metrics, Objective, Sums, token_metrics
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch


@jax.named_scope("loss")
def loss(
    between_choices: bool,
    model: LM,
    logits_BLC: jax.Array,
    batch: Batch,
    train: TrainConfig,
    ctx: Context,
) -> tuple[jax.Array, Sums]:
    """(local contribution to the mean loss, local sums).

    between_choices: a row is a question, each choice has one score where batch.targets is 1, and
    batch.loss_mask is set at the right choice's. All devices that share a vocabulary compute the
    loss; each counts its part.
    """
    mask_BL = batch.loss_mask
    if between_choices:
        scores_BL = logits_BLC[..., 0]
        scored_BL = jnp.where(batch.targets == 1, scores_BL, jnp.finfo(jnp.float32).min)
        total_BL = jax.nn.logsumexp(scored_BL, axis=1, keepdims=True)
        right_BL = scores_BL == scored_BL.max(axis=1, keepdims=True)
    else:
        targets_BL1 = batch.targets[..., None]
        scores_BL = jnp.take_along_axis(logits_BLC, targets_BL1, axis=-1)[..., 0]
        total_BL = jax.nn.logsumexp(logits_BLC, axis=-1)
        right_BL = logits_BLC.argmax(axis=-1) == batch.targets
    losses_BL = mask_BL * (total_BL - scores_BL)
    copies = collectives.axis_size(collectives.VOCAB_AXES)
    sums = {"loss_sum": jnp.sum(losses_BL), "tokens": jnp.sum(mask_BL)}
    sums |= {"right": jnp.sum(mask_BL * right_BL)}
    if not between_choices:
        sums["confusion"] = confusion(logits_BLC, batch)
    return jnp.sum(losses_BL) / batch.divisors[0] / copies, sums


def confusion(logits_BLC: jax.Array, batch: Batch) -> jax.Array:
    """Numbers of texts or words by class (rows) and by predicted class (columns), float32."""
    classes = logits_BLC.shape[-1]
    true_BLC = jax.nn.one_hot(batch.targets, classes) * batch.loss_mask[..., None]
    return jnp.einsum("BLC,BLD->CD", true_BLC, jax.nn.one_hot(logits_BLC.argmax(-1), classes))


def metrics(sums: Sums) -> Metrics:
    """Mean cross entropy of texts, words or questions, and the share that is predicted right."""
    return token_metrics(sums) | {"accuracy": sums["right"] / jnp.maximum(sums["tokens"], 1)}


CLASSIFICATION = Objective(loss=functools.partial(loss, False), metrics=metrics)
CHOICE = Objective(loss=functools.partial(loss, True), metrics=metrics)
