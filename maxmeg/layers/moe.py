"""Mixture of experts: a router, routed experts, an optional shared expert.

distributed/experts/call.py brings tokens to their experts, which several devices divide. No token
is dropped unless the spec sets a capacity.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.config.mixers import ExpertDrop, MoeConfig
from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.setting import shared_values
from maxmeg.distributed.experts.call import ExpertCall
from maxmeg.layers.balance import DROPPED, EXPERTS_END, TOKENS, balanced
from maxmeg.layers.context import Context
from maxmeg.layers.embedding import lookup
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Mixer, Widths
from maxmeg.layers.mlp import Mlp, MlpSpec
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.activation import activate
from maxmeg.ops.backend import Device, log_choice, target_device
from maxmeg.ops.broadcast import broadcast
from maxmeg.ops.experts.choice import BATCHED, choose_backend, warn_of_xla
from maxmeg.ops.experts.dispatch import weighted_rows
from maxmeg.ops.experts.grouped_matmul import grouped_matmul
from maxmeg.ops.experts.routing import Routing, RoutingSpec, Score, jittered, route, updated_bias
from maxmeg.ops.quantized import Quantized, Recipe
from maxmeg.ops.random import normal, split
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import stored, unshard_parameter
from maxmeg.parallel.mesh import EXPERT_TENSOR_AXES
from maxmeg.parallel.parameter import annotate, info, parameter, state

NORMS = ("router", "experts", "experts_out", "shared", "shared_out")
JITTER_PLACE = 2  # number of the jitter among the uses of randomness in a layer


def routing_spec(moe: MoeConfig) -> RoutingSpec:
    score, softmax_first = Score(moe.score.value), moe.softmax_before_topk or moe.sinkhorn
    if moe.sinkhorn:
        score = Score.sigmoid if moe.top_k == 1 else Score.softmax
    changes = {"score": score, "softmax_before_topk": softmax_first}
    return RoutingSpec(**shared_values(RoutingSpec, moe) | changes)


@dataclasses.dataclass(frozen=True)
class MoeSpec(MlpSpec):
    """The fields of MlpSpec describe one routed expert.

    shared_ffn_size: width of the shared expert, which all tokens pass through; 0: none.
    shared_gate: multiply its output by a learned gate per token.
    bias_balancing: a bias on the scores chooses experts (loss-free balancing); each step changes it
    by bias_rate. aux_loss, sequence_aux_loss, global_aux_loss: coefficients of the balance losses
    over a microbatch, over each sequence, and with the loads of the previous step. z_loss:
    coefficient of the router's z-loss. jitter: in training the router's input is multiplied by
    noise in [1 - jitter, 1 + jitter]. logit_bias: the router's logits have a trained bias.
    latent_size: width of a projection that routed experts read and write; 0: they use hidden_size.
    scale_inputs: routing weights multiply the inputs of experts, not the outputs (Llama 4).
    norm: of the input of the router, and of the inputs and outputs of the routed experts and of the
    shared expert (Gemma 4); a trained number per expert then multiplies its routing weights. None:
    the layer's input is normalized already.
    capacity: capacity factor per device; 0: dropless. drop_by_weight: copies with the smallest
    weights are dropped, else the last ones. pad: every expert computes exactly as many rows as its
    capacity, in one plain batched product.
    exchange: "gather", "all_to_all", or "auto" (all_to_all). buffer: rows of
    a round relative to the mean load of a device, or of an expert if `backend` is batched; unused
    with pad.
    nodes: number of nodes that the devices of the experts lie in, if each token is sent once to a
    node and spread inside it (distributed/experts/nodes.py). backend: of the experts' products, as
    in ops.experts.choice.
    """

    name = "moe"
    reads = writes = "shard"

    routing: RoutingSpec = dataclasses.field(kw_only=True)
    shared_ffn_size: int = 0
    shared_gate: bool = False
    bias_balancing: bool = False
    bias_rate: float = 0.0
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0
    logit_bias: bool = False
    latent_size: int = 0
    scale_inputs: bool = False
    norm: NormSpec | None = None
    capacity: float = 0.0
    drop_by_weight: bool = False
    pad: bool = False
    exchange: str = "auto"
    buffer: float = 1.5
    nodes: int = 1
    backend: str = "auto"

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        moe, base = config.moe, super().settings(config, parallel, mixer)
        is_apart = parallel.expert_axis * parallel.context * parallel.fold > 1  # on other devices
        return base | {
            "ffn_size": config.expert_ffn,
            "gate_scale": 1.0,
            "routing": routing_spec(moe),
            "norm": NormSpec.of(config) if moe.norms else None,
            "capacity": moe.capacity_factor,
            "drop_by_weight": moe.drop_policy is ExpertDrop.weight,
            "pad": moe.pad_to_capacity,
            "exchange": parallel.expert_exchange.value if is_apart else "gather",
            "buffer": parallel.expert_buffer,
            "nodes": parallel.nodes_of_experts(moe.num_groups),
        }

    @property
    def shared(self) -> MlpSpec:
        """The shared expert."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(MlpSpec)}
        return dataclasses.replace(MlpSpec(**fields), ffn_size=self.shared_ffn_size)

    def products(
        self, matrices: jax.ShapeDtypeStruct, recipe: Recipe | None, device: Device
    ) -> tuple[str, str]:
        """The backend of the experts and why, as `choose_backend` returns them.

        matrices: shape [experts, D, F] of this device's weights. recipe: how their products are
        quantized; None: not at all."""
        if self.pad:
            return BATCHED, ""
        most = self.routing.num_experts / self.routing.top_k  # every token to the same experts
        return choose_backend(
            self.backend,
            matrices,
            buffer=self.buffer,
            limit=min(self.capacity or most, most),
            fp8=recipe is not None and not recipe.block,
            device=device,
        )

    def make(self, key: jax.Array) -> "Moe":
        return Moe(key, self)

    def weights(self) -> int:
        """Weights of the router, the shared expert and the experts of one token."""
        D, routing = self.hidden_size, self.routing
        width = self.latent_size or D
        experts = (2 + self.is_gated) * width * routing.top_k * self.ffn_size
        latent = 2 * D * self.latent_size
        return (
            experts + self.shared.weights() + latent + D * (routing.num_experts + self.shared_gate)
        )

    def widths(self, tensor: int = 1) -> Widths:
        """Of the shared expert and of the projection before the routed experts."""
        D, latent, has_shared = self.hidden_size, self.latent_size, self.shared_ffn_size > 0
        widths = self.shared.widths() if has_shared else Widths()
        gathered = (D,) * has_shared
        if self.exchange == "gather" and (latent or self.norm or not has_shared):
            gathered += (latent or D,)
        stored = widths.stored | ({"expert_latent": latent} if latent else {})
        return dataclasses.replace(widths, stored=stored, gathered=gathered)


