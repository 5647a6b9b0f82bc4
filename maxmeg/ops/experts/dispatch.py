"""Permute tokens to experts on one device, and combine the experts' outputs.

Each token has K copies, one per chosen expert. Copies are sorted by expert, as `grouped_matmul`
requires. Forward and backward only gather: JAX's transpose of a gather is a scatter-add, whose
order of summation differs from run to run on a GPU.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from maxmeg.parallel.ordering import depending


class Order(NamedTuple):
    """A permutation of copies into R rows.

    copies_R: token * K + choice of each row; T * K for a row without a copy.
    rows_TK: row of each copy; at least R for a copy without a row. Both read as zeros.
    sizes_E: number of rows of each local expert. Copies for other experts follow them.
    """

    copies_R: Int[Array, " R"]
    rows_TK: Int[Array, "T K"]
    sizes_E: Int[Array, " E"]


def count_values(values: Int[Array, "*N"], number: int, dtype=jnp.int32) -> Array:
    """How often each of 0 .. number - 1 occurs. A sum of comparisons: additions that collide at a
    few places of memory are slow on a GPU."""
    numbers = jnp.arange(number, dtype=values.dtype)
    return jnp.sum(values.reshape(1, -1) == numbers[:, None], axis=1, dtype=dtype)


def sort_by_expert(
    experts_TK: Int[Array, "T K"],
    num_experts: int,
    first: int = 0,
    is_kept_TK: Bool[Array, "T K"] | None = None,
    distinct: bool = True,
) -> Order:
    """Sort the copies for experts first .. first + num_experts - 1 by expert, then by token.

    is_kept_TK: False for dropped copies. distinct: a token's experts all differ, which bounds the
    number of rows by min(K, num_experts) per token.
    """
    local_TK = experts_TK - first
    is_local_TK = (local_TK >= 0) & (local_TK < num_experts)
    if is_kept_TK is not None:
        is_local_TK &= is_kept_TK
    local_R = jnp.where(is_local_TK, local_TK, num_experts).reshape(-1)
    copies_R = jnp.argsort(local_R, stable=True).astype(jnp.int32)
    sizes_E = count_values(local_R, num_experts)
    tokens, top_k = experts_TK.shape
    rows = tokens * (min(top_k, num_experts) if distinct else top_k)
    return Order(copies_R[:rows], _inverse(copies_R).reshape(experts_TK.shape), sizes_E)


def capacity_of(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Capacity of an expert: `factor` times the mean load, rounded up, at most `num_tokens`."""
    return min(num_tokens, math.ceil(num_tokens * top_k / num_experts * factor))


def places_in_experts(
    experts_TK: Int[Array, "T K"],
    num_experts: int,
    weights_TK: Float[Array, "T K"] | None = None,
) -> Int[Array, "T K"]:
    """Place of each copy among the copies for the same expert, from 0.

    The order is by token or, with `weights_TK`, by falling weight and then by token. A copy exceeds
    a capacity if its place is at least that capacity.
    """
    expert_R = experts_TK.reshape(-1)
    keys = (expert_R,) if weights_TK is None else (-weights_TK.reshape(-1), expert_R)
    copies_R = jnp.lexsort(keys)  # the last key leads; stable
    counts_E = count_values(expert_R, num_experts)
    starts_E = jnp.cumsum(counts_E) - counts_E
    return (_inverse(copies_R) - starts_E[expert_R]).reshape(experts_TK.shape).astype(jnp.int32)


def pad_experts(
    experts_TK: Int[Array, "T K"],
    places_TK: Int[Array, "T K"],
    num_experts: int,
    capacity: int,
) -> Order:
    """Give every expert exactly `capacity` rows, some possibly empty.

    Copies with a place >= capacity and copies for other experts are dropped. places_TK must be
    distinct within an expert.
    """
    rows = num_experts * capacity
    is_local_TK = (experts_TK >= 0) & (experts_TK < num_experts) & (places_TK < capacity)
    rows_TK = jnp.where(is_local_TK, experts_TK * capacity + places_TK, rows)
    flat_R = rows_TK.reshape(-1)
    empty = jnp.full(rows, len(flat_R), jnp.int32)
    indices_R = jnp.arange(len(flat_R), dtype=jnp.int32)
    copies_R = empty.at[flat_R].set(indices_R, mode="drop", unique_indices=True)
    return Order(copies_R, rows_TK, jnp.full(num_experts, capacity, jnp.int32))


