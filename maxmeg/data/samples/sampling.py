"""Which tokens form sample n: splits, shuffled documents and shuffled samples, by arithmetic.

In the order `native`, no stored array is as large as the tokens or the samples. An epoch holds
every document of the split once, in shuffled order; the concatenated tokens are cut every
`sequence_length` tokens; a keyed permutation shuffles the samples.
"""

import dataclasses
import functools
import re
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]
_U64 = np.uint64
_ROUNDS = 6
_COUNTED = 1 << 16  # samples that `times_read` looks up at a time


def parse_split(split: str) -> list[float]:
    """Fractions of train, validation and test by Megatron-LM's rule; '969,30,1' are weights."""
    try:
        weights = [float(word) for word in re.findall(r"[.0-9]+", split)]
    except ValueError:
        weights = []
    weights += [0.0] * (3 - len(weights))
    if len(weights) != 3 or sum(weights) <= 0 or "-" in split:
        raise ValueError(
            f"split={split!r} must hold up to three weights >= 0, not all 0, like '969,30,1'"
        )
    # NumPy's sum, because the built-in sum rounds differently from Python 3.12 on.
    return (np.array(weights) / np.sum(np.array(weights))).tolist()


def split_range(split: str, index: int, count: int) -> tuple[int, int]:
    """The elements [begin, end) of `count` elements that belong to split 0, 1 or 2."""
    fractions = parse_split(split)
    bounds = [0.0]
    for fraction in fractions:
        bounds.append(bounds[-1] + fraction)
    return round(bounds[index] * count), round(bounds[index + 1] * count)


def nonempty_range(split: str, index: int, count: int, what: str) -> tuple[int, int]:
    """Like `split_range`; ValueError for an empty range. what: names the elements in the error."""
    begin, end = split_range(split, index, count)
    if begin == end:
        raise ValueError(
            f"split={split!r} leaves none of {count} {what} for split {index}: give it more weight"
        )
    return begin, end


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of uint64 in which every input bit affects all
    bits."""
    values = values + _U64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def make_key(*numbers: int) -> np.ndarray:
    """A uint64 hash (shape [1]) of integers."""
    key = np.zeros(1, _U64)
    for number in numbers:
        key = mix(key ^ np.array([number & 0xFFFFFFFFFFFFFFFF], _U64))
    return key


class Permutation:
    """A keyed bijection of [0, size) that is computed, not stored: O(1) per element.

    A Feistel network over the smallest even number of bits that holds `size`, applied again to
    results that are too large ("cycle walking"); at most four rounds are expected.
    """

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least 1 element, not {size}")
        self.size = size
        self._half = _U64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = (_U64(1) << self._half) - _U64(1)
        self._keys = [make_key(*key, i) for i in range(_ROUNDS)]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """The images of these indices, int64."""
        values = self._walk(np.asarray(indices).astype(_U64))
        while (outside := np.flatnonzero(values >= _U64(self.size))).size:
            values[outside] = self._walk(values[outside])
        return values.astype(np.int64)

    def _walk(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._mask)
        return (left << self._half) | right


def shuffled(count: int, *key: int) -> np.ndarray:
    """A random order of [0, count), the same on every machine and with every version of NumPy."""
    dtype = np.int32 if count < 2**31 else np.int64
    order = np.argsort(mix(make_key(*key) ^ mix(np.arange(count, dtype=_U64))), kind="stable")
    return order.astype(dtype)


def check_indices(indices: np.ndarray) -> np.ndarray:
    """Sample numbers as int64; ValueError where one is negative."""
    indices = np.asarray(indices, np.int64)
    if indices.size and indices.min() < 0:
        raise ValueError(f"sample {indices.min()} is negative")
    return indices


class EpochOrder:
    """The order in which `size` rows are read: with `shuffle`, another permutation in each epoch.

    key: distinguishes this order from other orders with the same seed.
    """

    def __init__(self, size: int, seed: int, key: int, shuffle: bool) -> None:
        self.size, self._seed, self._key, self._shuffle = size, seed, key, shuffle

    def within_epoch(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The rows at these positions of one epoch."""
        if not self._shuffle or not len(positions):
            return positions
        return Permutation(self.size, self._seed, epoch, self._key)(positions)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """The rows of the samples with these numbers, any >= 0."""
        epochs, rows = np.divmod(check_indices(indices), self.size)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = self.within_epoch(int(epoch), rows[in_epoch])
        return rows


