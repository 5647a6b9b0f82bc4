"""Gated DeltaNet and KDA: their recurrence and initial values. (On meshes, decoding:
test_mixers.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixer_cases import (
    D,
    check_documents,
    convolved,
    inputs,
    numbers,
    projected,
    run,
    sigmoid,
    silu,
)

from maxmeg.layers.delta import Delta, DeltaSpec, Kda, KdaSpec
from maxmeg.parallel.mesh import AXES, make_mesh
from maxmeg.parallel.rules import reductions
from maxmeg.weights.transforms import enter, whole_weights

SIZES = {"key_size": 6, "value_size": 4, "chunk": 4}
SPECS = {
    "gated_delta": DeltaSpec(D, num_heads=8, num_key_heads=4, **SIZES),
    "one key head": DeltaSpec(D, num_heads=4, num_key_heads=1, kernel_size=3, **SIZES),
    "kda": KdaSpec(D, num_heads=4, num_key_heads=4, rank=5, **SIZES),
}
BFLOAT16 = 0.05  # of the largest output: some ten roundings of 2^-8 in a row


def defined(layer: Delta, x_LD: np.ndarray) -> np.ndarray:
    """The published recurrence over one document, token by token, in float64."""
    spec, is_kda = layer.spec, isinstance(layer, Kda)
    H, G, N, P = spec.num_heads, spec.num_key_heads, spec.key_size, spec.value_size

    def of(name: str) -> np.ndarray:
        down = getattr(layer, f"{name}_down", None)
        return projected(getattr(layer, name), x_LD if down is None else projected(down, x_LD))

    def mixed(name: str) -> np.ndarray:
        return silu(convolved(getattr(layer, f"{name}_conv"), of(name)))

    def of_length_one(x_LX: np.ndarray) -> np.ndarray:
        x = x_LX.reshape(len(x_LX), G, N)
        x = x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
        return np.repeat(x, H // G, axis=1)

    q, k = of_length_one(mixed("query")) / np.sqrt(N), of_length_one(mixed("key"))
    v, beta = mixed("value").reshape(-1, H, P), sigmoid(of("beta"))
    steps = np.log1p(np.exp(of("step") + numbers(layer.step_bias))).reshape(len(x_LD), H, -1)
    decay = np.exp(-np.exp(numbers(layer.decay_log))[:, None] * steps)
    y, state = np.zeros((len(x_LD), H, P)), np.zeros((H, N, P))
    for t in range(len(x_LD)):
        state = decay[t, :, :, None] * state
        new = v[t] - np.einsum("hn,hnp->hp", k[t], state)
        state += np.einsum("h,hn,hp->hnp", beta[t], k[t], new)
        y[t] = np.einsum("hn,hnp->hp", q[t], state)
    y /= np.sqrt((y**2).mean(-1, keepdims=True) + spec.norm_eps)
    y = (y * numbers(layer.gated_norm.weight)).reshape(len(x_LD), -1)
    y *= sigmoid(of("gate")) if is_kda else silu(of("gate"))
    return projected(layer.out, y)


@pytest.mark.parametrize("name", ["kda", "gated_delta"])
def test_documents_have_the_output_of_the_definition_alone(name):
    check_documents(SPECS[name], defined)


def test_initial_values_are_those_of_the_authors():
    sizes = {"num_heads": 4096, "num_key_heads": 4096, "key_size": 1, "value_size": 1}
    specs = [spec(8, **sizes) for spec in (DeltaSpec, KdaSpec)]
    delta, kda = jax.jit(lambda key: [spec.make(key) for spec in specs])(jax.random.key(0))
    assert (delta.step_bias[...] == 1).all() and (delta.gated_norm.weight[...] == 1).all()
    for layer, least in ((delta, 0.01), (kda, 1.0)):
        decays = np.exp(layer.decay_log[...])
        assert least <= decays.min() < least + 0.1 and 15.9 < decays.max() <= 16.001
        assert abs(decays.mean() - (16 + least) / 2) < 0.3
    steps = np.log1p(np.exp(kda.step_bias[...]))
    assert 0.999e-3 <= steps.min() < 1.1e-3 and 0.095 < steps.max() <= 0.1001
    assert abs(np.log(steps).mean() - np.log(1e-2)) < 0.1


@pytest.mark.parametrize("name", ["gated_delta", pytest.param("kda", marks=pytest.mark.slow)])
def test_bfloat16_keeps_decays_and_step_biases_in_float32(name):
    layer, (x_BLD, _) = jax.jit(SPECS[name].make)(jax.random.key(0)), inputs()
    places = reductions(layer, make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]), zero1=False)
    rounded = enter(whole_weights(places, jnp.bfloat16), layer)
    assert rounded.decay_log.dtype == rounded.step_bias.dtype == jnp.float32
    assert rounded.query.weight.dtype == jnp.bfloat16
    y_BLD, wanted_BLD = run(rounded, x_BLD.astype(jnp.bfloat16)), run(layer, x_BLD)
    assert y_BLD.dtype == jnp.bfloat16
    error = np.abs(np.float32(y_BLD) - np.asarray(wanted_BLD)).max()
    assert error <= BFLOAT16 * np.abs(np.asarray(wanted_BLD)).max()
