"""What a step needs to know of a model and of a loss."""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.models.stack import Stack
from maxmeg.parallel.batch import Batch

Sums = dict[str, typing.Any]
Metrics = dict[str, typing.Any]


class Model(typing.Protocol):
    """What a step and a pipeline call: embed, the units of `stack`, outputs.

    embed: the stack's input; over pipe, a share of it that is to be summed. outputs: what the
    objective reads, from the stack's output, for the whole sequence. update: set the state of all
    layers from the sums of a whole step. token_losses: sum of weights * loss, and the plain cross
    entropy of every target [B, L].
    """

    stack: Stack

    def embed(self, batch: Batch, ctx: Context) -> jax.Array: ...

    def outputs(self, x_BLD: jax.Array, ctx: Context) -> jax.Array: ...

    def token_losses(
        self, h_BLD: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, train: TrainConfig
    ) -> tuple[jax.Array, jax.Array]: ...

    def update(self, sums: Sums) -> None: ...


def target_masks(model: Model, batch: Batch) -> Sequence[jax.Array]:
    """One loss, of all targets."""
    return [batch.loss_mask]


def token_loss(
    model: Model, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """(this device's share of the mean cross entropy of the targets, sums over its tokens)."""
    mask_BL = batch.loss_mask
    weights_BL = mask_BL / batch.divisors[0]
    loss, losses_BL = model.token_losses(h_BLD, batch.targets, weights_BL, train)
    return loss, {"loss_sum": jnp.sum(losses_BL * mask_BL), "tokens": jnp.sum(mask_BL)}


def token_metrics(sums: Sums) -> Metrics:
    """The mean cross entropy, in nats per token."""
    return {"loss": sums["loss_sum"] / jnp.maximum(sums["tokens"], 1)}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss and its normalization. The defaults are those of a cross entropy of targets.

    masks(model, batch): the masks of the targets of each loss in training, the main loss first;
    batch.divisors has one element for each. Evaluation computes the main loss alone: batch.divisors
    then has one element.
    loss(model, outputs, batch, train, ctx): this device's share of the global loss, and sums over
    its tokens, "tokens" among them; both are added over microbatches and devices.
    metrics(sums): scalars by name, "loss" among them.
    """

    masks: Callable[[typing.Any, Batch], Sequence[jax.Array]] = target_masks
    loss: Callable[..., tuple[jax.Array, Sums]] = token_loss
    metrics: Callable[[Sums], Metrics] = token_metrics
