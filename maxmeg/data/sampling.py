"""Which tokens make sample n: splits, shuffled documents and shuffled samples, all by arithmetic.

This is the order `native`, of which nothing is as large as the tokens or the samples. An epoch
holds every document of the split once, in an order of its own; its tokens, read through in that
order, are cut every `sequence_length` tokens; the samples come in an order given by a keyed
permutation.
"""

import dataclasses
import functools
import re

import numpy as np

_U64 = np.uint64
_ROUNDS = 6


def parse_split(split: str) -> list[float]:
    """Fractions of train, validation and test, by Megatron-LM's rule: '969,30,1' are weights."""
    try:
        weights = [float(word) for word in re.findall(r"[.0-9]+", split)]
    except ValueError:
        weights = []
    weights += [0.0] * (3 - len(weights))
    if len(weights) != 3 or sum(weights) <= 0 or "-" in split:
        raise ValueError(
            f"split={split!r} must hold up to three weights >= 0, not all 0, like '969,30,1'"
        )
    # NumPy's sum: from Python 3.12 on, the built-in one rounds differently.
    return (np.array(weights) / np.sum(np.array(weights))).tolist()


def split_range(split: str, index: int, count: int) -> tuple[int, int]:
    """The elements [begin, end) of `count` that belong to split 0, 1 or 2."""
    fractions = parse_split(split)
    bounds = [0.0]
    for fraction in fractions:
        bounds.append(bounds[-1] + fraction)
    return round(bounds[index] * count), round(bounds[index + 1] * count)


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of uint64 that scatters every bit."""
    values = values + _U64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def make_key(*numbers: int) -> np.ndarray:
    """One uint64 (shape [1]) from any integers."""
    key = np.zeros(1, _U64)
    for number in numbers:
        key = mix(key ^ np.array([number & 0xFFFFFFFFFFFFFFFF], _U64))
    return key


class Permutation:
    """A keyed bijection of [0, size) that is computed, not stored: O(1) per element.

    A Feistel network over the smallest even number of bits that holds `size`, repeated on
    results beyond it ("cycle walking"); at most four rounds are expected.
    """

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least 1 element, not {size}")
        self.size = size
        self._half = _U64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = (_U64(1) << self._half) - _U64(1)
        self._keys = [make_key(*key, i) for i in range(_ROUNDS)]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Where the permutation sends each index, int64."""
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
    """A random order of [0, count), the same on every machine and with every NumPy."""
    dtype = np.int32 if count < 2**31 else np.int64
    order = np.argsort(mix(make_key(*key) ^ mix(np.arange(count, dtype=_U64))), kind="stable")
    return order.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of sequences that make samples, in reading order; arrays of equal length."""

    rows: np.ndarray  # which of the samples asked for
    sequences: np.ndarray
    offsets: np.ndarray  # first token within the sequence
    lengths: np.ndarray


class Samples:
    """What all orders share: sequences read through and cut, `sequence_length` + 1 tokens each.

    lengths: tokens of every sequence of the split, in reading order.
    """

    def __init__(self, lengths: np.ndarray, sequence_length: int) -> None:
        self.lengths = np.asarray(lengths)
        self.sequence_length = sequence_length
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.samples_per_epoch = max(0, self.num_tokens - 1) // sequence_length
        self.num_samples = self.samples_per_epoch  # before an order repeats
        self.identity: tuple = ()  # plain values that decide the order, beside the corpus

    def __getitem__(self, n: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, length) of each part of sample n."""
        pieces = self.pieces(np.array([n]))
        columns = (pieces.sequences, pieces.offsets, pieces.lengths)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def pieces(self, samples: np.ndarray) -> Pieces:
        """Parts of these samples."""
        raise NotImplementedError

    def checked(self, samples: np.ndarray) -> np.ndarray:
        """Numbers of samples as int64."""
        samples = np.asarray(samples, np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError(f"sample {samples.min()} is negative")
        return samples

    def too_small(self) -> ValueError:
        return ValueError(
            f"{len(self.lengths)} sequences with {self.num_tokens} tokens are too few for one "
            f"sample of {self.sequence_length} + 1: use a larger corpus, another split or a "
            "shorter sequence_length"
        )


def cut(
    lengths: np.ndarray, order: np.ndarray, ends: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> Pieces:
    """Parts that hold tokens [start, stop) of the sequences read in `order`, row by row.

    ends: the token count up to the end of each sequence, in that order.
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


class GptSamples(Samples):
    """Sample n, for any n >= 0, in our own order, for which nothing is stored.

    With `shuffle` the documents of each epoch and its samples are in random order, from `seed`;
    without, in reading order.
    """

    def __init__(
        self, lengths: np.ndarray, sequence_length: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(lengths, sequence_length)
        if not self.samples_per_epoch:
            raise self.too_small()
        self._seed, self._shuffle = seed, shuffle
        self.identity = ("native", self.num_tokens, sequence_length, seed, shuffle)
        self._order = functools.lru_cache(maxsize=2 if shuffle else 1)(self._make_order)

    def pieces(self, samples: np.ndarray) -> Pieces:
        """Parts of these samples; O(log documents) for each."""
        epochs, within = np.divmod(self.checked(samples), self.samples_per_epoch)
        found = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            part = self._pieces_of_epoch(int(epoch), within[rows])
            found.append(dataclasses.replace(part, rows=rows[part.rows]))
        if len(found) == 1:
            return found[0]
        names = [field.name for field in dataclasses.fields(Pieces)]
        parts = [np.concatenate([getattr(p, name) for p in found] or [[]]) for name in names]
        by_row = np.argsort(parts[0], kind="stable")
        return Pieces(*(part[by_row].astype(np.int64) for part in parts))

    def _pieces_of_epoch(self, epoch: int, within: np.ndarray) -> Pieces:
        order, ends = self._order(epoch if self._shuffle else 0)
        if self._shuffle:
            within = Permutation(self.samples_per_epoch, self._seed, epoch, 1)(within)
        start = within * self.sequence_length
        return cut(self.lengths, order, ends, start, start + self.sequence_length + 1)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences in the epoch's order, and the token count up to the end of each."""
        count = len(self.lengths)
        order = shuffled(count, self._seed, epoch, 0) if self._shuffle else np.arange(count)
        return order, np.cumsum(self.lengths[order], dtype=np.int64)
