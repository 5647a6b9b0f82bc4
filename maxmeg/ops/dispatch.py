"""Tokens to experts and back on one device, without a copy per expert: sort, gather, weighted sum.

Every token has K copies, one an expert, which lie sorted by expert as `grouped_matmul` wants them.
Forward and backward are gathers alone: JAX's own transpose of a gather adds up in an order that a
GPU does not repeat.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Order(NamedTuple):
    """Where copies lie: `copies_N[row]` is token * K + choice, `rows_TK` the row of each copy.

    sizes_E: rows of each expert here; copies for experts elsewhere lie behind them.
    """

    copies_N: Int[Array, " N"]
    rows_TK: Int[Array, "T K"]
    sizes_E: Int[Array, " E"]


def sort_by_expert(experts_TK: Int[Array, "T K"], num_experts: int, first: int = 0) -> Order:
    """Copies for experts first .. first + num_experts - 1 in their order, tokens in theirs."""
    local_N = experts_TK.reshape(-1) - first
    local_N = jnp.where((local_N >= 0) & (local_N < num_experts), local_N, num_experts)
    copies_N = jnp.argsort(local_N, stable=True).astype(jnp.int32)
    places_N = jnp.arange(len(local_N), dtype=jnp.int32)
    rows_N = jnp.zeros_like(places_N).at[copies_N].set(places_N, unique_indices=True)
    sizes_E = jnp.bincount(local_N, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return Order(copies_N, rows_N.reshape(experts_TK.shape), sizes_E)


def spread(x_TD: Float[Array, "T D"], order: Order) -> Float[Array, "N D"]:
    """A row for each copy, in the order of experts."""
    return _spread(x_TD, order)


def collect(
    y_ND: Float[Array, "N D"], weights_TK: Float[Array, "T K"], order: Order
) -> Float[Array, "T D"]:
    """Of every token the weighted sum of its copies' rows, summed in float32, in y's dtype."""
    return _collect(y_ND, weights_TK, order)


def _taken(x_TD, order: Order):
    return x_TD[order.copies_N // order.rows_TK.shape[1]]


def _spread_forward(x_TD, order: Order):
    return _taken(x_TD, order), order


def _spread_backward(order: Order, slope_ND):
    parts_TKD = slope_ND[order.rows_TK].astype(jnp.float32)
    return jnp.sum(parts_TKD, axis=1).astype(slope_ND.dtype), None


def _summed(y_ND, weights_TK, order: Order):
    parts_TKD = y_ND[order.rows_TK].astype(jnp.float32)
    return jnp.sum(parts_TKD * weights_TK[:, :, None], axis=1).astype(y_ND.dtype)


def _collect_forward(y_ND, weights_TK, order: Order):
    return _summed(y_ND, weights_TK, order), (y_ND, weights_TK, order)


def _collect_backward(residuals, slope_TD):
    y_ND, weights_TK, order = residuals
    slope32_TD = slope_TD.astype(jnp.float32)
    weights_N1 = weights_TK.reshape(-1)[order.copies_N][:, None]
    d_y_ND = (_taken(slope32_TD, order) * weights_N1).astype(y_ND.dtype)
    parts_TKD = y_ND[order.rows_TK].astype(jnp.float32)
    d_weights_TK = jnp.sum(parts_TKD * slope32_TD[:, None], axis=-1)
    return d_y_ND, d_weights_TK.astype(weights_TK.dtype), None


_spread: Any = jax.custom_vjp(_taken)
_spread.defvjp(_spread_forward, _spread_backward)
_collect: Any = jax.custom_vjp(_summed)
_collect.defvjp(_collect_forward, _collect_backward)
