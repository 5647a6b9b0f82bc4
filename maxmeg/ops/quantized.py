"""Matrix products of operands that are rounded to 8-bit floats, which tensor cores multiply twice
as fast as 16-bit ones. ops/fp4.py has 4-bit floats, ops/recipes.py the table of recipes.

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
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from maxmeg.ops import block_matmul
from maxmeg.ops.backend import Device, target_device
from maxmeg.ops.block_matmul import MANTISSA_BITS, power_of_two

ADA = 8, 9  # compute capability of the first GPUs with 8-bit floats
MX_BLOCK, BLOCK = 32, 128  # of mxfp8 and blockwise scaling
E4M3, E5M2, FP4 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
NAN_EXPONENT = 255
EXPONENTS = 1, 253  # the least and the largest biased exponent of a scale: its inverse is normal


# Codes, and their scale or the scales of blocks; nvfp4: also the scale of the tensor.
Quantized = tuple[jax.Array, ...]
Shares = enum.Enum("Shares", ["nothing", "layer", "column"])


MULTIPLE = 16  # sizes of matrices that cuBLAS multiplies


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a layer's products round their operands: inputs and weights to the dtype `forward`,
    gradients of outputs to `backward`.

    block: numbers with a common scale along the dimension that a product sums over; 0: one scale
    for each tensor. square: scales of weights are of block x block numbers. copies: number of
    quantized copies of a weight. multiplies_codes: products on GPUs have the rounded operands, not
    wider copies of them; in blocks of 128 `backend` (ops/block_matmul.py) decides. speed: the peak
    FLOP/s of these products, as a multiple of that for 16 bits. capability: least compute
    capability of GPUs. draws: gradients are rounded stochastically, with the key of `slopes`.
    grouped: experts' grouped products (ops/experts/grouped_matmul.py) take this recipe. dispatch:
    tokens are sent to experts in 8 bits (distributed/experts/packed.py).
    """

    forward: str = E4M3
    backward: str = E5M2
    block: int = 0
    square: bool = False
    copies: int = 1
    multiplies_codes: bool = True
    backend: str = "auto"
    speed: int = 2
    capability: tuple[int, int] = ADA
    draws: bool = False
    grouped: bool = True
    dispatch: bool = False

    @property
    def multiple(self) -> int:
        """Rows and columns of a matrix must be multiples of it."""
        return self.block or MULTIPLE

    @property
    def shares(self) -> Shares:
        """Which weights have a common scale or largest magnitude, beside those of a block."""
        return Shares.nothing if self.block else Shares.layer

    def multiplies_codes_on(self, device: Device) -> bool:
        """Whether products on this device have the rounded operands, not wider copies of them."""
        if self.block == BLOCK:
            return block_matmul.backend_of(self.backend, device) == block_matmul.MOSAIC
        return self.multiplies_codes and device.is_cuda

    def passes(self, device: Device) -> float:
        """How often quantization moves the 16-bit bytes of an operand: it is read for the largest
        magnitude and the codes, and half of it written; and read, and a wider copy written, where
        products read that."""
        return 2.5 if self.multiplies_codes_on(device) else 4.0

    def weight_bytes(self, count: int) -> int:
        """Bytes of a quantized copy of `count` weights, without scales of whole layers."""
        sharing = self.block ** (1 + self.square)  # a byte's scale; 0: none to count
        return count + (count // sharing if self.block else 0)

    def weights(self, w: Float[Array, "*E I O"], largest: jax.Array | None) -> list[Quantized]:
        """Quantize w: a copy for sums over I and one for sums over O, or one for both.

        largest: the largest magnitudes of the weights that `shares` names.
        """
        if not self.block:
            assert largest is not None
            scale = scale_of(largest, self.forward)
            return [(quantize(w, self.forward, trailing(scale, w.ndim))[0], scale)]
        if self.square:
            return [quantize_blocks(w, self.forward, (self.block, self.block))]
        return [self.quantize(w, self.forward, dim) for dim in (-2, -1)]

    def inputs(self, x: Float[Array, "*E T I"]) -> tuple[Quantized, Quantized]:
        """Quantize x for the output, summed over I, and for the gradient of w, over T."""
        rows, columns = (self.quantize(x, self.forward, dim) for dim in (-1, -2))
        return rows, columns

    def slopes(
        self, slope: Float[Array, "*E T O"], key: jax.Array | None
    ) -> tuple[Quantized, Quantized]:
        """Quantize the gradient of the output for that of x, summed over O, and of w, over T."""
        rows, columns = (self.quantize(slope, self.backward, dim) for dim in (-1, -2))
        return rows, columns

    def quantize(self, x: Float[Array, "*E R C"], dtype: str, dim: int) -> Quantized:
        """x for a product that sums over dimension `dim`, -1 or -2."""
        if not self.block:
            return quantize(x, dtype)
        return quantize_blocks(x, dtype, (1, self.block) if dim == -1 else (self.block, 1))

    def multiply(
        self, a: Quantized, b: Quantized, dims: tuple[int, int], dtype, precision=None
    ) -> jax.Array:
        """As `multiply`, of operands that were quantized for these dimensions."""
        if not self.block:
            return multiply(a, b, dims, dtype, precision)
        if self.multiplies_codes_on(target_device()):
            multiply_codes = block_matmul.multiply if self.block == BLOCK else multiply_blocks
            return multiply_codes(a, b, dims, jnp.dtype(dtype))
        left, right = (self.wide(each, wider(dtype)) for each in (a, b))
        return contract(left, right, dims, dtype)

    def wide(self, quantized: Quantized, dtype) -> jax.Array:
        """The numbers of a quantized array."""
        codes, scales = quantized
        return dequantize_blocks(codes, scales, dtype)


def check_device(recipe: Recipe, device: Device) -> None:
    """ValueError for a GPU that cannot multiply these 8-bit floats. CPUs multiply wider floats."""
    if recipe.block == BLOCK:
        block_matmul.backend_of(recipe.backend, device)
    if not device.is_cuda or device.capability == (0, 0):
        return
    capability = ".".join(map(str, device.capability))
    if device.capability < ADA <= recipe.capability:
        raise ValueError(
            "8-bit and 4-bit products need compute capability 8.9 (Ada) or newer, found "
            f"{capability}: set train.quantization.recipe=none, mxfp4 or a qat_... recipe"
        )
    if device.capability < recipe.capability:
        raise ValueError(
            "this train.quantization.recipe (mxfp8, nvfp4) needs compute capability 10.0 "
            f"(Blackwell) or newer, found {capability}: set train.quantization.recipe=tensorwise, "
            "blockwise, mxfp4 or a qat_... recipe"
        )


def trailing(scale: jax.Array, ndim: int) -> jax.Array:
    """`scale` with trailing dimensions of size 1 up to `ndim` dimensions."""
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))


