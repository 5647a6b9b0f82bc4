"""Activations of feed-forward layers, plain and gated, in float32 with one rounding at the end.

GELU's tanh is written as a logistic: XLA computes activation and derivative in one pass if both use
a logistic, but writes a tanh to memory in a separate kernel (benchmarks/NOTES.md).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gelu_tanh(x: jax.Array) -> jax.Array:
    """x (1 + tanh u) / 2 = x logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": gelu_tanh,
    "swiglu": jax.nn.silu,
    "geglu": gelu_tanh,
    "geglu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "quick_geglu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = ("swiglu", "geglu", "geglu_erf", "quick_geglu")


def activate(
    name: str,
    x: Float[Array, "..."],
    up: Float[Array, "..."] | None = None,
    clamp: float = 0.0,
    offset: float = 0.0,
) -> Float[Array, "..."]:
    """ACTIVATIONS[name](x), times (up + offset) if `up` is given, in x's dtype.

    clamp: if not 0, limits x to at most clamp and `up` to [-clamp, clamp] (GPT-OSS).
    """
    wide = x.astype(jnp.float32)
    out = ACTIVATIONS[name](jnp.minimum(wide, clamp) if clamp else wide)
    if up is not None:
        up = up.astype(jnp.float32)
        up = jnp.clip(up, -clamp, clamp) if clamp else up
        out *= up + offset if offset else up
    return out.astype(x.dtype)
