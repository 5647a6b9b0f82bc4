"""Dropout whose mask depends on the seed and on the element's place, never on the layout.

A mask is drawn from a key folded with the global coordinates of each vector: (row of the global
batch, position) or (row, head, position). Devices that hold the same element draw the same bit;
devices that hold different elements draw different ones.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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


def kept(shape: tuple[int, ...], rate: float, key: jax.Array, *coordinates: jax.Array) -> jax.Array:
    """Which elements of an array of that shape `dropout` keeps."""

    def draw(key, size):
        return jax.random.bernoulli(key, 1.0 - rate, size)

    return drawn(draw, shape, key, *coordinates)


def drawn(draw, shape: tuple[int, ...], key: jax.Array, *coordinates: jax.Array) -> jax.Array:
    """An array whose vectors are draw(key, (size,)), each with the key of its place."""
    flat = [jnp.broadcast_to(c, shape[:-1]).reshape(-1) for c in coordinates]

    def vector(*place):
        folded = key
        for coordinate in place:
            folded = jax.random.fold_in(folded, coordinate)
        return draw(folded, shape[-1:])

    return jax.vmap(vector)(*flat).reshape(shape)