def scale_of(largest: Float[Array, "*N"], dtype: str) -> Float[Array, "*N"]:
    """The smallest powers of two by which numbers up to these magnitudes must be divided to fit
    `dtype`, float32. Infinite and NaN numbers stay so with the largest one."""
    ratio = largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = lax.bitcast_convert_type(ratio, jnp.int32)
    exponent = (bits + (1 << MANTISSA_BITS) - 1) >> MANTISSA_BITS  # rounded up
    return power_of_two(jnp.clip(exponent, *EXPONENTS))


def biased_exponents(scale: Float[Array, "*N"]) -> Int32[Array, "*N"]:
    """The biased exponents of powers of two, float32."""
    return lax.bitcast_convert_type(scale, jnp.int32) >> MANTISSA_BITS


def quantize(
    x: Float[Array, "*S"], dtype: str, scale: Float[Array, "*T"] | None = None
) -> tuple[Float[Array, "*S"], Float[Array, "*T"]]:
    """(x / scale in an 8-bit `dtype`, scale). scale: None is one scale for all of x."""
    if scale is None:
        scale = scale_of(jnp.max(jnp.abs(x)), dtype)
    wide = wider(x.dtype)
    return (x.astype(wide) * (1 / scale).astype(wide)).astype(dtype), scale


def quantize_blocks(
    x: Float[Array, "*E R C"], dtype: str, block: tuple[int, int]
) -> tuple[Float[Array, "*E r c"], UInt8[Array, "*E s t"]]:
    """(x in `dtype`, the biased exponents of the scales of its blocks). Zeros are appended to rows
    and columns that do not fill their last block. In 4 bits a block with a number that is not
    finite has E8M0's NaN as its scale."""
    x = filled(x, block)
    blocks = in_blocks(x, block)
    scale = scale_of(jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True), dtype)
    codes, _ = quantize(blocks, dtype, scale)
    exponents = biased_exponents(scale)
    if dtype == FP4:
        exponents = jnp.where(all_finite(blocks), exponents, NAN_EXPONENT)
    return codes.reshape(x.shape), exponents.astype(jnp.uint8).squeeze((-3, -1))


def all_finite(x: jax.Array, axis: int | tuple[int, ...] = (-3, -1)) -> Bool[Array, "..."]:
    """Whether all numbers along the axes, which are kept, are finite. For formats without NaN: the
    largest magnitude does not tell, as XLA's maximum on CPUs may lose a NaN."""
    return jnp.all(jnp.isfinite(x), axis=axis, keepdims=True)


def filled(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """x with zeros appended to rows and columns that do not fill their last block."""
    short = [-size % number for size, number in zip(x.shape[-2:], block, strict=True)]
    if any(short):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, number) for number in short])
    return x


