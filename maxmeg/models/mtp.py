"""Multi-token prediction (DeepSeek-V3, 2024): further tokens, each by one layer more.

Depth d joins what depth d - 1 made at token t (depth 0: the model's normalized output) with the
embedding of token t + d, and its own layer and norm predict token t + d + 1 by the model's output
weights. Training alone runs it. Orders and norms are Megatron-LM's and those of DeepSeek's files.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.models.stack import Unit, UnitSpec
from maxmeg.ops.dropout import fold
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import PIPE_AXIS
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.rules import is_counted, is_variable

SHIFTED = ("tokens", "positions", "targets", "loss_mask")
FIRST_KEY = 2**30  # of the dropout of later tokens' embeddings, apart from those of layers


class Depth(nnx.Module):
    """Not cut over pipe or tensor, but for its layer: what joins two vectors works on single tokens
    of the sharded sequence."""

    def __init__(self, key: jax.Array, config: ModelConfig, layer: UnitSpec, norm: NormSpec):
        keys, width = jax.random.split(key), config.hidden_size
        self.embedding_norm = Norm(width, norm)
        self.hidden_norm = Norm(width, norm)
        self.projection = Linear(keys[0], (2 * width, width), ("norm", "embed"), config.init_std)
        self.layer = Unit(keys[1], layer)
        self.final_norm = Norm(width, norm)

    def joined(
        self, x_BLD: Float[Array, "B L D"], later_BLD: Float[Array, "B L D"]
    ) -> Float[Array, "B L D"]:
        """The layer's input."""
        parts = [self.embedding_norm(later_BLD), self.hidden_norm(x_BLD)]
        return self.projection(jnp.concatenate(parts, axis=-1))


class Mtp(nnx.Module):
    """The depths of a model whose last layer has the sublayers `layer`; theirs are of that kind."""

    def __init__(self, key: jax.Array, config: ModelConfig, layer: UnitSpec, norm: NormSpec):
        keys = jax.random.split(key, config.mtp_depths)
        self.factor = config.mtp_loss
        self.depths = nnx.List([Depth(k, config, layer, norm) for k in keys])


def shifted(batch: dict[str, jax.Array], depth: int) -> dict[str, jax.Array]:
    """Arrays [..., L] of what comes `depth` places later, zero where that is beyond the row or,
    where documents are kept apart, in another one."""
    length = batch["tokens"].shape[-1]

    def later(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[..., depth:], jnp.zeros_like(x[..., :depth])], axis=-1)

    there = jnp.arange(length) < length - depth
    if "segment_ids" in batch:
        there &= later(batch["segment_ids"]) == batch["segment_ids"]
    return {name: jnp.where(there, later(batch[name]), 0) for name in SHIFTED}


def mtp_loss(
    model: typing.Any,
    h_BLD: jax.Array,
    batch: dict[str, jax.Array],
    train: TrainConfig,
    ctx: Context,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(this device's share of factor x mean over depths of their mean losses, sums over tokens of
    each depth) of an LM's normalized outputs.

    batch["mtp_divisors"] [depths]: each depth's own number of targets, so that rows which are
    shorter by its targets weigh as much. (So does Megatron-LM, but with --calculate-per-token-loss,
    where it divides by the number of all targets.) Over pipe every stage computes the same, and
    takes its part of the vocabulary: what adds to the loss besides is counted on one.
    """
    factor, depths = model.mtp.factor, model.mtp.depths
    first = collectives.axis_index((PIPE_AXIS,)) == 0
    ctx = dataclasses.replace(ctx, share=jnp.where(first, ctx.share, 0.0))
    length = h_BLD.shape[1] // collectives.axis_size(TENSOR_AXES)
    x_BLD, total = collectives.local_sequence(h_BLD, length), jnp.zeros(())
    units, sums, tokens = sum(model.stack.repeats), [], []
    for i, depth in enumerate(depths):
        later = shifted(batch, i + 1)
        key = ctx.dropout_key
        own = {"dropout_key": key if key is None else fold(key, FIRST_KEY + i)}
        there = dataclasses.replace(ctx, positions_BL=later["positions"], **own)
        later_BLD = summed(model.embed(later["tokens"], there))
        x_BLD = depth.joined(x_BLD, later_BLD)
        x_BLD, _, _ = model.stack.run_unit(counted_once(depth.layer), x_BLD, ctx, units + i)
        x_BLD = depth.final_norm(x_BLD)
        mask_BL = later["loss_mask"]
        later["weights"] = mask_BL * (factor / len(depths)) / batch["mtp_divisors"][i]
        loss, losses_BL = model.token_losses(collectives.gather_sequence(x_BLD), later, train)
        total += loss
        sums.append(jnp.sum(losses_BL * mask_BL))
        tokens.append(jnp.sum(mask_BL))
    return total, {"mtp_loss_sum": jnp.stack(sums), "mtp_tokens": jnp.stack(tokens)}


def mtp_metrics(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The mean cross entropy of each depth, in nats a token."""
    means_D = sums["mtp_loss_sum"] / jnp.maximum(sums["mtp_tokens"], 1)
    return {f"mtp_loss/{i + 1}": means_D[i] for i in range(len(means_D))}


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """The sum over pipe of shares; what each device hands back is its share of the cotangent."""
    return collectives.sum_over(x, (PIPE_AXIS,))


summed.defvjp(lambda x: (summed(x), None), lambda _, d: (collectives.sum_over(d, (PIPE_AXIS,)),))


def counted_once(unit: Unit) -> Unit:
    """The unit; of counts, which no cotangent scales, those of one stage alone are gradients."""
    first = collectives.axis_index((PIPE_AXIS,)) == 0

    def one(variable):
        if not is_counted(variable):
            return variable
        value = variable.get_value()
        return variable.replace(jnp.where(first, value, jax.lax.stop_gradient(value)))

    return jax.tree.map(one, unit, is_leaf=is_variable)
