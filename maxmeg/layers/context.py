"""What the sublayers of one forward pass read beside their input."""

import dataclasses
import typing
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from maxmeg.ops.cache import CachePlaces
from maxmeg.ops.random import fold
from maxmeg.ops.rope import RotarySpec, Rotation, rotation
from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import CONTEXT_AXES, TENSOR_AXES
from maxmeg.parallel.sequence import SequenceShard, chunk_places


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Arrays that layers read of the tokens of one Context: rotations, and dense masks."""

    keys: tuple[Hashable, ...] = dataclasses.field(default=(), metadata={"static": True})
    values: tuple = ()

    def get(self, key: Hashable) -> typing.Any:
        """The value of a key; None if there is none."""
        return self.values[self.keys.index(key)] if key in self.keys else None


TableMakers = dict[Hashable, Callable[["Context"], typing.Any]]  # by the key of Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Source:
    """Tokens of an encoder-decoder's source: of one device along context, gathered over tensor, as
    in Context. segments_BS: 0 for padding; 1, or the document of RETRO's chunk."""

    tokens_BS: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array

    @classmethod
    def of(cls, tokens_BS: jax.Array, segments_BS: jax.Array) -> "Source":
        """Of rows from place 0 on, which context parallelism cuts as those of the target."""
        size, rank = collectives.axis_size(CONTEXT_AXES), collectives.axis_index(CONTEXT_AXES)
        shard = SequenceShard(tokens_BS.shape[1] * size, size, rank)
        places_S = shard.places(jnp.arange(tokens_BS.shape[1]))
        return cls(tokens_BS, jnp.broadcast_to(places_S, tokens_BS.shape), segments_BS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Positions, documents and randomness of the tokens of one forward pass.

    positions_BL, segments_BL: position and document id of each token of the sequence gathered over
    tensor, which mixers read; `shard` returns the part of the residual stream. chunks_BC: numbers
    of this device's chunks of each row, where owners are chosen by row (parallel.sequence).
    token_types_BL: type of each token (model.bert.token_types); None: all 0.
    rows_B: index of each sample in the global batch. dropout_key: seed of all randomness.
    layer: index of the unit in model order. sublayer: index of the sublayer in its unit.
    cache_places: of the tokens in the cache; None: there is no cache.
    adapters_B: number of the adapter that each row uses, where several are served (`Lora.owners`).
    row_lengths_B: number of tokens that the rotation of a row is for, where it depends on that
    (ops.rope); None: up to the last position.
    sequence_sharded: the residual stream is sharded over tensor along the sequence; False in
    decoding. context_sharded: rows are cut over context; False for rows that this device holds
    whole, such as RETRO's chunks. training: apply dropout, router noise and Sinkhorn balancing.
    experts_after: with lanes together, an array that this unit's experts follow: a zero that exists
    once those of another microbatch have run. None: lanes are apart.
    microbatch_weight: of this microbatch in losses that are means over microbatches.
    tables: of these tokens, computed once for all layers (`with_tables`).
    source: of an encoder-decoder. memory: for cross attention, the other side's rows [B, M, D],
    gathered over tensor, and their context.
    bias_NH: table of relative biases of this device's heads, for attention.
    tokens_BL: of the vocabulary; None where no layer reads them. stream: the further arrays of the
    residual stream that the sublayer reads.
    """

    positions_BL: jax.Array
    segments_BL: jax.Array | None = None
    rows_B: jax.Array | None = None
    dropout_key: jax.Array | None = None
    layer: jax.Array | int = 0
    sublayer: int = dataclasses.field(default=0, metadata={"static": True})
    cache_places: CachePlaces | None = None
    adapters_B: jax.Array | None = None
    row_lengths_B: jax.Array | None = None
    sequence_sharded: bool = dataclasses.field(default=True, metadata={"static": True})
    context_sharded: bool = dataclasses.field(default=True, metadata={"static": True})
    microbatch_weight: jax.Array | float = 1.0
    training: bool = dataclasses.field(default=False, metadata={"static": True})
    experts_after: jax.Array | None = None
    tables: Tables = Tables()
    chunks_BC: jax.Array | None = None
    token_types_BL: jax.Array | None = None
    source: Source | None = None
    memory: "tuple[jax.Array, Context] | None" = None
    bias_NH: jax.Array | None = None
    tokens_BL: typing.Any = None
    stream: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def context_axes(self) -> tuple[str, ...]:
        """The mesh axes over which rows are cut."""
        return CONTEXT_AXES if self.context_sharded else ()

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the residual stream is sharded beside them."""
        return TENSOR_AXES if self.sequence_sharded else ()

    @property
    def sequence(self) -> SequenceShard:
        """The tokens of the residual stream on this device."""
        context_axes, tensor_axes = self.context_axes, self.tensor_axes
        return SequenceShard(
            whole_length=self.positions_BL.shape[1] * collectives.axis_size(context_axes),
            context_size=collectives.axis_size(context_axes),
            context_rank=collectives.axis_index(context_axes),
            tensor_size=collectives.axis_size(tensor_axes),
            tensor_rank=collectives.axis_index(tensor_axes),
        )

    def with_tables(self, makers: TableMakers) -> "Context":
        """The context of layers that read these tables."""
        values = tuple(make(self) for make in makers.values())
        return dataclasses.replace(self, tables=Tables(tuple(makers), values))

    def rotation(self, spec: RotarySpec, head_size: int) -> Rotation:
        """Cosines and sines for heads of `head_size` elements."""
        table = self.tables.get((spec, head_size))
        if table is not None:
            return table
        lengths_B = self.row_lengths_B
        if lengths_B is None and collectives.axis_size(self.context_axes) > 1:
            last_B = jnp.max(self.positions_BL, axis=1)
            lengths_B = 1 + collectives.max_over(last_B, self.context_axes)
        return rotation(self.positions_BL, head_size, spec, lengths_B)

    def shard(self, x_BL: jax.Array) -> jax.Array:
        """The part of the residual stream of an array [B, L, ...] of the gathered sequence."""
        return collectives.local_part(x_BL, TENSOR_AXES, 1) if self.sequence_sharded else x_BL

    def places(self, length: int) -> Int[Array, "A L"]:
        """Index in the global sequence of each token of an array [B, length, ...].

        The array holds either the residual stream or the sequence gathered over tensor.
        """
        sequence = self.sequence
        if length != sequence.length:
            sequence = sequence.gathered()
        assert length == sequence.length, (length, sequence)
        if self.chunks_BC is not None:
            total = sequence.gathered().length
            places_BL = chunk_places(self.chunks_BC, total // self.chunks_BC.shape[1])
            return places_BL if length == total else self.shard(places_BL)
        return sequence.places(jnp.arange(length))[None]

    def key(self, place: int) -> jax.Array:
        """Random key of use number `place` of randomness in this sublayer."""
        return fold(self.seed(), self.layer, self.sublayer, place)

    def seed(self) -> jax.Array:
        assert self.dropout_key is not None
        return self.dropout_key

    def rows(self) -> jax.Array:
        assert self.rows_B is not None
        return self.rows_B
