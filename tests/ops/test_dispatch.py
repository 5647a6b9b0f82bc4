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
    rng = np.random.default_rng(top_k)
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)
    x, into, out = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, rng.random((TOKENS, top_k), np.float32), into, out


@functools.partial(jax.jit, static_argnames=("first", "count", "capacity", "by_weight", "pads"))
def by_sorting(
    experts, operands, *, first=0, count=EXPERTS, capacity=0, by_weight=False, pads=False
) -> tuple:
    """Result and gradients of experts first .. first + count. capacity: copies of each, 0: all."""

    def run(x_TD, weights_TK, into_EDF, out_EFD):
        is_kept_TK = None
        if capacity:
            places = places_in_experts(experts, count, weights_TK if by_weight else None)
            is_kept_TK = places < capacity
        if pads:
            order = pad_experts(experts, places, count, capacity)
        else:
            order = sort_by_expert(experts, count, first, is_kept_TK=is_kept_TK)
        h_NF = jnp.tanh(grouped_matmul(spread(x_TD, order), into_EDF, order.sizes_E))
        h_NF *= rows_of_copies(weights_TK, order)[:, None]
        return collect(grouped_matmul(h_NF, out_EFD, order.sizes_E), order)

    result, pull = jax.vjp(run, *operands)
    return result, *pull(jnp.asarray(slope_of(result.shape)))


def slope_of(shape) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def kept_copies(experts: np.ndarray, weights: np.ndarray, capacity: int, by_weight: bool):
    """Which copies an expert takes, by a loop."""
    kept = np.zeros(experts.shape, bool)
    for e in range(EXPERTS):
        copies = [tuple(copy) for copy in np.argwhere(experts == e)]
        copies.sort(key=lambda copy: (-weights[copy] if by_weight else 0, copy))
        for copy in copies[:capacity]:
            kept[copy] = True
    return kept


def loop(experts, first, x_TD, weights_TK, into_EDF, out_EFD) -> tuple:
    """Result and gradients, an expert at a time, in float64."""
    operands = [np.asarray(array, np.float64) for array in (x_TD, weights_TK, into_EDF, out_EFD)]
    x, weights, into, out = operands
    d_x, d_weights, d_into, d_out = map(np.zeros_like, operands)
    total, d_total = np.zeros_like(x), np.float64(slope_of(x.shape))
    for e in range(len(into)):
        is_copy = experts == first + e
        weight = np.where(is_copy, weights, 0).sum(1, keepdims=True)
        hidden = np.tanh(x @ into[e])
        y = hidden @ out[e]
        total += weight * y
        d_weights += is_copy * (y * d_total).sum(1, keepdims=True)
        d_out[e] = hidden.T @ (weight * d_total)
        d_hidden = (weight * d_total) @ out[e].T * (1 - hidden**2)
        d_into[e] = x.T @ d_hidden
        d_x += d_hidden @ into[e].T
    return total, d_x, d_weights, d_into, d_out


def check(actual: tuple, wanted: tuple) -> None:
    for one, other in zip(actual, wanted, strict=True):
        limit = TOLERANCE * (1 + np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


@pytest.mark.parametrize("span", [(0, EXPERTS), (2, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("kind", ["random", "one expert"])
@pytest.mark.parametrize("top_k", thinned([2, 1, EXPERTS], 3))
def test_everything_equals_a_loop_over_experts(top_k, kind, span):
    """Also where only some experts lie here: the rest is zero, forward and in every gradient."""
    experts, (first, count) = choices(kind, top_k), span
    x, weights, into, out = arrays(top_k)
    operands = (x, weights, into[first : first + count], out[first : first + count])
    actual = by_sorting(experts, operands, first=first, count=count)
    check(actual, loop(experts, first, *operands))


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize(("kind", "factor"), [("random", 0.7), ("random", 9), ("one expert", 1)])
def test_copies_beyond_the_capacity_count_for_nothing(kind, factor, by_weight, pads):
    """Weights of dropped copies are zero in the loop, and so are their gradients."""
    experts = choices(kind, 2)
    operands = arrays(2)
    capacity = capacity_of(TOKENS, 2, EXPERTS, factor)
    kept = kept_copies(experts, operands[1], capacity, by_weight)
    assert kept.all() == (factor == 9)
    x, weights, *matrices = operands
    wanted = list(loop(experts, 0, x, np.where(kept, weights, 0), *matrices))
    wanted[2] = np.where(kept, wanted[2], 0)
    how = {"capacity": capacity, "by_weight": by_weight, "pads": pads}
    check(by_sorting(experts, operands, **how), tuple(wanted))


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "capacity"),
    [(64, 1, 8, 1.0, 8), (64, 2, 8, 1.25, 20), (10, 1, 4, 1.0, 3), (8, 2, 2, 4.0, 8)],
)
def test_capacity_is_a_share_rounded_up(tokens, top_k, experts, factor, capacity):
    assert capacity_of(tokens, top_k, experts, factor) == capacity


def test_no_array_has_a_dimension_of_experts_beside_that_of_tokens():
    """No one-hot dispatch, and backward scatters nothing."""
    experts = jnp.asarray(choices("random", 2))

    text = by_sorting.lower(experts, arrays(2)).as_text()
    assert f"tensor<{TOKENS}x{EXPERTS}x" not in text
    assert f"tensor<{TOKENS * 2}x{EXPERTS}x" not in text


def test_low_precision_sums_in_float32():
    """Of integers: float32 holds their sums exactly in any order, bfloat16 does not."""
    experts, rng = choices("random", 4), np.random.default_rng(0)
    y = rng.integers(-256, 257, (TOKENS * 4, WIDTH)).astype(jnp.bfloat16)
    order = jax.jit(sort_by_expert, static_argnums=1)(experts, EXPERTS)
    actual = jax.jit(collect)(y, order)
    wanted = np.float32(y)[order.rows_TK].sum(axis=1)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(actual), wanted.astype(jnp.bfloat16))


def test_the_gradient_of_rows_waits_for_that_of_their_weights():
    """Values and gradients are the same; the compiled gradient of x alone has the other's sums."""
    rng = np.random.default_rng(0)
    x_RF, slope_RF = rng.normal(size=(2, 8, 4)).astype(jnp.bfloat16)
    weights_R, results, sums = rng.random(8, np.float32), [], []
    for in_order in (False, True):

        def gradients(x_RF, in_order=in_order):
            function = functools.partial(weighted_rows, in_order=in_order)
            y_RF, pull = jax.vjp(function, x_RF, weights_R)
            return y_RF, *pull(slope_RF)

        results.append(jax.jit(gradients)(x_RF))
        of_x = jax.jit(lambda x_RF, gradients=gradients: gradients(x_RF)[1])
        sums.append(" reduce(" in str(of_x.lower(x_RF).compile().as_text()))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert sums == [False, True]
