"""Multi-token prediction (DeepSeek-V3, 2024): one more layer for each further token.

Depth d joins the output of depth d - 1 at token t (depth 0: the model's normalized output) with the
embedding of token t + d, and its own layer and norm predict token t + d + 1 by the model's output
weights. Only training runs it (objectives/language_modelling.py). Orders and norms are those of
Megatron-LM and of DeepSeek's files.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.layers.linear import Linear
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.models.stack import Unit, UnitSpec


class Depth(nnx.Module):
    """Not cut over pipe or tensor, but for its layer: what joins two vectors works on single tokens
    of the sharded sequence."""

    def __init__(self, key: jax.Array, config: ModelConfig, layer: UnitSpec, norm: NormSpec):
        keys, width = jax.random.split(key), config.hidden_size
        self.embedding_norm = Norm(width, norm)
        self.hidden_norm = Norm(width, norm)
        self.projection = Linear(keys[0], (2 * width, width), ("norm", "embed"), config.init_std)
        self.layer = Unit(keys[1], layer)
        self.final_norm = Norm(width, norm)

    def joined(
        self, x_BLD: Float[Array, "B L D"], later_BLD: Float[Array, "B L D"]
    ) -> Float[Array, "B L D"]:
        """The layer's input."""
        parts = [self.embedding_norm(later_BLD), self.hidden_norm(x_BLD)]
        return self.projection(jnp.concatenate(parts, axis=-1))


class Mtp(nnx.Module):
    """The depths of a model whose last layer has the sublayers `layer`; theirs are of that kind."""

    def __init__(self, key: jax.Array, config: ModelConfig, layer: UnitSpec, norm: NormSpec):
        keys = jax.random.split(key, config.mtp.num_layers)
        self.factor = config.mtp.loss_weight
        self.depths = nnx.List([Depth(k, config, layer, norm) for k in keys])
