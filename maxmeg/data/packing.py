"""Whole documents of different lengths in rows of one length. Pure NumPy.

A document of n tokens takes n - 1 positions of a row: its last token is a target alone, so no
position predicts the first token of another document.
"""

import heapq
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from maxmeg.data.sampling import Permutation, shuffled

POLICIES = ("greedy", "first_fit", "best_fit")
_NONE = np.iinfo(np.int64).max
_PLACED, _ROWS = 2, 3  # keys of the orders of documents and of rows, beside sampling's 0 and 1

Batch = dict[str, np.ndarray]


class _Open:
    """Rows that have room, by that room; ties go to the oldest row."""

    def __init__(self, capacity: int) -> None:
        self._heaps: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._oldest = np.full(capacity + 1, _NONE)  # row by room
        self.count = 0

    def put(self, row: int, room: int) -> None:
        heapq.heappush(self._heaps[room], row)
        self._oldest[room] = self._heaps[room][0]
        self.count += 1

    def first(self, length: int) -> int | None:
        """The room of the oldest row with at least `length` of it."""
        room = length + int(self._oldest[length:].argmin())
        return room if self._heaps[room] else None

    def best(self, length: int) -> int | None:
        """The least room that is at least `length`."""
        room = length + int((self._oldest[length:] != _NONE).argmax())
        return room if self._heaps[room] else None

    def take(self, room: int) -> int:
        row = heapq.heappop(self._heaps[room])
        self._oldest[room] = self._heaps[room][0] if self._heaps[room] else _NONE
        self.count -= 1
        return row


