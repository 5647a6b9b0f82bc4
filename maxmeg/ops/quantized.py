"""Matrix products of operands that are rounded to 8-bit floats, which tensor cores multiply twice
as fast as 16-bit ones.

An operand is divided by its scale, the smallest power of two with which its largest magnitude fits
the format, and rounded (Micikevicius et al., 2022; TransformerEngine's "current scaling"). Powers
of two keep mantissas: a number is rounded to the same value whatever shares its scale, unless it is
so small that the format has fewer bits for it (E4M3: below 2^-14 of the largest). So results hardly
depend on how devices share the tokens, and devices need not ask each other for their maxima.

XLA makes a cuBLAS call of each product on GPUs from Ada and Hopper on (`multiply`).

MXFP8 (OCP Microscaling formats; Mishra et al., 2025) has a scale for every 32 numbers along the
dimension that a product sums over. Tensors are therefore quantized once along rows and once along
columns. Scales are rounded up as above, and stored as their exponents in a byte (E8M0). XLA makes
a cuDNN call of each product on GPUs from Blackwell on (`multiply_blocks`).

Blockwise scaling (DeepSeek-V3, section 3.3) has a scale for every 128 numbers of inputs and
gradients, along the dimension that is summed over, and for every 128 x 128 weights. XLA has no
matrix product for it: operands are dequantized to 16 bits first, or our kernel multiplies the codes
(ops/block_matmul.py).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from maxmeg.config.quantization import Fp8Format, QuantizationConfig, QuantizationRecipe
from maxmeg.ops import block_matmul
from maxmeg.ops.backend import BLACKWELL, Device, target_device

MANTISSA_BITS = 23  # of float32
ADA = 8, 9  # compute capability of the first GPUs with 8-bit floats
MX_BLOCK, BLOCK = 32, 128  # of mxfp8 and blockwise scaling
EXPONENTS = 1, 253  # the least and the largest biased exponent of a scale: its inverse is normal


Quantized = tuple[jax.Array, jax.Array]  # codes, and their scale or the exponents of scales


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The dtypes of inputs and weights, and of gradients of outputs.

    block: numbers with a common scale along the dimension that a product sums over; 0: one scale
    for each tensor. square: scales of weights are of block x block numbers. backend: of products in
    blocks of 128 (ops/block_matmul.py).
    """

    forward: str = "float8_e4m3fn"
    backward: str = "float8_e5m2"
    block: int = 0
    square: bool = False
    backend: str = "auto"

    def multiplies_codes_on(self, device: Device) -> bool:
        """Whether products on this device have 8-bit operands, not dequantized ones."""
        if self.block == BLOCK:
            return block_matmul.backend_of(self.backend, device) == block_matmul.MOSAIC
        return self.block in (0, MX_BLOCK) and device.is_cuda

    def weights(self, w: Float[Array, "*E I O"]) -> list[Quantized]:
        """Quantize w in blocks: a copy for sums over I and one for sums over O; one for both if
        `square`."""
        if self.square:
            return [quantize_blocks(w, self.forward, (self.block, self.block))]
        return [self.quantize(w, self.forward, dim) for dim in (-2, -1)]

    def quantize(self, x: Float[Array, "*E R C"], dtype: str, dim: int) -> Quantized:
        """x for a product that sums over dimension `dim`, -1 or -2."""
        if not self.block:
            return quantize(x, dtype)
        return quantize_blocks(x, dtype, (1, self.block) if dim == -1 else (self.block, 1))

    def multiply(self, a: Quantized, b: Quantized, dims: tuple[int, int], dtype) -> jax.Array:
        """As `multiply`, of operands that `quantize` made for these dimensions."""
        if not self.block:
            return multiply(a, b, dims, dtype)
        if self.multiplies_codes_on(target_device()):
            multiply_codes = block_matmul.multiply if self.block == BLOCK else multiply_blocks
            return multiply_codes(a, b, dims, jnp.dtype(dtype))
        left, right = (dequantize_blocks(*each, wider(dtype)) for each in (a, b))
        return contract(left, right, dims, dtype)


