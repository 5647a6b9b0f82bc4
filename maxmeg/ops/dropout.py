"""Dropout with masks that do not depend on the layout of devices.

The random bits of an element are a hash of the key and of its global coordinates: (row of the
global batch, position, feature) or (row, head, query, key). Devices that hold the same element draw
the same bits. The hash is a few integer operations that XLA fuses with their consumer; jax.random's
generator needs three times as many, and a separate loop for each key and each mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

STEP = np.uint32(0x9E3779B9)  # keeps zeros from being hashed to zeros


def dropout(
    x: Float[Array, "..."], rate: float, key: jax.Array, *coordinates: Int[Array, "..."]
) -> jax.Array:
    """x / (1 - rate), or 0 with probability `rate`.

    coordinates: global coordinates of each vector; they broadcast to x.shape[:-1].
    """
    if rate == 0.0:
        return x
    keep = kept(x.shape, rate, key, *coordinates)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def kept(
    shape: tuple[int, ...],
    rate: float,
    key: jax.Array,
    *coordinates: jax.Array,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Mask of the elements of an array that `dropout` keeps; first: as in `random_bits`."""
    limit = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return random_bits(shape, key, *coordinates, first=first) >= limit


def random_bits(
    shape: tuple[int, ...],
    key: jax.Array,
    *coordinates: jax.Array,
    first: jax.Array | int = 0,
) -> UInt32[Array, "..."]:
    """32 random bits per element. first: global index of the first element of each vector."""
    words = _folded(jax.random.key_data(key), *coordinates)
    words = (jnp.broadcast_to(word, shape[:-1])[..., None] for word in words)
    elements = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return _absorbed(*words, elements + jnp.asarray(first, jnp.uint32))[1]


def fold(key: jax.Array, *numbers: jax.Array | int) -> jax.Array:
    """A key derived from `key`, different for every sequence of numbers."""
    return jax.random.wrap_key_data(jnp.stack(_folded(jax.random.key_data(key), *numbers)))


def _folded(key_2: UInt32[Array, "2"], *numbers):
    words = key_2[0], key_2[1]
    for number in numbers:
        words = _absorbed(*words, jnp.asarray(number, jnp.uint32))
    return words


def _absorbed(first, second, number):
    """Hash a number into two words; injective in the number."""
    first = _mixed((first ^ number) + STEP)
    return first, _mixed(second + first)


def _mixed(word):
    """A bijection of 32-bit words: Wellons' lowbias32 (Hash Prospector, 2018)."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)