def packed_rows(
    lengths: Iterable[int], capacity: int, policy: str, window: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """(number, documents) of each row as soon as it is complete; rows are numbered as they begin.

    lengths: positions of the documents, in the order in which they come. greedy: a document that
    does not fit completes the row; first_fit: the oldest row with room; best_fit: the fullest row
    with room. window: rows that are open at once, the oldest is completed for one more; 0: all.
    """
    if policy not in POLICIES:
        raise ValueError(f"packing={policy!r} must be one of {', '.join(POLICIES)}")
    if capacity < 1 or window < 0:
        raise ValueError(f"capacity={capacity} must be >= 1 and window={window} must be >= 0")
    window = 1 if policy == "greedy" else window
    rows: dict[int, list[int]] = {}
    available, begun = _Open(capacity), 0
    find = available.best if policy == "best_fit" else available.first
    for document, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(
                f"document {document} takes {length} positions, not 1 to {capacity}: drop, cut or "
                "split it before it is packed"
            )
        room = find(length)
        if room is None:
            if available.count == window > 0:
                done = available.take(available.first(0) or 0)
                yield done, rows.pop(done)
            row, room, begun = begun, capacity, begun + 1
            rows[row] = []
        else:
            row = available.take(room)
        rows[row].append(document)
        if room == length:
            yield row, rows.pop(row)
        else:
            available.put(row, room - length)
    yield from rows.items()


class Packed:
    """The rows of a whole epoch: row r holds documents[starts[r] : starts[r + 1]]."""

    def __init__(self, lengths: np.ndarray, capacity: int, policy: str, window: int = 0) -> None:
        rows = sorted(packed_rows(np.asarray(lengths).tolist(), capacity, policy, window))
        counts = [len(documents) for _, documents in rows]
        self.documents = np.array([d for _, documents in rows for d in documents], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.capacity = capacity
        self.num_positions = int(np.sum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]

    @property
    def utilisation(self) -> float:
        """Share of all positions that documents take."""
        return self.num_positions / max(len(self) * self.capacity, 1)


Document = tuple[np.ndarray, np.ndarray | None]  # tokens, and which of them have a loss (None: all)


def fill_rows(rows: Sequence[Sequence[Document]], length: int, pad: int) -> Batch:
    """Documents of each row one after the other; every array is [rows, length].

    tokens, targets, positions (from 0 in each document) and segment_ids (from 1; 0 is padding)
    int32; loss_mask float32, of the targets.
    """
    shape = (len(rows), length)
    batch = {"tokens": np.full(shape, pad, np.int32), "targets": np.full(shape, pad, np.int32)}
    batch |= {"positions": np.zeros(shape, np.int32), "loss_mask": np.zeros(shape, np.float32)}
    batch["segment_ids"] = np.zeros(shape, np.int32)
    for row, documents in enumerate(rows):
        at = 0
        for segment, (tokens, has_loss) in enumerate(documents, 1):
            end = at + len(tokens) - 1
            assert at < end <= length
            batch["tokens"][row, at:end] = tokens[:-1]
            batch["targets"][row, at:end] = tokens[1:]
            batch["positions"][row, at:end] = np.arange(end - at)
            batch["loss_mask"][row, at:end] = 1 if has_loss is None else has_loss[1:]
            batch["segment_ids"][row, at:end] = segment
            at = end
    return batch


class Documents(Protocol):
    """What can be packed: lengths in tokens, 2 and more, and each document by its number."""

    lengths: np.ndarray

    def read(self, i: int) -> Document: ...


class PackedDataset:
    """Batches of rows of whole documents. Row n is a function of (n, seed) alone.

    The documents are packed once, in the order of `seed` where they are shuffled; then every epoch
    holds the same rows in an order of its own. policy "none": one document a row.
    """

    def __init__(
        self,
        source: Documents,
        sequence_length: int,
        policy: str,
        pad: int,
        vocab_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._arguments = (source, sequence_length, policy, pad, vocab_size, seed, shuffle)
        self.source, self.sequence_length, self.vocab_size = source, sequence_length, vocab_size
        lengths = np.asarray(source.lengths, np.int64) - 1
        count = len(lengths)
        if not count:
            raise ValueError("there is no document to pack: give more text, or another split")
        self._order = shuffled(count, seed, _PLACED) if shuffle else np.arange(count)
        if policy == "none":
            self.packed = Packed(np.full(count, sequence_length), sequence_length, "greedy")
            self.packed.num_positions = int(lengths.sum())
        else:
            self.packed = Packed(lengths[self._order], sequence_length, policy)
        self._pad, self._seed, self._shuffle, self._policy = pad, seed, shuffle, policy

    def __reduce__(self) -> tuple:
        return PackedDataset, self._arguments

    @property
    def num_tokens(self) -> int:
        """Positions that documents take, once through."""
        return self.packed.num_positions

    @property
    def samples_per_epoch(self) -> int:
        return len(self.packed)

    @property
    def identity(self) -> tuple:
        """What decides which row has which number, as plain values."""
        lengths = np.asarray(self.source.lengths, "<i8").tobytes()
        return self._policy, self._shuffle, self.sequence_length, self._seed, zlib.crc32(lengths)

    @property
    def utilisation(self) -> float:
        return self.packed.utilisation

    def batch(self, indices: np.ndarray) -> Batch:
        """Rows by number, any >= 0: what fill_rows gives, segment_ids only where a row holds more
        than one document. ValueError for an id beyond the vocabulary."""
        epochs, rows = np.divmod(np.asarray(indices, np.int64), self.samples_per_epoch)
        if rows.size and epochs.min() < 0:
            raise ValueError(f"sample {np.min(indices)} is negative")
        if self._shuffle:
            rows = rows.copy()
            for epoch in np.unique(epochs):
                here = epochs == epoch
                order = Permutation(self.samples_per_epoch, self._seed, int(epoch), _ROWS)
                rows[here] = order(rows[here])
        documents = [[self.source.read(int(self._order[i])) for i in self.packed[r]] for r in rows]
        batch = fill_rows(documents, self.sequence_length, self._pad)
        largest = max(batch[name].max(initial=0) for name in ("tokens", "targets"))
        if largest >= self.vocab_size:
            raise ValueError(
                f"id {largest} is not in the vocabulary [0, {self.vocab_size}): the corpus was "
                "made with another tokenizer; name that one"
            )
        if self._policy == "none":
            del batch["segment_ids"]
        return batch