class Experts(nnx.Module):
    """The matrices of this device's experts, stacked."""

    quantizable = ("up", "gate", "out")

    def __init__(self, key: jax.Array, spec: MoeSpec):
        keys = split(key, 3)
        E, D = spec.routing.num_experts, spec.latent_size or spec.hidden_size
        F, self.spec = spec.ffn_size, spec
        inward, outward = ("expert", "embed", "expert_mlp"), ("expert", "expert_mlp", "embed")

        def matrix(key, sizes, std, axes):
            return parameter(std * normal(key, sizes), *axes, sizes=sizes)

        def bias(size, axis):
            return parameter(jnp.zeros((E, size)), "expert", axis) if spec.bias else None

        gated = spec.is_gated
        self.up = matrix(keys[0], (E, D, F), spec.std, inward)
        self.gate = matrix(keys[1], (E, D, F), spec.std, inward) if gated else None
        self.out = matrix(keys[2], (E, F, D), spec.out_std, outward)
        self.up_bias = bias(F, "expert_mlp")
        self.gate_bias = bias(F, "expert_mlp") if gated else None
        self.out_bias = bias(D, "norm")
        self.codes: dict[str, typing.Any] = nnx.data({})  # layers.quantized.Codes of the matrices

    def __call__(
        self,
        x_RD: Float[Array, "R D"],
        sizes_E: Int[Array, " E"] | None,
        weights_R: Float[Array, " R"],
        codes: Quantized | None = None,
    ) -> Float[Array, "R D"]:
        """The weighted output of each row's expert; partial sums over EXPERT_TENSOR_AXES.

        sizes_E: number of rows of each expert; None: equal numbers. codes: x in 8 bits, if it came
        so. The weight is applied before the last product, so that backward does not need the
        output.
        """
        if sizes_E is not None and self.backend() == "xla" and target_device().is_cuda:
            sides = 2 + (self.gate is not None)
            warn_of_xla(len(x_RD), self.up.shape[-3], 2.0 * sides * x_RD.size * self.up.shape[-1])
        if self.spec.scale_inputs:
            x_RD, codes = weighted_rows(x_RD, weights_R, in_order=bool(self.codes)), None
            weights_R = jnp.sign(weights_R)  # 0 in rows without a token
        up_RF = self._product(x_RD, "up", self.up_bias, sizes_E, codes)
        inputs = (stored(up_RF, "expert_up"),)
        if self.gate is not None:
            gate_RF = self._product(x_RD, "gate", self.gate_bias, sizes_E, codes)
            inputs = (stored(gate_RF, "expert_gate"), *inputs)
        spec = self.spec
        h_RF = activate(spec.activation, *inputs, clamp=spec.clamp, offset=spec.offset)
        h_RF = weighted_rows(h_RF, weights_R, in_order=bool(self.codes))
        y_RD = self._product(h_RF, "out", None, sizes_E)
        if self.out_bias is None:
            return y_RD
        bias_ED = collectives.counted_once(self.out_bias[...], EXPERT_TENSOR_AXES)
        bias_RD = rows_of_experts(bias_ED, sizes_E, len(x_RD))
        return y_RD + (bias_RD * weights_R[:, None]).astype(y_RD.dtype)

    @property
    def dispatch(self) -> Recipe | None:
        """The recipe by which tokens are sent to experts in 8 bits; None: they are not."""
        codes = self.codes.get("up")
        return codes.recipe if codes is not None and codes.recipe.dispatch else None

    def backend(self) -> str:
        """The backend of the products of these matrices on the target device."""
        D = self.spec.latent_size or self.spec.hidden_size
        shape, dtype = (self.up.shape[-3], D, self.up.shape[-1]), self.up.dtype
        matrices = jax.ShapeDtypeStruct(shape, dtype)
        recipe = next((codes.recipe for codes in self.codes.values()), None)
        name, reason = self.spec.products(matrices, recipe, target_device())
        if self.spec.backend == "auto":
            log_choice("experts", name, reason)
        return name

    def _product(self, x_RI, name: str, bias, sizes_E, x_codes=None):
        weight, codes = getattr(self, name), self.codes.get(name)
        w_EIO = unshard_parameter(weight)
        if sizes_E is None:
            x_ECI = x_RI.reshape(len(w_EIO), -1, x_RI.shape[-1])
            y_ECO = x_ECI @ w_EIO if codes is None else codes.product(x_ECI, weight)
            y_RO = y_ECO.reshape(len(x_RI), -1)
        else:
            options: dict = {"backend": self.backend(), "x_codes": x_codes}
            if codes is not None:
                options |= codes.of_groups()
            y_RO = grouped_matmul(x_RI, w_EIO, sizes_E, **options)
        return y_RO if bias is None else y_RO + rows_of_experts(bias[...], sizes_E, len(x_RI))