def in_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """[.., R, C] -> [.., R / r, r, C / c, c]."""
    (rows, columns), (r, c) = x.shape[-2:], block
    return x.reshape(*x.shape[:-2], rows // r, r, columns // c, c)


def dequantize_blocks(codes: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """The numbers that `quantize_blocks` rounded to. scales: of blocks, or integers, their
    exponents."""
    rows, columns = (n // m for n, m in zip(codes.shape[-2:], scales.shape[-2:], strict=True))
    numbers = power_of_two(scales) if scales.dtype == jnp.uint8 else scales
    scale = numbers[..., None, :, None].astype(dtype)
    return (in_blocks(codes.astype(dtype), (rows, columns)) * scale).reshape(codes.shape)


def multiply(a: Quantized, b: Quantized, dims: tuple[int, int], dtype, precision=None) -> jax.Array:
    """The product of two quantized matrices, or of two stacks of as many, each (codes, scale), over
    these two of their last dimensions (-1 or -2).

    XLA's GPU compiler looks for just this: codes, converted, times a scalar, multiplied. Elsewhere
    the product is of the wider numbers, which are the same. precision: with HIGHEST, cuBLAS on Ada
    and Hopper adds up in float32, else with about 14 bits.
    """
    wide = wider(dtype)
    left, right = (codes.astype(wide) * scale.astype(wide) for codes, scale in (a, b))
    return contract(left, right, dims, dtype, precision)


def multiply_blocks(a: Quantized, b: Quantized, dims: tuple[int, int], dtype) -> jax.Array:
    """As `multiply` on GPUs alone, of matrices in blocks along the dimensions that are summed over:
    32 with the exponents of their scales (mxfp8), or 16 with scales in E4M3 (nvfp4)."""
    in_rows = block_matmul.in_rows
    codes, scales = zip(a, b, strict=True)
    operands = [in_rows(array, dim) for array, dim in zip(codes, dims, strict=True)]
    for array, dim, rows in zip(scales, dims, [x.shape[1] for x in operands], strict=True):
        if array.dtype == jnp.uint8:
            array = lax.bitcast_convert_type(array, jnp.float8_e8m0fnu)
        array = in_rows(array, dim)
        operands.append(jnp.repeat(array, rows // array.shape[1], axis=1))  # of square blocks
    product = jax.nn.scaled_matmul(*operands, preferred_element_type=wider(dtype))
    return product.reshape(*codes[0].shape[:-2], *product.shape[1:]).astype(dtype)


def wider(dtype) -> jnp.dtype:
    """The dtype that products in `dtype` are computed in: float16 cannot hold all scales."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def contract(a: jax.Array, b: jax.Array, dims: tuple[int, int], dtype, precision=None) -> jax.Array:
    """The product of two matrices, or of two stacks of as many, over these dimensions."""
    stacked = tuple(range(a.ndim - 2))
    contracted = (a.ndim + dims[0],), (b.ndim + dims[1],)
    numbers = contracted, (stacked, stacked)
    product = lax.dot_general(a, b, numbers, precision, preferred_element_type=a.dtype)
    return product.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def matmul(
    x: Float[Array, "*E T I"],
    w: Float[Array, "*E I O"],
    forward: Quantized,
    backward: Quantized,
    recipe: Recipe,
    key: UInt32[Array, "2"] | None = None,
) -> Float[Array, "*E T O"]:
    """x times w, in the dtype of x; x and gradients of the output are quantized by `recipe`.

    w: the parameter. It is not read, so that XLA neither makes nor gathers it: it gets the gradient
    of the matrices. forward, backward: w [*E, I, O], quantized for sums over I and over O. key: for
    stochastic rounding of gradients; None: they are rounded to nearest.
    """
    return matmul_forward(x, w, forward, backward, recipe, key)[0]


def matmul_forward(x, w, forward, backward, recipe, key):
    in_rows, in_columns = recipe.inputs(x)
    y = recipe.multiply(in_rows, forward, (-1, -2), x.dtype)
    return y, (in_columns, forward, backward, key)


def matmul_backward(recipe, residuals, slope):
    x_quantized, forward, backward, key = residuals
    in_rows, in_columns = recipe.slopes(slope, key)
    exact = lax.Precision.HIGHEST  # as TransformerEngine's: gradients are sums over many tokens
    x_slope = recipe.multiply(in_rows, backward, (-1, -1), slope.dtype, exact)
    w_slope = recipe.multiply(x_quantized, in_columns, (-2, -2), slope.dtype, exact)
    forward, backward, key = jax.tree.map(no_gradient, (forward, backward, key))
    return x_slope, w_slope, forward, backward, key


def no_gradient(array: jax.Array):
    """The gradient of codes, scales, exponents or a key."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


matmul.defvjp(matmul_forward, matmul_backward)
