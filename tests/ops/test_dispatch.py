"""Sorted copies, grouped products, weighted sums: a loop over experts, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import thinned

from maxmeg.ops.experts.dispatch import (
    capacity_of,
    collect,
    pad_experts,
    places_in_experts,
    rows_of_copies,
    sort_by_expert,
    spread,
    weighted_rows,
)
from maxmeg.ops.experts.grouped_matmul import grouped_matmul

TOLERANCE = 1e-5  # relative, float32
TOKENS, WIDTH, INNER, EXPERTS = 24, 8, 12, 6


def choices(kind: str, top_k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "one expert":
        return np.tile((np.arange(top_k) + 3) % EXPERTS, (TOKENS, 1)).astype(np.int32)
    return np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(TOKENS)]).astype(np.int32)


def arrays(top_k: int) -> tuple:
    keys = jax.random.split(jax.random.key(top_k), 4)
    x = jax.random.normal(keys[0], (TOKENS, WIDTH))
    weights = jax.random.uniform(keys[1], (TOKENS, top_k))
    into = jax.random.normal(keys[2], (EXPERTS, WIDTH, INNER))
    return x, weights, into, jax.random.normal(keys[3], (EXPERTS, INNER, WIDTH))


def weighted(order, x_TD, weights_TK, into_EDF, out_EFD):
    h_NF = jnp.tanh(grouped_matmul(spread(x_TD, order), into_EDF, order.sizes_E))
    h_NF *= rows_of_copies(weights_TK, order)[:, None]
    return collect(grouped_matmul(h_NF, out_EFD, order.sizes_E), order)


def sorted_experts(experts, first, count):
    def run(x_TD, weights_TK, into_EDF, out_EFD):
        order = sort_by_expert(experts, count, first)
        return weighted(order, x_TD, weights_TK, into_EDF, out_EFD)

    return run


def limited(experts, capacity, by_weight, pads):
    """As `sorted_experts`, of the copies within the capacity alone."""

    def run(x_TD, weights_TK, into_EDF, out_EFD):
        places = places_in_experts(experts, EXPERTS, weights_TK if by_weight else None)
        if pads:
            order = pad_experts(experts, places, EXPERTS, capacity)
        else:
            order = sort_by_expert(experts, EXPERTS, kept_TK=places < capacity)
        return weighted(order, x_TD, weights_TK, into_EDF, out_EFD)

    return run


def kept_copies(experts: np.ndarray, weights: np.ndarray, capacity: int, by_weight: bool):
    """Which copies an expert takes, by a loop."""
    kept = np.zeros(experts.shape, bool)
    for e in range(EXPERTS):
        copies = [tuple(copy) for copy in np.argwhere(experts == e)]
        copies.sort(key=lambda copy: (-weights[copy] if by_weight else 0, copy))
        for copy in copies[:capacity]:
            kept[copy] = True
    return kept


def loop(experts, first, count):
    def run(x_TD, weights_TK, into_EDF, out_EFD):
        total_TD = jnp.zeros_like(x_TD)
        for e in range(count):
            weight_T = jnp.sum(jnp.where(experts == first + e, weights_TK, 0), axis=1)
            total_TD += weight_T[:, None] * (jnp.tanh(x_TD @ into_EDF[e]) @ out_EFD[e])
        return total_TD

    return run


@pytest.mark.parametrize("span", [(0, EXPERTS), (2, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("kind", ["random", "one expert"])
@pytest.mark.parametrize("top_k", thinned([2, 1, EXPERTS], 3))
def test_everything_equals_a_loop_over_experts(top_k, kind, span):
    """Also where only some experts lie here: the rest is zero, forward and in every gradient."""
    experts, (first, count) = jnp.asarray(choices(kind, top_k)), span
    x, weights, into, out = arrays(top_k)
    operands = (x, weights, into[first : first + count], out[first : first + count])
    both = (both_ways(make(experts, first, count), operands) for make in (sorted_experts, loop))
    for actual, wanted in zip(*both, strict=True):
        limit = TOLERANCE * (1 + np.abs(wanted).max())
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=limit)


def both_ways(function, operands) -> tuple:
    """Result and gradients."""
    result, pull = jax.vjp(function, *operands)
    return result, *pull(jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape))


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize(("kind", "factor"), [("random", 0.7), ("random", 9), ("one expert", 1)])
def test_copies_beyond_the_capacity_count_for_nothing(kind, factor, by_weight, pads):
    experts = choices(kind, 2)
    operands = arrays(2)
    capacity = capacity_of(TOKENS, 2, EXPERTS, factor)
    kept = kept_copies(experts, np.asarray(operands[1]), capacity, by_weight)
    assert kept.all() == (factor == 9)

    def without_dropped(x_TD, weights_TK, *matrices):
        return loop(experts, 0, EXPERTS)(x_TD, jnp.where(kept, weights_TK, 0), *matrices)

    run = limited(jnp.asarray(experts), capacity, by_weight, pads)
    both = (both_ways(function, operands) for function in (run, without_dropped))
    for actual, wanted in zip(*both, strict=True):
        limit = TOLERANCE * (1 + np.abs(wanted).max())
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "capacity"),
    [(64, 1, 8, 1.0, 8), (64, 2, 8, 1.25, 20), (10, 1, 4, 1.0, 3), (8, 2, 2, 4.0, 8)],
)
def test_capacity_is_a_share_rounded_up(tokens, top_k, experts, factor, capacity):
    assert capacity_of(tokens, top_k, experts, factor) == capacity


@pytest.mark.parametrize("kind", ["random", "one expert"])
def test_nothing_is_dropped_and_tokens_keep_their_order(kind):
    experts = choices(kind, 2)
    order = sort_by_expert(jnp.asarray(experts), EXPERTS)
    assert np.array_equal(order.sizes_E, np.bincount(experts.reshape(-1), minlength=EXPERTS))
    copies = np.asarray(order.copies_R)
    assert np.array_equal(copies, np.argsort(experts.reshape(-1), kind="stable"))
    assert np.array_equal(copies[np.asarray(order.rows_TK)].reshape(-1), np.arange(copies.size))


def test_no_array_has_a_dimension_of_experts_beside_that_of_tokens():
    """No one-hot dispatch, and backward scatters nothing."""
    experts = jnp.asarray(choices("random", 2))

    def loss(*operands):
        return jnp.sum(sorted_experts(experts, 0, EXPERTS)(*operands) ** 2)

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays(2)).as_text()
    assert f"tensor<{TOKENS}x{EXPERTS}x" not in text
    assert f"tensor<{TOKENS * 2}x{EXPERTS}x" not in text


def test_low_precision_sums_in_float32():
    """Of integers: float32 holds their sums exactly in any order, bfloat16 does not."""
    experts = jnp.asarray(choices("random", 4))
    order = sort_by_expert(experts, EXPERTS)
    y = jax.random.randint(jax.random.key(0), (TOKENS * 4, WIDTH), -256, 257).astype(jnp.bfloat16)
    actual = collect(y, order)
    wanted = jnp.sum(y[order.rows_TK].astype(jnp.float32), axis=1)
    assert actual.dtype == jnp.bfloat16
    assert np.array_equal(actual, wanted.astype(jnp.bfloat16))


def test_the_gradient_of_rows_waits_for_that_of_their_weights():
    """Values and gradients are the same; the compiled gradient of x alone has the other's sums."""
    keys = jax.random.split(jax.random.key(0), 3)
    x_RF, slope_RF = (jax.random.normal(key, (8, 4), jnp.bfloat16) for key in keys[:2])
    weights_R = jax.random.uniform(keys[2], (8,))
    results, sums = [], []
    for in_order in (False, True):
        function = functools.partial(weighted_rows, in_order=in_order)
        y_RF, pull = jax.vjp(function, x_RF, weights_R)
        results.append((y_RF, *pull(slope_RF)))

        def of_x(x_RF, function=function):
            return jax.vjp(function, x_RF, weights_R)[1](slope_RF)[0]

        text = jax.jit(of_x).lower(x_RF).compile().as_text()
        sums.append(" reduce(" in str(text))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert sums == [False, True]
