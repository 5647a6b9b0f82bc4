"""What every sublayer of one forward pass may need to know, beside its input."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from maxmeg.ops.dropout import fold
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import CONTEXT_AXES, TENSOR_AXES
from maxmeg.parallel.sequence import SequenceShard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Positions, documents and randomness of the tokens of one forward pass.

    positions_BL, segments_BL: position and document of each token that a mixer reads, which is
    the sequence gathered over tensor; `shard` cuts them to the residual stream's tokens.
    rows_B: number of each sample in the global batch. dropout_key: seeds all randomness of a pass
    with training=True. training: dropout and the router's noise are on, and routers balance.
    layer: index of the unit in model order. sublayer: index of the sublayer in its unit.
    cache_offset: number of tokens that the cache already holds, for all rows or for each [B]; the
    integer 0 means an empty cache, so that attention reads the new tokens alone.
    sequence_sharded: the residual stream is cut over tensor along the sequence; False in decoding.
    share: this microbatch's weight in losses that are means over microbatches.
    """

    positions_BL: jax.Array
    segments_BL: jax.Array | None = None
    rows_B: jax.Array | None = None
    dropout_key: jax.Array | None = None
    layer: jax.Array | int = 0
    sublayer: int = dataclasses.field(default=0, metadata={"static": True})
    cache_offset: jax.Array | int | None = None
    sequence_sharded: bool = dataclasses.field(default=True, metadata={"static": True})
    share: jax.Array | float = 1.0
    training: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def sequence(self) -> SequenceShard:
        """The tokens of the residual stream on this device."""
        context_size = collectives.axis_size(CONTEXT_AXES)
        tensor_axes = TENSOR_AXES if self.sequence_sharded else ()
        return SequenceShard(
            whole_length=self.positions_BL.shape[1] * context_size,
            context_size=context_size,
            context_rank=collectives.axis_index(CONTEXT_AXES),
            tensor_size=collectives.axis_size(tensor_axes),
            tensor_rank=collectives.axis_index(tensor_axes),
        )

    def shard(self, x_BL: jax.Array) -> jax.Array:
        """The residual stream's part of an array [B, L, ...] of the gathered sequence."""
        return collectives.local_part(x_BL, TENSOR_AXES, 1) if self.sequence_sharded else x_BL

    def places(self, length: int) -> Int[Array, "1 L"]:
        """Places in the whole sequence of the tokens of an array [B, length, ...], which holds
        either the residual stream's tokens or the sequence gathered over tensor."""
        sequence = self.sequence
        if length != sequence.length:
            sequence = sequence.gathered()
        assert length == sequence.length, (length, sequence)
        return sequence.places(jnp.arange(length))[None]

    def key(self, place: int) -> jax.Array:
        """Key of the `place`-th use of randomness in this sublayer."""
        return fold(self.seed(), self.layer, self.sublayer, place)

    def seed(self) -> jax.Array:
        """dropout_key, which every pass in training has."""
        assert self.dropout_key is not None
        return self.dropout_key

    def rows(self) -> jax.Array:
        """rows_B where dropout needs them."""
        assert self.rows_B is not None
        return self.rows_B
