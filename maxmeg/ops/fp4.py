"""Matrix products of 4-bit floats (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign) in NVFP4, which
Blackwell's tensor cores multiply four times as fast as 16-bit floats.

NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; TransformerEngine) divides 16
numbers along the dimension that a product sums over by a scale in E4M3, which itself is a multiple
of one float32 scale for the tensor. Here that one is a power of two: E4M3 then rounds the scale of
a block to the same number whatever else is in the tensor, so that results do not depend on how
devices share tokens. (TransformerEngine's is largest magnitude / 2688. The power of two costs up to
a bit of the 17 octaves of E4M3, and no precision.)

- Weights have blocks of 16 x 16, so that forward and backward multiply the same numbers.
- The operands of a weight gradient are first rotated by a random Hadamard transform of 16 tokens,
  which spreads outliers over a block. The rotation cancels in the product.
- Gradients are rounded stochastically, so that their mean over keys is exact. The exception: scales
  are rounded to nearest, and numbers above 6 times their block's scale are clipped, by at most 1/16
  (more in blocks 2**15 times smaller than the tensor's largest number, which may become 0).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from maxmeg.ops.backend import BLACKWELL, Device, target_device
from maxmeg.ops.block_matmul import power_of_two
from maxmeg.ops.quantized import (
    E4M3,
    FP4,
    MX_BLOCK,
    Quantized,
    Recipe,
    Shares,
    all_finite,
    contract,
    dequantize_blocks,
    filled,
    in_blocks,
    multiply_blocks,
    quantize_blocks,
    scale_of,
    trailing,
    wider,
)
from maxmeg.ops.random import fold, random_bits

FP4_LARGEST, E4M3_LARGEST = 6.0, 448.0
BLOCK = 16  # numbers with one scale, and tokens that a Hadamard transform mixes
# Bit j: the transform negates token j. Fixed, since both operands of a product need the same.
# TransformerEngine's.
NEGATED = 0b1101_0111_1110_1000


@dataclasses.dataclass(frozen=True)
class Nvfp4(Recipe):
    """Products of NVFP4 operands. square=False is for weights that forward alone multiplies."""

    forward: str = FP4
    backward: str = FP4
    block: int = BLOCK
    speed: int = 4
    capability: tuple[int, int] = (BLACKWELL, 0)
    draws: bool = True
    grouped: bool = False

    def passes(self, device: Device) -> float:
        """An operand is read twice and rotated; that is written and read twice; then codes."""
        return 6.5

    @property
    def shares(self) -> Shares:
        return Shares.layer

    def weight_bytes(self, count: int) -> int:
        return count // 2 + count // BLOCK ** (1 + self.square)

    def weights(self, w: Float[Array, "*E I O"], largest: jax.Array | None) -> list[Quantized]:
        """One copy, two codes in a byte: collectives have no 4-bit numbers."""
        codes, *scales = quantize_nvfp4(w, (BLOCK, BLOCK if self.square else 1), largest)
        return [(packed(codes), *scales)]

    def inputs(self, x: Float[Array, "*E T I"]) -> tuple[Quantized, Quantized]:
        return quantize_nvfp4(x, (1, BLOCK)), quantize_nvfp4(rotated(x), (BLOCK, 1))

    def slopes(
        self, slope: Float[Array, "*E T O"], key: jax.Array | None
    ) -> tuple[Quantized, Quantized]:
        keys = [None, None]
        if key is not None:
            base = fold(jax.random.wrap_key_data(key), checksum(slope))
            keys = [fold(base, number) for number in range(2)]
        rows = quantize_nvfp4(slope, (1, BLOCK), key=keys[0])
        return rows, quantize_nvfp4(rotated(slope), (BLOCK, 1), key=keys[1])

    def multiply(
        self, a: Quantized, b: Quantized, dims: tuple[int, int], dtype, precision=None
    ) -> jax.Array:
        if not target_device().is_cuda:
            left, right = (self.wide(each, wider(dtype)) for each in (a, b))
            return contract(left, right, dims, dtype)
        left, right = (
            (unpacked(codes) if codes.dtype == jnp.uint8 else codes, scales)
            for codes, scales, _ in (a, b)
        )
        product = multiply_blocks(left, right, dims, wider(dtype))
        return (product * (a[2] * b[2]).astype(product.dtype)).astype(dtype)

    def wide(self, quantized: Quantized, dtype) -> jax.Array:
        codes, scales, scale = quantized
        scales = scales.astype(jnp.float32) * trailing(scale, scales.ndim)
        return dequantize_blocks(decoded(codes, dtype), scales, dtype)


@dataclasses.dataclass(frozen=True)
class Mxfp4(Recipe):
    """MXFP4 (OCP Microscaling formats): E2M1 with a power of two for 32 numbers, rounded up as in
    MXFP8. For forward alone (ops/straight_through.py): jax 0.10 has no such product on GPUs."""

    forward: str = FP4
    block: int = MX_BLOCK

    def weight_bytes(self, count: int) -> int:
        return count // 2 + count // MX_BLOCK

    def weights(self, w: Float[Array, "*E I O"], largest: jax.Array | None) -> list[Quantized]:
        codes, exponents = quantize_blocks(w, FP4, (MX_BLOCK, 1))
        return [(packed(codes), exponents)]

    def wide(self, quantized: Quantized, dtype) -> jax.Array:
        codes, exponents = quantized
        return dequantize_blocks(decoded(codes, dtype), exponents, dtype)


def quantize_nvfp4(
    x: Float[Array, "*E R C"],
    block: tuple[int, int],
    largest: Float[Array, "*L"] | None = None,
    key: jax.Array | None = None,
) -> Quantized:
    """(x in E2M1, the scales of its blocks in E4M3, the scales of the first dimensions).

    Zeros are appended to rows and columns that do not fill their last block. largest: the largest
    magnitudes in x, for each index of the first dimensions; None: one for all. key: rounds
    stochastically. A block with a number that is not finite becomes NaN.
    """
    x = filled(x, block)
    if largest is None:
        largest = jnp.max(jnp.abs(x))
    scale = scale_of(largest.astype(jnp.float32) / FP4_LARGEST, E4M3)
    blocks = in_blocks(x, block).astype(jnp.float32)
    factor = trailing(scale, blocks.ndim)
    most = jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True)
    ratio = most * (1 / factor * np.float32(1 / FP4_LARGEST))
    ratio = jnp.where(all_finite(blocks), jnp.minimum(ratio, E4M3_LARGEST), jnp.nan)
    scales = ratio.astype(E4M3)
    inverse = jnp.minimum(1 / (scales.astype(jnp.float32) * factor), jnp.finfo(jnp.float32).max)
    y = jnp.clip(blocks * inverse, -FP4_LARGEST, FP4_LARGEST).reshape(x.shape)
    rows = (lax.broadcasted_iota(jnp.uint32, x.shape[:-1], i) for i in range(x.ndim - 1))
    bits = None if key is None else random_bits(x.shape, key, *rows)
    return rounded(y, bits).astype(FP4), scales.squeeze((-3, -1)), scale


def rounded(y: Float[Array, "*S"], bits: UInt32[Array, "*S"] | None = None) -> Float[Array, "*S"]:
    """y, -6 to 6, rounded to numbers of E2M1: to the nearest (XLA's conversion rounds twice), or
    with random bits up with the probability of the part that is cut off."""
    size = jnp.abs(y)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    if bits is None:
        steps = jnp.round(size / step)
    else:
        uniform = (bits >> 12).astype(jnp.float32) * np.float32(2**-20)
        steps = jnp.floor(size / step + uniform)
    return jnp.copysign(steps * step, y)


def checksum(x: jax.Array) -> UInt32[Array, ""]:
    """The sum of the bits of x: different for different microbatches, without a counter."""
    words = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    return jnp.sum(lax.bitcast_convert_type(x, words), dtype=jnp.uint32)


def hadamard() -> Float[Array, "16 16"]:
    """The transform H diag(signs), orthogonal. Computed from indices: autodiff would store a
    constant for each layer, and XLA rotate an input once for each projection that reads it."""
    i = lax.iota(jnp.uint32, BLOCK)
    is_negative = (lax.population_count(i[:, None] & i) ^ (NEGATED >> i)) & 1
    return jnp.where(is_negative, -1.0, 1.0) / BLOCK**0.5


def rotated(x: Float[Array, "*E T C"]) -> Float[Array, "*E t C"]:
    """`hadamard` of every 16 tokens of x, with zeros for the last ones."""
    x = filled(x, (BLOCK, 1))
    tokens = x.reshape(*x.shape[:-2], -1, BLOCK, x.shape[-1])
    matrix = hadamard().astype(x.dtype)
    mixed = jnp.einsum("ij,...jc->...ic", matrix, tokens, precision=lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)


def packed(codes: Float[Array, "*E R C"]) -> UInt8[Array, "*E R c"]:
    """Two codes in a byte, the first in the low bits."""
    y = codes.astype(jnp.float32)
    size = jnp.abs(y)
    bits = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
    bits = bits.astype(jnp.uint8) | (jnp.signbit(y).astype(jnp.uint8) << 3)
    return bits[..., ::2] | (bits[..., 1::2] << 4)


def unpacked(codes: UInt8[Array, "*E R c"]) -> Float[Array, "*E R C"]:
    """The codes of `packed`. On GPUs alone: XLA's CPU compiler fails with some of these casts."""
    pairs = lax.bitcast_convert_type(codes, FP4)
    return pairs.reshape(*codes.shape[:-1], -1)


def decoded(codes: jax.Array, dtype) -> Float[Array, "*E R C"]:
    """The numbers of codes, which may be `packed`, in a wider dtype."""
    if codes.dtype != jnp.uint8:
        return codes.astype(dtype)
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
    bits = pairs.reshape(*codes.shape[:-1], -1).astype(jnp.int32)
    exponent, half = (bits >> 1) & 3, (bits & 1) * np.float32(0.5)
    size = jnp.where(exponent == 0, half, (1 + half) * power_of_two(exponent + 126))
    return jnp.where(bits > 7, -size, size).astype(dtype)
