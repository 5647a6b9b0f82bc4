"""Backward in two lanes: the same gradients, every product once, the least stored between."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_layers import drawn

from maxmeg.config.mixers import Activation, QkNorm
from maxmeg.config.model import ModelConfig, Norm
from maxmeg.config.setting import with_fields
from maxmeg.layers.context import Context
from maxmeg.models.lm import LM
from maxmeg.pipeline.residuals import UnitVjp, combine_at, empty_ring, read, write
from maxmeg.pipeline.split import divide

B, L, D = 2, 32, 64
KINDS = {
    "llama": {"attention.num_kv_heads": 2, "attention.qk_norm": QkNorm.head},
    "gpt": {
        "mlp.activation": Activation.gelu_tanh,
        "norm": Norm.layernorm,
        "mlp.bias": True,
        "attention.bias_qkv": True,
        "dropout_hidden": 0.1,
        "attention.dropout": 0.1,
        "layers": "*(attention+mlp)",
    },
}


def layer(kind: str):
    """(unit, its parameters, input, given) of the first layer of a stack."""
    sizes = {"vocab_size": 64, "num_layers": 2, "hidden_size": D, "attention.num_heads": 4}
    config = with_fields(ModelConfig(), sizes | {"recompute": "full"} | KINDS[kind])
    stack = drawn(lambda key: LM(key, config).stack, 0.1)
    key = jax.random.key_data(jax.random.key(3))

    def unit(params, x, given):
        positions_BL, index = given
        randomness = {"dropout_key": jax.random.wrap_key_data(key), "training": True}
        ctx = Context(positions_BL, rows_B=jnp.arange(B), **randomness)
        return stack.run_unit(params, x, ctx, index, prevent_cse=False)

    x = {"target": jax.random.normal(jax.random.key(1), (B, L, D))}
    positions_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    return unit, read(stack.groups[0], 0), x, (positions_BL, jnp.int32(0))


def test_an_array_that_is_twice_in_the_input_is_two_inputs():
    def unit(params, x, given):
        return {"a": x["a"] * params, "b": 3 * x["b"]}, {}

    x, two, given = jnp.arange(3.0), jnp.float32(2), jnp.float32(0)
    vjp = UnitVjp(unit, two, {"a": x, "b": 2 * x}, given)

    @jax.jit
    def gradients(params, x, given):
        residuals = vjp.forward(params, {"a": x, "b": x}, given)[1]
        return vjp.backward(residuals, params, given, {"a": x, "b": x})

    d_params, dx = gradients(two, x, given)
    assert float(d_params) == float(x @ x)
    np.testing.assert_array_equal(dx["a"], 2 * x)
    np.testing.assert_array_equal(dx["b"], 3 * x)


def products(equations) -> int:
    return collections.Counter(e.primitive.name for e in equations)["dot_general"]


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_neither_parameters_nor_inputs_of_all_layers(kind):
    unit, params, x, given = layer(kind)
    kept = UnitVjp(unit, params, x, given).residuals
    shape = x["target"].shape
    large = [a.shape for a in kept if a.size >= x["target"].size]
    assert large == [shape]


def test_the_cheapest_place_is_stored():
    """A product's small operand is stored, not the two large results of cheap functions of it."""

    def backward(residual, dy):
        narrow = dy @ jnp.ones((64, 8))
        wide = jnp.concatenate([narrow] * 8, axis=1)
        first, second = jnp.sin(wide), jnp.cos(wide)
        dx = (first * second) @ jnp.ones((64, 64))
        return residual.T @ first, residual.T @ second, dx

    closed = jax.make_jaxpr(backward)(jnp.ones((32, 16)), jnp.ones((32, 64)))
    first, second, stored = divide(closed.jaxpr)
    assert [v.aval.shape for v in stored] == [(32, 8)]
    assert products(first) == 2 and products(second) == 2


def test_what_is_wanted_and_free_is_not_stored():
    def backward(residual, dy):
        return jnp.sum(residual), dy * 2.0

    closed = jax.make_jaxpr(backward)(jnp.ones(4), jnp.ones(4))
    _, second, stored = divide(closed.jaxpr)
    assert stored == [] and len(second) == 1


def test_a_ring_returns_the_values_written_to_it():
    shapes = [jax.typeof(jnp.zeros(2)), jax.typeof(jnp.int32(0))]
    ring = empty_ring(shapes, 3, 4)
    assert [a.shape for a in ring] == [(3, 4, 2), (3, 4)]
    ring = write(ring, [jnp.array([1.0, 2.0]), jnp.int32(7)], jnp.int32(2), jnp.int32(1))
    np.testing.assert_array_equal(read(ring, 2, 1)[0], [1, 2])
    assert int(read(ring, 2, 1)[1]) == 7 and float(ring[0].sum()) == 3
    total = combine_at({"a": jnp.ones((3, 2))}, {"a": jnp.array([1.0, 2.0])}, jnp.int32(1))
    np.testing.assert_array_equal(total["a"], [[1, 1], [2, 3], [1, 1]])
