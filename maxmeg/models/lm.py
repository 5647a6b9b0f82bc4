"""The causal language model, and how a ModelConfig describes one."""

import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.config.lazy import Lazy
from maxmeg.config.model import ModelConfig, Position, QkNorm
from maxmeg.config.schema import Config, ParallelConfig, TrainConfig
from maxmeg.config.stages import layers_of_chunks
from maxmeg.layers.attention import AttentionSpec
from maxmeg.layers.context import Context
from maxmeg.layers.embedding import Embedding, Positions
from maxmeg.layers.mlp import MlpSpec
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.residual import ResidualSpec, drop_residual
from maxmeg.models.stack import Pattern, Stack, UnitSpec
from maxmeg.ops.cross_entropy import CrossEntropySpec, linear_cross_entropy, softcapped
from maxmeg.ops.dropout import fold
from maxmeg.ops.rope import RotaryScaling, RotarySpec
from maxmeg.parallel import collectives
from maxmeg.pipeline.layout import Layout, arrange

adapters = Lazy("maxmeg.layers.lora")
experts = Lazy("maxmeg.models.experts")
latent = Lazy("maxmeg.layers.mla")
mtp = Lazy("maxmeg.models.mtp")
MTP = 2  # keys the initial weights of layers for further tokens
ADAPTERS = 1  # keys their initial weights, apart from those of the model
EMBEDDING_LAYER = 2**31 - 1  # keys the dropout of the embedding, as if it were that layer


def norm_spec(config: ModelConfig) -> NormSpec:
    return NormSpec(config.norm.value, config.norm_eps, config.norm_one_plus)


def rotary_spec(config: ModelConfig, local: bool = False) -> RotarySpec:
    if local and config.rotary_local_base:
        return RotarySpec(
            config.rotary_local_base, config.rotary_fraction, config.rotary_interleaved
        )
    scaling = RotaryScaling(
        config.rotary_scaling.value,
        config.rotary_factor,
        config.rotary_original_length,
        config.rotary_low,
        config.rotary_high,
        config.rotary_attention_factor,
        config.rotary_truncate,
        config.rotary_short_factors,
        config.rotary_long_factors,
    )
    turn = (config.rotary_base, config.rotary_fraction, config.rotary_interleaved)
    return RotarySpec(*turn, scaling)


def pattern(config: ModelConfig) -> Pattern:
    """((unit, repeats), ...): a unit ends with a global layer, what is left is the last group's.

    Layers without experts before those with them are a group of their own, the first."""
    unit_layers, dense = config.layers_of_unit, config.dense_layers
    every = config.attention_global_every
    kinds = [
        layer_spec(config, bool(every) and (i + 1) % every > 0, not config.has_experts(dense + i))
        for i in range(unit_layers)
    ]
    whole, left = divmod(config.num_layers - dense, unit_layers)
    first = [layer_spec(config, local=False, dense=True)]
    groups = ((first, dense), (kinds, whole), (kinds[:left], 1 if left else 0))
    return tuple((sum(unit, ()), repeats) for unit, repeats in groups if repeats)


def layer_places(config: ModelConfig) -> list[tuple[int, int, int]]:
    """Of every layer its group, its repeat in that and the first of its sublayers in the unit."""
    sublayers, dense = 1 if config.parallel_block else 2, config.dense_layers
    places = [(0, layer, 0) for layer in range(dense)]
    for layer in range(config.num_layers - dense):
        unit, place = divmod(layer, config.layers_of_unit)
        whole = (config.num_layers - dense) // config.layers_of_unit
        last = int(unit >= whole > 0)
        places.append((last + bool(dense), 0 if last else unit, place * sublayers))
    return places


def layer_spec(config: ModelConfig, local: bool, dense: bool = False) -> UnitSpec:
    """Sublayers of one layer; local: a layer with a window beside global ones; dense: one without
    experts beside those that have them."""
    out_std = config.init_std
    if config.scaled_output_init:
        out_std /= (2 * config.num_layers) ** 0.5
    norm = norm_spec(config)
    attention = AttentionSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        rotary=rotary_spec(config, local) if config.position is Position.rotary else None,
        qk_norm=norm if config.qk_norm is not QkNorm.none else None,
        qk_norm_over=config.qk_norm.value,
        bias_qkv=config.bias_qkv,
        bias_out=config.bias_attention_out,
        dropout=config.dropout_attention,
        window=config.attention_window if local or not config.attention_global_every else 0,
        softcap=config.attention_softcap,
        scale=config.attention_scale,
        sinks=config.attention_sinks,
        backend=config.attention_backend.value,
        std=config.init_std,
        out_std=out_std,
    )
    if config.mla_kv_rank:
        sizes = (config.mla_query_rank, config.mla_kv_rank, config.mla_rotary_size)
        low_norm = NormSpec(norm.kind, config.mla_norm_eps or norm.eps, norm.one_plus)
        attention = latent.MlaSpec(*vars(attention).values(), *sizes, config.value_size, low_norm)
    mlp = MlpSpec(
        hidden_size=config.hidden_size,
        ffn_size=config.ffn,
        activation=config.activation.value,
        bias=config.bias_mlp,
        std=config.init_std,
        out_std=out_std,
        clamp=config.activation_clamp,
        offset=config.glu_offset,
    )
    if config.num_experts and not dense:
        mlp = experts.moe_spec(config, out_std)
    sublayers = ((attention, mlp),) if config.parallel_block else ((attention,), (mlp,))
    options = (config.dropout_hidden, config.norm_place.value, config.parallel_norms)
    return tuple(ResidualSpec(norm, mixers, *options) for mixers in sublayers)


