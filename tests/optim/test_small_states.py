"""Stored moments and masters against float32 states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmeg.config.schema import Moments, OptimConfig, Optimizer
from maxmeg.ops.random import fold
from maxmeg.optim import storage
from maxmeg.optim.build import make_optimizer
from maxmeg.parallel.parameter import parameter

RATES = {"learning_rate": 0.01, "weight_decay": 0.1}


def trees():
    """(parameters, gradients of step n)."""
    rng = np.random.default_rng(0)
    shapes = {"up": (3, 8, 256), "table": (16, 32), "norm": (3, 32)}
    axes = {"up": ("embed", "mlp"), "table": ("vocab", "embed"), "norm": ("norm",)}
    tree = {
        name: parameter(jnp.asarray(rng.normal(size=shape), jnp.float32), *axes[name])
        for name, shape in shapes.items()
    }

    def gradients(step: int):
        rng = np.random.default_rng(step)
        return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), tree)

    return tree, gradients


def updated(config: OptimConfig, steps: int):
    """(parameters, optimizer state) after so many steps."""
    tree, gradients = trees()
    optimizer = make_optimizer(config)

    @jax.jit
    def step(tree, state, gradients, key):
        updates, state = optimizer.update(gradients, state, tree, key=key, **RATES)
        return jax.tree.map(jnp.add, tree, updates), state

    state = jax.jit(optimizer.init)(tree)
    for n in range(steps):
        tree, state = step(tree, state, gradients(n), fold(jax.random.key(0), n))
    return tree, state


def test_every_float32_comes_back_and_its_weight_is_the_nearest():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, size=(1000, 64), dtype=np.uint32)
    bits[0, :] = (bits[0] & 0xFFFF0000) | 0x8000  # ties
    x = jnp.asarray(np.where(np.isfinite(bits.view(np.float32)), bits, 0).view(np.float32))
    weights, rest = storage.divided({"w": parameter(x, "embed", "mlp")})
    back = storage.merged(weights, rest)["w"][...]
    np.testing.assert_array_equal(back.view(np.uint32), x.view(np.uint32))
    lower = np.asarray(x).view(np.uint32) & 0xFFFF
    nearest = np.asarray(x.astype(jnp.bfloat16))[lower != 0x8000]  # of ties, the even one
    np.testing.assert_array_equal(np.asarray(weights["w"][...])[lower != 0x8000], nearest)


@functools.cache
def with_float32_moments(optimizer: Optimizer):
    return updated(OptimConfig(optimizer), 10)[0]


@pytest.mark.parametrize(
    ("optimizer", "moments", "near"),
    [
        (Optimizer.adamw, Moments.bfloat16, 0.01),
        (Optimizer.adamw, Moments.float8, 0.15),
        (Optimizer.sgd, Moments.float8, 0.15),
    ],
)
def test_updates_are_close_to_those_of_float32_moments(optimizer, moments, near):
    """Rounding of 2^-9 and of 2^-4 of each moment, most of which averages out."""
    start, exact = trees()[0], with_float32_moments(optimizer)
    found, state = updated(OptimConfig(optimizer, moments=moments), 10)
    for name in exact:
        change = np.asarray(exact[name][...]) - np.asarray(start[name][...])
        off = np.asarray(found[name][...]) - np.asarray(exact[name][...])
        assert np.sqrt((off**2).mean() / (change**2).mean()) < near
        assert (name == "norm") == (not off.any())  # vectors keep float32 moments
    itemsize = {Moments.bfloat16: 2, Moments.float8: 1}[moments]
    dtypes = [a.dtype.itemsize for a in jax.tree.leaves(state) if a.ndim > 1 and a.shape[-1] == 256]
    assert set(dtypes) == {itemsize}
