"""Experts on other devices: copies go there and their outputs come back.

Padded, every expert gets as many rows from every device, in one exchange. Else what is kept goes in
rounds: the first is differentiated as it stands. Loads so uneven that more are needed are rare:
those run in a loop that backward makes again, so that memory is that of one round.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from maxmeg.ops.experts.dispatch import collect, pad_experts, rows_of_copies, sort_by_expert, spread
from maxmeg.ops.experts.exchange import Exchange, Parcels, count_rounds, parcels, plan_round
from maxmeg.ops.experts.routing import Routing
from maxmeg.parallel import collectives


def exchange_of(
    tokens: int, top_k: int, count: int, axes: tuple[str, ...], kind: str, buffer: float
) -> tuple[Exchange, bool]:
    """(what is exchanged of so many tokens on each device, whether one round holds every case).

    count: experts on a device. buffer: rows of a round over the mean load of a device.
    """
    devices = collectives.axis_size(axes)
    each = tokens * min(top_k, count)  # at most, from one device to another
    width = min(math.ceil(buffer * tokens * top_k / devices), each)
    if kind == "ragged":
        rows = min(math.ceil(buffer * tokens * top_k), each * devices)
        return Exchange(axes, rows, ragged=True), rows == each * devices
    return Exchange(axes, width * devices), width == each


def exchanged(
    experts, x_TD: Float[Array, "T D"], routing: Routing, kept_TK, kind: str, buffer: float, axes
) -> Float[Array, "T D"]:
    """Weighted sums of the outputs of each token's experts, wherever along `axes` they are.

    experts(x_ND, sizes_E, weights_N) computes those of this device.
    """
    experts_TK, weights_TK = routing
    count = experts.up.shape[-3]
    tokens, top_k = experts_TK.shape
    exchange, enough = exchange_of(tokens, top_k, count, axes, kind, buffer)
    given = parcels(experts_TK // count, kept_TK, exchange)
    numbers_TK = experts_TK % count
    y_TD = one_round(exchange, 0, experts, x_TD, weights_TK, numbers_TK, given)
    if enough:
        return y_TD
    rounds = count_rounds(given, exchange)
    return y_TD + further(exchange, experts, x_TD, weights_TK, numbers_TK, given, rounds)


def one_round(
    exchange: Exchange, number, experts, x_TD, weights_TK, numbers_TK, given: Parcels
) -> Float[Array, "T D"]:
    """What the copies sent in this round add; numbers_TK: experts as their devices count them."""
    order, there, back = plan_round(given, number, exchange)
    x_ND = collectives.stored(there(spread(x_TD, order)), "dispatched_tokens")
    # Rows without a copy have the number 0, also where nothing arrived.
    labels = (weights_TK, (numbers_TK + 1).astype(weights_TK.dtype))
    labels_NI = jnp.stack([rows_of_copies(label, order) for label in labels], axis=1)
    labels_NI = collectives.stored(there(labels_NI), "dispatched_weights")
    numbers_NK = labels_NI[:, 1:].astype(jnp.int32) - 1
    local = sort_by_expert(numbers_NK, experts.up.shape[-3])
    weights_N = rows_of_copies(labels_NI[:, :1], local)
    rows_ND = experts(spread(x_ND, local), local.sizes_E, weights_N)
    return collect(back(collect(rows_ND, local)), order)


def padded(
    experts, x_TD: Float[Array, "T D"], routing: Routing, places_TK, capacity: int, axes
) -> Float[Array, "T D"]:
    """As `exchanged`, of `capacity` copies an expert: blocks that are rows of their experts as they
    arrive. places_TK: `places_in_experts`."""
    num_experts = experts.up.shape[-3] * collectives.axis_size(axes)
    order = pad_experts(routing.experts_TK, places_TK, num_experts, capacity)
    order = jax.tree.map(lambda index: collectives.stored(index, "dispatch_order"), order)

    def there(rows):
        rows_EC = rows.reshape(num_experts, capacity, *rows.shape[1:])
        return collectives.exchange(rows_EC, axes, cut=0, joined=1).reshape(rows.shape)

    def back(rows):
        rows_EC = rows.reshape(experts.up.shape[-3], -1, *rows.shape[1:])
        return collectives.exchange(rows_EC, axes, cut=1, joined=0).reshape(rows.shape)

    x_ND = collectives.stored(there(spread(x_TD, order)), "dispatched_tokens")
    weights_N = there(rows_of_copies(routing.weights_TK, order))
    rows_ND = experts(x_ND, None, collectives.stored(weights_N, "dispatched_weights"))
    return collect(back(rows_ND), order)


def _further(exchange, experts, x_TD, weights_TK, numbers_TK, given: Parcels, rounds):
    """What the rounds after the first add."""

    def body(state):
        number, total_TD = state
        added_TD = one_round(exchange, number, experts, x_TD, weights_TK, numbers_TK, given)
        return number + 1, total_TD + added_TD

    start = (jnp.int32(1), jnp.zeros_like(x_TD))
    return lax.while_loop(lambda state: state[0] < rounds, body, start)[1]


def _further_forward(exchange, *operands):
    return _further(exchange, *operands), operands


def _further_backward(exchange, operands, slope_TD):
    experts, x_TD, weights_TK, numbers_TK, given, rounds = operands
    variables = (experts, x_TD, weights_TK)

    def body(state):
        number, total = state

        def run(experts, x_TD, weights_TK):
            return one_round(exchange, number, experts, x_TD, weights_TK, numbers_TK, given)

        _, pull = jax.vjp(run, *variables)
        return number + 1, jax.tree.map(jnp.add, total, pull(slope_TD))

    start = (jnp.int32(1), jax.tree.map(jnp.zeros_like, variables))
    gradients = lax.while_loop(lambda state: state[0] < rounds, body, start)[1]
    return (*gradients, None, None, None)


further: Any = jax.custom_vjp(_further, nondiff_argnums=(0,))
further.defvjp(_further_forward, _further_backward)