def layout(config: ModelConfig, parallel: ParallelConfig) -> Layout:
    """Where a pipeline's stages hold the layers; in model order without a pipeline."""
    repeats, unit = tuple(repeats for _, repeats in pattern(config)), config.layers_of_unit
    counts = layers_of_chunks(parallel, sum(repeats) * unit, unit)
    return arrange(repeats, parallel.pipe, counts)


class LM(nnx.Module):
    """Decoder-only language model; `LM(key, config)` has random weights in float32.

    The model is a pytree: jit, grad and map it with plain jax. Activations have the dtype of the
    weights. `parallel` pads the vocabulary and places the layers; weights do not depend on it.
    """

    def __init__(self, key: jax.Array, config: ModelConfig, parallel: ParallelConfig | None = None):
        parallel = parallel or ParallelConfig()
        keys = jax.random.split(key, 4)
        padded = config.padded_vocab_size(parallel.tensor, parallel.pipe)
        size = (config.vocab_size, padded, config.hidden_size, config.init_std)
        self.vocab_size = config.vocab_size
        self.softcap = config.logit_softcap
        self.dropout = config.dropout_embedding
        self.embedding_scale = config.embedding_scale
        self.embedding = Embedding(keys[0], *size)
        learned = config.position is Position.learned
        self.positions = (
            Positions(keys[1], config.max_position, config.hidden_size, config.init_std)
            if learned
            else None
        )
        places = layout(config, parallel)
        layers = pattern(config)
        if config.num_experts:
            layers = experts.placed(layers, parallel)
        self.stack = Stack(keys[2], layers, config.recompute.value, places, config.scan_layers)
        self.final_norm = Norm(config.hidden_size, norm_spec(config))
        self.output = None if config.tied else Embedding(keys[3], *size)
        last = layers[-1][0][-1 if config.parallel_block else -2 :]
        further = (jax.random.fold_in(key, MTP), config, last, norm_spec(config))
        self.mtp = mtp.Mtp(*further) if config.mtp_depths else None

    def embed(self, ids_BL: Int[Array, "B L"], ctx: Context) -> Float[Array, "B L D"]:
        """The stack's input; over pipe, a share of it that is to be summed."""
        x_BLD = collectives.scatter_sequence(self.embedding(ids_BL), ctx.sequence_sharded)
        if self.embedding_scale != 1:
            x_BLD *= jnp.asarray(self.embedding_scale, x_BLD.dtype)
        if self.positions is not None:
            length = x_BLD.shape[1]
            added_BLD = self.positions(collectives.local_sequence(ctx.positions_BL, length))
            x_BLD += collectives.counted_once(added_BLD, (collectives.PIPE_AXIS,))
        if self.dropout and ctx.dropout_key is not None:
            key = fold(ctx.dropout_key, EMBEDDING_LAYER)
            x_BLD = drop_residual(x_BLD, self.dropout, key, ctx)
        return x_BLD

    def normalized(self, x_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L D"]:
        """The stack's output after the final norm, the whole sequence."""
        return collectives.gather_sequence(self.final_norm(x_BLD), ctx.sequence_sharded)

    def hidden(
        self, ids_BL: Int[Array, "B L"], ctx: Context, cache: list | None = None
    ) -> tuple[Float[Array, "B L D"], list | None, list]:
        """Normalized output of the stack for the whole sequence, caches, auxiliary values."""
        x_BLD, cache, aux = self.stack(self.embed(ids_BL, ctx), ctx, cache)
        return self.normalized(x_BLD, ctx), cache, aux

    def output_weight(self) -> jax.Array:
        """This device's rows of the output projection, [V, D]."""
        head = self.embedding if self.output is None else self.output
        return collectives.unshard_parameter(head.table)

    def logits(self, h_BLD: Float[Array, "B L D"]) -> Float[Array, "B L V"]:
        """float32 logits over the whole vocabulary without padding."""
        part_BLV = jnp.einsum(
            "BLD,VD->BLV", h_BLD, self.output_weight(), preferred_element_type=jnp.float32
        )
        all_BLV = collectives.gather(part_BLV, collectives.VOCAB_AXES, 2)
        return softcapped(all_BLV, self.softcap)[..., : self.vocab_size]

    def __call__(self, ids_BL: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        """Logits of every next token."""
        positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
        return self.logits(self.hidden(ids_BL, Context(positions_BL))[0])

    def token_losses(
        self,
        h_BLD: Float[Array, "B L D"],
        batch: dict[str, jax.Array],
        train: TrainConfig | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, "B L"]]:
        """Sum of batch["weights"] * (smoothed cross entropy + z-loss), and every token's plain
        cross entropy."""
        train = train or TrainConfig()
        options = (train.z_loss, self.softcap, train.loss_chunk, train.label_smoothing)
        both: typing.Any = linear_cross_entropy(
            h_BLD.reshape(-1, h_BLD.shape[-1]),
            self.output_weight(),
            batch["targets"].reshape(-1),
            batch["weights"].reshape(-1),
            CrossEntropySpec(self.vocab_size, *options),
            backend=train.loss_backend.value,
        )
        loss, losses_T = both
        return loss, losses_T.reshape(batch["targets"].shape)


def language_model(key: jax.Array, config: Config) -> LM:
    """The model of a run: an LM, or with `config.lora` adapters beside an LM that is frozen in the
    compute dtype."""
    model, lora = LM(key, config.model, config.parallel), config.lora
    if not lora.rank:
        return model
    spec = adapters.LoraSpec(lora.rank, lora.alpha, lora.dropout, lora.targets)
    dtype, orders = jnp.dtype(config.model.dtype.value), model.stack.layout.orders
    return adapters.adapted(jax.random.fold_in(key, ADAPTERS), model, spec, dtype, orders)
