"""Rows that go to experts in 8 bits: what arrives, and what goes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial
from ops.grouped_matmul_cases import RECIPES, e4m3

from maxmeg.ops.experts import packed
from maxmeg.ops.experts.dispatch import Order, sort_by_expert
from maxmeg.ops.experts.exchange import Route

TOKENS, SIZE, EXPERTS = 24, 256, 4
SAME = 1e-6


def order_of(rng) -> Order:
    experts_TK = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :2]
    kept_TK = jnp.asarray(rng.random((TOKENS, 2)) < 0.8)
    return sort_by_expert(jnp.asarray(experts_TK), EXPERTS, kept_TK=kept_TK)


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
    wide, narrow = (Route(order, Partial(moved), Partial(moved_back), r) for r in (None, recipe))
    near = functools.partial(np.testing.assert_allclose, rtol=SAME, atol=SAME * np.abs(x).max())
    of_token = functools.partial(e4m3, axes=1, size=recipe.block or SIZE)

    sent, pull = jax.vjp(lambda x: narrow.dispatch(x).values_RD, jnp.asarray(x))
    expected, pull_wide = jax.vjp(lambda x: wide.dispatch(x).values_RD, jnp.asarray(of_token(x)))
    np.testing.assert_array_equal(sent, expected)
    y = jnp.asarray(y)
    near(pull(y)[0], pull_wide(y)[0])

    summed, pull = jax.vjp(narrow.combine, y)
    expected, pull_wide = jax.vjp(wide.combine, y)
    near(summed, expected)
    rounded = jnp.asarray(of_token(slope), jnp.float32)
    np.testing.assert_array_equal(pull(jnp.asarray(slope))[0], pull_wide(rounded)[0])


@pytest.mark.parametrize(("name", "scales"), [("blockwise", 2), ("mxfp8", 8), ("tensorwise", 1)])
def test_a_row_is_a_byte_a_number_and_one_a_scale(name: str, scales: int):
    recipe = RECIPES[name]
    assert recipe is not None
    rows = packed.pack(jnp.ones((3, SIZE), jnp.bfloat16), recipe)
    assert rows.dtype == jnp.uint8 and rows.shape == (3, SIZE + scales)
