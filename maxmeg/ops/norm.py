"""Normalization in float32 over the last dimension, with gradients of its own.

Vectors are taken as one matrix [.., D]: with more dimensions XLA keeps, for the weight's gradient,
a transposed copy of whatever a stack of layers stores of the input. The statistics, two numbers a
vector at most, are stored for backward: then each gradient is one pass over the inputs. Derived by
JAX, the weight's gradient would be a product in float32 written to memory and summed afterwards.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.parallel.collectives import stored


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype (Zhang and Sennrich, 2019)."""
    return normalize(x.reshape(-1, x.shape[-1]), weight, None, eps, False).reshape(x.shape)


def layer_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * weight + bias, in x's dtype (Ba et al., 2016)."""
    return normalize(x.reshape(-1, x.shape[-1]), weight, bias, eps, True).reshape(x.shape)


def normalized(x_TD, weight_D, bias_D, eps: float, centred: bool) -> jax.Array:
    """(x - mean) * scale * weight + bias; not centred: without the mean; bias None: without it."""
    return forward(x_TD, weight_D, bias_D, eps, centred)[0]


def forward(x_TD, weight_D, bias_D, eps: float, centred: bool) -> tuple[jax.Array, tuple]:
    x32_TD = x_TD.astype(jnp.float32)
    mean_T1 = stored(jnp.mean(x32_TD, axis=-1, keepdims=True)) if centred else None
    x32_TD = x32_TD if mean_T1 is None else x32_TD - mean_T1
    scale_T1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_TD), axis=-1, keepdims=True) + eps)
    scale_T1 = stored(scale_T1)
    out_TD = x32_TD * scale_T1 * weight_D.astype(jnp.float32)
    out_TD = out_TD if bias_D is None else out_TD + bias_D.astype(jnp.float32)
    return out_TD.astype(x_TD.dtype), (x_TD, mean_T1, scale_T1, weight_D, bias_D)


def backward(eps: float, centred: bool, residuals, slope_TD):
    x_TD, mean_T1, scale_T1, weight_D, bias_D = residuals
    x32_TD = x_TD.astype(jnp.float32)
    unit_TD = (x32_TD if mean_T1 is None else x32_TD - mean_T1) * scale_T1
    slope32_TD = slope_TD.astype(jnp.float32)
    d_weight_D = jnp.sum(slope32_TD * unit_TD, axis=0).astype(weight_D.dtype)
    d_bias_D = None if bias_D is None else jnp.sum(slope32_TD, axis=0).astype(bias_D.dtype)
    d_unit_TD = slope32_TD * weight_D.astype(jnp.float32)
    along_T1 = jnp.mean(d_unit_TD * unit_TD, axis=-1, keepdims=True)
    d_x_TD = d_unit_TD - unit_TD * along_T1
    d_x_TD = d_x_TD - jnp.mean(d_unit_TD, axis=-1, keepdims=True) if centred else d_x_TD
    return (d_x_TD * scale_T1).astype(x_TD.dtype), d_weight_D, d_bias_D


normalize: Any = jax.custom_vjp(normalized, nondiff_argnums=(3, 4))
normalize.defvjp(forward, backward)
