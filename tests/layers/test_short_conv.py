"""The gated short convolution: its definition, documents, meshes, and decoding with its state."""

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixer_cases import (
    SEGMENTS,
    B,
    D,
    L,
    check_decoding,
    check_mesh,
    inputs,
    positions,
    randomized,
)

from maxmeg.layers.context import Context
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.residual import ResidualSpec
from maxmeg.layers.short_conv import ShortConv, ShortConvSpec

SPECS = {
    "lfm2": ShortConvSpec(D, std=0.5, out_std=0.5),
    "biases": ShortConvSpec(D, kernel_size=4, bias=True, std=0.5, out_std=0.5),
    "one token": ShortConvSpec(D, kernel_size=1, std=0.5, out_std=0.5),
}


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
    """Channels cut over tensor, also with dropout."""
    spec = ResidualSpec(NormSpec(), (SPECS["biases"],), dropout=0.2)
    check_mesh(spec, {"fsdp": 2, "tensor": 4}, training=True)


@pytest.mark.parametrize("name", SPECS)
def test_decoding_with_a_state_equals_the_whole_sequence(name):
    layer = randomized(ShortConv(jax.random.key(0), SPECS[name]))
    shape = cached.empty(layer, cached.size_of(B, L)).shape
    assert shape == (1, B, SPECS[name].kernel_size - 1, D)
    check_decoding(layer)
