"""The protocols of models and objectives that a train step calls."""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.layers.stream import Stream
from maxmeg.models.stack import Stack
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import NO_TARGETS, Batch

Sums = dict[str, typing.Any]
Metrics = dict[str, typing.Any]
TargetLoss = Callable[[jax.Array, Batch], jax.Array]  # (logits_BLV, batch) -> losses_BL


class Model(typing.Protocol):
    """The methods that a train step and a pipeline call.

    embed: the stack's input, as partial sums over pipe. reads: names of the arrays of the stack's
    output that `outputs` reads. outputs: the objective's input, for the whole sequence. aux_of:
    auxiliary values of the layers, from the sums of a whole step. update: set the layers' state
    from them. token_losses: sum of weights * loss, and the plain cross entropy [B, L].
    """

    stack: Stack
    reads: tuple[str, ...]

    def embed(self, batch: Batch, ctx: Context) -> Stream: ...

    def outputs(self, x: Stream, ctx: Context) -> jax.Array: ...

    def token_losses(
        self, h_BLD: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, train: TrainConfig
    ) -> tuple[jax.Array, jax.Array]: ...

    def aux_of(self, sums: Sums) -> list: ...

    def update(self, aux: list) -> None: ...


def target_masks(model: Model, batch: Batch) -> Sequence[jax.Array]:
    return [batch.loss_mask]


def token_loss(
    model: Model, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context
) -> tuple[jax.Array, Sums]:
    """(local contribution to the mean cross entropy of the targets, sums over local tokens)."""
    mask_BL = batch.loss_mask
    weights_BL = mask_BL / batch.divisors[0]
    loss, losses_BL = model.token_losses(h_BLD, batch.targets, weights_BL, train)
    return loss, {"loss_sum": jnp.sum(losses_BL * mask_BL), "tokens": jnp.sum(mask_BL)}


def token_metrics(sums: Sums) -> Metrics:
    """Mean cross entropy, weighted by the loss mask, in nats per token."""
    return {"loss": sums["loss_sum"] / jnp.maximum(sums["tokens"], NO_TARGETS)}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss and its normalization; by default the cross entropy of the targets.

    masks(model, batch): target masks of all losses in training, the main loss first; batch.divisors
    has one element per mask, in evaluation that of the main loss alone.
    head_inputs(model, batch, ctx): arrays that `loss_inputs` reads, as partial sums over pipe.
    loss_inputs(model, x, head_inputs, batch, ctx): ([inputs of the loss], auxiliary values), from
    the stack's output x and the sums of `head_inputs`, computed by the last pipeline stage alone
    (elsewhere x is not the stack's output: see pipeline/last_stage.py).
    loss(model, outputs, batch, train, ctx, *loss_inputs): (local contribution to the global loss,
    sums over local tokens, including "tokens"); both are summed over microbatches and devices.
    metrics(sums): scalars by name, including "loss".
    """

    masks: Callable[[typing.Any, Batch], Sequence[jax.Array]] = target_masks
    head_inputs: Callable[..., list[jax.Array]] = lambda *_: []
    loss_inputs: Callable[..., tuple[list[jax.Array], Sums]] = lambda *_: ([], {})
    loss: Callable[..., tuple[jax.Array, Sums]] = token_loss
    metrics: Callable[[Sums], Metrics] = token_metrics


def objective_of(function: TargetLoss) -> Objective:
    """The objective whose loss is the mean of `function(logits_BLV, batch)` over the targets.

    `function` returns one float32 loss per target, [B, L], weighted by batch.loss_mask. All devices
    that share a vocabulary compute it; each counts its part.
    """

    def loss(model, h_BLD: jax.Array, batch: Batch, train: TrainConfig, ctx: Context):
        logits_BLV = model.logits(h_BLD)
        losses_BL = function(logits_BLV, batch)
        if losses_BL.shape != batch.targets.shape:
            raise ValueError(
                f"the loss function returned shape {losses_BL.shape} for targets of shape "
                f"{batch.targets.shape}: return one loss per target"
            )
        mask_BL = batch.loss_mask
        copies = collectives.axis_size(collectives.VOCAB_AXES)
        total = jnp.sum(losses_BL * mask_BL / batch.divisors[0]) / copies
        return total, {"loss_sum": jnp.sum(losses_BL * mask_BL), "tokens": jnp.sum(mask_BL)}

    return Objective(loss=loss)