def recipe_of(config: QuantizationConfig) -> Recipe | None:
    """The recipe that the settings name; None: products are not quantized."""
    if config.recipe is QuantizationRecipe.none:
        return None
    e4m3 = "float8_e4m3fn"
    if config.recipe is QuantizationRecipe.mxfp8:
        return Recipe(backward=e4m3, block=MX_BLOCK)
    if config.recipe is QuantizationRecipe.blockwise:
        return Recipe(backward=e4m3, block=BLOCK, square=True, backend=config.backend.value)
    return Recipe(backward="float8_e5m2" if config.format is Fp8Format.hybrid else e4m3)


def check_device(recipe: Recipe, device: Device) -> None:
    """ValueError for a GPU that cannot multiply these 8-bit floats. CPUs multiply wider floats."""
    if recipe.block == BLOCK:
        block_matmul.backend_of(recipe.backend, device)
    if not device.is_cuda or device.capability == (0, 0):
        return
    found = ".".join(map(str, device.capability))
    if device.capability < ADA:
        raise ValueError(
            f"train.quantization needs compute capability 8.9 (Ada) or newer, found {found}: set "
            "train.quantization.recipe=none"
        )
    if recipe.block == MX_BLOCK and device.capability < (BLACKWELL, 0):
        raise ValueError(
            "train.quantization.recipe=mxfp8 needs compute capability 10.0 (Blackwell) or newer, "
            f"found {found}: set train.quantization.recipe=tensorwise"
        )


def scale_of(largest: Float[Array, "*N"], dtype: str) -> Float[Array, "*N"]:
    """The smallest powers of two by which numbers up to these magnitudes must be divided to fit
    `dtype`, float32. Infinite and NaN numbers stay so with the largest one."""
    ratio = largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = lax.bitcast_convert_type(ratio, jnp.int32)
    exponent = (bits + (1 << MANTISSA_BITS) - 1) >> MANTISSA_BITS  # rounded up
    return power_of_two(jnp.clip(exponent, *EXPONENTS))


def power_of_two(biased: jax.Array) -> jax.Array:
    """The float32 numbers with these biased exponents, integers."""
    return lax.bitcast_convert_type(biased.astype(jnp.int32) << MANTISSA_BITS, jnp.float32)


def quantize(
    x: Float[Array, "*S"], dtype: str, scale: Float[Array, "*T"] | None = None
) -> tuple[Float[Array, "*S"], Float[Array, "*T"]]:
    """(x / scale in an 8-bit `dtype`, scale). scale: None is one scale for all of x."""
    if scale is None:
        scale = scale_of(jnp.max(jnp.abs(x)), dtype)
    return (x * (1 / scale).astype(x.dtype)).astype(dtype), scale


def quantize_blocks(
    x: Float[Array, "*E R C"], dtype: str, block: tuple[int, int]
) -> tuple[Float[Array, "*E r c"], UInt8[Array, "*E s t"]]:
    """(x in an 8-bit `dtype`, the biased exponents of the scales of its blocks). Zeros are appended
    to rows and columns that do not fill their last block."""
    short = [-size % number for size, number in zip(x.shape[-2:], block, strict=True)]
    if any(short):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, number) for number in short])
    blocks = in_blocks(x, block)
    scale = scale_of(jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True), dtype)
    codes, _ = quantize(blocks, dtype, scale)
    biased = lax.bitcast_convert_type(scale, jnp.int32) >> MANTISSA_BITS
    return codes.reshape(x.shape), biased.astype(jnp.uint8).squeeze((-3, -1))