def rows_of_experts(
    vectors_EO: Float[Array, "E O"], sizes_E: Int[Array, " E"] | None, rows: int
) -> Float[Array, "R O"]:
    """The vector of each row's expert, zeros after the last expert's rows.

    sizes_E: number of rows of each expert; None: equal numbers. Gradients are summed in float32.
    """
    if sizes_E is None:
        E, size = vectors_EO.shape
        return broadcast(vectors_EO[:, None], (E, rows // E, size)).reshape(rows, size)
    ends_E = jnp.cumsum(sizes_E)
    experts_R = jnp.searchsorted(ends_E, jnp.arange(rows), side="right", method="compare_all")
    rows_1RO: jax.Array = lookup(vectors_EO, experts_R[None], len(vectors_EO))  # pyright: ignore
    return rows_1RO[0]


class Moe(Mixer):
    """sum_k weight_k expert_k(x) + gate(x) shared(x).

    State, set by `update` after each step: `bias`, added to the scores when experts are chosen
    (bias_balancing); `load`, the tokens of each expert in the previous step (global_aux_loss).
    """

    def __init__(self, key: jax.Array, spec: MoeSpec):
        keys = split(key, 6)
        D, E = spec.hidden_size, spec.routing.num_experts
        self.spec = spec
        self.router = parameter(spec.std * normal(keys[0], (D, E)), "norm", None)

        self.bias = state(jnp.zeros(E), None) if spec.bias_balancing else None
        self.load = state(jnp.zeros(E), None) if spec.global_aux_loss else None
        self.logit_bias = parameter(jnp.zeros(E), None) if spec.logit_bias else None
        self.experts = Experts(keys[1], spec)
        self.shared = Mlp(keys[2], spec.shared) if spec.shared_ffn_size else None
        gated = spec.shared_ffn_size and spec.shared_gate
        self.shared_gate = Linear(keys[3], (D, 1), ("norm", "norm"), spec.std) if gated else None
        norms = {name: Norm(D, spec.norm) for name in NORMS} if spec.norm else None
        self.norms = nnx.Dict(norms) if norms else None
        self.expert_scale = parameter(jnp.ones(E), None) if norms else None
        width = spec.latent_size
        inward, outward = ("embed", "norm"), ("norm", "embed")
        self.latent_down = Linear(keys[4], (D, width), inward, spec.std) if width else None
        self.latent_up = Linear(keys[5], (width, D), outward, spec.out_std) if width else None
        if width:
            annotate((self.experts.up, self.experts.gate, self.latent_up), reads_width=False)

    def __call__(
        self, h_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None
    ) -> tuple[Float[Array, "B L D"], None, dict]:
        """Complete sums, no cache; values of `balanced`, and the number of dropped copies."""
        router_BLD, h_BLD, shared_input_BLD = self._inputs(h_BLD)
        logits_TE = self._logits(router_BLD, ctx)
        bias_E = None if self.bias is None else self.bias[...]
        routing = route(logits_TE, self.spec.routing, bias_E, ctx.training, ctx.tensor_axes)
        weights_TK, aux = balanced(routing, logits_TE, h_BLD.shape[0], self, ctx)
        if self.expert_scale is not None:
            weights_TK *= self.expert_scale[...].astype(weights_TK.dtype)[routing.experts_TK]
        routing = Routing(self._of_tokens(routing.experts_TK, ctx), weights_TK)
        if self.latent_down is not None:
            h_BLD = stored(self.latent_down(h_BLD, ctx), "expert_latent")
        call = ExpertCall(self.spec, self.experts, ctx.sequence_sharded, ctx.experts_after)
        gather = functools.partial(collectives.gather_sequence, sharded=ctx.sequence_sharded)
        reads_same = self.shared is not None and h_BLD is shared_input_BLD
        sequence_BLD = h_BLD if self.shared is None else gather(shared_input_BLD)
        if not call.is_exchanged:
            h_BLD = sequence_BLD if reads_same else gather(h_BLD)
        y_BLD, aux[DROPPED], ended = call(h_BLD, routing)
        if ctx.experts_after is not None:
            aux[EXPERTS_END] = ended
        y_BLD = y_BLD if self.latent_up is None else self.latent_up(y_BLD, ctx)
        y_BLD = y_BLD if self.norms is None else self.norms["experts_out"](y_BLD)
        if self.shared is not None:
            shared_BLD, _, _ = self.shared(sequence_BLD, ctx)
            shared_BLD = collectives.scatter_sequence(shared_BLD, ctx.sequence_sharded)
            if self.shared_gate is not None:
                gate_BL1 = stored(self.shared_gate(shared_input_BLD, ctx), "shared_expert_gate")
                shared_BLD *= broadcast(jax.nn.sigmoid(gate_BL1), shared_BLD.shape)
            y_BLD += shared_BLD if self.norms is None else self.norms["shared_out"](shared_BLD)
        return y_BLD, cache, aux

    def _inputs(self, h_BLD: Float[Array, "B L D"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The inputs of the router, of the routed experts, and of the shared expert."""
        if self.norms is None:
            return h_BLD, h_BLD, h_BLD
        router_BLD = self.norms["router"](h_BLD) * self.spec.hidden_size**-0.5
        return router_BLD, self.norms["experts"](h_BLD), self.norms["shared"](h_BLD)

    def _of_tokens(self, experts_TK: Int[Array, "T K"], ctx: Context) -> Int[Array, "T K"]:
        """The experts of tokens; beyond the last expert for padding and idle rows of a cache."""
        if ctx.cache_places is None:
            return experts_TK
        places, rows = ctx.cache_places, ctx.positions_BL.shape[1]
        is_token_T1 = places.is_token(rows).reshape(-1, 1)
        return jnp.where(is_token_T1, experts_TK, self.spec.routing.num_experts)

    def update(self, aux: dict[str, Array]) -> None:
        counts_E = aux[TOKENS]
        if self.bias is not None and not info(self.bias).frozen:
            self.bias.set_value(updated_bias(self.bias[...], counts_E, self.spec.bias_rate))
        if self.load is not None and not info(self.load).frozen:
            self.load.set_value(counts_E)

    def _logits(self, h_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "T E"]:
        """Router logits in float32; in training the input is jittered."""
        if self.spec.jitter and ctx.training:
            place = ctx.rows()[:, None], ctx.places(h_BLD.shape[1])
            h_BLD = jittered(h_BLD, self.spec.jitter, ctx.key(JITTER_PLACE), *place)
        x_TD = h_BLD.reshape(-1, h_BLD.shape[-1]).astype(jnp.float32)
        logits_TE = x_TD @ self.router[...].astype(jnp.float32)
        if self.logit_bias is not None:
            logits_TE += self.logit_bias[...].astype(jnp.float32)
        return logits_TE
