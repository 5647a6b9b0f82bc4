"""What stands around a model's layers: what embeds tokens, and what reads the layers' output."""

import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.config.model import ModelConfig, NormPlace, Position
from maxmeg.config.schema import TrainConfig
from maxmeg.layers.context import Context
from maxmeg.layers.embedding import Embedding, Positions
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.residual import drop_residual
from maxmeg.models.bert import Bert
from maxmeg.models.classifier import Classifier
from maxmeg.ops.cross_entropy.call import (
    CrossEntropySpec,
    linear_cross_entropy,
    softcapped,
    token_log_probs,
)
from maxmeg.ops.random import fold, split
from maxmeg.parallel import collectives

# The parts of a model, in the order of their random keys: append only.
KEYS = ("embedding", "positions", "stack", "output", "mtp", "adapters", "bert", "relative")
KEYS += ("source", "classifier", "query")
EMBEDDERS = ("positions", "bert")  # return the embedding of tokens, changed: `embed(x_BLD, ctx)`
READERS = ("bert", "classifier")  # the same of the layers' normalized output: `read(h_BLD, ctx)`
STREAMERS = ("relative", "embedding_norm")  # return arrays of the residual stream: `arrays()`
DROPOUT_LAYER = 2**31 - 1  # random key of the embedding's dropout, in place of a layer's number


def keys_of(key: jax.Array) -> dict[str, jax.Array]:
    """The random key of each part of a model."""
    return dict(zip(KEYS, split(key, len(KEYS)), strict=True))


class Ends(nnx.Module):
    """The parts of a model around its layers, for the tokens of one side; None for those it lacks.

    Another part, such as an image tower or a value head, is a module with `embed` or `read`: an
    attribute here, and a name in EMBEDDERS or READERS, which are applied in this order.
    """

    def __init__(self, key: jax.Array, config: ModelConfig, padded_size: int):
        keys, width, std = keys_of(key), config.hidden_size, config.init_std
        size = (config.vocab_size, padded_size, width, std)
        self.vocab_size = config.vocab_size
        self.softcap = config.logit_softcap
        self.dropout = config.dropout_embedding
        self.embedding_scale = config.embedding_scale
        self.logit_scale = config.without_mup().logit_scale
        self.embedding = Embedding(keys["embedding"], *size)
        places = (config.max_position, width, std, config.bert.position_offset)
        learned = config.position is Position.learned
        self.positions = Positions(keys["positions"], *places) if learned else None
        normed = config.norm_place is NormPlace.post_residual
        self.final_norm = None if normed else Norm(width, NormSpec.of(config))
        self.output = None if config.tied else Embedding(keys["output"], *size, is_output=True)
        self.bert = Bert(keys["bert"], config, padded_size)
        self.classifier = Classifier(keys["classifier"], config) if config.head.width else None

    def parts(self, names: tuple[str, ...]) -> list:
        """Those of the named parts that the model has."""
        return [part for name in names if (part := getattr(self, name)) is not None]

    @jax.named_scope("embedding")
    def embed_side(self, ids_BL: Int[Array, "B L"], ctx: Context) -> Float[Array, "B L D"]:
        """The input of the layers: partial sums over pipe, for the sequence shard."""
        x_BLD = collectives.scatter_sequence(self.embedding(ids_BL), ctx.sequence_sharded)
        if self.embedding_scale != 1:
            x_BLD *= jnp.asarray(self.embedding_scale, x_BLD.dtype)
        for part in self.parts(EMBEDDERS):
            x_BLD = part.embed(x_BLD, ctx)
        if self.dropout and ctx.training:
            key = fold(ctx.seed(), DROPOUT_LAYER)
            x_BLD = drop_residual(x_BLD, self.dropout, key, ctx)
        return x_BLD

    def read_side(self, x_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L D"]:
        """The input of the output projection, from the output of the layers, for the whole
        sequence; the logits [B, L, C] of a classifier, the vectors [B, L, W] of a biencoder."""
        h_BLD = self.normed(x_BLD)
        for part in self.parts(READERS):
            h_BLD = part.read(h_BLD, ctx)
        return collectives.gather_sequence(h_BLD, ctx.sequence_sharded)

    def normed(self, x_BLD: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The output of the layers after the final norm, if the model has one."""
        return x_BLD if self.final_norm is None else self.final_norm(x_BLD)

    @property
    def head(self) -> Embedding:
        return self.embedding if self.output is None else self.output

    def output_weight(self) -> jax.Array:
        """The local rows [V, D] of the output projection."""
        return collectives.unshard_parameter(self.head.table)

    def set_output_weight(self, output_VD: jax.Array) -> None:
        """Replace the rows of the output projection by those gathered over fsdp."""
        self.head.table = collectives.mark_gathered(self.head.table.replace(output_VD))

    def projection(
        self, h_BLD: Float[Array, "B L D"]
    ) -> tuple[Float[Array, "B L D"], Float[Array, "V D"]]:
        """Two arrays whose product is the logits of the local rows of the vocabulary: `h_BLD`,
        transformed and scaled, and the output weights, both with further columns where logits have
        biases."""
        h_BLD = self.bert.transformed(h_BLD)
        h_BLD = h_BLD if self.logit_scale == 1 else h_BLD * self.logit_scale
        return self.bert.with_bias(h_BLD, self.output_weight())

    def logits(self, h_BLD: Float[Array, "B L D"]) -> Float[Array, "B L V"]:
        """float32 logits over the whole vocabulary without padding."""
        pair = self.projection(h_BLD)
        local_BLV = jnp.einsum("BLD,VD->BLV", *pair, preferred_element_type=jnp.float32)
        all_BLV = collectives.gather(local_BLV, collectives.VOCAB_AXES, 2)
        return softcapped(all_BLV, self.softcap)[..., : self.vocab_size]

    def token_losses(
        self,
        h_BLD: Float[Array, "B L D"],
        targets_BL: Int[Array, "B L"],
        weights_BL: Float[Array, "B L"],
        train: TrainConfig,
    ) -> tuple[Float[Array, ""], Float[Array, "B L"]]:
        """(sum of weights * (smoothed cross entropy + z-loss), plain cross entropy per target)."""
        spec = CrossEntropySpec(
            self.vocab_size, train.z_loss, self.softcap, train.loss_chunk, train.label_smoothing
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
        train: TrainConfig,
        temperature: float = 1.0,
    ) -> Float[Array, "B L"]:
        """Log-probability of each target under logits / temperature, at the memory of
        `token_losses`. Gradients reach `h_BLD` and the output weights; as with `token_losses`, and
        unlike with `logits`, each device that shares the vocabulary differentiates the whole loss
        of its tokens, not its part."""
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
