"""The tokens of a sequence on each device, under context and sequence parallelism.

Two orders of the tokens along context: Megatron-LM's, in which every device has two chunks of the
sequence (`SequenceShard`), and one by row, in which the owners of more and shorter chunks are
chosen so that all devices have equal parts of the attention inside the documents of the row.

Letter not in the legend: C chunks of a row.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

Index = typing.TypeVar("Index", np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class SequenceShard:
    """One device's part of a sequence of `whole_length` tokens.

    The sequence is cut into 2 n chunks for n ranks along context. The piece of rank r is chunk r
    and then chunk 2 n - 1 - r: causal attention then costs every rank the same, as in Megatron-LM.
    The ranks along tensor have consecutive shards of that piece. A rank is an integer, or a traced
    array inside shard_map.
    """

    whole_length: int
    context_size: int = 1
    context_rank: jax.Array | int = 0
    tensor_size: int = 1
    tensor_rank: jax.Array | int = 0

    @property
    def length(self) -> int:
        """Number of tokens on this device."""
        return self.whole_length // (self.context_size * self.tensor_size)

    def gathered(self) -> "SequenceShard":
        """The device's part after a gather over tensor: the piece of its context rank."""
        return dataclasses.replace(self, tensor_size=1, tensor_rank=0)

    def places(self, index_L: Index) -> Index:
        """Places in the whole sequence of this device's tokens number `index_L`."""
        in_piece_L = self.tensor_rank * self.length + index_L
        if self.context_size == 1:
            return typing.cast(Index, in_piece_L)
        chunk = self.whole_length // (2 * self.context_size)
        is_second_L = in_piece_L // chunk
        distance = 2 * (self.context_size - 1 - self.context_rank) * chunk  # between the two chunks
        first = self.context_rank * chunk
        return typing.cast(Index, first + in_piece_L + is_second_L * distance)


def context_order(whole_length: int, context_size: int) -> np.ndarray:
    """The place of every token, in the order of the ranks along context."""
    pieces = (SequenceShard(whole_length, context_size, rank) for rank in range(context_size))
    return np.concatenate([piece.places(np.arange(piece.length)) for piece in pieces])


def chunk_places(chunks: Index, length: int) -> Index:
    """Places in the row of the tokens [.., L] of chunks [.., C] of `length` tokens."""
    index = jnp.arange(length) if isinstance(chunks, jax.Array) else np.arange(length)
    places = chunks[..., None] * length + index
    return typing.cast(Index, places.reshape(*chunks.shape[:-1], -1))
