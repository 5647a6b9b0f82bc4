"""Multi-token prediction (MTP; DeepSeek-V3, 2024): one extra layer per additional token.

Depth d combines the output of depth d - 1 at token t (depth 0: the model's normalized output) with
the embedding of token t + d. Its layer and norm predict token t + d + 1 with the model's output
weights: in training beside the next token (objectives/language_modelling.py), in inference as
proposals that the model checks (inference/speculation.py). Order of operations and norms follow
Megatron-LM and DeepSeek's checkpoints.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.linear import Linear
from maxmeg.layers.norm import Norm, NormSpec
from maxmeg.layers.stream import Stream
from maxmeg.models.stack import Unit, UnitSpec
from maxmeg.ops.cache import CacheSize
from maxmeg.ops.random import split


class Depth(nnx.Module):
    """One MTP layer. Its norms and projection are replicated: they work on the sequence shard."""

    def __init__(self, key: jax.Array, config: ModelConfig, layer: UnitSpec):
        keys, width, norm = split(key, 2), config.hidden_size, NormSpec.of(config)
        self.embedding_norm = Norm(width, norm)
        self.hidden_norm = Norm(width, norm)
        self.projection = Linear(keys[0], (2 * width, width), ("norm", "embed"), config.hidden_std)
        self.layer = Unit(keys[1], layer)
        self.final_norm = Norm(width, norm)

    def joined(
        self, x_BLD: Float[Array, "B L D"], later_BLD: Float[Array, "B L D"]
    ) -> Float[Array, "B L D"]:
        """The layer's input."""
        normed = [self.embedding_norm(later_BLD), self.hidden_norm(x_BLD)]
        return self.projection(jnp.concatenate(normed, axis=-1))

    def cached(
        self, x_BLD: jax.Array, later_BLD: jax.Array, ctx: Context, cache: list
    ) -> tuple[Float[Array, "B L D"], list]:
        """(normed output, new cache) of tokens that follow cached ones."""
        x: Stream = {"target": self.joined(x_BLD, later_BLD)}
        x, cache, _ = self.layer(x, ctx, cache)  # pyright: ignore
        return self.final_norm(x["target"]), cache


class Mtp(nnx.Module):
    """All MTP layers; layer: the sublayers of each."""

    def __init__(self, key: jax.Array, config: ModelConfig, layer: UnitSpec):
        keys = split(key, config.mtp.num_layers)
        self.factor = config.mtp.loss_weight
        self.depths = nnx.List([Depth(k, config, layer) for k in keys])

    def init_cache(self, size: CacheSize, count: int) -> list:
        """An empty cache of each of the first layers, as of a group with one unit."""
        caches = [depth.layer.init_cache(size) for depth in self.depths[:count]]
        return jax.tree.map(lambda array: array[None], caches)