def spread(x_TD: Num[Array, "T D"], order: Order) -> Num[Array, "R D"]:
    """The token of each row; zeros for rows without a copy."""
    return _spread(x_TD, order)


def collect(y_RD: Float[Array, "R D"], order: Order) -> Float[Array, "T D"]:
    """Sum of the rows of each token's copies, accumulated in float32, in y's dtype."""
    return _collect(y_RD, order)


def rows_of_copies(
    values_TK: Float[Array, "T K"], order: Order, fill: float = 0.0
) -> Float[Array, " R"]:
    """The value of each row's copy; `fill` for rows without a copy."""
    return _rows_of_copies(fill, values_TK, order)


def weighted_rows(
    x_RF: Float[Array, "R F"], weights_R: Float[Array, " R"], *, in_order: bool
) -> Float[Array, "R F"]:
    """Each row times its weight, in x's dtype.

    in_order: backward computes the gradient of the weights before that of x. With products in 8
    bits this saves memory: XLA otherwise computes it last, and until then keeps arrays of x's size
    beside the 8-bit copies of x's gradient."""
    return (_weighted_in_order if in_order else _weighted)(x_RF, weights_R)


def _inverse(order_R: Int[Array, " R"]) -> Int[Array, " R"]:
    places_R = jnp.arange(len(order_R), dtype=jnp.int32)
    return jnp.zeros_like(places_R).at[order_R].set(places_R, unique_indices=True)


def _rows_of_tokens(x_TD, order: Order):
    tokens_R = order.copies_R // order.rows_TK.shape[1]
    return x_TD.at[tokens_R].get(mode="fill", fill_value=0)


def _sums_of_rows(y_RD, order: Order):
    copies_TKD = y_RD.at[order.rows_TK].get(mode="fill", fill_value=0)
    return jnp.sum(copies_TKD, axis=1, dtype=jnp.float32).astype(y_RD.dtype)


def _values_of_rows(fill, values_TK, order: Order):
    return values_TK.reshape(-1).at[order.copies_R].get(mode="fill", fill_value=fill)


_spread: Any = jax.custom_vjp(_rows_of_tokens)
_spread.defvjp(
    lambda x_TD, order: (_rows_of_tokens(x_TD, order), order),
    lambda order, slope_RD: (_sums_of_rows(slope_RD, order), None),
)
_collect: Any = jax.custom_vjp(_sums_of_rows)
_collect.defvjp(
    lambda y_RD, order: (_sums_of_rows(y_RD, order), order),
    lambda order, slope_TD: (_rows_of_tokens(slope_TD, order), None),
)
_rows_of_copies: Any = jax.custom_vjp(_values_of_rows, nondiff_argnums=(0,))
_rows_of_copies.defvjp(
    lambda fill, values_TK, order: (_values_of_rows(fill, values_TK, order), order),
    lambda fill, order, slope_R: (slope_R.at[order.rows_TK].get(mode="fill", fill_value=0), None),
)


def _weighted(x_RF, weights_R):
    return (x_RF * weights_R[:, None]).astype(x_RF.dtype)


def _weighted_backward(operands, slope_RF):
    _, pull = jax.vjp(_weighted, *operands)
    slope_R = pull(slope_RF)[1]
    return pull(depending(slope_RF, slope_R))[0], slope_R


_weighted_in_order: Any = jax.custom_vjp(_weighted)
_weighted_in_order.defvjp(lambda *operands: (_weighted(*operands), operands), _weighted_backward)
