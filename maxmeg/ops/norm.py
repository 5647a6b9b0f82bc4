"""RMSNorm and LayerNorm in float32 over the last dimension, with a custom gradient.

Inputs are reshaped to one matrix [T, D]: with more dimensions XLA keeps a transposed copy of the
stored input for the weight's gradient. Backward stores the statistics, at most two numbers per
vector, so that each gradient is one pass over the inputs. JAX's own weight gradient would write a
float32 product to memory and then sum it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import stored


def norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"] | None,
    bias: Float[Array, " D"] | None,
    eps: float,
    centred: bool,
    over: tuple[str, ...] = (),
    groups: int = 1,
) -> jax.Array:
    """LayerNorm (Ba et al., 2016) if `centred`, else RMSNorm (Zhang and Sennrich, 2019).

    The result has x's dtype. over: mesh axes that shard the last dimension; the statistics cover
    the whole dimension, or its part on each of `groups` groups of neighbours along `over`.
    """
    rows = x.reshape(-1, x.shape[-1])
    return normalize(rows, weight, bias, Statistics(eps, centred, over, groups)).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Statistics:
    eps: float
    centred: bool
    over: tuple[str, ...]
    groups: int = 1

    def mean(self, x_TD: jax.Array) -> jax.Array:
        sums_T1, devices = jnp.sum(x_TD, axis=-1, keepdims=True), collectives.axis_size(self.over)
        if self.groups == 1:
            sums_T1 = collectives.sum_over(sums_T1, self.over)
        else:
            inside = collectives.inside(self.over, self.groups)
            sums_TN = collectives.gather(sums_T1, self.over, 1, inside)
            sums_T1 = jnp.sum(sums_TN, axis=-1, keepdims=True)
        return sums_T1 * self.groups / (x_TD.shape[-1] * devices)


def normalized(x_TD, weight_D, bias_D, statistics: Statistics) -> jax.Array:
    return forward(x_TD, weight_D, bias_D, statistics)[0]


def forward(x_TD, weight_D, bias_D, statistics: Statistics) -> tuple[jax.Array, tuple]:
    x32_TD = x_TD.astype(jnp.float32)
    mean_T1 = stored(statistics.mean(x32_TD), "norm_mean") if statistics.centred else None
    x32_TD = x32_TD if mean_T1 is None else x32_TD - mean_T1
    variance_T1 = statistics.mean(jnp.square(x32_TD))
    scale_T1 = stored(jax.lax.rsqrt(variance_T1 + statistics.eps), "norm_scale")
    out_TD = x32_TD * scale_T1
    out_TD = out_TD if weight_D is None else out_TD * weight_D.astype(jnp.float32)
    out_TD = out_TD if bias_D is None else out_TD + bias_D.astype(jnp.float32)
    return out_TD.astype(x_TD.dtype), (x_TD, mean_T1, scale_T1, weight_D, bias_D)


def backward(statistics: Statistics, residuals, slope_TD):
    x_TD, mean_T1, scale_T1, weight_D, bias_D = residuals
    x32_TD = x_TD.astype(jnp.float32)
    unit_TD = (x32_TD if mean_T1 is None else x32_TD - mean_T1) * scale_T1
    slope32_TD = d_unit_TD = slope_TD.astype(jnp.float32)
    d_weight_D = d_bias_D = None
    if weight_D is not None:
        d_weight_D = jnp.sum(slope32_TD * unit_TD, axis=0).astype(weight_D.dtype)
        d_unit_TD = slope32_TD * weight_D.astype(jnp.float32)
    if bias_D is not None:
        d_bias_D = jnp.sum(slope32_TD, axis=0).astype(bias_D.dtype)
    d_x_TD = d_unit_TD - unit_TD * statistics.mean(d_unit_TD * unit_TD)
    d_x_TD = d_x_TD - statistics.mean(d_unit_TD) if statistics.centred else d_x_TD
    return (d_x_TD * scale_T1).astype(x_TD.dtype), d_weight_D, d_bias_D


normalize: Any = jax.custom_vjp(normalized, nondiff_argnums=(3,))
normalize.defvjp(forward, backward)
