"""The language model."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.config.head import Biencoder
from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.config.model_rules import check_model
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.config.stages import units_of_chunks
from maxmeg.layers import lora as adapters
from maxmeg.layers.attention import Attention
from maxmeg.layers.context import Context, Source
from maxmeg.layers.embedding import Embedding, Positions
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.qk_clip import QkClip
from maxmeg.layers.residual import drop_residual
from maxmeg.layers.stream import RelativeTables, Stream, source_context
from maxmeg.models import mtp
from maxmeg.models.bert import make_bert
from maxmeg.models.classifier import Classifier
from maxmeg.models.mixers import mtp_unit, pattern, unit_costs
from maxmeg.models.outline import outline
from maxmeg.models.stack import Stack
from maxmeg.ops.cross_entropy.call import (
    CrossEntropySpec,
    linear_cross_entropy,
    softcapped,
    token_log_probs,
)
from maxmeg.ops.random import fold, split
from maxmeg.parallel import collectives
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.parameter import annotate, info, is_variable
from maxmeg.parallel.rules import shard_over_context
from maxmeg.pipeline.layout import Layout, arrange

ADAPTERS = 5  # number of the random key of LoRA adapters, after those of the plain model
BERT = 6  # that of what model.bert sets
RELATIVE = 7  # that of the tables of relative biases
SOURCE = 8  # of the dropout of an encoder-decoder's source embedding
CLASSIFIER = 9  # of the classifier
QUERY = 10  # of what a second encoder, of queries, has around its layers
EMBEDDING_LAYER = 2**31 - 1  # random key of the embedding's dropout, in place of a layer's number


def layout(config: ModelConfig, parallel: ParallelConfig) -> Layout:
    """The layers of each pipeline stage; in model order without a pipeline."""
    repeats = tuple(repeats for _, repeats in config.groups)
    counts = units_of_chunks(config, parallel, unit_costs(config))
    return arrange(repeats, parallel.pipe, counts)


class LM(nnx.Module):
    """Language model of one stack, with random float32 weights.

    The model is a pytree: use plain jax to jit, differentiate or map it. Activations have the dtype
    of the weights. `parallel` pads the vocabulary and places the layers; the weights do not depend
    on it. ValueError with every broken rule if the config is invalid.
    """

    def __init__(self, key: jax.Array, config: ModelConfig, parallel: ParallelConfig | None = None):
        check_model(config)
        parallel = parallel or ParallelConfig()
        keys = split(key, ADAPTERS)
        norm = NormSpec.of(config)
        padded = config.padded_vocab_size(parallel.tensor, parallel.pipe)
        size = (config.vocab_size, padded, config.hidden_size, config.init_std)
        self.vocab_size = config.vocab_size
        self.softcap = config.logit_softcap
        self.dropout = config.dropout_embedding
        self.embedding_scale = config.embedding_scale
        self.logit_scale = config.without_mup().logit_scale
        self.embedding = Embedding(keys[0], *size)
        learned = config.position is Position.learned
        self.positions = (
            Positions(keys[1], config.max_position, config.hidden_size, config.init_std)
            if learned
            else None
        )
        places = layout(config, parallel)
        layers = pattern(config, parallel)
        unroll = config.scan_unroll if config.scan_layers else 0
        self.stack = Stack(keys[2], layers, config.recompute, places, unroll)
        self.stack.unquantized = config.unquantized_groups
        normed = config.norm_place is NormPlace.post_residual
        self.final_norm = None if normed else Norm(config.hidden_size, norm)
        self.output = None if config.tied else Embedding(keys[3], *size, is_output=True)
        arguments = (keys[4], config, mtp_unit(config, parallel), norm)
        self.mtp = mtp.Mtp(*arguments) if config.mtp.num_layers else None
        scale_readers_of_ranks((self.stack, self.mtp), config.width_multiplier**0.5)
        self.bert = make_bert(fold(key, BERT), config, norm, padded)
        self.position_offset = config.bert.position_offset
        self.neighbour_length = config.retro.neighbour_length
        has_layer, self.has_tokens = config.head.width > 0, not config.head.replaces_output
        self.classifier = Classifier(fold(key, CLASSIFIER), config) if has_layer else None
        self.query = make_query(fold(key, QUERY), config, padded)
        self.reads: tuple[str, ...] = ("target",) if self.query is None else ("source", "target")
        shape, std = (config.relative.buckets, config.attention.num_heads), config.init_std
        is_relative = config.position is Position.relative
        self.relative = RelativeTables(fold(key, RELATIVE), shape, std) if is_relative else None

    def __str__(self) -> str:
        return outline(self, self.vocab_size)

    def embed(self, batch: Batch, ctx: Context) -> Stream:
        """The stack's input: partial sums over pipe."""
        return self.embed_tokens(batch.tokens, ctx)

    def embed_tokens(self, ids_BL: Int[Array, "B L"], ctx: Context) -> Stream:
        """As `embed`: of these tokens and, in an encoder-decoder, of `ctx.source`."""
        x = {"target": self.embed_side(ids_BL, ctx)}
        if self.relative is not None:
            x["tables"] = self.relative()
        if ctx.source is None:
            return x
        source_ctx, key = source_context(ctx), ctx.dropout_key
        if self.neighbour_length:
            positions_BS = ctx.source.positions_BS % self.neighbour_length
            source_ctx = dataclasses.replace(source_ctx, positions_BL=positions_BS)
        if key is not None:
            source_ctx = dataclasses.replace(source_ctx, dropout_key=fold(key, SOURCE))
        of_source = self if self.query is None else self.query
        if ctx.source.tokens_BS.size:
            x["source"] = of_source.embed_side(ctx.source.tokens_BS, source_ctx)
        else:  # in decoding
            x["source"] = x["target"][:, :0]
        return x

    @jax.named_scope("embedding")
    def embed_side(self, ids_BL: Int[Array, "B L"], ctx: Context) -> Float[Array, "B L D"]:
        x_BLD = collectives.scatter_sequence(self.embedding(ids_BL), ctx.sequence_sharded)
        if self.embedding_scale != 1:
            x_BLD *= jnp.asarray(self.embedding_scale, x_BLD.dtype)
        if self.positions is not None:
            positions_BLD = self.positions(ctx.shard(ctx.positions_BL + self.position_offset))
            x_BLD += collectives.counted_once(positions_BLD, (collectives.PIPE_AXIS,))
        if self.bert is not None:
            types_BL = ctx.token_types_BL
            types_BL = jnp.zeros_like(ctx.positions_BL) if types_BL is None else types_BL
            x_BLD = self.bert.embed(x_BLD, ctx.shard(types_BL))
        if self.dropout and ctx.training:
            key = fold(ctx.seed(), EMBEDDING_LAYER)
            x_BLD = drop_residual(x_BLD, self.dropout, key, ctx)
        return x_BLD

    def outputs(self, x: Stream, ctx: Context) -> Float[Array, "B L D"]:
        """The input of the output projection, from the stack's output, for the whole sequence; with
        a classifier its logits [B, L, C], with a biencoder the vector at each token [B, L, W], with
        two encoders those of the source's tokens before those of the target's."""
        text_BLW = self.outputs_of_side(x["target"], ctx)
        if self.query is None:
            return text_BLW
        query_BSW = self.query.outputs_of_side(x["source"], source_context(ctx))
        return jnp.concatenate([query_BSW, text_BLW], axis=1)

    def outputs_of_side(self, x_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L D"]:
        h_BLD = self.normed(x_BLD)
        if self.bert is not None and self.bert.pooler is not None and not self.has_tokens:
            h_BLD = self.bert.pooled(h_BLD)
        if self.classifier is not None:
            h_BLD = self.classifier(h_BLD, ctx)
        return collectives.gather_sequence(h_BLD, ctx.sequence_sharded)

    def normed(self, x_BLD: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The stack's output after the final norm, if the model has one."""
        return x_BLD if self.final_norm is None else self.final_norm(x_BLD)

    def hidden(
        self, ids_BL: Int[Array, "B L"], ctx: Context, cache: list | None = None
    ) -> tuple[Float[Array, "B L D"], list | None, list]:
        """(`outputs` of the layers, new caches, auxiliary values)."""
        x, cache, aux = self.stack(self.embed_tokens(ids_BL, ctx), ctx, cache)
        return self.outputs(x, ctx), cache, aux

    def aux_of(self, sums: dict[str, typing.Any]) -> list:
        """The auxiliary values of a whole step for `update`: of each group of the stack, in the
        order of its rows, and at the end a list of those of the MTP layers."""
        return [*self.stack.aux_of(sums["stack_aux"]), sums.get("mtp_aux", [])]

    def update(self, aux: list) -> None:
        """Set the state of the layers from auxiliary values, as `aux_of` returns them. Groups with
        None in their place are left as they are."""
        depths = self.mtp.depths if self.mtp is not None else []
        layers = [*self.stack.groups, *(depth.layer for depth in depths)]
        for layer, values in zip(
            layers, [*aux[:-1], *(aux[-1] or [None] * len(depths))], strict=True
        ):
            if values is not None:
                layer.update(values)

    def output_weight(self) -> jax.Array:
        """The local rows [V, D] of the output projection."""
        return collectives.unshard_parameter(self.head.table)

    def set_output_weight(self, output_VD: jax.Array) -> None:
        """Replace the rows of the output projection by those gathered over fsdp."""
        self.head.table = collectives.whole(self.head.table.replace(output_VD))

    @property
    def head(self) -> Embedding:
        return self.embedding if self.output is None else self.output

    def projection(
        self, h_BLD: Float[Array, "B L D"]
    ) -> tuple[Float[Array, "B L D"], Float[Array, "V D"]]:
        """Two arrays whose product is the logits of the local rows of the vocabulary: `h_BLD`,
        transformed and scaled, and the output weights, both with further columns where logits have
        biases."""
        h_BLD = h_BLD if self.bert is None else self.bert.transformed(h_BLD)
        h_BLD = h_BLD if self.logit_scale == 1 else h_BLD * self.logit_scale
        output_VD = self.output_weight()
        return (h_BLD, output_VD) if self.bert is None else self.bert.with_bias(h_BLD, output_VD)

    def logits(self, h_BLD: Float[Array, "B L D"]) -> Float[Array, "B L V"]:
        """float32 logits over the whole vocabulary without padding."""
        local_BLV = jnp.einsum(
            "BLD,VD->BLV",
            *self.projection(h_BLD),
            preferred_element_type=jnp.float32,
        )
        all_BLV = collectives.gather(local_BLV, collectives.VOCAB_AXES, 2)
        return softcapped(all_BLV, self.softcap)[..., : self.vocab_size]

    def __call__(
        self, ids_BL: Int[Array, "B L"], source: Source | None = None
    ) -> Float[Array, "B L V"]:
        """Logits of each next token. source: what an encoder-decoder reads beside the tokens."""
        positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
        return self.logits(self.hidden(ids_BL, Context(positions_BL, source=source))[0])

    def token_losses(
        self,
        h_BLD: Float[Array, "B L D"],
        targets_BL: Int[Array, "B L"],
        weights_BL: Float[Array, "B L"],
        train: TrainConfig | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, "B L"]]:
        """(sum of weights * (smoothed cross entropy + z-loss), plain cross entropy per target)."""
        train = train or TrainConfig()
        spec = CrossEntropySpec(
            vocab_size=self.vocab_size,
            z_loss=train.z_loss,
            softcap=self.softcap,
            chunk=train.loss_chunk,
            label_smoothing=train.label_smoothing,
        )
        weights_T, backend = weights_BL.reshape(-1), train.loss_backend.value
        h_TD, output_VD, targets_T = self.tokens(h_BLD, targets_BL)
        outputs: typing.Any = linear_cross_entropy(
            h_TD, output_VD, targets_T, weights_T, spec, backend=backend
        )
        loss, losses_T = outputs
        return loss, losses_T.reshape(targets_BL.shape)

    def token_log_probs(
        self,
        h_BLD: Float[Array, "B L D"],
        targets_BL: Int[Array, "B L"],
        train: TrainConfig | None = None,
        temperature: float = 1.0,
    ) -> Float[Array, "B L"]:
        """Log-probability of each target under logits / temperature, at the memory of
        `token_losses`. Gradients reach `h_BLD` and the output weights."""
        train = train or TrainConfig()
        cap, chunk = self.softcap / temperature, train.loss_chunk
        spec = CrossEntropySpec(self.vocab_size, softcap=cap, chunk=chunk)
        h_TD, output_VD, targets_T = self.tokens(h_BLD, targets_BL)
        h_TD = h_TD if temperature == 1 else h_TD / temperature
        backend = train.loss_backend.value
        log_probs_T: typing.Any = token_log_probs(h_TD, output_VD, targets_T, spec, backend)
        return log_probs_T.reshape(targets_BL.shape)

    def tokens(self, h_BLD: Float[Array, "B L D"], targets_BL: Int[Array, "B L"]) -> tuple:
        """(`projection`'s inputs [T, D] and weights [V, D], targets [T]), for cross entropy."""
        h_BLD, output_VD = self.projection(h_BLD)
        return h_BLD.reshape(-1, h_BLD.shape[-1]), output_VD, targets_BL.reshape(-1)


def scale_readers_of_ranks(layers, factor: float) -> None:
    """Multiply the initial matrices that read a rank, which muP does not scale, by `factor`."""
    for weight in jax.tree.leaves(layers, is_leaf=is_variable):
        if info(weight).has_matrices and not info(weight).reads_width:
            weight.set_value(factor * weight.get_value())


def make_query(key: jax.Array, config: ModelConfig, padded_size: int) -> LM | None:
    """Embeddings and head of a biencoder's separate encoder of queries, whose layers are the
    source's in the model's stack; None if it has none."""
    if config.head.biencoder is not Biencoder.separate:
        return None
    one = dataclasses.replace(config.one_encoder, vocab_divisible_by=padded_size)
    query = LM(key, one)
    query.stack = None  # type: ignore[assignment]
    return query


def language_model(key: jax.Array, config: Config) -> LM:
    """The model of a run: an LM, with config.lora frozen in the compute dtype and with adapters."""
    model, lora = LM(key, config.model, config.parallel), config.lora
    if lora.rank:
        spec = adapters.LoraSpec(lora.rank, lora.alpha, lora.dropout, lora.targets)
        dtype, orders = jnp.dtype(config.model.dtype.value), model.stack.layout.orders
        model = adapters.adapted(fold(key, ADAPTERS), model, spec, dtype, orders)
    if config.optim.qk_clip.threshold:
        set_qk_clip(model, QkClip(**vars(config.optim.qk_clip)))
    annotate(model, gradient_dtype=jnp.dtype(config.parallel.gradient_dtype.value))
    if config.parallel.fsdp_context:
        shard_over_context(model)
    return model


def set_qk_clip(model: LM, clip: QkClip) -> None:
    """Turn on QK-clip in all attention layers."""

    def is_attention(node) -> bool:
        return isinstance(node, Attention)

    for node in filter(is_attention, jax.tree.leaves(model, is_leaf=is_attention)):
        node.spec = dataclasses.replace(node.spec, clip=clip)
