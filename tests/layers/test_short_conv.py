"""The gated short convolution: its definition, documents, meshes, and decoding with its state."""

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import check_equal, on_mesh

from maxmeg.layers.context import Context
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.residual import Residual, ResidualSpec
from maxmeg.layers.short_conv import ShortConv, ShortConvSpec

B, L, D = 2, 8, 16
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 2, 3, 3, 3, 3]])
SPECS = {
    "lfm2": ShortConvSpec(D, std=0.5, out_std=0.5),
    "biases": ShortConvSpec(D, kernel_size=4, bias=True, std=0.5, out_std=0.5),
    "one token": ShortConvSpec(D, kernel_size=1, std=0.5, out_std=0.5),
}


def randomized(layer):
    """The layer with random biases too."""
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


def defined(layer: ShortConv, x_BLD: np.ndarray, segments_BL: np.ndarray) -> np.ndarray:
    """Published formula, token by token: out(C * conv(B * x)), where B, C and x are projections."""

    def project(linear, x):
        y = x @ np.asarray(linear.weight[...], np.float64)
        return y if linear.bias is None else y + np.asarray(linear.bias[...])

    gate, output, value = (
        project(one, x_BLD) for one in (layer.input_gate, layer.output_gate, layer.value)
    )
    kernel, bias = np.asarray(layer.kernel.weight[...])[:, 0], layer.kernel.bias
    y_BLD = np.zeros_like(value)
    for row, token in np.ndindex(B, L):
        for ago in range(min(len(kernel), token + 1)):
            if segments_BL[row, token - ago] == segments_BL[row, token]:
                product = (gate * value)[row, token - ago]
                y_BLD[row, token] += kernel[len(kernel) - 1 - ago] * product
    y_BLD += 0 if bias is None else np.asarray(bias[...])
    return project(layer.out, output * y_BLD)


@pytest.mark.parametrize("name", SPECS)
def test_output_is_that_of_the_definition(name):
    layer, (x_BLD, _) = randomized(ShortConv(jax.random.key(0), SPECS[name])), inputs()
    for segments_BL in (None, SEGMENTS):
        ctx = Context(positions(), None if segments_BL is None else jnp.asarray(segments_BL))
        found_BLD, _, _ = layer(x_BLD, ctx)
        same_BL = np.zeros((B, L)) if segments_BL is None else segments_BL
        wanted_BLD = defined(layer, np.asarray(x_BLD), same_BL)  # values up to 100
        np.testing.assert_allclose(found_BLD, wanted_BLD, rtol=1e-6, atol=2e-5)


def test_a_mesh_equals_one_device():
    """Output and gradients of a sublayer, documents kept apart, channels cut over tensor."""
    spec = ResidualSpec(NormSpec(), (SPECS["biases"],), dropout=0.2)
    layer = randomized(Residual(jax.random.key(0), spec))

    def output(layer, x_BLD):
        count = len(x_BLD)
        rows_B = jax.lax.axis_index("fsdp") * count + jnp.arange(count)
        segments_BL = jnp.asarray(SEGMENTS)[rows_B]
        training = {"dropout_key": jax.random.key(3), "training": True}
        return layer(x_BLD, Context(positions()[:count], segments_BL, rows_B, **training))[0]

    alone = on_mesh(output, layer, {})(layer, *inputs())
    check_equal(on_mesh(output, layer, {"fsdp": 2, "tensor": 4})(layer, *inputs()), alone)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(alone))


@pytest.mark.parametrize("name", SPECS)
def test_decoding_with_a_state_equals_the_whole_sequence(name):
    """Rows of 2 and of 5 tokens before, two further at once and one alone."""
    layer, (x_BLD, _) = randomized(ShortConv(jax.random.key(0), SPECS[name])), inputs()
    whole_BLD, _, _ = layer(x_BLD, Context(positions()))
    lengths_B = jnp.array([2, 5])
    size = cached.size_of(B, L)
    cache = cached.empty(layer, size)
    assert cache.shape == (1, B, SPECS[name].kernel_size - 1, D)
    found_BLD, cache, _ = layer(x_BLD[:, :5], cached.context(size, 0, 5, lengths_B), cache)
    np.testing.assert_allclose(found_BLD, whole_BLD[:, :5], atol=1e-5)
    for count in (2, 1):
        places_BL = lengths_B[:, None] + jnp.arange(count)
        next_BLD = jnp.take_along_axis(x_BLD, places_BL[..., None], axis=1)
        found_BLD, cache, _ = layer(next_BLD, cached.context(size, lengths_B, count), cache)
        wanted_BLD = jnp.take_along_axis(whole_BLD, places_BL[..., None], axis=1)
        np.testing.assert_allclose(found_BLD, wanted_BLD, atol=1e-5)
        lengths_B += count
