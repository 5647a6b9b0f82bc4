"""Which sentences form sample n of BERT and T5, in Megatron-LM's order.

The .bin/.idx files have one sequence per sentence. Each document is read from its start; a sample
ends when it has the number of tokens that was drawn for it. One random generator serves all
documents in turn, so samples are found one after the other, with tables from NumPy; the result is
computed once per node and memory-mapped.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import cached, digest
from maxmeg.data.opening import Opening
from maxmeg.data.samples.dataset import Record, RecordedDataset, identify
from maxmeg.data.samples.sampling import check_indices, nonempty_range
from maxmeg.data.workers import Arrays, RebuiltInWorkers

MAX_SENTENCE = 512  # tokens; documents with several sentences, one of them longer, are left out
_BLOCK = 1 << 20  # sentences, or draws, per block
_SMALL = 1 << 14  # fewer sentences than this: computing samples is faster than a cache

_U64 = np.uint64


@dataclasses.dataclass(frozen=True)
class SentenceOrder:
    """The settings that decide the samples, besides the corpus and their lengths.

    num_samples: whole epochs are made until there are as many; None means one epoch. cache_dir: the
    folder for the result; empty keeps it in memory.
    """

    seed: int = 0
    num_samples: int | None = None
    cache_dir: str = ""


ONE_EPOCH = SentenceOrder()


def order_of(opening: Opening) -> SentenceOrder:
    """The order of a run's samples."""
    return SentenceOrder(opening.seed, opening.request.num_samples, opening.cache_dir)


