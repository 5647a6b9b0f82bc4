"""Options of the attention layer against the reference of the op. (Decoding: test_mixers.py.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import Case, error, expected
from sharded_layers import drawn

from maxmeg.layers.attention import AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.ops.attention.call import Operands, ScoreSpec

TOLERANCE = 1e-5
B, L, D, H, G, K = 2, 11, 12, 4, 2, 6
PLAIN = AttentionSpec(D, H, G, K, rotary=None)
OPTIONS = {
    "all keys": {"causal": False},
    "chunk": {"chunk": 4},
    "everything": {"window": 4, "chunk": 8, "softcap": 0.5, "scale": 0.7, "sinks": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_the_op(name):
    layer = drawn(dataclasses.replace(PLAIN, **OPTIONS[name]).make, 0.5)
    x_BLD = np.float32(np.random.default_rng(2).normal(size=(B, L, D)))
    ctx = Context(jnp.broadcast_to(jnp.arange(L), (B, L)))
    actual = jax.jit(lambda layer, x_BLD: layer(x_BLD, ctx)[0])(layer, x_BLD)
    parts = (layer.query, layer.key, layer.value, layer.out)
    *qkv, out = (np.float64(part.weight[...]) for part in parts)
    arrays = [(np.float64(x_BLD) @ w).reshape(B, L, -1, K) for w in qkv]
    arrays += [np.zeros((B, L, H, K)), np.zeros((B, L, H))]
    fields = {key: value for key, value in OPTIONS[name].items() if key != "sinks"}
    case = Case(L, 0, H, G, K, 0, ScoreSpec(**fields), sinks=layer.sinks is not None)
    sinks_H = None if layer.sinks is None else np.asarray(layer.sinks[...])
    wanted = expected(case, arrays, Operands(sinks_H=sinks_H))["out"].reshape(B, L, -1) @ out
    assert error(actual, wanted) <= TOLERANCE
