"""Expert parallelism over several nodes: each token is sent once to every node that has one of its
experts, and spread to their devices inside the node, which sums their outputs before they return.

Between nodes a token with K experts takes as many rows as it has nodes, not K: with DeepSeek-V3's
router (8 experts on 4 of 8 nodes) 3.6 on average. A device sends a bounded number of rows to the
device of its own place in each node; tokens that do not fit go directly to their experts' devices,
in rounds. (DeepSeek-V3, section 3.2.2.)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from maxmeg.distributed.experts.exchange import (
    Blocks,
    Exchange,
    Outputs,
    Route,
    in_rounds,
    plan_of,
    run_rounds,
)
from maxmeg.ops.experts.dispatch import pad_experts, spread
from maxmeg.ops.experts.routing import Routing, RoutingSpec
from maxmeg.parallel import collectives


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Between the nodes that the devices along inside.axes lie in a device sends `rows` rows to
    each. inside: the exchange of the received rows. direct: that of copies whose tokens are beyond
    `rows`, from device to device; None: no load needs it."""

    inside: Blocks | Exchange
    rows: int
    direct: Blocks | Exchange | None


def exchange_by_node(
    nodes: Nodes,
    experts,
    x_TD: Float[Array, "T D"],
    routing: Routing,
    is_kept_TK: Bool[Array, "T K"],
    after,
) -> Outputs:
    """Weighted sums of the outputs of each token's experts. is_kept_TK: False for dropped copies.

    experts(x_RD, sizes_E, weights_R) computes this device's experts. after: as in `run_rounds`.
    """
    inside, local_experts = nodes.inside, experts.up.shape[-3]
    here = local_experts * inside.devices
    node_TK = jnp.where(is_kept_TK, routing.experts_TK // here, inside.nodes)
    places_TN = places_at_nodes(node_TK, inside.nodes)
    routed = routing.experts_TK, is_kept_TK, places_TN, after

    def first(experts, x_TD, weights_TK, experts_TK, *routed):
        return once_per_node(nodes, experts, x_TD, Routing(experts_TK, weights_TK), *routed)

    if nodes.direct is None:
        return first(experts, x_TD, routing.weights_TK, *routed)
    place_TK = jnp.take_along_axis(places_TN, jnp.minimum(node_TK, inside.nodes - 1), axis=1)
    left_TK = is_kept_TK & (place_TK >= nodes.rows)
    plan = plan_of(nodes.direct, routing.experts_TK, left_TK, local_experts)
    overflow = plan, nodes.direct.count_rounds(plan)
    return in_rounds(first, nodes.direct, 0, experts, x_TD, routing.weights_TK, routed, overflow)


def places_at_nodes(node_TK: Int[Array, "T K"], nodes: int) -> Int[Array, "T nodes"]:
    """Number of earlier tokens for the same node; a large number if the token has none there."""
    is_sent_TN = jnp.any(node_TK[:, :, None] == jnp.arange(nodes), axis=1)
    earlier_TN = jnp.cumsum(is_sent_TN, axis=0, dtype=jnp.int32) - is_sent_TN
    return jnp.where(is_sent_TN, earlier_TN, jnp.iinfo(jnp.int32).max)


def once_per_node(
    nodes: Nodes, experts, x_TD, routing: Routing, is_kept_TK, places_TN, after
) -> Outputs:
    """Outputs of the tokens with a place below `rows` at their nodes."""
    inside, local_experts = nodes.inside, experts.up.shape[-3]
    nodes_TN = jnp.broadcast_to(jnp.arange(inside.nodes), places_TN.shape)
    order = pad_experts(nodes_TN, places_TN, inside.nodes, nodes.rows)
    order = jax.tree.map(collectives.stored_always, order)

    def send(rows):
        across = collectives.across(inside.axes, inside.nodes)
        return collectives.exchange(rows, inside.axes, groups=across)

    # A row carries its token's experts, plus 1, and weights; rows without a token get zeros.
    weights_TK = routing.weights_TK
    experts_TK = jnp.where(is_kept_TK, routing.experts_TK + 1, 0).astype(weights_TK.dtype)
    labels_R = send(spread(jnp.concatenate((experts_TK, weights_TK), axis=1), order))
    labels_R = collectives.stored_always(labels_R)
    experts_RK, weights_RK = jnp.split(labels_R, 2, axis=1)
    here = local_experts * inside.devices
    first = collectives.axis_index(inside.axes) // inside.devices * here
    experts_RK = experts_RK.astype(jnp.int32) - 1 - first
    plan = plan_of(inside, experts_RK, (experts_RK >= 0) & (experts_RK < here), local_experts)
    route = Route(order, Partial(send), Partial(send), experts.dispatch)
    x_RD = route.dispatch(x_TD).values_RD
    y_RD, ended = run_rounds(inside, experts, x_RD, weights_RK, plan, after)
    return route.combine(y_RD), ended


def node_rows(tokens: int, nodes: int, rule: RoutingSpec, buffer: float) -> int:
    """Rows for a node: `buffer` times their mean number if experts are chosen evenly.

    With group-limited routing a token's experts lie in at most `topk_groups` groups.
    """
    most = nodes
    if rule.num_groups > 1:
        groups = max(nodes // rule.num_groups, 1)  # nodes of a group
        most = min(nodes, rule.topk_groups * groups)
    share = most / nodes * (1 - (1 - 1 / most) ** rule.top_k)
    return min(math.ceil(buffer * tokens * share), tokens)
