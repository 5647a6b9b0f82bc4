"""The tokens of a sequence on each device, under context and sequence parallelism."""

import dataclasses
import typing

import jax
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
        ahead = 2 * (self.context_size - 1 - self.context_rank) * chunk  # between the two chunks
        first = self.context_rank * chunk
        return typing.cast(Index, first + in_piece_L + is_second_L * ahead)


def context_order(whole_length: int, context_size: int) -> np.ndarray:
    """The place of every token, in the order of the ranks along context."""
    pieces = (SequenceShard(whole_length, context_size, rank) for rank in range(context_size))
    return np.concatenate([piece.places(np.arange(piece.length)) for piece in pieces])
