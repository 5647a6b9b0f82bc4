"""The mixture of experts: a router, experts in one grouped product, and experts that all share.

Experts lie on other devices along EXPERT_AXES of the mesh, and are cut over its tensor.
Tokens go there by all-to-all (layers/exchange.py); or their vectors are gathered, each device runs
its experts on those that chose them, and the sums go back scattered, as in a tensor-parallel layer.
Nothing is dropped, unless the spec says how much an expert takes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.layers.balance import TOKENS, balanced
from maxmeg.layers.context import Context
from maxmeg.layers.embedding import lookup
from maxmeg.layers.exchange import exchanged, padded
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.layers.mlp import Mlp, MlpSpec
from maxmeg.ops.activation import GATED, activate
from maxmeg.ops.experts.dispatch import (
    capacity_of,
    collect,
    pad_experts,
    places_in_experts,
    rows_of_copies,
    sort_by_expert,
    spread,
)
from maxmeg.ops.experts.grouped_matmul import grouped_matmul
from maxmeg.ops.experts.routing import (
    Routing,
    RoutingSpec,
    Score,
    jittered,
    route,
    updated_bias,
)
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import stored, unshard_parameter
from maxmeg.parallel.mesh import EXPERT_AXES, TOKEN_AXES
from maxmeg.parallel.rules import is_frozen

GATHER_AXES = tuple(axis for axis in EXPERT_AXES if axis in TOKEN_AXES)
FOLD_AXES, CUT_AXES = ("fold",), ("tensor",)  # tensor where experts differ, and where one is cut
JITTER_PLACE = 2  # of the noise among the uses of randomness in a layer
__all__ = ["Experts", "Moe", "MoeSpec", "RoutingSpec", "Score"]


@dataclasses.dataclass(frozen=True)
class MoeSpec(MixerSpec):
    """Sizes as of MlpSpec, of one expert; shared_size: of the expert that every token goes to.

    biased: a bias on the scores chooses experts (loss-free balance); each step changes it by
    bias_rate. Coefficients of losses that balance loads: over all tokens of a microbatch, over each
    sequence, by the loads of the previous step; and of the router's z-loss. jitter: in training the
    router's input is multiplied by noise from 1 - jitter to 1 + jitter. latent_size: experts read
    and write projections of that width (0: hidden_size); router and shared expert do not.
    capacity: an expert takes this times its even share of a device's tokens, 0 all; by_weight: it
    drops those that weigh least, else those that come last; pad: it always computes as many rows,
    some of them empty, so that its product is a plain one. exchange: between devices by "gather",
    "all_to_all" or "ragged" all-to-all, in rounds of `buffer` times a device's mean load; "auto" is
    all_to_all; with pad there are no rounds.
    logit_bias: the router's logits have a bias that is trained as weights are.
    """

    name = "moe"
    writes = "shard"

    ffn_size: int
    routing: RoutingSpec
    activation: str = "swiglu"
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    biased: bool = False
    bias_rate: float = 0.0
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
    exchange: str = "auto"
    buffer: float = 1.5
    logit_bias: bool = False
    global_aux_loss: float = 0.0
    jitter: float = 0.0
    latent_size: int = 0
    pad: bool = False

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def shared(self) -> MlpSpec:
        """The expert that every token goes to."""
        return MlpSpec(
            hidden_size=self.hidden_size,
            ffn_size=self.shared_size,
            activation=self.activation,
            bias=self.bias,
            std=self.std,
            out_std=self.out_std,
            clamp=self.clamp,
            offset=self.offset,
        )

    def make(self, key: jax.Array) -> "Moe":
        return Moe(key, self)

    def weights(self) -> int:
        """Those of the router, the shared expert and the experts that a token is routed to."""
        D, routing = self.hidden_size, self.routing
        width = self.latent_size or D
        experts = (2 + self.is_gated) * width * routing.top_k * self.ffn_size
        latent = 2 * D * self.latent_size
        return (
            experts + self.shared.weights() + latent + D * (routing.num_experts + self.shared_gate)
        )

    def widths(self, kv_copies: int = 1) -> Widths:
        widths = self.shared.widths() if self.shared_size else Widths()
        return dataclasses.replace(
            widths,
            replicated={"expert_latent": self.latent_size} if self.latent_size else {},
            expert_columns=(1 + self.is_gated) * self.ffn_size,
            expert_input=self.ffn_size,
            shared_expert=self.shared_size > 0,
        )


class Experts(nnx.Module):
    """All experts' matrices stacked, those of a device's own share of them."""

    def __init__(self, key: jax.Array, spec: MoeSpec):
        keys = jax.random.split(key, 3)
        E, D = spec.routing.num_experts, spec.latent_size or spec.hidden_size
        F, self.spec = spec.ffn_size, spec
        inward, outward = ("expert", "embed", "expert_mlp"), ("expert", "expert_mlp", "embed")

        def matrix(key, sizes, std, axes):
            return nnx.Param(std * jax.random.normal(key, sizes), axes=axes)

        def bias(size, axis):
            return nnx.Param(jnp.zeros((E, size)), axes=("expert", axis)) if spec.bias else None

        gated = spec.is_gated
        self.up = matrix(keys[0], (E, D, F), spec.std, inward)
        self.gate = matrix(keys[1], (E, D, F), spec.std, inward) if gated else None
        self.out = matrix(keys[2], (E, F, D), spec.out_std, outward)
        self.up_bias = bias(F, "expert_mlp")
        self.gate_bias = bias(F, "expert_mlp") if gated else None
        self.out_bias = bias(D, "norm")

    def __call__(
        self,
        x_ND: Float[Array, "N D"],
        sizes_E: Int[Array, " E"] | None,
        weights_N: Float[Array, " N"],
    ) -> Float[Array, "N D"]:
        """Row by row the weighted output of its expert; partial sums over the mesh's tensor.

        sizes_E: rows of each expert, None: as many of every one. The weight is applied before the
        last product: backward then needs no output for it.
        """
        up_NF = self._product(x_ND, self.up, self.up_bias, sizes_E)
        inputs = (stored(up_NF, "expert_up"),)
        if self.gate is not None:
            gate_NF = self._product(x_ND, self.gate, self.gate_bias, sizes_E)
            inputs = (stored(gate_NF, "expert_gate"), *inputs)
        spec = self.spec
        h_NF = activate(spec.activation, *inputs, clamp=spec.clamp, offset=spec.offset)
        h_NF = (h_NF * weights_N[:, None]).astype(h_NF.dtype)
        y_ND = self._product(h_NF, self.out, None, sizes_E)
        if self.out_bias is None:
            return y_ND
        bias_ED = collectives.counted_once(self.out_bias[...], CUT_AXES)
        bias_ND = rows_of_experts(bias_ED, sizes_E, len(x_ND))
        return y_ND + (bias_ND * weights_N[:, None]).astype(y_ND.dtype)

    def _product(self, x_NI, weight, bias, sizes_E):
        matrices = unshard_parameter(weight)
        if sizes_E is None:
            x_ECI = x_NI.reshape(len(matrices), -1, x_NI.shape[-1])
            y_NO = (x_ECI @ matrices).reshape(len(x_NI), -1)
        else:
            y_NO = grouped_matmul(x_NI, matrices, sizes_E, backend=self.spec.backend)
        return y_NO if bias is None else y_NO + rows_of_experts(bias[...], sizes_E, len(x_NI))


def rows_of_experts(
    vectors_EO: Float[Array, "E O"], sizes_E: Int[Array, " E"] | None, rows: int
) -> Float[Array, "N O"]:
    """[rows, O]: for every row its expert's vector, zeros for rows behind the last expert's.

    sizes_E: rows of each expert; None: as many of every one. Gradients are summed in float32.
    """
    if sizes_E is None:
        return jnp.repeat(vectors_EO, rows // len(vectors_EO), axis=0)
    ends_E = jnp.cumsum(sizes_E)
    experts_N = jnp.searchsorted(ends_E, jnp.arange(rows), side="right")
    found_1NO: jax.Array = lookup(vectors_EO, experts_N[None], len(vectors_EO))  # pyright: ignore
    return found_1NO[0]


class Moe(Mixer):
    """sum_k weight_k expert_k(x), plus the shared expert's output, gated where the spec says so.

    State that the train step updates (`update`): `bias`, added to the scores for the choice of
    experts alone, where the spec is biased; `load`, the tokens of each expert in the previous step,
    where a loss needs them.
    """

    def __init__(self, key: jax.Array, spec: MoeSpec):
        keys = jax.random.split(key, 4)
        D, E = spec.hidden_size, spec.routing.num_experts
        self.spec = spec
        self.router = nnx.Param(spec.std * jax.random.normal(keys[0], (D, E)), axes=("norm", None))
        has_logit_bias, has_load = spec.logit_bias, spec.global_aux_loss
        self.bias = nnx.Variable(jnp.zeros(E), axes=(None,), state=True) if spec.biased else None
        self.load = nnx.Variable(jnp.zeros(E), axes=(None,), state=True) if has_load else None
        self.logit_bias = nnx.Param(jnp.zeros(E), axes=(None,)) if has_logit_bias else None
        self.experts = Experts(keys[1], spec)
        self.shared = Mlp(keys[2], spec.shared) if spec.shared_size else None
        gated = spec.shared_size and spec.shared_gate
        self.shared_gate = Linear(keys[3], (D, 1), ("norm", "norm"), spec.std) if gated else None
        width, keys = spec.latent_size, [jax.random.fold_in(key, place) for place in (4, 5)]
        down = Linear(keys[0], (D, width), ("embed", "norm"), spec.std) if width else None
        self.latent_down = down
        up = Linear(keys[1], (width, D), ("norm", "embed"), spec.out_std) if width else None
        self.latent_up = up

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None
    ) -> tuple[Float[Array, "B M D"], None, dict]:
        """Sums of this device's part of the sequence, no cache, and the values of `balanced`."""
        logits_TE = self._logits(h_BLD, ctx)
        bias_E = None if self.bias is None else self.bias[...]
        routing = route(logits_TE, self.spec.routing, bias_E, ctx.training)
        weights_TK, aux = balanced(routing, logits_TE, h_BLD.shape[0], self, ctx)
        routing = Routing(routing.experts_TK, weights_TK)
        if self.latent_down is None or self.latent_up is None:
            y_BLD = self._experts(h_BLD, routing, ctx)
        else:
            low_BLD = stored(self.latent_down(h_BLD, ctx), "expert_latent")
            y_BLD = self._experts(low_BLD, routing, ctx)
            y_BLD = self.latent_up(y_BLD, ctx)
        if self.shared is not None:
            shared_BLD, _, _ = self.shared(h_BLD, ctx)
            if self.shared_gate is not None:
                gate_BL1 = stored(self.shared_gate(h_BLD, ctx), "shared_expert_gate")
                shared_BLD *= jax.nn.sigmoid(gate_BL1)
            y_BLD += collectives.scatter_sequence(shared_BLD, ctx.sequence_sharded)
        return y_BLD, cache, aux

    def update(self, aux: dict[str, Array]) -> None:
        """Set the state from the auxiliary values of a whole step."""
        counts_E = aux[TOKENS]
        if self.bias is not None and not is_frozen(self.bias):
            self.bias.set_value(updated_bias(self.bias[...], counts_E, self.spec.bias_rate))
        if self.load is not None and not is_frozen(self.load):
            self.load.set_value(counts_E)

    def _logits(self, h_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "T E"]:
        """In float32, of an input that is jittered in training."""
        if self.spec.jitter and ctx.training:
            place = ctx.rows()[:, None], ctx.places(h_BLD.shape[1])
            h_BLD = jittered(h_BLD, self.spec.jitter, ctx.key(JITTER_PLACE), *place)
        x_TD = h_BLD.reshape(-1, h_BLD.shape[-1]).astype(jnp.float32)
        logits_TE = x_TD @ self.router[...].astype(jnp.float32)
        if self.logit_bias is not None:
            logits_TE += self.logit_bias[...].astype(jnp.float32)
        return logits_TE

    def _is_exchanged(self, ctx: Context) -> bool:
        """Whether tokens go to other devices by all-to-all."""
        apart = ctx.sequence_sharded and self.spec.exchange != "gather"
        return apart and collectives.axis_size(EXPERT_AXES) > 1

    def pieces(self, ctx: Context) -> int:
        """Parts that the sequence is cut into before experts take of it what they can hold."""
        return collectives.axis_size(FOLD_AXES) if self._is_exchanged(ctx) else 1

    def _experts(
        self, h_BLD: Float[Array, "B L D"], routing: Routing, ctx: Context
    ) -> Float[Array, "B M D"]:
        """Sums over the experts of each token, this device's part of the sequence."""
        spec, top_k = self.spec, self.spec.routing.top_k
        if not self._is_exchanged(ctx):
            y_TD = self._gathered(h_BLD.reshape(-1, h_BLD.shape[-1]), routing)
            return collectives.scatter_sequence(y_TD.reshape(h_BLD.shape), ctx.sequence_sharded)
        rows = h_BLD.shape[0]
        local = (h_BLD, *(array.reshape(rows, -1, top_k) for array in routing))
        local = [collectives.local_part(array, FOLD_AXES, 1) for array in local]
        x_TD, experts_TK, weights_TK = (a.reshape(-1, a.shape[-1]) for a in local)
        routing = Routing(experts_TK, weights_TK)
        places_TK, room = self._places(routing)
        if spec.pad:
            y_TD = padded(self.experts, x_TD, routing, places_TK, room, EXPERT_AXES)
        else:
            rounds = spec.exchange, spec.buffer, EXPERT_AXES
            y_TD = exchanged(self.experts, x_TD, routing, places_TK < room, *rounds)
        y_BLD = y_TD.reshape(rows, -1, h_BLD.shape[-1])
        return collectives.scatter(y_BLD, CUT_AXES, 1)

    def _places(self, routing: Routing) -> tuple[Int[Array, "T K"], int]:
        """(places of these tokens' copies at their experts, how many of them an expert takes); all
        are first where nothing is dropped."""
        spec, (experts_TK, weights_TK) = self.spec, routing
        if not spec.capacity:
            return jnp.zeros(experts_TK.shape, jnp.int32), 1
        num_experts, top_k = spec.routing.num_experts, spec.routing.top_k
        order = jax.lax.stop_gradient(weights_TK) if spec.by_weight else None
        room = capacity_of(len(experts_TK), top_k, num_experts, spec.capacity)
        return places_in_experts(experts_TK, num_experts, order), room

    def _gathered(self, x_TD: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Partial sums over TENSOR_AXES."""
        count, devices = self.experts.up.shape[-3], collectives.axis_size(GATHER_AXES)
        places_TK, room = self._places(routing)
        given_TK = is_kept_TK = places_TK < room
        if self.spec.pad:  # an expert has rows for each device's copies, one device's after another
            places_TK += collectives.first_index(GATHER_AXES, room)
            given_TK = jnp.where(is_kept_TK, places_TK, devices * room)
        x_TD, experts_TK, weights_TK, given_TK = (
            collectives.gather(array, GATHER_AXES, 0) for array in (x_TD, *routing, given_TK)
        )
        local_TK = experts_TK - collectives.first_index(EXPERT_AXES, count)
        if self.spec.pad:
            order, sizes_E = pad_experts(local_TK, given_TK, count, devices * room), None
        else:
            order = sort_by_expert(local_TK, count, kept_TK=given_TK)
            sizes_E = order.sizes_E
        rows_ND = self.experts(spread(x_TD, order), sizes_E, rows_of_copies(weights_TK, order))
        return collectives.scatter(collect(rows_ND, order), GATHER_AXES, 0)
