"""Expert parallelism: send each token's copies to the devices of its experts and sum the outputs.

Every device sends the tokens of its sequence shard. Devices that share the columns of an expert
gather the rows that each of them received, and reduce-scatter the outputs before these are sent
back.

A round sends a bounded number of rows. Copies that do not fit in it go in the next one, so nothing
is dropped and memory does not depend on the expert loads. `Blocks` sends equal numbers of rows for
every expert, `Exchange` equal numbers of rows to every device. The first round is differentiated by
JAX. Further rounds are rare; they run in a loop that backward recomputes, so that memory stays that
of one round, and add to the first round's outputs and gradients in place.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from maxmeg.distributed.experts import packed
from maxmeg.distributed.experts.packed import Rows, Send
from maxmeg.ops.experts.dispatch import (
    Order,
    capacity_of,
    collect,
    pad_experts,
    places_in_experts,
    rows_of_copies,
    sort_by_expert,
    spread,
)
from maxmeg.ops.quantized import Recipe
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import EXPERT_TENSOR_AXES, MESH_AXES
from maxmeg.parallel.ordering import depending, zeros_after
from maxmeg.parallel.trainable import fixed, joined, trained

# Weighted sums of the experts' outputs [T, D], and a zero that exists once the experts have run.
Outputs = tuple[Array, Array]
EVERYWHERE = tuple(axis for axis in MESH_AXES if axis != collectives.PIPE_AXIS)


class Places(NamedTuple):
    """Where the copies go in `Blocks`.

    experts_TK: expert of each copy; none of this device's if out of range. places_TK: number of
    earlier copies of the same sending device for the same expert.
    """

    experts_TK: Int[Array, "T K"]
    places_TK: Int[Array, "T K"]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Equal blocks: in a round every expert takes `rows` rows of each sending device.

    experts: number of experts that tokens are sent to. limit: most copies that one device has for
    one expert; copies with a higher place are dropped. axes: devices along which tokens are sent,
    inside each of `nodes` equal parts; (): the tokens of `senders` devices, in their order, are
    here already.
    """

    experts: int
    rows: int
    limit: int
    axes: tuple[str, ...] = ()
    senders: int = 1
    nodes: int = 1

    @property
    def devices(self) -> int:
        return collectives.axis_size(self.axes) // self.nodes

    @property
    def one_suffices(self) -> bool:
        return self.rows >= self.limit

    def count_rounds(self, plan: Places) -> jax.Array:
        """Rounds until every copy is sent, equal on all devices except along pipe."""
        experts_TK, places_TK = plan
        is_sent_TK = (experts_TK >= 0) & (experts_TK < self.experts) & (places_TK < self.limit)
        rounds = jnp.max(jnp.where(is_sent_TK, places_TK // self.rows + 1, 0))
        return collectives.stored_always(collectives.max_over(rounds, EVERYWHERE))

    def run(self, number, experts, x_TD, weights_TK, plan: Places, after=None) -> Outputs:
        """Outputs of the copies sent in round `number`. Rows arrive in the order of the experts."""
        order = self._order(number, plan)
        order = jax.tree.map(collectives.stored_always, order)
        weights_R = rows_of_copies(weights_TK, order)
        if not self.axes:
            y_RD = experts(spread(x_TD, order), None, weights_R)
            return collect(y_RD, order), zeros_after(y_RD, ())
        route = Route(order, Partial(self._send), Partial(self._send_back), experts.dispatch)
        x_RD = route.dispatch(x_TD, self.nodes).values_RD
        weights_R = depending(kept_weights(self._send(weights_R), self.nodes), after)
        y_RD = experts(x_RD, None, weights_R)
        return route.combine(y_RD), zeros_after(y_RD, ())

    def _order(self, number, plan: Places) -> Order:
        experts_TK, places_TK = plan
        tokens, size = len(places_TK) // self.senders, self.senders * self.rows
        senders_T1 = jnp.arange(len(places_TK))[:, None] // tokens
        is_now_TK = (places_TK < self.limit) & (places_TK // self.rows == number)
        rows_TK = jnp.where(is_now_TK, senders_T1 * self.rows + places_TK % self.rows, size)
        return pad_experts(experts_TK, rows_TK, self.experts, size)

    def _send(self, rows):
        rows_EC = rows.reshape(self.experts, self.rows, *rows.shape[1:])
        groups = collectives.inside(self.axes, self.nodes)
        sent = collectives.exchange(rows_EC, self.axes, cut=0, joined=1, groups=groups)
        return collectives.gather(sent, EXPERT_TENSOR_AXES, 1).reshape(-1, *rows.shape[1:])

    def _send_back(self, rows):
        rows_EC = rows.reshape(self.experts // self.devices, -1, *rows.shape[1:])
        rows_EC = collectives.scatter(rows_EC, EXPERT_TENSOR_AXES, 1)
        groups = collectives.inside(self.axes, self.nodes)
        sent = collectives.exchange(rows_EC, self.axes, cut=1, joined=0, groups=groups)
        return sent.reshape(-1, *rows.shape[1:])


def kept_weights(weights_R: jax.Array, nodes: int) -> jax.Array:
    """Received weights, stored for backward; not inside a node, where sending them again is cheap:
    the rows that crossed nodes are stored."""
    return collectives.stored_always(weights_R) if nodes == 1 else weights_R


class Route(NamedTuple):
    """The way of a round's rows to the devices of their experts, and back.

    order: of the rows that this device sends. recipe: of 8-bit rows (packed.py); None: rows have
    the dtype of the tokens.
    """

    order: Order
    send: Send
    send_back: Send
    recipe: Recipe | None

    def dispatch(self, x_TD: Float[Array, "T D"], nodes: int = 1) -> Rows:
        def keep(rows: jax.Array) -> jax.Array:
            return collectives.stored(rows, "dispatched_tokens") if nodes == 1 else rows

        if self.recipe is None:
            return Rows(keep(self.send(spread(x_TD, self.order))))
        return packed.dispatch(x_TD, *self[:3], self.recipe, keep)

    def combine(self, y_RD: Float[Array, "R D"]) -> Float[Array, "T D"]:
        if self.recipe is None:
            return collect(self.send_back(y_RD), self.order)
        return packed.combine(y_RD, *self)


class DispatchPlan(NamedTuple):
    """Where this device's copies go in an `Exchange`.

    devices_TK: device of each copy's expert. local_TK: index of the expert there. order: sorts the
    copies by device. places_TK: number of earlier copies for the same device. counts: [sender,
    receiver] numbers of copies.
    """

    devices_TK: Int[Array, "T K"]
    local_TK: Int[Array, "T K"]
    order: Order
    places_TK: Int[Array, "T K"]
    counts: Int[Array, "devices devices"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange between the devices along `axes`, inside each of `nodes` equal parts.

    rows: rows that a device receives per round, an equal number from each device, before those of
    EXPERT_TENSOR_AXES are gathered.
    one_suffices: whether every copy fits in one round, however uneven the loads are.
    """

    axes: tuple[str, ...]
    rows: int
    one_suffices: bool
    nodes: int = 1

    @property
    def devices(self) -> int:
        return collectives.axis_size(self.axes) // self.nodes

    def count_rounds(self, plan: DispatchPlan) -> jax.Array:
        """Rounds until every copy is sent, equal on all devices except along pipe."""
        rounds = -(-jnp.max(plan.counts) // (self.rows // self.devices))
        return collectives.stored_always(collectives.max_over(rounds, EVERYWHERE))

    def run(self, number, experts, x_TD, weights_TK, plan: DispatchPlan, after=None) -> Outputs:
        """Outputs of the copies sent in round `number`."""
        order, send = self._order(number, plan), Partial(self._send)
        route = Route(order, send, Partial(self._send_back), experts.dispatch)
        received = route.dispatch(x_TD, self.nodes)
        # Rows without a copy get the label 0, also rows that do not arrive.
        labels = (weights_TK, (plan.local_TK + 1).astype(weights_TK.dtype))
        labels_R2 = jnp.stack([rows_of_copies(label, order) for label in labels], axis=1)
        labels_R2 = depending(kept_weights(send(labels_R2), self.nodes), after)
        local_R1 = labels_R2[:, 1:].astype(jnp.int32) - 1
        local_order = sort_by_expert(local_R1, experts.up.shape[-3])
        weights_R = rows_of_copies(labels_R2[:, :1], local_order)
        rows = received.spread(local_order)
        y_RD = experts(rows.values_RD, local_order.sizes_E, weights_R, rows.codes)
        return route.combine(collect(y_RD, local_order)), zeros_after(y_RD, ())

    def _order(self, number, plan: DispatchPlan) -> Order:
        """The order of the rows of one round. Rows without a copy arrive as zeros."""
        width = self.rows // self.devices
        is_now_TK = plan.places_TK // width == number
        places_TK = jnp.where(is_now_TK, plan.places_TK % width, width)
        return pad_experts(plan.devices_TK, places_TK, self.devices, width)

    def _send(self, rows):
        groups = collectives.inside(self.axes, self.nodes)
        sent = collectives.exchange(rows, self.axes, groups=groups)
        return collectives.gather(sent, EXPERT_TENSOR_AXES, 0)

    def _send_back(self, rows):
        groups = collectives.inside(self.axes, self.nodes)
        rows = collectives.scatter(rows, EXPERT_TENSOR_AXES, 0)
        return collectives.exchange(rows, self.axes, groups=groups)


def make_exchange(
    tokens: int,
    top_k: int,
    local_experts: int,
    axes: tuple[str, ...],
    buffer: float,
    nodes: int = 1,
    received: int = 0,
) -> Exchange:
    """The exchange of `tokens` tokens per device.

    buffer: rows of a round relative to a device's mean load.
    received: rows that it received from other nodes, in place of its own tokens.
    """
    devices = collectives.axis_size(axes) // nodes
    most = (received or tokens) * min(top_k, local_experts)  # from one device to another
    width = min(math.ceil(buffer * tokens * top_k / devices), most)
    return Exchange(axes, width * devices, width == most, nodes=nodes)


def block_rows(tokens: int, top_k: int, num_experts: int, buffer: float, limit: int) -> int:
    """Rows of a block: `buffer` times an expert's mean load of `tokens` tokens, at most `limit`."""
    return min(capacity_of(tokens, top_k, num_experts, buffer), limit)


def plan_of(
    exchange: Blocks | Exchange, experts_TK, is_kept_TK: Bool[Array, "T K"], local_experts: int
) -> Any:
    """Where copies go whose expert is numbered from the first one of the exchange.

    is_kept_TK: copies that are sent; the experts of others may be out of range.
    """
    if isinstance(exchange, Blocks):
        experts_TK = jnp.where(is_kept_TK, experts_TK, exchange.experts)
        return Places(experts_TK, places_in_experts(experts_TK, exchange.experts + 1))
    experts_TK = jnp.where(is_kept_TK, experts_TK, 0)
    return plan_dispatch(experts_TK, local_experts, is_kept_TK, exchange)


def plan_dispatch(
    experts_TK: Int[Array, "T K"], local_experts: int, is_kept_TK: Bool[Array, "T K"], exchange
) -> DispatchPlan:
    """is_kept_TK: copies that are not dropped."""
    devices_TK, local_TK = experts_TK // local_experts, experts_TK % local_experts
    order = sort_by_expert(devices_TK, exchange.devices, is_kept_TK=is_kept_TK, distinct=False)
    order = jax.tree.map(collectives.stored_always, order)
    starts = jnp.cumsum(order.sizes_E) - order.sizes_E
    never = jnp.iinfo(jnp.int32).max
    places_TK = jnp.where(is_kept_TK, order.rows_TK - starts[devices_TK], never)
    groups = collectives.inside(exchange.axes, exchange.nodes)
    counts = collectives.gather(order.sizes_E[None], exchange.axes, 0, groups)
    counts = collectives.stored_always(counts)
    return DispatchPlan(devices_TK, local_TK, order, places_TK, counts)


def run_rounds(
    exchange: Blocks | Exchange, experts, x_TD: Float[Array, "T D"], weights_TK, plan: Any, after
) -> Outputs:
    """Weighted sums of the outputs of each token's experts, by an exchange and its plan: in one
    round if that suffices for any loads, else in a loop of as many as the loads need.

    experts(x_RD, sizes_E, weights_R, codes) computes this device's experts. after: an array that
    they follow, or None.
    """
    first = functools.partial(exchange.run, 0)
    if exchange.one_suffices:
        return first(experts, x_TD, weights_TK, plan, after)
    overflow = plan, exchange.count_rounds(plan)
    return in_rounds(first, exchange, 1, experts, x_TD, weights_TK, (plan, after), overflow)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def in_rounds(first, exchange, number: int, experts, x_TD, weights_TK, arguments, overflow):
    """Outputs: those of first(experts, x_TD, weights_TK, *arguments), the rounds before `number`,
    with the sums of the rounds from `number` on added. These run after it in forward and in
    backward and add to its results in place.

    overflow: (plan of the exchange, number of all its rounds).
    """
    inputs = experts, x_TD, weights_TK
    y_TD, ended = first(*inputs, *arguments)
    return _add_rounds(exchange, number, y_TD, inputs, overflow), ended


def _forward(first, exchange, number: int, experts, x_TD, weights_TK, arguments, overflow):
    others, inputs = fixed(experts), (experts, x_TD, weights_TK)

    def run(experts, *inputs):
        return first(joined(experts, others), *inputs, *arguments)

    y_TD, pull, ended = jax.vjp(run, trained(experts), x_TD, weights_TK, has_aux=True)
    y_TD = _add_rounds(exchange, number, y_TD, inputs, overflow)
    return (y_TD, ended), (pull, inputs, overflow)


def _add_rounds(exchange, number: int, y_TD, inputs: tuple, overflow: tuple):
    plan, rounds = overflow

    def body(state):
        number, total_TD = state
        return number + 1, total_TD + exchange.run(number, *inputs, plan)[0]

    return lax.while_loop(lambda state: state[0] < rounds, body, (jnp.int32(number), y_TD))[1]


def _backward(first, exchange, number: int, saved: tuple, slopes) -> tuple:
    pull, (experts, *inputs), (plan, rounds) = saved
    others, slope_TD = fixed(experts), slopes[0]

    def body(state):
        number, total = state

        def run(experts, *inputs):
            return exchange.run(number, joined(experts, others), *inputs, plan)[0]

        _, pull = jax.vjp(run, trained(experts), *inputs)
        return number + 1, jax.tree.map(jnp.add, total, pull(slope_TD))

    start = jnp.int32(number), pull(slope_TD)
    return *lax.while_loop(lambda state: state[0] < rounds, body, start)[1], None, None


in_rounds.defvjp(_forward, _backward)
