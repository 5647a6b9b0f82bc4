"""The language model."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmeg.config.head import Biencoder
from maxmeg.config.model import ModelConfig, Position
from maxmeg.config.model_rules import check_model
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.config.stages import units_of_chunks
from maxmeg.layers import lora as adapters
from maxmeg.layers.attention import Attention
from maxmeg.layers.context import Context, Source
from maxmeg.layers.layer_embedding import SharedNorm
from maxmeg.layers.norm import NormSpec
from maxmeg.layers.qk_clip import QkClip
from maxmeg.layers.stream import RelativeTables, Stream, source_context
from maxmeg.models.ends import KEYS, STREAMERS, Ends, keys_of
from maxmeg.models.mixers import mtp_unit, pattern, unit_costs
from maxmeg.models.mtp import Mtp
from maxmeg.models.outline import outline
from maxmeg.models.stack import Stack
from maxmeg.ops.random import fold
from maxmeg.parallel.batch import Batch
from maxmeg.parallel.parameter import annotate, info, is_variable
from maxmeg.parallel.rules import shard_over_context
from maxmeg.pipeline.layout import Layout, arrange


def layout(config: ModelConfig, parallel: ParallelConfig) -> Layout:
    """The layers of each pipeline stage; in model order without a pipeline."""
    repeats = tuple(repeats for _, repeats in config.groups)
    counts = units_of_chunks(config, parallel, unit_costs(config))
    return arrange(repeats, parallel.pipe, counts)


class LM(Ends):
    """Language model of one stack, with random float32 weights.

    The model is a pytree: use plain jax to jit, differentiate or map it. Activations have the dtype
    of the weights. `parallel` pads the vocabulary and places the layers; the weights do not depend
    on it. ValueError with every broken rule if the config is invalid.
    """

    def __init__(self, key: jax.Array, config: ModelConfig, parallel: ParallelConfig | None = None):
        check_model(config)
        parallel = parallel or ParallelConfig()
        keys, padded = keys_of(key), config.padded_vocab_size(parallel.tensor, parallel.pipe)
        super().__init__(key, config, padded)
        places, layers = layout(config, parallel), pattern(config, parallel)
        unroll = config.scan_unroll if config.scan_layers else 0
        self.stack = Stack(keys["stack"], layers, config.recompute, places, unroll)
        self.stack.unquantized = config.unquantized_groups
        self.mtp = Mtp(keys["mtp"], config, mtp_unit(config, parallel))
        scale_readers_of_ranks((self.stack, self.mtp), config.width_multiplier**0.5)
        shape = config.relative.buckets, config.attention.num_heads
        relative = keys["relative"], shape, config.init_std
        is_relative = config.position is Position.relative
        self.relative = RelativeTables(*relative) if is_relative else None
        has_norm, plain = config.has("layer_embedding"), NormSpec(eps=config.norm_eps)
        self.embedding_norm = SharedNorm(config.layer_embedding.size, plain) if has_norm else None
        # Positions in the source begin anew after so many tokens: with the next neighbour.
        self.source_length = config.retro.neighbour_length or np.iinfo(np.int32).max
        has_two = config.head.biencoder is Biencoder.separate
        self.query = Ends(keys["query"], config.one_encoder, padded) if has_two else None
        self.reads: tuple[str, ...] = ("source", "target") if has_two else ("target",)

    def __str__(self) -> str:
        return outline(self, self.vocab_size)

    def embed(self, batch: Batch, ctx: Context) -> Stream:
        """The stack's input: partial sums over pipe."""
        return self.embed_tokens(batch.tokens, ctx)

    def embed_tokens(self, ids_BL: Int[Array, "B L"], ctx: Context) -> Stream:
        """As `embed`: of these tokens and, in an encoder-decoder, of `ctx.source`."""
        x = {"target": self.embed_side(ids_BL, ctx)}
        x |= self.stack.stream(x["target"], ctx)
        for part in self.parts(STREAMERS):
            x |= part.arrays()
        if ctx.source is None:
            return x
        if not ctx.source.tokens_BS.size:  # in decoding
            return x | {"source": x["target"][:, :0]}
        positions_BS, key = ctx.source.positions_BS % self.source_length, ctx.dropout_key
        key = key if key is None else fold(key, KEYS.index("source"))
        fields = {"positions_BL": positions_BS, "dropout_key": key}
        source_ctx = dataclasses.replace(source_context(ctx), **fields)
        source_BSD = (self.query or self).embed_side(ctx.source.tokens_BS, source_ctx)
        return x | {"source": source_BSD}

    def outputs(self, x: Stream, ctx: Context) -> Float[Array, "B L D"]:
        """The input of the output projection, from the stack's output, for the whole sequence; with
        a classifier its logits [B, L, C], with a biencoder the vector at each token [B, L, W], with
        two encoders those of the source's tokens before those of the target's."""
        text_BLW = self.read_side(x["target"], ctx)
        if self.query is None:
            return text_BLW
        query_BSW = self.query.read_side(x["source"], source_context(ctx))
        return jnp.concatenate([query_BSW, text_BLW], axis=1)

    def hidden(
        self, ids_BL: Int[Array, "B L"], ctx: Context, cache: list | None = None
    ) -> tuple[Float[Array, "B L D"], list | None, list]:
        """(`outputs` of the layers, new caches, auxiliary values)."""
        ctx = dataclasses.replace(ctx, tokens_BL=ids_BL)
        x, cache, aux = self.stack(self.embed_tokens(ids_BL, ctx), ctx, cache)
        return self.outputs(x, ctx), cache, aux

    def aux_of(self, sums: dict[str, typing.Any]) -> list:
        """The auxiliary values of a whole step for `update`: of each group of the stack, in the
        order of its rows, and at the end a list of those of the MTP layers."""
        return [*self.stack.aux_of(sums["stack_aux"]), sums.get("mtp_aux", [])]

    def update(self, aux: list) -> None:
        """Set the state of the layers from auxiliary values, as `aux_of` returns them. Groups with
        None in their place are left as they are."""
        depths = self.mtp.depths if aux[-1] else []
        layers = [*self.stack.groups, *(depth.layer for depth in depths)]
        for layer, values in zip(layers, [*aux[:-1], *(aux[-1] or [])], strict=True):
            if values is not None:
                layer.update(values)

    def __call__(
        self, ids_BL: Int[Array, "B L"], source: Source | None = None
    ) -> Float[Array, "B L V"]:
        """Logits of each next token. source: what an encoder-decoder reads beside the tokens."""
        positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
        return self.logits(self.hidden(ids_BL, Context(positions_BL, source=source))[0])


def scale_readers_of_ranks(layers, factor: float) -> None:
    """Multiply the initial matrices that read a rank, which muP does not scale, by `factor`."""
    for weight in jax.tree.leaves(layers, is_leaf=is_variable):
        if info(weight).has_matrices and not info(weight).reads_width:
            weight.set_value(factor * weight.get_value())


def language_model(key: jax.Array, config: Config) -> LM:
    """The model of a run: an LM, with config.lora frozen in the compute dtype and with adapters."""
    model, lora = LM(key, config.model, config.parallel), config.lora
    if lora.rank:
        dtype, orders = jnp.dtype(config.model.dtype.value), model.stack.layout.orders
        model = adapters.adapted(keys_of(key)["adapters"], model, lora, dtype, orders)
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