def empty_batch(count: int, length: int, source_length: int = 0, *extra_names: str) -> Batch:
    """`count` rows of padding. int32 [count, length]: tokens, targets, positions, segment_ids and
    the arrays of `extra_names`; float32: loss_mask. With a source, int32 [count, source_length]:
    encoder_tokens, encoder_segment_ids."""
    source = ("encoder_tokens", "encoder_segment_ids") if source_length else ()
    names = dict.fromkeys(("tokens", "targets", "positions", "segment_ids", *extra_names), length)
    names |= dict.fromkeys(source, source_length)
    batch: Batch = {name: np.zeros((count, size), np.int32) for name, size in names.items()}
    return batch | {"loss_mask": np.zeros((count, length), np.float32)}


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Pieces of sequences that form samples, in reading order; arrays of equal length."""

    rows: np.ndarray  # index of the requested sample
    sequences: np.ndarray
    offsets: np.ndarray  # first token within the sequence
    lengths: np.ndarray


class Samples:
    """The base of all orders: sequences are concatenated and cut into samples of `sequence_length`
    + 1 tokens.

    lengths: tokens of every sequence of the split, in reading order.
    """

    def __init__(self, lengths: np.ndarray, sequence_length: int) -> None:
        self.lengths = np.asarray(lengths)
        self.sequence_length = sequence_length
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.samples_per_epoch = max(0, self.num_tokens - 1) // sequence_length
        self.num_samples = self.samples_per_epoch  # before the order repeats
        self.order: dict[str, Any] = {}  # the JSON values that decide the order, besides the corpus

    def __getitem__(self, n: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, length) of each piece of sample n."""
        pieces = self.pieces(np.array([n]))
        columns = (pieces.sequences, pieces.offsets, pieces.lengths)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces of these samples."""
        raise NotImplementedError

    def times_read(self, places: np.ndarray, count: int) -> np.ndarray:
        """How often samples 0 to count - 1 contain each of these tokens as an input; int64.

        places: positions in the concatenated sequences, ascending. O(samples log places).
        """
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        changes = np.zeros(len(places) + 1, np.int64)
        for first in range(0, count, _COUNTED):
            pieces = self.pieces(np.arange(first, min(first + _COUNTED, count)))
            begins = starts[pieces.sequences] + pieces.offsets
            # The last token of a sample is a target only.
            ends = begins + pieces.lengths - np.append(np.diff(pieces.rows) > 0, True)
            for sign, bounds in ((1, begins), (-1, ends)):
                at = np.searchsorted(places, bounds)
                changes += sign * np.bincount(at, minlength=len(changes))
        return np.cumsum(changes[:-1])

    def too_small(self) -> ValueError:
        return ValueError(
            f"{len(self.lengths)} sequences with {self.num_tokens} tokens are too few for one "
            f"sample of {self.sequence_length} + 1: use a larger corpus, another split or a "
            "shorter sequence_length"
        )


def cut(
    lengths: np.ndarray, order: np.ndarray, ends: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> Pieces:
    """The pieces that hold tokens [start, stop) of the sequences in `order`, row by row.

    ends: the cumulative token counts of the sequences in that order.
    """
    first = np.searchsorted(ends, start, side="right")
    count = np.searchsorted(ends, stop - 1, side="right") - first + 1
    rows = np.repeat(np.arange(len(start)), count)
    at = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count) + first[rows]
    sequences = order[at].astype(np.int64)
    sequence_start = ends[at] - lengths[sequences]
    begin = np.maximum(sequence_start, start[rows])
    end = np.minimum(ends[at], stop[rows])
    return Pieces(rows, sequences, begin - sequence_start, end - begin)


def joined(parts: list[Pieces]) -> Pieces:
    """Concatenate pieces of different rows, sorted by row."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in dataclasses.fields(Pieces)]
    columns = [np.concatenate([getattr(p, name) for p in parts] or [[]]) for name in names]
    by_row = np.argsort(columns[0], kind="stable")
    return Pieces(*(column[by_row].astype(np.int64) for column in columns))


class GptSamples(Samples):
    """Sample n, for any n >= 0, in maxmeg's native order.

    With `shuffle`, the documents and the samples of each epoch are in random order, from `seed`;
    without it, in reading order.
    """

    def __init__(
        self, lengths: np.ndarray, sequence_length: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(lengths, sequence_length)
        if not self.samples_per_epoch:
            raise self.too_small()
        self._seed, self._shuffle = seed, shuffle
        self._cuts = EpochOrder(self.samples_per_epoch, seed, 1, shuffle)
        self.order = {"order": "native", "seed": seed}
        self._order = functools.lru_cache(maxsize=2 if shuffle else 1)(self._make_order)

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces of these samples; O(log documents) per sample."""
        epochs, within = np.divmod(check_indices(samples), self.samples_per_epoch)
        parts = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            part = self._pieces_of_epoch(int(epoch), within[rows])
            parts.append(dataclasses.replace(part, rows=rows[part.rows]))
        return joined(parts)

    def _pieces_of_epoch(self, epoch: int, within: np.ndarray) -> Pieces:
        order, ends = self._order(epoch if self._shuffle else 0)
        start = self._cuts.within_epoch(epoch, within) * self.sequence_length
        return cut(self.lengths, order, ends, start, start + self.sequence_length + 1)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequences in the epoch's order, and their cumulative token counts."""
        count = len(self.lengths)
        order = shuffled(count, self._seed, epoch, 0) if self._shuffle else np.arange(count)
        return order, np.cumsum(self.lengths[order], dtype=np.int64)


def check_epochs(epochs: float, most: float) -> None:
    """ValueError for a run that reads its training corpora too often. most: 0 means any number."""
    if 0 < most < epochs:
        raise ValueError(
            f"the run would read its training corpora {epochs:,.0f} times, more than "
            f"data.max_epochs={most:g}: use a larger corpus or a smaller train.num_steps, or raise "
            "data.max_epochs"
        )
