"""QK-clip (MuonClip; Kimi K2, 2025): after a step, projections of heads with large logits shrink.

The rule is Megatron-LM's (core/optimizer/qk_clip.py): a head whose largest attention logit in the
step exceeded a threshold gets eta = threshold / logit, other heads 1. Queries are multiplied by
eta^alpha and keys by eta^(1 - alpha), so the logit would now be the threshold. Query heads that
share a key head have one eta. The rotary key of multi-latent attention, which all heads share,
stays as it is: there the rotary part of the queries is multiplied by eta.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

LARGEST = "attention_logit_max"  # name of the auxiliary value: each head's largest logit


@dataclasses.dataclass(frozen=True)
class QkClip:
    """threshold: largest logit without a change. alpha: exponent of eta in the queries' factor."""

    threshold: float
    alpha: float

    def shrinkage(self, largest_H: jax.Array) -> jax.Array:
        """eta [..., H] of the largest logits."""
        exceeds_H = largest_H > self.threshold
        return jnp.where(exceeds_H, self.threshold / jnp.where(exceeds_H, largest_H, 1), 1)


def scale_heads(linear: typing.Any, *parts: tuple[jax.Array, int]) -> None:
    """Multiply the outputs of each head. parts: (factor [..., heads], number of columns) of the
    consecutive parts of a head. A bias is an output too."""
    columns = [jnp.broadcast_to(x[..., None], (*x.shape, size)) for x, size in parts]
    factor_HI = jnp.concatenate(columns, axis=-1)
    factor_O = factor_HI.reshape(*factor_HI.shape[:-2], -1)
    linear.weight.set_value(linear.weight[...] * factor_O[..., None, :])
    if linear.bias is not None:
        linear.bias.set_value(linear.bias[...] * factor_O)
