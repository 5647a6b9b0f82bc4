"""Random numbers that do not depend on the layout of devices.

The random bits of an element are a hash of the key and of its global coordinates: (row of the
global batch, position, feature) of an activation, the indices of a parameter. Devices that hold the
same element draw the same bits. The hash is a few integer operations that XLA fuses with their
consumer; jax.random's generator needs three times as many, and a separate loop for each key and
each array.

A key is either folded or drawn from, never both: the first row of normal(key, (2, 3)) equals
normal(fold(key, 0), (3,)).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

STEP = np.uint32(0x9E3779B9)  # keeps zeros from being hashed to zeros


def random_bits(
    shape: tuple[int, ...],
    key: jax.Array,
    *coordinates: jax.Array,
    first: jax.Array | int = 0,
) -> UInt32[Array, "..."]:
    """32 random bits per element.

    coordinates: global coordinates of each vector; they broadcast to shape[:-1].
    first: global index of the first element of each vector.
    """
    words = _folded(jax.random.key_data(key), *coordinates)
    words = (jnp.broadcast_to(word, shape[:-1])[..., None] for word in words)
    elements = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return _absorbed(*words, elements + jnp.asarray(first, jnp.uint32))[1]


def uniform_of(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 numbers, uniform in (-1, 1): odd multiples of 2**-24, hence never -1, 0 or 1."""
    odd = (jax.lax.bitcast_convert_type(bits, jnp.int32) >> 7) | 1  # exact in float32
    return odd.astype(jnp.float32) * np.float32(2**-24)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """A float32 array with values uniform in (-1, 1)."""
    indices = (jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], i) for i in range(len(shape) - 1))
    return uniform_of(random_bits(shape, key, *indices))


@functools.partial(jax.jit, static_argnames="shape", inline=True)  # traced once for each shape
def normal(key: jax.Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """A float32 array with values from the standard normal distribution."""
    return np.float32(2**0.5) * jax.lax.erf_inv(uniform(key, shape))


def fold(key: jax.Array, *numbers: jax.Array | int) -> jax.Array:
    """A key derived from `key`, different for every sequence of numbers."""
    return jax.random.wrap_key_data(jnp.stack(_folded(jax.random.key_data(key), *numbers)))


def split(key: jax.Array, count: int) -> list[jax.Array]:
    """`count` different keys derived from `key`."""
    return [fold(key, number) for number in range(count)]


def _folded(key_2: UInt32[Array, "2"], *numbers):
    words = key_2[0], key_2[1]
    for number in numbers:
        words = _absorbed(*words, jnp.asarray(number, jnp.uint32))
    return words


@functools.partial(jax.jit, inline=True)
def _absorbed(first, second, number):
    """Hash a number into two words; injective in the number."""
    first = _mixed((first ^ number) + STEP)
    return first, _mixed(second + first)


def _mixed(word):
    """A bijection of 32-bit words: Wellons' lowbias32 (Hash Prospector, 2018)."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)