def in_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """[.., R, C] -> [.., R / r, r, C / c, c]."""
    (rows, columns), (r, c) = x.shape[-2:], block
    return x.reshape(*x.shape[:-2], rows // r, r, columns // c, c)


def dequantize_blocks(codes: jax.Array, exponents: jax.Array, dtype) -> jax.Array:
    """The numbers that `quantize_blocks` rounded to."""
    rows, columns = (n // m for n, m in zip(codes.shape[-2:], exponents.shape[-2:], strict=True))
    scale = power_of_two(exponents)[..., None, :, None].astype(dtype)
    return (in_blocks(codes.astype(dtype), (rows, columns)) * scale).reshape(codes.shape)


def multiply(a: Quantized, b: Quantized, dims: tuple[int, int], dtype) -> jax.Array:
    """The product of two quantized matrices, or of two stacks of as many, each (codes, scale), over
    these two of their last dimensions (-1 or -2).

    XLA's GPU compiler looks for just this: codes, converted, times a scalar, multiplied. Elsewhere
    the product is of the wider numbers, which are the same.
    """
    wide = wider(dtype)
    left, right = (codes.astype(wide) * scale.astype(wide) for codes, scale in (a, b))
    return contract(left, right, dims, dtype)


def multiply_blocks(a: Quantized, b: Quantized, dims: tuple[int, int], dtype) -> jax.Array:
    """As `multiply` on GPUs alone, of matrices in blocks of 32 along the dimensions that are summed
    over, with the exponents of their scales."""

    def in_rows(array: jax.Array, dim: int) -> jax.Array:
        array = array if dim == -1 else array.swapaxes(-1, -2)
        return array.reshape(-1, *array.shape[-2:])

    codes, exponents = zip(a, b, strict=True)
    operands = [in_rows(array, dim) for array, dim in zip(codes, dims, strict=True)]
    for array, dim in zip(exponents, dims, strict=True):
        operands.append(lax.bitcast_convert_type(in_rows(array, dim), jnp.float8_e8m0fnu))
    product = jax.nn.scaled_matmul(*operands, preferred_element_type=wider(dtype))
    return product.reshape(*codes[0].shape[:-2], *product.shape[1:]).astype(dtype)


def wider(dtype) -> jnp.dtype:
    """The dtype that products in `dtype` are computed in: float16 cannot hold all scales."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def contract(a: jax.Array, b: jax.Array, dims: tuple[int, int], dtype) -> jax.Array:
    """The product of two matrices, or of two stacks of as many, over these dimensions."""
    stacked = tuple(range(a.ndim - 2))
    contracted = (a.ndim + dims[0],), (b.ndim + dims[1],)
    numbers = contracted, (stacked, stacked)
    return lax.dot_general(a, b, numbers, preferred_element_type=a.dtype).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def matmul(
    x: Float[Array, "*E T I"],
    w: Float[Array, "*E I O"],
    forward: Quantized,
    backward: Quantized,
    recipe: Recipe,
) -> Float[Array, "*E T O"]:
    """x times w, in the dtype of x; x and gradients of the output are quantized by `recipe`.

    w: the parameter. It is not read, so that XLA neither makes nor gathers it: it gets the gradient
    of the matrices. forward, backward: w [*E, I, O], quantized for sums over I and over O.
    """
    return matmul_forward(x, w, forward, backward, recipe)[0]


def matmul_forward(x, w, forward, backward, recipe):
    x_quantized = recipe.quantize(x, recipe.forward, -1)
    y = recipe.multiply(x_quantized, forward, (-1, -2), x.dtype)
    return y, (recipe.quantize(x, recipe.forward, -2), forward, backward)


def matmul_backward(recipe, residuals, slope):
    x_quantized, forward, backward = residuals
    in_rows = recipe.quantize(slope, recipe.backward, -1)
    x_slope = recipe.multiply(in_rows, backward, (-1, -1), slope.dtype)
    in_columns = recipe.quantize(slope, recipe.backward, -2)
    w_slope = recipe.multiply(x_quantized, in_columns, (-2, -2), slope.dtype)
    return x_slope, w_slope, *jax.tree.map(no_gradient, (forward, backward))


def no_gradient(array: jax.Array):
    """The gradient of codes, scales or exponents."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


matmul.defvjp(matmul_forward, matmul_backward)
