"""Normalization in float32 over the last dimension.

Vectors are taken as one matrix [.., D]: with more dimensions XLA keeps, for the weight's gradient,
a transposed copy of whatever a stack of layers stores of the input.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype (Zhang and Sennrich, 2019)."""
    x32 = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype).reshape(x.shape)


def layer_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * weight + bias, in x's dtype (Ba et al., 2016)."""
    x32 = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    out = centered * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)
    return out.astype(x.dtype).reshape(x.shape)
