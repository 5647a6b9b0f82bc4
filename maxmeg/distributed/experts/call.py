"""Routed experts that several devices divide: one call, several ways of tokens to their experts.

Experts are spread over EXPERT_AXES of the mesh and split over EXPERT_TENSOR_AXES. Tokens go to
their experts by all-to-all (exchange.py). Or they are all-gathered, each device runs its experts,
and the outputs are reduce-scattered, as in a tensor-parallel layer.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmeg.distributed.experts.exchange import (
    Blocks,
    Exchange,
    Outputs,
    Places,
    block_rows,
    make_exchange,
    plan_dispatch,
    run_rounds,
)
from maxmeg.distributed.experts.nodes import Nodes, exchange_by_node, node_rows
from maxmeg.ops.experts.choice import BATCHED
from maxmeg.ops.experts.dispatch import (
    capacity_of,
    collect,
    places_in_experts,
    rows_of_copies,
    sort_by_expert,
    spread,
)
from maxmeg.ops.experts.routing import Routing
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import EXPERT_AXES, TOKEN_AXES
from maxmeg.parallel.ordering import zeros_after

GATHER_AXES = tuple(axis for axis in EXPERT_AXES if axis in TOKEN_AXES)


@dataclasses.dataclass(frozen=True)
class ExpertCall:
    """spec: a layers.moe.MoeSpec. experts: its layers.moe.Experts on this device. sequence_sharded:
    and experts_after: as in Context."""

    spec: typing.Any
    experts: typing.Any
    sequence_sharded: bool
    experts_after: jax.Array | None

    @property
    def is_exchanged(self) -> bool:
        """Whether tokens go to other devices by all-to-all."""
        allowed = self.sequence_sharded and self.spec.exchange != "gather"
        return allowed and collectives.axis_size(EXPERT_AXES) > 1

    def __call__(self, h_BLD: Float[Array, "B M D"], routing: Routing) -> tuple:
        """(weighted sums [B, L, D] of the routed experts' outputs for the local sequence shard,
        number of copies that this device drops, a zero that exists once the experts have run).

        routing: of the shard. h_BLD: the shard if `is_exchanged`, else the sequence gathered over
        tensor. The capacity applies to its tokens.
        """
        is_exchanged, rows = self.is_exchanged, h_BLD.shape[0]
        if self.sequence_sharded and not is_exchanged:
            of_rows = (array.reshape(rows, -1, array.shape[-1]) for array in routing)
            sequences = (collectives.gather_sequence(array) for array in of_rows)
            routing = Routing(*(array.reshape(-1, array.shape[-1]) for array in sequences))
        places_TK, limit = self._places(routing)
        combine = self._exchanged if is_exchanged else self._gathered
        y_TD, ended = combine(h_BLD.reshape(-1, h_BLD.shape[-1]), routing, places_TK, limit)
        y_BLD, dropped = y_TD.reshape(h_BLD.shape), jnp.sum(places_TK >= limit, dtype=jnp.float32)
        if is_exchanged:
            return y_BLD, dropped, ended
        y_BLD = collectives.scatter_sequence(y_BLD, self.sequence_sharded)
        return y_BLD, collectives.counted_once(dropped), ended

    def _exchanged(self, x_TD, routing: Routing, places_TK, limit: int) -> Outputs:
        """Weighted sums of the outputs, with tokens sent to their experts."""
        spec, (experts_TK, weights_TK) = self.spec, routing
        is_kept_TK, number = places_TK < limit, len(x_TD)
        exchange = self._exchange(number, limit)
        if spec.nodes > 1:
            sent = node_rows(number, spec.nodes, spec.routing, spec.buffer)
            direct = None if sent == number else exchange
            nodes = Nodes(self._exchange(number, limit, sent * spec.nodes), sent, direct)
            inputs = self.experts, x_TD, routing, is_kept_TK
            return exchange_by_node(nodes, *inputs, self.experts_after)
        if isinstance(exchange, Blocks):
            plan = Places(experts_TK, places_TK)
        else:
            plan = plan_dispatch(experts_TK, self.experts.up.shape[-3], is_kept_TK, exchange)
        return run_rounds(exchange, self.experts, x_TD, weights_TK, plan, self.experts_after)

    @property
    def _in_blocks(self) -> bool:
        return self.experts.backend() == BATCHED

    def _exchange(self, tokens: int, limit: int, received: int = 0) -> Blocks | Exchange:
        """The exchange of `tokens` tokens per device over EXPERT_AXES; inside a node if `received`
        rows came from all of them."""
        spec, nodes = self.spec, self.spec.nodes if received else 1
        if self._in_blocks:
            limit = min(limit * nodes, received) if received else limit
            return self._blocks(tokens * nodes, limit, axes=EXPERT_AXES, nodes=nodes)
        local, top_k = self.experts.up.shape[-3], spec.routing.top_k
        return make_exchange(tokens, top_k, local, EXPERT_AXES, spec.buffer, nodes, received)

    def _blocks(self, tokens: int, limit: int, **layout) -> Blocks:
        """Blocks of the experts for `tokens` tokens per device."""
        spec = self.spec
        sizes = tokens, spec.routing.top_k, spec.routing.num_experts
        rows = limit if spec.pad else block_rows(*sizes, spec.buffer, limit)
        devices = collectives.axis_size(layout.get("axes", ())) // layout.get("nodes", 1)
        count = self.experts.up.shape[-3] * devices
        return Blocks(count, rows, limit, **layout)

    def _places(self, routing: Routing) -> tuple[Int[Array, "T K"], int]:
        """(place of each copy at its expert, number of places); (zeros, 1) if nothing reads it."""
        spec, (experts_TK, weights_TK) = self.spec, routing
        num_experts, top_k = spec.routing.num_experts, spec.routing.top_k
        if not spec.capacity and not self._in_blocks:
            return jnp.zeros(experts_TK.shape, jnp.int32), 1
        limit = len(experts_TK)
        if spec.capacity:
            limit = capacity_of(limit, top_k, num_experts, spec.capacity)
        priority_TK = jax.lax.stop_gradient(weights_TK) if spec.drop_by_weight else None
        return places_in_experts(experts_TK, num_experts, priority_TK), limit

    def _gathered(self, x_TD, routing: Routing, places_TK, limit: int) -> Outputs:
        """As `_exchanged`, with all-gathered tokens: partial sums over TENSOR_AXES."""
        count, devices = self.experts.up.shape[-3], collectives.axis_size(GATHER_AXES)
        blocks = self._blocks(len(x_TD), limit, senders=devices)
        sent_TK = places_TK if self._in_blocks else places_TK < limit
        x_TD, experts_TK, weights_TK, sent_TK = (
            collectives.gather(array, GATHER_AXES, 0) for array in (x_TD, *routing, sent_TK)
        )
        local_TK = experts_TK - collectives.first_index(EXPERT_AXES, count)
        if self._in_blocks:
            plan = Places(local_TK, sent_TK)
            y_TD, _ = run_rounds(blocks, self.experts, x_TD, weights_TK, plan, None)
        else:
            order = sort_by_expert(local_TK, count, is_kept_TK=sent_TK)
            weights_R = rows_of_copies(weights_TK, order)
            y_TD = collect(self.experts(spread(x_TD, order), order.sizes_E, weights_R), order)
        y_TD = collectives.scatter(y_TD, GATHER_AXES, 0)
        return y_TD, zeros_after(y_TD, ())