class Mersenne64:
    """std::mt19937_64, with vectorized draws."""

    _size, _half = 312, 156

    def __init__(self, seed: int) -> None:
        state = [seed & 0xFFFFFFFFFFFFFFFF]
        for i in range(1, self._size):
            last = state[-1] ^ (state[-1] >> 62)
            state.append((6364136223846793005 * last + i) & 0xFFFFFFFFFFFFFFFF)
        self._state = np.array(state, _U64)
        self._ready = np.empty(0, _U64)

    def draw(self, count: int) -> np.ndarray:
        """The next `count` numbers, uint64."""
        blocks = [self._ready]
        for _ in range(-(-(count - len(self._ready)) // self._size)):
            self._advance()
            blocks.append(self._state.copy())
        raw = np.concatenate(blocks)
        self._ready, x = raw[count:], raw[:count].copy()
        x ^= (x >> _U64(29)) & _U64(0x5555555555555555)
        x ^= (x << _U64(17)) & _U64(0x71D67FFFEDA60000)
        x ^= (x << _U64(37)) & _U64(0xFFF7EEE000000000)
        return x ^ (x >> _U64(43))

    def _advance(self) -> None:
        state, half = self._state, self._half
        # In three slices, each of which reads old and updated elements like the scalar loop.
        for begin, end in ((0, half), (half, self._size - 1), (self._size - 1, self._size)):
            here = np.arange(begin, end)
            after, far = (here + 1) % self._size, (here + half) % self._size
            x = (state[here] & _U64(0xFFFFFFFF80000000)) | (state[after] & _U64(0x7FFFFFFF))
            odd = np.where(x & _U64(1), _U64(0xB5026F5AA96619E9), _U64(0))
            state[here] = state[far] ^ (x >> _U64(1)) ^ odd


def shuffled_rows(count: int, seed: int) -> np.ndarray:
    """Megatron-LM's order of the samples: swaps from the end; int64."""
    random, order = Mersenne64(seed), np.arange(count)
    view = order.data
    for top in range(count - 1, 0, -_BLOCK):
        places = np.arange(top, max(0, top - _BLOCK), -1)
        others = random.draw(len(places)) % (places + 1).astype(_U64)
        for i, j in zip(places.tolist(), others.astype(np.int64).tolist(), strict=True):
            view[i], view[j] = view[j], view[i]
    return order


class _Targets:
    """The intended number of tokens of each sample, in the order in which these are drawn."""

    def __init__(self, longest: int, short_probability: float, seed: int) -> None:
        self._longest, self._random = longest, np.random.RandomState(seed)
        # Rounded as in C: halves away from zero.
        self._ratio = int(1 / short_probability + 0.5) if short_probability else 0
        self._ready = np.empty(0, np.int64)

    def peek(self, count: int) -> np.ndarray:
        """At least the next `count` numbers; they remain the next until `use`."""
        missing = count - len(self._ready)
        if missing > 0:
            drawn = np.full(missing, self._longest, np.int64)
            if self._ratio:
                raw = self._random.randint(0, 2**32, missing, np.uint32).astype(np.int64)
                is_short = raw % self._ratio == 0
                drawn[is_short] = 2 + raw[is_short] % (self._longest - 1)
            self._ready = np.concatenate([self._ready, drawn])
        return self._ready

    def use(self, count: int) -> None:
        self._ready = self._ready[count:]


@dataclasses.dataclass(frozen=True)
class SentenceSamples:
    """Rows [N, 3] of Megatron-LM's `build_mapping`: first sentence, end, and tokens drawn.

    lengths: of every sentence of the corpus. bounds: the first sentence of each of the split's
    documents, and the end of the last document. longest: the intended tokens of a sample. fewest:
    the smallest number of sentences.
    """

    lengths: np.ndarray
    bounds: np.ndarray
    longest: int
    fewest: int
    short_probability: float

    def rows(self, order: SentenceOrder) -> np.ndarray:
        """The shuffled rows; ValueError for settings out of range and if no document is usable."""
        ratio = self.short_probability
        if self.longest < 2:
            raise ValueError(f"{self.longest} tokens per sample are too few: raise sequence_length")
        if not 0 <= order.seed < 2**31:
            raise ValueError(f"seed={order.seed} must lie in [0, 2^31) for Megatron's samples")
        if order.num_samples is not None and order.num_samples < 1:
            raise ValueError(f"num_samples={order.num_samples} must be at least 1")
        folder, name = order.cache_dir, ""
        if int(self.bounds[-1] - self.bounds[0]) < _SMALL:
            folder = ""
        if folder:
            lengths = self.lengths[self.bounds[0] : self.bounds[-1]]
            parts = (self.longest, self.fewest, ratio, order.seed, order.num_samples)
            name = digest(1, *parts, self.bounds, lengths)
        return cached(folder, f"sentences-{name}", ("rows",), lambda: self._make(order))["rows"]

    def _make(self, order: SentenceOrder) -> Arrays:
        targets = _Targets(self.longest, self.short_probability, order.seed)
        wide = len(self.lengths) > np.iinfo(np.uint32).max
        blocks, count = [], 0
        while True:
            for block in self._blocks():
                blocks.append(self._follow(block, targets).astype(np.uint64 if wide else np.uint32))
                count += len(blocks[-1])
            if not count:
                raise ValueError(
                    f"no document of {len(self.bounds) - 1} has {self.fewest} sentences or more, "
                    f"none above {MAX_SENTENCE} tokens: was the corpus prepared with "
                    "--split_sentences?"
                )
            if order.num_samples is None or count >= order.num_samples:
                break
        return {"rows": np.concatenate(blocks)[shuffled_rows(count, order.seed + 1)]}

    def _blocks(self) -> Iterator[np.ndarray]:
        """The bounds of successive documents with about _BLOCK sentences in all."""
        at, bounds = 0, self.bounds
        while at < len(bounds) - 1:
            end = int(np.searchsorted(bounds, bounds[at] + _BLOCK, side="right")) - 1
            end = max(at + 1, end)
            yield bounds[at : end + 1]
            at = end

    def _follow(self, bounds: np.ndarray, targets: _Targets) -> np.ndarray:
        """The samples of a block of documents, [N, 3]."""
        origin, count = int(bounds[0]), int(bounds[-1] - bounds[0])
        lengths = self.lengths[origin : origin + count]
        totals = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=totals[1:])
        firsts, lasts = bounds[:-1] - origin, bounds[1:] - origin
        too_long = np.zeros(count + 1, np.int64)
        np.cumsum(lengths > MAX_SENTENCE, out=too_long[1:])
        sizes = lasts - firsts
        usable = (sizes >= self.fewest) & ((sizes < 2) | (too_long[lasts] == too_long[firsts]))
        # The end of a sample that starts at each sentence, if its target is the longest: it needs
        # its tokens and sentences, and must not leave a single sentence of the document over.
        starts, last = np.arange(count), np.repeat(lasts, sizes)
        ends = np.searchsorted(totals, totals[:-1] + self.longest)
        ends = np.maximum(ends, starts + self.fewest)
        ends = np.where(ends > last - 2, last, ends).data
        next_lengths = targets.peek(count + len(sizes))
        drawn, sums, longest, at = next_lengths.data, totals.data, self.longest, 0
        sample_ends, numbers = [], [0]  # ends of samples; number of samples at each document's end
        for start, stop in zip(firsts[usable].tolist(), lasts[usable].tolist(), strict=True):
            while start < stop:
                target = drawn[at]
                at += 1
                if target == longest:
                    start = ends[start]
                else:
                    end = bisect.bisect_left(sums, sums[start] + target, start, stop)
                    end = max(end, start + self.fewest)
                    start = stop if end > stop - 2 else end
                sample_ends.append(start)
            at += 1  # Megatron-LM draws once more after a document's last sample
            numbers.append(len(sample_ends))
        targets.use(at)
        begins, document = np.empty(len(sample_ends), np.int64), np.diff(numbers)
        begins[1:] = sample_ends[:-1]
        begins[numbers[:-1]] = firsts[usable]
        draws = np.arange(len(sample_ends)) + np.repeat(np.arange(len(document)), document)
        return np.stack(
            [origin + begins, origin + np.array(sample_ends, np.int64), next_lengths[draws]], axis=1
        )


def sentence_samples(
    longest: int, fewest: int, short_probability: float
) -> Callable[[np.ndarray, np.ndarray], SentenceSamples]:
    """SentenceSamples of these settings, from lengths and bounds."""
    return lambda lengths, bounds: SentenceSamples(
        lengths, bounds, longest, fewest, short_probability
    )


class Samples(Protocol):
    """What `rows` returns, [N, 3], is shuffled: first sentence, end, and a number. ValueError for
    settings out of range and if no document is usable."""

    def rows(self, order: SentenceOrder) -> np.ndarray: ...


class SentenceDataset(RecordedDataset, RebuiltInWorkers):
    """The base of datasets of sentences: sample n is a range of sentences and a random seed.

    samples: from the length of every sentence of the corpus and the bounds of the split's
    documents, as of SentenceSamples. After the last sample of the order the ranges repeat, with
    other random numbers.
    """

    sequence_length: int

    def __init__(
        self,
        corpus: IndexedDataset,
        split: str,
        split_index: int,
        samples: Callable[[np.ndarray, np.ndarray], Samples],
        order: SentenceOrder,
    ) -> None:
        documents = f"documents of {corpus.prefix}"
        begin, end = nonempty_range(split, split_index, corpus.num_documents, documents)
        self.corpus, self._seed = corpus, order.seed
        bounds = np.asarray(corpus.document_indices[begin : end + 1], np.int64)
        self.sentences_range = int(bounds[0]), int(bounds[-1])
        try:
            self.rows = samples(corpus.lengths, bounds).rows(order)
        except ValueError as error:
            raise ValueError(f"{corpus.prefix}: {error}") from None
        lengths = corpus.lengths[bounds[0] : bounds[-1]]
        self.num_tokens = int(lengths.sum(dtype=np.int64))

    @property
    def description(self) -> Record:
        return {
            "order": "sentences",
            "corpora": identify([self.corpus], [self.sentences_range]),
            "sequence_length": self.sequence_length,
            "seed": self._seed,
            "num_samples": self.num_samples,
        }

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    @property
    def samples_per_epoch(self) -> int:
        return len(self.rows)

    def sentences(self, n: int, random: np.random.RandomState) -> tuple[list[np.ndarray], int]:
        """The sentences of sample n, and the third number of its row.

        Seeds `random` for all further draws of the sample. (Creating a RandomState costs a hundred
        times as much.)
        """
        first, end, number = self.rows[int(check_indices(np.array(n))) % len(self.rows)].tolist()
        random.seed((self._seed + n) % 2**32)
        return [self.corpus.get(i) for i in range(first, end)], number
