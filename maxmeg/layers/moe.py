"""The mixture of experts: a router, experts in one grouped product, and experts that all share.

Tokens keep their device: over `expert` their vectors are gathered, each device runs its experts on
those that chose them, and the sums go back scattered, as in a tensor-parallel layer. Nothing is
dropped, unless the spec says how much an expert takes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.mlp import Mlp, MlpSpec
from maxmeg.ops.activation import GATED, activate
from maxmeg.ops.dispatch import (
    Order,
    capacity_of,
    collect,
    places_in_experts,
    sort_by_expert,
    spread,
)
from maxmeg.ops.grouped_matmul import grouped_matmul
from maxmeg.ops.routing import (
    Routing,
    RoutingSpec,
    Score,
    balance_loss,
    balance_scores,
    count_experts,
    route,
    z_loss,
)
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import stored, unshard_parameter
from maxmeg.parallel.mesh import BATCH_AXES

EXPERT_AXES = ("expert",)
__all__ = ["Experts", "Moe", "MoeSpec", "RoutingSpec", "Score"]


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """Sizes as of MlpSpec, of one expert; shared_size: of the expert that every token goes to.

    biased: a bias on the scores chooses experts (loss-free balance). Coefficients of losses that
    balance loads: over all tokens of a microbatch, over each sequence, and of the router's z-loss.
    capacity: an expert takes this times its even share of a device's tokens, 0 all; by_weight: it
    drops those that weigh least, else those that come last. logit_bias: the router's logits have a
    bias that is trained as weights are.
    """

    hidden_size: int
    ffn_size: int
    routing: RoutingSpec
    activation: str = "swiglu"
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    biased: bool = False
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity: float = 0.0
    by_weight: bool = False
    backend: str = "auto"
    std: float = 0.02
    out_std: float = 0.02
    clamp: float = 0.0
    offset: float = 0.0
    logit_bias: bool = False


class Experts(nnx.Module):
    """All experts' matrices stacked, those of a device's own share of them."""

    def __init__(self, key: jax.Array, spec: MoeSpec):
        keys = jax.random.split(key, 3)
        E, D, F = spec.routing.num_experts, spec.hidden_size, spec.ffn_size
        self.spec = spec
        inward, outward = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")

        def matrix(key, sizes, std, axes):
            return nnx.Param(std * jax.random.normal(key, sizes), axes=axes)

        def bias(size, axis):
            return nnx.Param(jnp.zeros((E, size)), axes=("expert", axis)) if spec.bias else None

        gated = spec.activation in GATED
        self.up = matrix(keys[0], (E, D, F), spec.std, inward)
        self.gate = matrix(keys[1], (E, D, F), spec.std, inward) if gated else None
        self.out = matrix(keys[2], (E, F, D), spec.out_std, outward)
        self.up_bias = bias(F, "mlp")
        self.gate_bias = bias(F, "mlp") if gated else None
        self.out_bias = bias(D, "norm")

    def __call__(self, x_ND: Float[Array, "N D"], order: Order) -> Float[Array, "N D"]:
        """Row by row the output of its expert; partial sums over tensor."""
        up_NF = stored(self._product(x_ND, self.up, self.up_bias, order))
        inputs = (up_NF,)
        if self.gate is not None:
            inputs = (stored(self._product(x_ND, self.gate, self.gate_bias, order)), up_NF)
        spec = self.spec
        h_NF = activate(spec.activation, *inputs, clamp=spec.clamp, offset=spec.offset)
        bias = self.out_bias
        return self._product(h_NF, self.out, bias, order, counted=bias is not None)

    def _product(self, x_NI, weight, bias, order: Order, counted: bool = False):
        matrices = unshard_parameter(weight)
        y_NO = grouped_matmul(x_NI, matrices, order.sizes_E, backend=self.spec.backend)
        if bias is None:
            return y_NO
        ends_E = jnp.cumsum(order.sizes_E)
        experts_N = jnp.searchsorted(ends_E, jnp.arange(len(x_NI)), side="right")
        added_EO = collectives.counted_once(bias[...]) if counted else bias[...]
        return y_NO + added_EO.at[experts_N].get(mode="fill", fill_value=0)


class Moe(nnx.Module):
    """sum_k weight_k expert_k(x), plus the shared expert's output, gated where the spec says so.

    `bias` takes part in the choice alone, and where the spec is biased. Its gradient is how many
    tokens of the microbatches went to each expert: what loss-free balance moves it by, and metrics
    tell.
    """

    def __init__(self, key: jax.Array, spec: MoeSpec):
        keys = jax.random.split(key, 4)
        D, E = spec.hidden_size, spec.routing.num_experts
        self.spec = spec
        self.router = nnx.Param(spec.std * jax.random.normal(keys[0], (D, E)), axes=("norm", None))
        self.bias = nnx.Param(jnp.zeros(E), axes=(None,), counts=True)
        biased = spec.logit_bias
        self.logit_bias = nnx.Param(jnp.zeros(E), axes=(None,)) if biased else None
        self.experts = Experts(keys[1], spec)
        common = (spec.activation, spec.bias, spec.std, spec.out_std, spec.clamp, spec.offset)
        shared = MlpSpec(D, spec.shared_size, *common)
        self.shared = Mlp(keys[2], shared) if spec.shared_size else None
        gated = spec.shared_size and spec.shared_gate
        self.shared_gate = Linear(keys[3], (D, 1), ("norm", "norm"), spec.std) if gated else None

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None
    ) -> tuple[Float[Array, "B L D"], None, dict]:
        """Partial sums over tensor; no cache, no auxiliary values."""
        x_TD = h_BLD.reshape(-1, h_BLD.shape[-1])
        logits_TE = x_TD.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        if self.logit_bias is not None:
            logits_TE += self.logit_bias[...].astype(jnp.float32)
        bias_E = self.bias[...] if self.spec.biased else None
        routing = route(logits_TE, self.spec.routing, bias_E, BATCH_AXES)
        weights_TK = self._balanced(routing, logits_TE, h_BLD.shape[0], ctx)
        y_TD = self._experts(x_TD, Routing(routing.experts_TK, weights_TK))
        y_BLD = y_TD.reshape(h_BLD.shape)
        if self.shared is not None:
            shared_BLD, _, _ = self.shared(h_BLD, ctx)
            if self.shared_gate is not None:
                shared_BLD *= jax.nn.sigmoid(self.shared_gate(h_BLD, ctx))
            y_BLD += shared_BLD
        return y_BLD, cache, {}

    def _experts(self, x_TD: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        spec, (experts_TK, weights_TK) = self.spec, routing
        kept_TK = jnp.ones(experts_TK.shape, bool)
        if spec.capacity:
            num_experts, top_k = spec.routing.num_experts, spec.routing.top_k
            order = jax.lax.stop_gradient(weights_TK) if spec.by_weight else None
            places_TK = places_in_experts(experts_TK, num_experts, order)
            kept_TK = places_TK < capacity_of(len(x_TD), top_k, num_experts, spec.capacity)
        x_TD, experts_TK, weights_TK, kept_TK = (
            collectives.gather(array, EXPERT_AXES, 0)
            for array in (x_TD, experts_TK, weights_TK, kept_TK)
        )
        count = self.experts.up.shape[-3]
        first = collectives.axis_index(EXPERT_AXES) * count
        order = sort_by_expert(experts_TK - first, count, kept_TK=kept_TK)
        y_TD = collect(self.experts(spread(x_TD, order), order), weights_TK, order)
        return collectives.scatter(y_TD, EXPERT_AXES, 0)

    def _balanced(
        self, routing: Routing, logits_TE: Float[Array, "T E"], rows: int, ctx: Context
    ) -> Float[Array, "T K"]:
        """The weights, with the gradients of the balance losses and of the bias behind them."""
        spec, top_k = self.spec, self.spec.routing.top_k
        experts_TK, weights_TK = routing
        tokens, num_experts = logits_TE.shape
        shards = collectives.axis_size(BATCH_AXES)
        counts_E = count_experts(experts_TK, num_experts)
        losses = []
        if spec.aux_loss or spec.sequence_aux_loss:
            scores_TE = balance_scores(logits_TE, spec.routing)
            if spec.aux_loss:
                all_E = collectives.sum_over(counts_E, BATCH_AXES)
                loss = balance_loss(scores_TE, all_E, top_k, tokens * shards)
                losses.append(spec.aux_loss * loss)
            if spec.sequence_aux_loss:
                length = tokens // rows
                each_B = jax.vmap(
                    lambda scores, experts: balance_loss(
                        scores, count_experts(experts, num_experts), top_k, length
                    )
                )(scores_TE.reshape(rows, length, -1), experts_TK.reshape(rows, length, -1))
                losses.append(spec.sequence_aux_loss * jnp.sum(each_B) / (rows * shards))
        if spec.z_loss:
            losses.append(spec.z_loss * z_loss(logits_TE, tokens * shards))
        # Every device along tensor has the same tokens and loads: each counts for its part.
        part = 1 / collectives.axis_size((collectives.SEQUENCE_AXIS,))
        if losses:
            weights_TK = with_loss(weights_TK, part * ctx.share * sum(losses))
        return with_gradient(weights_TK, self.bias[...], part * counts_E)


def _first(x, *_):
    return x


with_loss: Any = jax.custom_vjp(_first)  # x; what follows from it has `loss` added to its own loss
with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, slope: (slope, jnp.ones_like(loss)))

with_gradient: Any = jax.custom_vjp(_first)  # x; the gradient of the second is the third
with_gradient.defvjp(
    lambda x, parameter, gradient: (x, (parameter, gradient)),
    lambda kept, slope: (slope, kept[1].astype(kept[0].dtype), jnp.zeros_like(kept[1])),
)
