"""Dropout whose mask depends on the seed and on the element's place, never on the layout.

Every element's bits are a hash of the key and of its global coordinates: (row of the global batch,
position, feature) or (row, head, query, key). Devices that hold the same element draw the same
bits. The hash is a few integer operations that fuse into what uses them; jax.random's generator
needs three times as many, and a loop of its own in the program for each key and each mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

STEP = np.uint32(0x9E3779B9)  # so that zeros are not hashed to zeros


def dropout(
    x: Float[Array, "..."], rate: float, key: jax.Array, *coordinates: Int[Array, "..."]
) -> jax.Array:
    """x / (1 - rate) where kept, 0 where dropped with probability `rate`.

    `coordinates` give, broadcast against x without its last dimension, where each vector lies.
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
    """Which elements of an array of that shape `dropout` keeps; first: as of `random_bits`."""
    limit = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return random_bits(shape, key, *coordinates, first=first) >= limit


def random_bits(
    shape: tuple[int, ...],
    key: jax.Array,
    *coordinates: jax.Array,
    first: jax.Array | int = 0,
) -> UInt32[Array, "..."]:
    """32 bits an element. first: number of the first element of a vector that is a part of one."""
    words = _folded(jax.random.key_data(key), *coordinates)
    words = (jnp.broadcast_to(word, shape[:-1])[..., None] for word in words)
    elements = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return _absorbed(*words, elements + jnp.asarray(first, jnp.uint32))[1]


def fold(key: jax.Array, *numbers: jax.Array | int) -> jax.Array:
    """Another key for every sequence of numbers."""
    return jax.random.wrap_key_data(jnp.stack(_folded(jax.random.key_data(key), *numbers)))


def _folded(key_2: UInt32[Array, "2"], *numbers):
    words = key_2[0], key_2[1]
    for number in numbers:
        words = _absorbed(*words, jnp.asarray(number, jnp.uint32))
    return words


def _absorbed(one, other, number):
    """Two words that depend on two words and a number; for each two, another for every number."""
    one = _mixed((one ^ number) + STEP)
    return one, _mixed(other + one)


def _mixed(word):
    """A bijection in which every bit depends on all: Wellons' lowbias32 (Hash Prospector, 2018)."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)
