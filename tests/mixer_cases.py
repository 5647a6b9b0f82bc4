"""Inputs for tests of mixers with a state, and parts of their definitions in float64 NumPy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from sharded_layers import drawn

from maxmeg.layers.context import Context

B, L, D = 2, 8, 16
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 2, 3, 3, 3, 3]])
DEVIATION = 0.4  # of random weights: outputs are about 1
ROUNDING = 2e-5  # relative and absolute, float32: sums in another order, decays multiplied up


def inputs() -> tuple[jax.Array, jax.Array]:
    """Vectors, and the weights of their outputs in the loss."""
    rng = np.random.default_rng(2)
    x_BLD, slope_BLD = (jnp.float32(rng.normal(size=(B, L, D))) for _ in range(2))
    return x_BLD, slope_BLD


def positions(length: int = L) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(length), (B, length))


@jax.jit
def run(layer, x_BLD, segments_BL=None):
    return layer(x_BLD, Context(positions(x_BLD.shape[1]), segments_BL))[0]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def numbers(parameter) -> np.ndarray:
    """A parameter in float64; zero for a bias that a layer does not have."""
    return np.float64(0.0 if parameter is None else parameter[...])


def projected(linear, x_LD: np.ndarray) -> np.ndarray:
    return x_LD @ numbers(linear.weight) + numbers(linear.bias)


def convolved(conv, x_LX: np.ndarray) -> np.ndarray:
    """Each channel's sum over the last tokens, with zeros before the document."""
    taps = numbers(conv.weight)[:, 0]
    before = np.concatenate((np.zeros((len(taps) - 1, x_LX.shape[1])), x_LX))
    sums = sum(tap * before[i : i + len(x_LX)] for i, tap in enumerate(taps))
    return sums + numbers(conv.bias)


def check_documents(spec, defined: Callable) -> None:
    """defined: (layer, a document [L, D]) -> its output alone, in float64. With and without ids of
    documents, which are two programs."""
    layer, (x_BLD, _) = drawn(spec.make, DEVIATION), inputs()
    for segments_BL in (None, SEGMENTS):
        found_BLD = run(layer, x_BLD, segments_BL)
        for row, ids_L in enumerate(np.ones((B, L)) if segments_BL is None else segments_BL):
            for document in np.unique(ids_L):
                there = ids_L == document
                wanted = defined(layer, np.float64(x_BLD[row])[there])
                found = found_BLD[row][there]
                np.testing.assert_allclose(found, wanted, rtol=ROUNDING, atol=ROUNDING)
