"""Options of the attention layer against the reference of the op, and in decoding."""

import dataclasses

import cached
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.attention_cases import Case, error, expected
from tables import thinned

from maxmeg.layers.attention import Attention, AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.ops.attention.call import Operands, ScoreSpec

TOLERANCE = 1e-5
B, L, D, H, G, K = 2, 11, 12, 4, 2, 6
PLAIN = AttentionSpec(D, H, G, K, rotary=None, std=0.5, out_std=0.5)
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
    layer = Attention(jax.random.key(0), dataclasses.replace(PLAIN, **options))
    if layer.sinks is not None:
        layer.sinks[...] = jax.random.normal(jax.random.key(1), (H,))
    return layer


def context(length: int = L) -> Context:
    return Context(jnp.broadcast_to(jnp.arange(length), (B, length)))


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_that_of_the_op(name):
    layer = made(OPTIONS[name])
    x_BLD = jax.random.normal(jax.random.key(2), (B, L, D))
    actual = jax.jit(lambda layer, x: layer(x, context())[0])(layer, x_BLD)
    x, (q, k, v, out) = (
        np.asarray(x_BLD, np.float64),
        (
            np.asarray(part.weight[...], np.float64)
            for part in (layer.query, layer.key, layer.value, layer.out)
        ),
    )
    arrays = [(x @ w).reshape(B, L, -1, K) for w in (q, k, v)]
    arrays += [np.zeros((B, L, H, K)), np.zeros((B, L, H))]
    fields = {key: value for key, value in OPTIONS[name].items() if key != "sinks"}
    case = Case(L, 0, H, G, K, 0, ScoreSpec(**fields), sinks=layer.sinks is not None)
    sinks_H = None if layer.sinks is None else np.asarray(layer.sinks[...])
    wanted = expected(case, arrays, Operands(sinks_H=sinks_H))["out"].reshape(B, L, -1) @ out
    assert error(actual, wanted) <= TOLERANCE
    plain = made({})(x_BLD, context())[0]
    assert error(actual, plain) > 0.01


@pytest.mark.parametrize("name", thinned((name for name in OPTIONS if name != "causal"), 2))
def test_decoding_after_a_prefix_is_the_whole_sequence(name):
    layer = made(OPTIONS[name])
    x_BLD = jax.random.normal(jax.random.key(2), (B, L, D))
    run = jax.jit(lambda layer, x, ctx, cache: layer(x, ctx, cache)[:2])
    whole, _ = run(layer, x_BLD, context(), None)
    size = cached.size_of(B, L)
    cache, parts = cached.empty(layer, size), []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 11)):
        ctx = cached.context(size, start, stop - start)
        part, cache = run(layer, x_BLD[:, start:stop], ctx, cache)
        parts.append(part)
    assert error(np.concatenate(parts, axis=1), whole) <= TOLERANCE


def test_sinks_are_learned_and_sharded_like_heads():
    layer = made({"sinks": True})
    x_BLD = jax.random.normal(jax.random.key(2), (B, L, D))
    gradient = jax.jit(jax.grad(lambda layer: jnp.sum(jnp.sin(layer(x_BLD, context())[0]))))(layer)
    assert (np.abs(gradient.sinks[...]) > 1e-4).all()
    assert layer.sinks.get_metadata()["axes"] == ("heads",)
    assert made({}).sinks is None
