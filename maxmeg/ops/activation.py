"""Activations of the feed-forward layer, plain and gated, in float32 with one rounding at the end.

Backward needs the activation (for the next weight's gradient) and its derivative. XLA makes both in
one pass over the inputs where they share a logistic; a tanh it would write to memory in a kernel of
its own and read back twice (benchmarks/NOTES.md). So GELU's tanh is written as a logistic.
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
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = ("swiglu", "geglu")


def activate(
    name: str, x: Float[Array, "..."], up: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """ACTIVATIONS[name](x), times `up` where that is given; in x's dtype."""
    out = ACTIVATIONS[name](x.astype(jnp.float32))
    return (out if up is None else out * up.astype(jnp.float32)).astype(x.dtype)
