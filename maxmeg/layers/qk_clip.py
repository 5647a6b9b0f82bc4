"""QK-clip (MuonClip; Kimi K2, 2025): scale down heads whose attention logits are too large.

The rule is Megatron-LM's (core/optimizer/qk_clip.py). After a step, each head has the factor eta =
min(1, threshold / its largest logit in the step). Its query weights are multiplied by eta^alpha and
its key weights by eta^(1 - alpha), so that the same logit would now be the threshold. Query heads
that share a key head share eta. Multi-latent attention has one rotary key for all heads, which is
not changed; the rotary part of the queries is multiplied by eta instead.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

LARGEST = "attention_logit_max"  # name of the auxiliary value: each head's largest logit


@dataclasses.dataclass(frozen=True)
class QkClip:
    """threshold: of the largest logit. alpha: queries are scaled by eta^alpha."""

    threshold: float
    alpha: float

    def shrinkage(self, largest_H: jax.Array) -> jax.Array:
        """eta [..., H] for the largest logits [..., H]."""
        exceeds_H = largest_H > self.threshold
        return jnp.where(exceeds_H, self.threshold / jnp.where(exceeds_H, largest_H, 1), 1)


def scale_heads(linear: typing.Any, *parts: tuple[jax.Array, int]) -> None:
    """Scale weights and bias of a projection by head. parts: (factor [..., heads], number of
    columns) for each consecutive part of a head's columns."""
    columns = [jnp.broadcast_to(x[..., None], (*x.shape, size)) for x, size in parts]
    factor_HI = jnp.concatenate(columns, axis=-1)
    factor_O = factor_HI.reshape(*factor_HI.shape[:-2], -1)
    linear.weight.set_value(linear.weight[...] * factor_O[..., None, :])
    if linear.bias is not None:
        linear.bias.set_value(linear.bias[...] * factor_O)
