"""Layers by themselves: formulas, gradients of the lookup, keys of dropout."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import drawn

from maxmeg.layers.context import Context
from maxmeg.layers.embedding import Embedding, Positions, lookup
from maxmeg.layers.mlp import MlpSpec
from maxmeg.layers.moe import rows_of_experts
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.activation import ACTIVATIONS, GATED

TOLERANCE = 2e-6  # of the largest value, float32
BFLOAT16 = 2**-8  # of each value: one rounding of the result
B, L, D, F = 2, 3, 8, 12


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def double(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def close(actual, expected) -> bool:
    return bool(np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max())


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


FORMULAS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swiglu": lambda x: x / (1 + np.exp(-x)),
    "geglu": gelu_tanh,
    "geglu_erf": gelu,
    "quick_geglu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp_is_its_formula(name):
    mlp, x_BLD = drawn(MlpSpec(D, F, name, bias=True).make, 0.5), normal(B, L, D)
    actual, cache, aux = mlp(x_BLD, Context(jnp.zeros((B, L), int)))

    def apply(linear, x):
        return x @ double(linear.weight[...]) + double(linear.bias[...])

    up_BLF = apply(mlp.up, double(x_BLD))
    inner_BLF = FORMULAS[name](up_BLF)
    if name in GATED:
        inner_BLF = FORMULAS[name](apply(mlp.gate, double(x_BLD))) * up_BLF
    assert close(actual, apply(mlp.out, inner_BLF)) and cache is None and aux == {}


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_weight_stored_as_one_less_is_the_same_norm(kind):
    x_BLD = 3 * normal(B, L, D) + 1
    plain, shifted = (Norm(D, NormSpec(kind, one_plus=one_plus)) for one_plus in (False, True))
    assert not shifted.weight[...].any()
    np.testing.assert_array_equal(plain(x_BLD), shifted(x_BLD))
    plain.weight[...] = 1 + normal(D)
    shifted.weight[...] = normal(D)
    assert close(shifted(x_BLD), plain(x_BLD))


def test_a_weight_stored_as_one_less_keeps_its_digits_in_bfloat16():
    """What the form is for: 1 + 2^-10 is 1 in bfloat16, 2^-10 is not 0."""
    norm = Norm(D, NormSpec(one_plus=True))
    norm = jax.tree.map(lambda a: jnp.full(D, 2.0**-10, jnp.bfloat16), norm)
    x_BLD = normal(B, L, D, seed=1)
    ratio = norm(x_BLD) / Norm(D, NormSpec())(x_BLD)
    np.testing.assert_allclose(ratio, 1 + 2.0**-10, rtol=TOLERANCE)


def test_tables_sum_their_gradients_in_float32():
    table_VD, ids_BL = normal(5, D), jnp.array([[0, 3, 3], [4, 3, 0]])
    cotangent_BLD, expected = normal(B, L, D, seed=2), np.zeros((5, D))

    @jax.jit
    def gradient(table_VD):
        rows_BLD, transpose = jax.vjp(lambda table: lookup(table, ids_BL, 5), table_VD)
        return rows_BLD, transpose(cotangent_BLD)[0]

    rows_BLD, sums_VD = gradient(table_VD)
    np.testing.assert_array_equal(rows_BLD, np.asarray(table_VD)[ids_BL])
    np.add.at(expected, np.asarray(ids_BL), double(cotangent_BLD))
    assert close(sums_VD, expected)
    many_BL = jnp.zeros((1, 4096), jnp.int32)  # in bfloat16 a sum of ones stops at 256

    @jax.jit
    def sums_of_ones(layer):
        return jax.grad(lambda layer: layer(many_BL).astype(jnp.float32).sum())(layer)

    for make in (lambda key: Embedding(key, 5, 5, D, 0.1), lambda key: Positions(key, 5, D, 0.1)):
        layer = jax.tree.map(lambda a: a.astype(jnp.bfloat16), drawn(make, 1.0))
        (sums,) = map(np.asarray, jax.tree.leaves(sums_of_ones(layer)))
        assert sums.dtype == jnp.bfloat16 and (sums[0] == 4096).all() and not sums[1:].any()


@pytest.mark.parametrize("sizes_E", [None, jnp.array([4096, 0])])
def test_biases_of_experts_sum_their_gradients_in_float32(sizes_E):
    bias_ED, rows = jnp.zeros((2, D), jnp.bfloat16), 8192

    @jax.jit
    def gradient(bias_ED):
        _, transpose = jax.vjp(lambda bias: rows_of_experts(bias, sizes_E, rows), bias_ED)
        return transpose(jnp.ones((rows, D), jnp.bfloat16))

    (sums,) = map(np.asarray, gradient(bias_ED))
    assert sums.dtype == jnp.bfloat16 and (sums[0] == 4096).all()
    assert (sums[1] == (4096 if sizes_E is None else 0)).all()


def test_every_layer_and_place_has_its_own_dropout_key():
    keys = set()
    for layer, place in itertools.product(range(6), range(6)):
        ctx = Context(jnp.zeros((1, 1)), dropout_key=jax.random.key(0), layer=layer)
        keys.add(tuple(np.asarray(jax.random.key_data(ctx.key(place)))))
    assert len(keys) == 36
