"""float32 numbers in 16 and 8 bits, stochastically rounded.

Codes of 8 bits have a scale, a power of two, for each block of at most 128 neighbours along the
last dimension. Numbers with a sign are float8_e4m3fn; squares, which have none, have 5 bits of
exponent and 3 of mantissa (uint8). Both are rounded without bias: if instead the roots of squares
were, averages with beta2 = 0.999 would grow without limit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.ops.random import random_bits

BLOCK = 128  # largest number of elements with one scale
MIN_SQUARE = 768  # code 1 of a square is the float32 with the upper bits 769, 2**-31 * 1.125


def element_bits(shape: tuple[int, ...], key: jax.Array, order=None) -> jax.Array:
    """32 random bits of each element. order: the layer in each row, if not the row's number."""
    row = jnp.uint32(0)
    for dim, size in enumerate(shape[:-1]):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], dim)
        if dim == 0 and order is not None:
            layers = jnp.asarray(order, jnp.int32).reshape(-1, *[1] * (len(shape) - 2))
            index = jnp.broadcast_to(layers, shape[:-1]).astype(jnp.uint32)  # padding is -1
        row = row * size + index
    return random_bits(shape, key, row)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 numbers, stochastically rounded: up with the probability of the part cut off."""
    upper = (_bits(x) + (bits >> 16)) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


def block_size(size: int) -> int:
    """Elements of a block along a dimension: the largest divisor of its size up to BLOCK."""
    return max(n for n in range(1, min(size, BLOCK) + 1) if size % n == 0)


def scale_of(x: jax.Array, largest: int) -> jax.Array:
    """[..., blocks]: the powers of two s with max |x| / s in [2**largest, 2**(largest + 1))."""
    blocks = x.reshape(*x.shape[:-1], -1, block_size(x.shape[-1]))
    exponent = (_bits(jnp.max(jnp.abs(blocks), axis=-1)) >> 23).astype(jnp.int32)
    return _float(jnp.clip(exponent - largest, 1, 254) << 23)


def of_elements(scale: jax.Array, size: int) -> jax.Array:
    """[..., size]: the scale of each element's block."""
    return jnp.repeat(scale, size // scale.shape[-1], axis=-1)


def to_float8(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(float8_e4m3fn codes, scales) of float32 numbers, stochastically rounded."""
    scale = scale_of(x, 7)
    y = x / of_elements(scale, x.shape[-1])
    exponent = jnp.maximum((_bits(y) >> 23) & 255, 127 - 6)  # that of subnormal codes, or more
    step = _float((exponent - 3) << 23)
    uniform = (bits >> 12).astype(jnp.float32) * np.float32(2**-20)  # the sum below is exact
    steps = jnp.floor(jnp.abs(y) / step + uniform).astype(jnp.uint32)  # 8 to 16, or of a subnormal
    codes = (_bits(y) >> 31 << 7) + (exponent - 121) * 8 + steps
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn), scale


def of_float8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * of_elements(scale, codes.shape[-1])


def to_squares(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(uint8 codes, scales) of float32 numbers >= 0, stochastically rounded. Code 0 is 0 alone:
    numbers too small for code 1 are rounded up to it, as a root of 0 would be divided by."""
    scale = scale_of(x, -1)
    upper = (_bits(x / of_elements(scale, x.shape[-1])) + (bits >> 12)) >> 20
    codes = jnp.clip(upper.astype(jnp.int32) - MIN_SQUARE, 1, 255)
    return jnp.where(x > 0, codes, 0).astype(jnp.uint8), scale


def of_squares(codes: jax.Array, scale: jax.Array) -> jax.Array:
    y = _float((codes.astype(jnp.uint32) + MIN_SQUARE) << 20)
    return jnp.where(codes > 0, y * of_elements(scale, codes.shape[-1]), 0)


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x in bfloat16, rounded to the nearest, ties away from zero; its low 16 bits, uint16)."""
    bits = _bits(x)
    upper = ((bits + 0x8000) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16), bits.astype(jnp.uint16)


def joined_float32(rounded: jax.Array, low: jax.Array) -> jax.Array:
    """The inverse of `split_float32`, bit for bit."""
    upper = jax.lax.bitcast_convert_type(rounded, jnp.uint16) - (low >> 15)
    return _float((upper.astype(jnp.uint32) << 16) | low)
