"""Embeddings of each layer (Gemma 3n and 4, Google, 2025): out(act(gate x) * e).

Each token has a second embedding in every layer, its layer input, of size E:
e = (sqrt(E) table[token] + norm(projection(embedding) / sqrt(D))) / sqrt(2), where `embedding` is
the model's and all layers share the norm's weights. Devices along tensor divide the rows of the
table where tensor divides vocab_size; all else runs on sequence shards, with whole matrices.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.layers.context import Context
from maxmeg.layers.embedding import lookup
from maxmeg.layers.linear import Linear
from maxmeg.layers.mixer import Mixer, MixerSpec, Widths
from maxmeg.layers.norm import Norm
from maxmeg.ops.activation import activate
from maxmeg.ops.norm import norm
from maxmeg.ops.random import normal, split
from maxmeg.parallel.collectives import (
    PIPE_AXIS,
    counted_once,
    first_index,
    scatter_sequence,
    stored,
    unshard_parameter,
)
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import annotate, parameter

EMBEDDING, NORM = "embedding", "embedding_norm"  # arrays of the residual stream


class SharedNorm(Norm):
    """The norm whose weights all layers share."""

    def arrays(self) -> dict[str, jax.Array]:
        """Its weights, which layers read from the residual stream; in float32, so that their
        gradients are summed in it. Partial sums over pipe."""
        assert self.weight is not None
        weight_E = self.weight[...].astype(jnp.float32)
        return {NORM: counted_once(weight_E, (PIPE_AXIS,))}


@dataclasses.dataclass(frozen=True)
class LayerEmbeddingSpec(MixerSpec):
    """size: E. is_cut: whether the devices along tensor share the rows of the table. eps: of the
    norm."""

    name = "layer_embedding"
    reads = writes = "shard"
    reads_stream = (EMBEDDING, NORM)

    size: int
    vocab_size: int
    is_cut: bool
    activation: str = "geglu"
    eps: float = 1e-6

    @classmethod
    def settings(cls, config: ModelConfig, parallel: ParallelConfig, mixer: str) -> dict:
        is_cut = config.vocab_size % parallel.tensor == 0
        sizes = {"vocab_size": config.vocab_size, "eps": config.norm_eps, "is_cut": is_cut}
        return super().settings(config, parallel, mixer) | sizes

    def stream(self, x_BLD: Float[Array, "B L D"], ctx: Context) -> dict[str, jax.Array]:
        return {EMBEDDING: x_BLD}

    def make(self, key: jax.Array) -> "LayerEmbedding":
        return LayerEmbedding(key, self)

    def weights(self) -> int:
        return 3 * self.hidden_size * self.size

    def widths(self, tensor: int = 1) -> Widths:
        return Widths(replicated={"mlp_up": 2 * self.size, "mlp_gate": self.size})


class LayerEmbedding(Mixer):
    """The mixer of a layer's embedding, whose own input is not normalized."""

    def __init__(self, key: jax.Array, spec: LayerEmbeddingSpec):
        keys = split(key, 4)
        self.spec, D, E = spec, spec.hidden_size, spec.size
        table = spec.std * normal(keys[0], (spec.vocab_size, E))
        rows = "layer_vocab" if spec.is_cut else None
        self.table = parameter(table, rows, "embed", sizes=table.shape)
        self.projection = Linear(keys[1], (D, E), ("embed", "latent"), spec.std)
        self.gate = Linear(keys[2], (D, E), ("embed", "latent"), spec.std)
        self.out = Linear(keys[3], (E, D), ("latent", "embed"), spec.out_std)
        annotate((self.table, self.out), reads_width=False)

    def __call__(
        self, x_BLD: Float[Array, "B L D"], ctx: Context, cache: None = None
    ) -> tuple[Float[Array, "B L D"], None, dict]:
        """(complete sums for the shard, no cache, no auxiliary values)."""
        inputs_BLE = stored(self.inputs(ctx), "mlp_up")
        gate_BLE = stored(self.gate(x_BLD, ctx), "mlp_gate")
        return self.out(activate(self.spec.activation, gate_BLE, inputs_BLE), ctx), cache, {}

    def inputs(self, ctx: Context) -> Float[Array, "B L E"]:
        """The layer input e of each token."""
        rows, spec = self.table.shape[0], self.spec
        ids_BL = ctx.tokens_BL - (first_index(TENSOR_AXES, rows) if spec.is_cut else 0)
        token_BLE: typing.Any = lookup(unshard_parameter(self.table), ids_BL, rows)
        sharded = ctx.sequence_sharded
        token_BLE = scatter_sequence(token_BLE, sharded) if spec.is_cut else ctx.shard(token_BLE)
        h_BLE = stored(self.projection(ctx.stream[EMBEDDING], ctx), "mlp_up")
        h_BLE = norm(h_BLE * spec.hidden_size**-0.5, ctx.stream[NORM], None, spec.eps, False)
        return (spec.size**0.5 * token_BLE + h_BLE) * 2**-0.5
