"""Newton-Schulz iterations, which orthogonalize matrices by products alone.

Coefficients are those of NVIDIA's Emerging-Optimizers, which Megatron-LM uses.
"""

import itertools

import jax
import jax.numpy as jnp

from maxmeg.config.optimizers import NewtonSchulz

Steps = list[tuple[float, float, float]]

EPSILON = 1e-15  # smallest Frobenius norm
COEFFICIENTS = {  # (a, b, c) of each step: X -> a X + b (X X^T) X + c (X X^T)^2 X
    NewtonSchulz.simple: [(3.4445, -4.7750, 2.0315)],
    NewtonSchulz.quintic: [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    NewtonSchulz.polar_express: [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ],
    NewtonSchulz.cans: [
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ],
    NewtonSchulz.aol: [
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
    NewtonSchulz.deepseek_v4: [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
    NewtonSchulz.cubic: [
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ],
}
ENDS_REPEATED = (NewtonSchulz.polar_express, NewtonSchulz.cans, NewtonSchulz.deepseek_v4)


@jax.named_scope("newton_schulz")
def newton_schulz(x: jax.Array, steps: Steps, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Approximate U V^T for matrices U S V^T [..., in, out]; float32.

    Products have operands in `dtype` and are summed in float32. A zero matrix stays zero.
    """
    transposed = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if transposed else x
    x = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, EPSILON)).astype(dtype)
    for a, b, c in steps:
        gram = product("...ij,...kj->...ik", x, x)
        polynomial = b * gram + c * product("...ij,...jk->...ik", gram, gram) if c else b * gram
        x = a * x + product("...ij,...jk->...ik", polynomial.astype(x.dtype), x)
    x = x.astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if transposed else x


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum, summed in float32 and rounded once to the dtype of the operands."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def coefficients(name: NewtonSchulz, count: int) -> Steps:
    """(a, b, c) of each of `count` steps. Past its end a set starts again, or its last step is
    repeated (ENDS_REPEATED)."""
    rows = COEFFICIENTS[name]
    if name in ENDS_REPEATED:
        rows = rows + [rows[-1]] * count
    return list(itertools.islice(itertools.cycle(rows), count))
