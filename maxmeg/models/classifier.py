"""A classifier of texts or tokens, or a projection of text vectors, in place of output weights."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.residual import drop_residual
from maxmeg.ops.random import fold

LAYER = 2**31 - 2  # random key of the dropout, in place of a layer's number
AXES = ("embed", "norm")  # every device along tensor has all classes


class Classifier(nnx.Module):
    """A linear layer from hidden states to classes, or to the vectors of a biencoder; it is trained
    beside LoRA adapters too."""

    def __init__(self, key: jax.Array, config: ModelConfig):
        head, sizes = config.head, (config.hidden_size, config.head.width)
        self.linear = Linear(key, sizes, AXES, config.init_std, head.bias)
        self.dropout = head.dropout

    def read(self, h_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L C"]:
        """float32 logits of each token of the local sequence shard."""
        if self.dropout and ctx.training:
            h_BLD = drop_residual(h_BLD, self.dropout, fold(ctx.seed(), LAYER), ctx)
        return self.linear(h_BLD).astype(jnp.float32)
