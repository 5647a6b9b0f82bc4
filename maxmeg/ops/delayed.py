"""Delayed scaling: 8-bit products with scales from the largest magnitudes of earlier steps.

The rules are those of TransformerEngine's DelayedScaling recipe. Each quantized matrix has three
operands: its input, its weight and the gradient of its output. A step quantizes each with a scale
that is known before the step, so that it need not read the operand twice, and numbers outside of
the format's range become its largest number. The step's largest magnitudes (amax) then enter the
history that the scales of the next step are computed from. Unlike TransformerEngine's, scales are
powers of two, rounded up (ops/quantized.py), and a step has one entry for all its microbatches.

A history is an array [3, 1 + length] of float32: in column 0 the exponents of the scales, then the
maxima of the last steps, newest first, 0 for steps before the first. Zeros are an empty history:
its scales are 1.
"""

import functools

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from maxmeg.ops.quantized import (
    EXPONENTS,
    Quantized,
    Recipe,
    biased_exponents,
    multiply,
    no_gradient,
    power_of_two,
    scale_of,
    wider,
)

INPUT, WEIGHT, GRADIENT = OPERANDS = range(3)  # rows of a history
BIAS = 127  # of float32's exponents


def scales_of(history: Float[Array, "*N 3 H"]) -> Float[Array, "*N 3"]:
    """The scales of the next step: operands are divided by them."""
    return power_of_two(history[..., 0] + BIAS)


def rolled(
    history: Float[Array, "*N 3 H"], largest: Float[Array, "*N 3"], recipe: Recipe
) -> Float[Array, "*N 3 H"]:
    """The history after a step with these largest magnitudes, without the oldest ones. The scale
    of an operand with the magnitude 0, infinity or NaN stays."""
    rule = recipe.history
    assert rule is not None
    maxima = jnp.concatenate([largest[..., None], history[..., 1:-1]], axis=-1)
    most = largest if rule.latest else jnp.max(maxima, axis=-1)
    dtypes = recipe.forward, recipe.forward, recipe.backward
    scales = [scale_of(most[..., row], dtypes[row]) for row in OPERANDS]
    biased = biased_exponents(jnp.stack(scales, axis=-1))
    exponents = jnp.clip(biased + rule.margin, *EXPONENTS) - BIAS
    is_known = jnp.isfinite(most) & (most > 0)
    exponents = jnp.where(is_known, exponents.astype(history.dtype), history[..., 0])
    return jnp.concatenate([exponents[..., None], maxima], axis=-1)


def amax(x: jax.Array) -> Float[Array, ""]:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def saturated(x: Float[Array, "*S"], scale: jax.Array, dtype: str) -> Float[Array, "*S"]:
    """x / scale in an 8-bit `dtype`. Finite numbers outside of its range become its largest one;
    infinity and NaN do not, so that a step that has one is skipped."""
    wide, limit = wider(x.dtype), float(jnp.finfo(dtype).max)
    scaled = jnp.clip(x.astype(wide) * (1 / scale).astype(wide), -limit, limit)
    return jnp.where(jnp.isfinite(x), scaled, x.astype(wide)).astype(dtype)


PLAIN = Partial(multiply)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def matmul(
    x: Float[Array, "*X T I"],
    w: Float[Array, "*E I O"],
    quantized: Quantized,
    scales: Float[Array, "3"],
    largest: Float[Array, "3"],
    products: Partial,
    recipe: Recipe,
) -> Float[Array, "*X T O"]:
    """x times w, in the dtype of x; x and gradients of the output are divided by their `scales`.

    w: the parameter, which is not read (ops/quantized.py). quantized: its codes and their scale.
    largest: is not read; its gradient is no gradient, but the largest magnitudes of the input and
    of the output's gradient. Where several products read one `largest`, see parallel/maxima.py.
    products: PLAIN for X = E, or what multiplies with the arguments of `ops.quantized.multiply`.
    """
    return matmul_forward(x, w, quantized, scales, largest, products, recipe)[0]


def matmul_forward(x, w, quantized, scales, largest, products, recipe):
    x_quantized = saturated(x, scales[INPUT], recipe.forward), scales[INPUT]
    y = products(x_quantized, quantized, (-1, -2), x.dtype)
    return y, (x_quantized, quantized, scales, amax(x), products)


def matmul_backward(recipe, residuals, slope):
    x_quantized, quantized, scales, x_largest, products = residuals
    slope_quantized = saturated(slope, scales[GRADIENT], recipe.backward), scales[GRADIENT]
    x_slope = products(slope_quantized, quantized, (-1, -1), slope.dtype)
    w_slope = products(x_quantized, slope_quantized, (-2, -2), slope.dtype)
    largest = jnp.stack([x_largest, jnp.zeros_like(x_largest), amax(slope)])
    unread = jax.tree.map(no_gradient, (quantized, scales))
    return x_slope, w_slope, *unread, largest, None


matmul.defvjp(matmul_forward, matmul_backward)
