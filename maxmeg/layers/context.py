"""What every sublayer of one forward pass may need to know, beside its input."""

import dataclasses

import jax

from maxmeg.ops.dropout import fold


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """positions_BL and segments_BL span the whole sequence, also where x is a shard of it.

    rows_B: numbers of the samples within the global batch. dropout_key: None when dropout is
    off (evaluation). layer: index of the unit in model order; sublayer: place in it.
    cache_offset: tokens already in the cache, of all rows or of each [B]; the number 0 and no
    array: there are none, so that attention reads nothing but these tokens.
    sequence_sharded: x_BLD holds a part of the sequence over tensor; off in decoding.
    share: of this microbatch in the mean of losses that are not of single tokens.
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

    def key(self, place: int) -> jax.Array:
        """Dropout key of the `place`-th use of dropout in this sublayer."""
        assert self.dropout_key is not None
        return fold(self.dropout_key, self.layer, self.sublayer, place)

    def rows(self) -> jax.Array:
        """rows_B where dropout needs them."""
        assert self.rows_B is not None
        return self.rows_B
