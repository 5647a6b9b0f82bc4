"""Tokens to experts and back on one device, without a copy per expert: sort, gather, sum.

Every token has K copies, one an expert, which lie sorted by expert as `grouped_matmul` wants them.
Forward and backward are gathers alone: JAX's own transpose of a gather adds up in an order that a
GPU does not repeat.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Order(NamedTuple):
    """Where copies lie: `copies_N[row]` is token * K + choice, `rows_TK` the row of each copy.

    A row without a copy has the number T * K, a copy without a row a row from N on; both count as
    zeros.
    sizes_E: rows of each expert here; copies for experts elsewhere lie behind them.
    """

    copies_N: Int[Array, " N"]
    rows_TK: Int[Array, "T K"]
    sizes_E: Int[Array, " E"]


def sort_by_expert(
    experts_TK: Int[Array, "T K"],
    num_experts: int,
    first: int = 0,
    kept_TK: Bool[Array, "T K"] | None = None,
    distinct: bool = True,
) -> Order:
    """Copies for experts first .. first + num_experts - 1 in their order, tokens in theirs.

    kept_TK: those that are not dropped. distinct: a token's experts differ, so that there are no
    more rows than min(K, num_experts) a token.
    """
    local_TK = experts_TK - first
    is_here_TK = (local_TK >= 0) & (local_TK < num_experts)
    if kept_TK is not None:
        is_here_TK &= kept_TK
    local_N = jnp.where(is_here_TK, local_TK, num_experts).reshape(-1)
    copies_N = jnp.argsort(local_N, stable=True).astype(jnp.int32)
    sizes_E = jnp.bincount(local_N, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    tokens, top_k = experts_TK.shape
    rows = tokens * (min(top_k, num_experts) if distinct else top_k)
    return Order(copies_N[:rows], _inverse(copies_N).reshape(experts_TK.shape), sizes_E)


def capacity_of(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Copies that an expert takes: `factor` times its even share, rounded up; never more than there
    are tokens."""
    return min(num_tokens, math.ceil(num_tokens * top_k / num_experts * factor))


def places_in_experts(
    experts_TK: Int[Array, "T K"],
    num_experts: int,
    weights_TK: Float[Array, "T K"] | None = None,
) -> Int[Array, "T K"]:
    """How many copies for the same expert come before each: earlier tokens, or with `weights_TK`
    those that weigh more, of equal ones earlier tokens.

    A copy is within an expert's capacity where this is less than it.
    """
    expert_N = experts_TK.reshape(-1)
    keys = (expert_N,) if weights_TK is None else (-weights_TK.reshape(-1), expert_N)
    copies_N = jnp.lexsort(keys)  # the last key leads; stable
    counts_E = jnp.bincount(expert_N, length=num_experts)
    starts_E = jnp.cumsum(counts_E) - counts_E
    return (_inverse(copies_N) - starts_E[expert_N]).reshape(experts_TK.shape).astype(jnp.int32)


def pad_experts(
    experts_TK: Int[Array, "T K"],
    places_TK: Int[Array, "T K"],
    num_experts: int,
    capacity: int,
) -> Order:
    """As many rows for every expert: `capacity`, of which some may be empty; copies beyond it and
    those for other experts are dropped. places_TK: of an expert's copies all different."""
    rows = num_experts * capacity
    is_here_TK = (experts_TK >= 0) & (experts_TK < num_experts) & (places_TK < capacity)
    rows_TK = jnp.where(is_here_TK, experts_TK * capacity + places_TK, rows)
    flat_N = rows_TK.reshape(-1)
    empty = jnp.full(rows, len(flat_N), jnp.int32)
    numbers_N = jnp.arange(len(flat_N), dtype=jnp.int32)
    copies_N = empty.at[flat_N].set(numbers_N, mode="drop", unique_indices=True)
    return Order(copies_N, rows_TK, jnp.full(num_experts, capacity, jnp.int32))


def spread(x_TD: Float[Array, "T D"], order: Order) -> Float[Array, "N D"]:
    """A row for each copy, in the order of experts."""
    return _spread(x_TD, order)


def collect(y_ND: Float[Array, "N D"], order: Order) -> Float[Array, "T D"]:
    """Of every token the sum of its copies' rows, summed in float32, in y's dtype."""
    return _collect(y_ND, order)


def rows_of_copies(
    values_TK: Float[Array, "T K"], order: Order, fill: float = 0.0
) -> Float[Array, " N"]:
    """A number of every copy, row by row; `fill` where a row has no copy."""
    return _rows_of_copies(fill, values_TK, order)


def _inverse(order_N: Int[Array, " N"]) -> Int[Array, " N"]:
    places_N = jnp.arange(len(order_N), dtype=jnp.int32)
    return jnp.zeros_like(places_N).at[order_N].set(places_N, unique_indices=True)


def _rows_of_tokens(x_TD, order: Order):
    """Row by row the token's vector, zeros where the row has no copy."""
    tokens_N = order.copies_N // order.rows_TK.shape[1]
    return x_TD.at[tokens_N].get(mode="fill", fill_value=0)


def _sums_of_rows(y_ND, order: Order):
    copies_TKD = y_ND.at[order.rows_TK].get(mode="fill", fill_value=0)
    return jnp.sum(copies_TKD, axis=1, dtype=jnp.float32).astype(y_ND.dtype)


def _numbers(fill, values_TK, order: Order):
    return values_TK.reshape(-1).at[order.copies_N].get(mode="fill", fill_value=fill)


_spread: Any = jax.custom_vjp(_rows_of_tokens)
_spread.defvjp(
    lambda x_TD, order: (_rows_of_tokens(x_TD, order), order),
    lambda order, slope_ND: (_sums_of_rows(slope_ND, order), None),
)
_collect: Any = jax.custom_vjp(_sums_of_rows)
_collect.defvjp(
    lambda y_ND, order: (_sums_of_rows(y_ND, order), order),
    lambda order, slope_TD: (_rows_of_tokens(slope_TD, order), None),
)
_rows_of_copies: Any = jax.custom_vjp(_numbers, nondiff_argnums=(0,))
_rows_of_copies.defvjp(
    lambda fill, values_TK, order: (_numbers(fill, values_TK, order), order),
    lambda fill, order, slope_N: (slope_N.at[order.rows_TK].get(mode="fill", fill_value=0), None),
)
