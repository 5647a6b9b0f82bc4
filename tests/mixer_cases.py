"""Inputs for tests of mixers with a state, and what must hold of each of them."""

import cached
import jax
import jax.numpy as jnp
import numpy as np
from sharded_layers import check_equal, on_mesh

from maxmeg.layers.context import Context
from maxmeg.layers.residual import Residual, ResidualSpec

B, L, D = 2, 8, 16
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 2, 3, 3, 3, 3]])


def randomized(layer):
    """The layer with random biases and vectors too."""
    leaves, tree = jax.tree.flatten(layer)
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(
        tree, [a + jnp.float32(0.3 * rng.normal(size=a.shape)) for a in leaves]
    )


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


@jax.jit
def run_cached(layer, x_BLD, ctx: Context, cache):
    return layer(x_BLD, ctx, cache)[:2]


def check_documents(layer, defined, segments_BL: np.ndarray) -> None:
    """defined: (layer, a document [L, D]) -> its output alone, in float64."""
    x_BLD, _ = inputs()
    found_BLD = run(layer, x_BLD, jnp.asarray(segments_BL))
    for row, ids_L in enumerate(segments_BL):
        for document in np.unique(ids_L):
            there = ids_L == document
            wanted = defined(layer, np.asarray(x_BLD[row], np.float64)[there])
            np.testing.assert_allclose(found_BLD[row][there], wanted, rtol=2e-5, atol=2e-5)


def check_mesh(spec: ResidualSpec, sizes: dict[str, int], training: bool = False) -> None:
    """A mesh has one device's output and gradients of a sublayer, documents kept apart."""
    layer = randomized(Residual(jax.random.key(0), spec))
    how = {"dropout_key": jax.random.key(3), "training": True} if training else {}

    def output(layer, x_BLD):
        count = len(x_BLD)
        rows_B = jax.lax.axis_index("fsdp") * count + jnp.arange(count)
        segments_BL = jnp.asarray(SEGMENTS)[rows_B]
        return layer(x_BLD, Context(positions()[:count], segments_BL, rows_B, **how))[0]

    alone = on_mesh(output, layer, {})(layer, *inputs())
    check_equal(on_mesh(output, layer, sizes)(layer, *inputs()), alone)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(alone))


def check_decoding(layer) -> None:
    """With a state, rows of 2 and of 5 tokens, then two further at once and one alone."""
    x_BLD, _ = inputs()
    whole_BLD, lengths_B, size = run(layer, x_BLD), jnp.array([2, 5]), cached.size_of(B, L)
    cache, ctx = cached.empty(layer, size), cached.context(size, 0, 5, lengths_B)
    found_BLD, cache = run_cached(layer, x_BLD[:, :5], ctx, cache)
    for row, length in enumerate(lengths_B):
        np.testing.assert_allclose(found_BLD[row, :length], whole_BLD[row, :length], atol=1e-5)
    for count in (2, 1):
        places_BL = lengths_B[:, None] + jnp.arange(count)
        next_BLD = jnp.take_along_axis(x_BLD, places_BL[..., None], axis=1)
        ctx = cached.context(size, lengths_B, count)
        found_BLD, cache = run_cached(layer, next_BLD, ctx, cache)
        wanted_BLD = jnp.take_along_axis(whole_BLD, places_BL[..., None], axis=1)
        np.testing.assert_allclose(found_BLD, wanted_BLD, atol=1e-5)
        lengths_B += count
