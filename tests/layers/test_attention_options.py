"""Options of the attention layer against the reference of the op. (Decoding: test_mixers.py.)"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import Case, error, expected
from sharded_layers import drawn

from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.ops.attention.call import Operands, ScoreSpec

TOLERANCE = 1e-5
B, L, D, H, G, K = 2, 11, 12, 4, 2, 6
PLAIN = AttentionSpec(D, H, G, K, rotary=None)
OPTIONS = {
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "softcap": {"softcap": 0.3},
    "scale": {"scale": 0.9},
    "sinks": {"sinks": True},
    "causal": {"causal": False},
    "everything": {"window": 4, "chunk": 8, "softcap": 0.5, "scale": 0.7, "sinks": True},
}


def made(options: dict) -> Attention:
    return drawn(dataclasses.replace(PLAIN, **options).make, 0.5)


def inputs() -> np.ndarray:
    return np.float32(np.random.default_rng(2).normal(size=(B, L, D)))


def context(length: int = L) -> Context:
    return Context(jnp.broadcast_to(jnp.arange(length), (B, length)))


@functools.cache
def output(name: str = "") -> np.ndarray:
    """Of the whole sequence, with one of the options or none."""
    layer = made(OPTIONS.get(name, {}))
    return np.asarray(jax.jit(lambda layer, x: layer(x, context())[0])(layer, inputs()))


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_that_of_the_op(name):
    layer, x_BLD = made(OPTIONS[name]), np.float64(inputs())
    parts = (layer.query, layer.key, layer.value, layer.out)
    *qkv, out = (np.float64(part.weight[...]) for part in parts)
    arrays = [(x_BLD @ w).reshape(B, L, -1, K) for w in qkv]
    arrays += [np.zeros((B, L, H, K)), np.zeros((B, L, H))]
    fields = {key: value for key, value in OPTIONS[name].items() if key != "sinks"}
    case = Case(L, 0, H, G, K, 0, ScoreSpec(**fields), sinks=layer.sinks is not None)
    sinks_H = None if layer.sinks is None else np.asarray(layer.sinks[...])
    wanted = expected(case, arrays, Operands(sinks_H=sinks_H))["out"].reshape(B, L, -1) @ out
    assert error(output(name), wanted) <= TOLERANCE
    if layer.sinks is None:  # with sinks, the other arrays are drawn differently
        assert error(output(name), output()) > 0.01


def test_sinks_are_learned_and_sharded_like_heads():
    layer = made({"sinks": True})
    x_BLD = jnp.asarray(inputs())
    gradient = jax.jit(jax.grad(lambda layer: jnp.sum(jnp.sin(layer(x_BLD, context())[0]))))(layer)
    assert (np.abs(np.asarray(gradient.sinks[...])) > 1e-4).all()
    assert layer.sinks.get_metadata()["axes"] == ("heads",)
    assert made({}).sinks is None
