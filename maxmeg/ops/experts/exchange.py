"""Expert parallelism: send each token's copies to the devices of its experts and sum the outputs.

`exchange_padded` sends `capacity` rows per expert in one all-to-all. `exchange_in_rounds` sends a
bounded number of rows per round: an all-to-all of equal blocks, or a ragged all-to-all. Copies that
do not fit in a round go in the next one, so nothing is dropped and memory does not depend on the
expert loads. The first round is differentiated by JAX. Further rounds are rare; they run in a loop
that backward recomputes, so that memory stays that of one round.

XLA has a ragged all-to-all on CUDA only; other backends pick the rows from an all-gather.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from maxmeg.ops.backend import target_device
from maxmeg.ops.experts.dispatch import (
    Order,
    collect,
    pad_experts,
    rows_of_copies,
    sort_by_expert,
    spread,
)
from maxmeg.ops.experts.routing import Routing
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import MESH_AXES

EVERYWHERE = tuple(axis for axis in MESH_AXES if axis != collectives.PIPE_AXIS)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange between the devices along `axes`.

    rows: rows that a device receives per round; unless ragged, an equal number from each device.
    """

    axes: tuple[str, ...]
    rows: int
    ragged: bool = False

    @property
    def devices(self) -> int:
        return collectives.axis_size(self.axes)


class DispatchPlan(NamedTuple):
    """Where this device's copies go.

    order: sorts the copies by device. places_TK: number of earlier copies for the same device.
    counts: [sender, receiver] numbers of copies.
    """

    devices_TK: Int[Array, "T K"]
    order: Order
    places_TK: Int[Array, "T K"]
    counts: Int[Array, "devices devices"]


def make_exchange(
    tokens: int, top_k: int, local_experts: int, axes: tuple[str, ...], kind: str, buffer: float
) -> tuple[Exchange, bool]:
    """(the exchange of `tokens` tokens per device, whether one round always suffices).

    buffer: rows of a round relative to a device's mean load.
    """
    devices = collectives.axis_size(axes)
    most = tokens * min(top_k, local_experts)  # from one device to another
    width = min(math.ceil(buffer * tokens * top_k / devices), most)
    if kind == "ragged":
        rows = min(math.ceil(buffer * tokens * top_k), most * devices)
        return Exchange(axes, rows, ragged=True), rows == most * devices
    return Exchange(axes, width * devices), width == most


