"""Matrix products of operands that are rounded to 8-bit floats, which tensor cores multiply twice
as fast as 16-bit ones.

An operand is divided by its scale, the smallest power of two with which its largest magnitude fits
the format, and rounded (Micikevicius et al., 2022; TransformerEngine's "current scaling"). Powers
of two keep mantissas: a number is rounded to the same value whatever shares its scale, unless it is
so small that the format has fewer bits for it (E4M3: below 2^-14 of the largest). So results hardly
depend on how devices share the tokens, and devices need not ask each other for their maxima.

XLA makes a cuBLAS call of each product on GPUs from Ada and Hopper on (`multiply`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

MANTISSA_BITS = 23  # of float32
EXPONENTS = 1, 253  # the least and the largest biased exponent of a scale: its inverse is normal


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The dtypes of inputs and weights, and of gradients of outputs."""

    forward: str = "float8_e4m3fn"
    backward: str = "float8_e5m2"


def scale_of(largest: Float[Array, "*N"], dtype: str) -> Float[Array, "*N"]:
    """The smallest powers of two by which numbers up to these magnitudes must be divided to fit
    `dtype`, float32. Infinite and NaN numbers stay so with the largest one."""
    ratio = largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = lax.bitcast_convert_type(ratio, jnp.int32)
    exponent = (bits + (1 << MANTISSA_BITS) - 1) >> MANTISSA_BITS  # rounded up
    exponent = jnp.clip(exponent, *EXPONENTS)
    return lax.bitcast_convert_type(exponent << MANTISSA_BITS, jnp.float32)


def quantize(
    x: Float[Array, "*S"], dtype: str, scale: Float[Array, "*T"] | None = None
) -> tuple[Float[Array, "*S"], Float[Array, "*T"]]:
    """(x / scale in an 8-bit `dtype`, scale). scale: None is one scale for all of x."""
    if scale is None:
        scale = scale_of(jnp.max(jnp.abs(x)), dtype)
    return (x * (1 / scale).astype(x.dtype)).astype(dtype), scale


def multiply(a, b, dims: tuple[int, int], dtype) -> jax.Array:
    """The product of two quantized matrices, or of two stacks of as many, each (codes, scale), over
    these two of their last dimensions (-1 or -2).

    XLA's GPU compiler looks for just this: codes, converted, times a scalar, multiplied. Elsewhere
    the product is of the wider numbers, which are the same.
    """
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32  # float16 cannot hold all scales
    a, b = (codes.astype(wide) * scale.astype(wide) for codes, scale in (a, b))
    stacked = tuple(range(a.ndim - 2))
    contracted = (a.ndim + dims[0],), (b.ndim + dims[1],)
    numbers = contracted, (stacked, stacked)
    return lax.dot_general(a, b, numbers, preferred_element_type=wide).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def matmul(
    x: Float[Array, "*E T I"],
    w: Float[Array, "*E I O"],
    codes: Float[Array, "*E I O"],
    scale: Float[Array, ""],
    recipe: Recipe,
) -> Float[Array, "*E T O"]:
    """x times the matrices codes * scale, in the dtype of x; x and gradients of the output are
    quantized by `recipe`.

    w: the parameter that the codes are of. It is not read, so that XLA neither makes nor gathers
    it: it gets the gradient of the matrices.
    """
    return multiply(quantize(x, recipe.forward), (codes, scale), (-1, -2), x.dtype)


def matmul_forward(x, w, codes, scale, recipe):
    x_quantized = quantize(x, recipe.forward)
    y = multiply(x_quantized, (codes, scale), (-1, -2), x.dtype)
    return y, (x_quantized, codes, scale)


def matmul_backward(recipe, residuals, slope):
    x_quantized, codes, scale = residuals
    slope_quantized = quantize(slope, recipe.backward)
    x_slope = multiply(slope_quantized, (codes, scale), (-1, -1), slope.dtype)
    w_slope = multiply(x_quantized, slope_quantized, (-2, -2), slope.dtype)
    return x_slope, w_slope, jnp.zeros_like(codes), jnp.zeros_like(scale)


matmul.defvjp(matmul_forward, matmul_backward)
