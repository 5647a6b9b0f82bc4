"""Activations of the feed-forward layer, plain and gated, in float32 with one rounding at the end.

Backward needs the activation (for the next weight's gradient) and its derivative. Left alone XLA
writes what both share, a tanh or a logistic, to memory in a kernel of its own and reads it back
twice; behind a barrier each of the two is one pass over the inputs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = ("swiglu", "geglu")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(
    name: str, x: Float[Array, "..."], up: Float[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """ACTIVATIONS[name](x), times `up` where that is given; in x's dtype."""
    return in_float32(name, x, up).astype(x.dtype)


def in_float32(name: str, x, up):
    out = ACTIVATIONS[name](x.astype(jnp.float32))
    return out if up is None else out * up.astype(jnp.float32)


def forward(name, x, up=None):
    return activate(name, x, up), (x, up)


def backward(name, inputs, slope):
    inputs = lax.optimization_barrier(inputs)
    _, pull = jax.vjp(functools.partial(in_float32, name), *inputs)
    return pull(slope.astype(jnp.float32))


activate.defvjp(forward, backward)
