"""Dropout with masks that do not depend on the layout of devices (ops/random.py)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.ops.random import random_bits


def dropout(
    x: Float[Array, "..."],
    rate: float,
    key: jax.Array,
    *coordinates: Int[Array, "..."],
    first: jax.Array | int = 0,
) -> jax.Array:
    """x / (1 - rate), or 0 with probability `rate`.

    coordinates: global coordinates of each vector; they broadcast to x.shape[:-1]. first: as in
    `random_bits`.
    """
    if rate == 0.0:
        return x
    keep = dropout_mask(x.shape, rate, key, *coordinates, first=first)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def dropout_mask(
    shape: tuple[int, ...],
    rate: float,
    key: jax.Array,
    *coordinates: jax.Array,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Mask of the elements of an array that `dropout` keeps; first: as in `random_bits`."""
    limit = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return random_bits(shape, key, *coordinates, first=first) >= limit
