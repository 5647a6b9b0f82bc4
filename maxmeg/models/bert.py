"""BERT's embeddings and heads, around a stack of bidirectional layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.bert import Transform
from maxmeg.config.model import ModelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.embedding import Positions
from maxmeg.layers.linear import Linear
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.ops.activation import activate
from maxmeg.ops.random import split
from maxmeg.parallel import collectives
from maxmeg.parallel.parameter import parameter

COLUMNS = 8  # which a bias adds to the output weights: products of such widths are fast
DENSE = ("embed", "norm")  # every device along tensor has the whole matrix


class VocabularyBias(nnx.Module):
    """A bias of each logit [V], padded like the vocabulary."""

    def __init__(self, padded_size: int):
        self.bias = parameter(jnp.zeros(padded_size), "vocab")


class Bert(nnx.Module):
    """Optional parts of BERT, by model.bert: embeddings of token types and their norm, the layer
    before the output weights, biases of the logits, and the head for pairs of segments."""

    def __init__(self, key: jax.Array, config: ModelConfig, padded_size: int):
        settings, D, std = config.bert, config.hidden_size, config.init_std
        keys, norm = split(key, 4), NormSpec.of(config)
        self.activation = settings.transform.value
        has_transform = settings.transform is not Transform.none
        self.num_types = types = settings.token_types
        self.token_types = Positions(keys[0], types, D, std) if types else None
        self.norm = Norm(D, norm) if settings.embedding_norm else None
        bias = settings.transform_bias
        self.transform = Linear(keys[1], (D, D), DENSE, std, bias) if has_transform else None
        self.transform_norm = Norm(D, norm) if has_transform else None
        self.output = VocabularyBias(padded_size) if settings.output_bias else None
        self.pooler = Linear(keys[2], (D, D), DENSE, std, True) if settings.pooler else None
        self.pools_all = settings.pooler and config.head.replaces_output
        self.pair = Linear(keys[3], (D, 2), DENSE, std, True) if settings.pair_head else None

    def embed(self, x_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L D"]:
        """The embedding of the tokens and their positions, with that of their types, normalized;
        both as partial sums over pipe, which the norm needs as a whole."""
        pipe = (collectives.PIPE_AXIS,)
        if self.token_types is not None:
            types_BL = ctx.token_types_BL
            types_BL = jnp.zeros_like(ctx.positions_BL) if types_BL is None else types_BL
            types_BL = jnp.minimum(types_BL, self.num_types - 1)  # RoBERTa has one for both texts
            x_BLD += collectives.counted_once(self.token_types(ctx.shard(types_BL)), pipe)
        if self.norm is not None:
            x_BLD = collectives.counted_once(self.norm(collectives.sum_over(x_BLD, pipe)), pipe)
        return x_BLD

    def transformed(self, h_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """The input of the output weights."""
        if self.transform is None or self.transform_norm is None:
            return h_BLD
        return self.transform_norm(activate(self.activation, self.transform(h_BLD)))

    def with_bias(
        self, h_BLD: Float[Array, "B L D"], output_VD: Float[Array, "V D"]
    ) -> tuple[Float[Array, "B L E"], Float[Array, "V E"]]:
        """The input and the rows of the output projection, longer by COLUMNS: their products are
        the logits with their biases."""
        if self.output is None:
            return h_BLD, output_VD
        bias_V = self.output.bias[...]
        first = jnp.zeros(COLUMNS, h_BLD.dtype).at[0].set(1)
        ones_BLE = jnp.broadcast_to(first, (*h_BLD.shape[:-1], COLUMNS))
        biases_VE = bias_V[:, None] * first
        joined = [(h_BLD, ones_BLE), (output_VD, biases_VE.astype(output_VD.dtype))]
        longer_BLE, rows_VE = (jnp.concatenate(parts, axis=-1) for parts in joined)
        return longer_BLE, rows_VE

    def read(self, h_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L D"]:
        return self.pooled(h_BLD) if self.pools_all else h_BLD

    def pooled(self, h_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """From the normalized output of the layers for the first token of each row, or for each
        token that a classifier may read."""
        assert self.pooler is not None
        return jnp.tanh(self.pooler(h_BLD).astype(jnp.float32)).astype(h_BLD.dtype)

    def pair_logits(self, first_B1D: Float[Array, "B 1 D"]) -> Float[Array, "B 2"]:
        """float32 logits of the two segments being in order, and swapped."""
        assert self.pair is not None
        return self.pair(self.pooled(first_B1D))[:, 0].astype(jnp.float32)
