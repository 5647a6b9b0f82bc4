"""Rotary position embedding (Su et al., 2021)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x_BLHK: Float[Array, "B L H K"],
    positions_BL: Int[Array, "B L"],
    base: float = 10000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> jax.Array:
    """x with the first `fraction` of each head rotated by position, in x's dtype.

    Angles are position * base^(-2i/d), d the rotated size. Halves (i, i + d/2) rotate together,
    or pairs (2i, 2i + 1) when interleaved.
    """
    size = int(x_BLHK.shape[-1] * fraction) // 2 * 2
    turned, kept = x_BLHK[..., :size], x_BLHK[..., size:]
    frequency = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle = positions_BL[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if interleaved:
        pairs = turned.astype(jnp.float32).reshape(*turned.shape[:-1], size // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    both = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        out = jnp.stack(both, axis=-1).reshape(turned.shape)
    else:
        out = jnp.concatenate(both, axis=-1)
    return jnp.concatenate((out.astype(x_BLHK.dtype), kept), axis=-1)
