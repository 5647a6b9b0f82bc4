"""Rows that go to experts in 8 bits: what arrives, and what goes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial
from ops.grouped_matmul_cases import RECIPES, e4m3

from maxmeg.distributed.experts.exchange import Route
from maxmeg.ops.experts.dispatch import Order, sort_by_expert

TOKENS, SIZE, EXPERTS = 24, 256, 4
SAME = 1e-6


def order_of(rng) -> Order:
    experts_TK = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :2]
    is_kept_TK = jnp.asarray(rng.random((TOKENS, 2)) < 0.8)
    return sort_by_expert(jnp.asarray(experts_TK), EXPERTS, is_kept_TK=is_kept_TK)


def moved(x):
    """What stands in for an exchange: rows change places."""
    return jnp.roll(x, 5, axis=0)


def moved_back(x):
    return jnp.roll(x, -5, axis=0)


@pytest.mark.parametrize("name", ["blockwise", "tensorwise"])
def test_rows_to_experts_are_rounded_and_those_from_them_are_not(name: str):
    rng = np.random.default_rng(0)
    recipe, order = RECIPES[name], order_of(rng)
    assert recipe is not None
    scales = 2.0 ** rng.integers(-12, 12, (TOKENS, 1))  # of each token's own size
    x, slope = np.asarray(rng.normal(size=(2, TOKENS, SIZE)) * scales, np.float32)
    y = np.float32(rng.normal(size=(len(order.copies_R), SIZE)))
    near = functools.partial(np.testing.assert_allclose, rtol=SAME, atol=SAME * np.abs(x).max())
    of_token = functools.partial(e4m3, axes=1, size=recipe.block or SIZE)

    @functools.partial(jax.jit, static_argnums=0)
    def both(is_packed: bool, x, y, slope):
        route = Route(order, Partial(moved), Partial(moved_back), recipe if is_packed else None)
        sent, pull = jax.vjp(lambda x: route.dispatch(x).values_RD, x)
        summed, pull_sums = jax.vjp(route.combine, y)
        return sent, *pull(y), summed, *pull_sums(slope)

    sent, x_slope, summed, y_slope = both(True, x, y, slope)
    wanted = both(False, *(np.float32(a) for a in (of_token(x), y, of_token(slope))))
    np.testing.assert_array_equal(sent, wanted[0])
    near(x_slope, wanted[1])
    near(summed, wanted[2])
    np.testing.assert_array_equal(y_slope, wanted[3])