def exchange_in_rounds(
    experts, x_TD: Float[Array, "T D"], routing: Routing, kept_TK, kind: str, buffer: float, axes
) -> Float[Array, "T D"]:
    """Weighted sums of the outputs of each token's experts, which are spread over `axes`.

    experts(x_RD, sizes_E, weights_R) computes this device's experts. kept_TK: copies that are not
    dropped. kind, buffer: as in `make_exchange`.
    """
    experts_TK, weights_TK = routing
    local_experts = experts.up.shape[-3]
    tokens, top_k = experts_TK.shape
    exchange, one_suffices = make_exchange(tokens, top_k, local_experts, axes, kind, buffer)
    plan = plan_dispatch(experts_TK // local_experts, kept_TK, exchange)
    local_TK = experts_TK % local_experts
    y_TD = run_round(exchange, 0, experts, x_TD, weights_TK, local_TK, plan)
    if one_suffices:
        return y_TD
    rounds = count_rounds(plan, exchange)
    return y_TD + further_rounds(exchange, experts, x_TD, weights_TK, local_TK, plan, rounds)


def exchange_padded(
    experts, x_TD: Float[Array, "T D"], routing: Routing, places_TK, capacity: int, axes
) -> Float[Array, "T D"]:
    """As `exchange_in_rounds`, with `capacity` rows per expert and device in one exchange.

    Rows arrive in the order of the experts. places_TK: as of `places_in_experts`.
    """
    num_experts = experts.up.shape[-3] * collectives.axis_size(axes)
    order = pad_experts(routing.experts_TK, places_TK, num_experts, capacity)
    order = jax.tree.map(lambda index: collectives.stored(index, "dispatch_order"), order)

    def send(rows):
        rows_EC = rows.reshape(num_experts, capacity, *rows.shape[1:])
        return collectives.exchange(rows_EC, axes, cut=0, joined=1).reshape(rows.shape)

    def send_back(rows):
        rows_EC = rows.reshape(experts.up.shape[-3], -1, *rows.shape[1:])
        return collectives.exchange(rows_EC, axes, cut=1, joined=0).reshape(rows.shape)

    x_RD = collectives.stored(send(spread(x_TD, order)), "dispatched_tokens")
    weights_R = send(rows_of_copies(routing.weights_TK, order))
    y_RD = experts(x_RD, None, collectives.stored(weights_R, "dispatched_weights"))
    return collect(send_back(y_RD), order)


def plan_dispatch(
    devices_TK: Int[Array, "T K"], kept_TK: Bool[Array, "T K"], exchange: Exchange
) -> DispatchPlan:
    """kept_TK: copies that are not dropped."""
    order = sort_by_expert(devices_TK, exchange.devices, kept_TK=kept_TK, distinct=False)
    order = jax.tree.map(lambda index: collectives.stored(index, "dispatch_order"), order)
    starts = jnp.cumsum(order.sizes_E) - order.sizes_E
    never = jnp.iinfo(jnp.int32).max
    places_TK = jnp.where(kept_TK, order.rows_TK - starts[devices_TK], never)
    counts = collectives.gather(order.sizes_E[None], exchange.axes, 0)
    counts = collectives.stored(counts, "dispatch_counts")
    return DispatchPlan(devices_TK, order, places_TK, counts)


def count_rounds(plan: DispatchPlan, exchange: Exchange) -> jax.Array:
    """Rounds until every copy is sent, equal on all devices except along pipe."""
    if exchange.ragged:
        most = jnp.max(jnp.sum(plan.counts, axis=0))
        rounds = -(-most // exchange.rows)
    else:
        rounds = -(-jnp.max(plan.counts) // (exchange.rows // exchange.devices))
    return collectives.stored(collectives.max_over(rounds, EVERYWHERE), "dispatch_rounds")


def plan_round(
    plan: DispatchPlan, number, exchange: Exchange
) -> tuple[Order, Callable[[Array], Array], Callable[[Array], Array]]:
    """(order of the rows of one round, function that sends them, function that returns outputs).

    Rows without a copy arrive as zeros.
    """
    if exchange.ragged:
        slices = ragged_slices(plan.counts, number, exchange.rows)
        sent = len(plan.order.copies_R)
        send = functools.partial(_ragged, exchange.axes, exchange.rows, slices)
        return plan.order, send, functools.partial(_ragged, exchange.axes, sent, slices.reversed())
    width = exchange.rows // exchange.devices
    is_now_TK = plan.places_TK // width == number
    places_TK = jnp.where(is_now_TK, plan.places_TK % width, width)
    order = pad_experts(plan.devices_TK, places_TK, exchange.devices, width)
    send = functools.partial(collectives.exchange, axes=exchange.axes)
    return order, send, send


def run_round(
    exchange: Exchange, number, experts, x_TD, weights_TK, local_TK, plan: DispatchPlan
) -> Float[Array, "T D"]:
    """Output of the copies sent in round `number`. local_TK: index of each expert on its device."""
    order, send, send_back = plan_round(plan, number, exchange)
    x_RD = collectives.stored(send(spread(x_TD, order)), "dispatched_tokens")
    # Rows without a copy get the label 0, also rows that do not arrive.
    labels = (weights_TK, (local_TK + 1).astype(weights_TK.dtype))
    labels_R2 = jnp.stack([rows_of_copies(label, order) for label in labels], axis=1)
    labels_R2 = collectives.stored(send(labels_R2), "dispatched_weights")
    local_R1 = labels_R2[:, 1:].astype(jnp.int32) - 1
    local_order = sort_by_expert(local_R1, experts.up.shape[-3])
    weights_R = rows_of_copies(labels_R2[:, :1], local_order)
    y_RD = experts(spread(x_RD, local_order), local_order.sizes_E, weights_R)
    return collect(send_back(collect(y_RD, local_order)), order)


def _further_rounds(exchange, experts, x_TD, weights_TK, local_TK, plan: DispatchPlan, rounds):
    """Output of all rounds after the first."""

    def body(state):
        number, total_TD = state
        y_TD = run_round(exchange, number, experts, x_TD, weights_TK, local_TK, plan)
        return number + 1, total_TD + y_TD

    start = (jnp.int32(1), jnp.zeros_like(x_TD))
    return lax.while_loop(lambda state: state[0] < rounds, body, start)[1]


def _further_rounds_backward(exchange, operands, slope_TD):
    experts, x_TD, weights_TK, local_TK, plan, rounds = operands
    variables = (experts, x_TD, weights_TK)

    def body(state):
        number, total = state

        def run(experts, x_TD, weights_TK):
            return run_round(exchange, number, experts, x_TD, weights_TK, local_TK, plan)

        _, pull = jax.vjp(run, *variables)
        return number + 1, jax.tree.map(jnp.add, total, pull(slope_TD))

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), variables)
    start = (jnp.int32(1), zeros)
    total = lax.while_loop(lambda state: state[0] < rounds, body, start)[1]
    gradients = jax.tree.map(lambda sum, a: sum.astype(a.dtype), total, variables)
    return (*gradients, None, None, None)


further_rounds: Any = jax.custom_vjp(_further_rounds, nondiff_argnums=(0,))
further_rounds.defvjp(
    lambda exchange, *operands: (_further_rounds(exchange, *operands), operands),
    _further_rounds_backward,
)


class Slices(NamedTuple):
    """[sender, receiver] slices: `sizes` rows from row `starts` of the sender's buffer to row
    `places` of the receiver's."""

    starts: Int[Array, "devices devices"]
    sizes: Int[Array, "devices devices"]
    places: Int[Array, "devices devices"]

    def reversed(self) -> "Slices":
        return Slices(self.places.T, self.sizes.T, self.starts.T)


def ragged_slices(counts: Int[Array, "devices devices"], number, rows: int) -> Slices:
    """The slices of round `number`: the next `rows` rows for each receiver, ordered by sender."""
    before = jnp.cumsum(counts, axis=0) - counts
    first = jnp.clip(number * rows - before, 0, counts)
    last = jnp.clip((number + 1) * rows - before, 0, counts)
    starts = jnp.cumsum(counts, axis=1) - counts + first
    places = jnp.clip(before + first - number * rows, 0, rows)
    return Slices(starts, last - first, places)


def _move(axes: tuple[str, ...], rows: int, slices: Slices, x_RD: Float[Array, "R D"]):
    rank = collectives.axis_index(axes)
    starts, sizes, places = (matrix.astype(jnp.int32) for matrix in slices)
    if target_device().is_cuda:
        out = jnp.zeros((rows, *x_RD.shape[1:]), x_RD.dtype)
        sent = (starts[rank], sizes[rank], places[rank], sizes[:, rank])
        return collectives.ragged_exchange(x_RD, out, *sent, axes)
    gathered = collectives.gather(x_RD[None], axes, 0)  # [sender, R, D]
    within = jnp.arange(rows) - places[:, rank][:, None]  # [sender, R]
    is_from = (within >= 0) & (within < sizes[:, rank][:, None])
    sender_R = jnp.argmax(is_from, axis=0)
    row_R = (starts[:, rank][:, None] + within)[sender_R, jnp.arange(rows)]
    row_R = jnp.where(jnp.any(is_from, axis=0), row_R, len(x_RD))
    return gathered.at[sender_R, row_R].get(mode="fill", fill_value=0)


_ragged: Any = jax.custom_vjp(_move, nondiff_argnums=(0, 1))
_ragged.defvjp(
    lambda axes, rows, slices, x_RD: (_move(axes, rows, slices, x_RD), (slices, len(x_RD))),
    lambda axes, rows, residuals, slope: (
        None,
        _move(axes, residuals[1], residuals[0].reversed(), slope),
    ),
)
