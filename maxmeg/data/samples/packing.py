"""Pack whole documents of different lengths into rows of one length.

A document of n tokens takes n - 1 positions of a row: its last token is only a target, so no
position predicts the first token of the next document.
"""

import functools
import heapq
import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from maxmeg.data.corpus.indexed import check_vocabulary
from maxmeg.data.samples.dataset import Difference, Record, RecordedDataset, identify_weights
from maxmeg.data.samples.sampling import Batch, EpochOrder, shuffled
from maxmeg.data.workers import RebuiltInWorkers

POLICIES = ("greedy", "first_fit", "best_fit")
_NONE = np.iinfo(np.int64).max
_PLACED, _ROWS = 2, 3  # keys of the permutations of documents and rows; sampling has 0 and 1


class _OpenRows:
    """Rows with free positions, by the number of these; among equals the oldest row is first."""

    def __init__(self, capacity: int) -> None:
        self._heaps: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._oldest = np.full(capacity + 1, _NONE)  # row by room

    def put(self, row: int, room: int) -> None:
        heapq.heappush(self._heaps[room], row)
        self._oldest[room] = self._heaps[room][0]

    def first(self, length: int) -> int | None:
        """The room of the oldest row with at least `length` free positions."""
        room = length + int(self._oldest[length:].argmin())
        return room if self._heaps[room] else None

    def best(self, length: int) -> int | None:
        """The smallest room that is at least `length`."""
        room = length + int((self._oldest[length:] != _NONE).argmax())
        return room if self._heaps[room] else None

    def take(self, room: int) -> int:
        row = heapq.heappop(self._heaps[room])
        self._oldest[room] = self._heaps[room][0] if self._heaps[room] else _NONE
        return row


def pack(lengths: Iterable[int], capacity: int, policy: str) -> list[list[int]]:
    """The documents of each row, by number, for documents of these lengths in positions.

    greedy: a document that does not fit begins the next row; first_fit: it goes to the oldest row
    with room; best_fit: to the fullest row with room.
    """
    rows: list[list[int]] = []
    open_rows = _OpenRows(capacity)
    find = open_rows.best if policy == "best_fit" else open_rows.first
    for document, length in enumerate(lengths):
        assert 0 < length <= capacity
        room = find(length)
        if room is None:
            if policy == "greedy" and (left := open_rows.first(0)) is not None:
                open_rows.take(left)
            row, room = len(rows), capacity
            rows.append([])
        else:
            row = open_rows.take(room)
        rows[row].append(document)
        if room > length:
            open_rows.put(row, room - length)
    return rows


class Packed:
    """The rows of an epoch: row r holds documents[starts[r] : starts[r + 1]]."""

    def __init__(self, lengths: np.ndarray, capacity: int, policy: str) -> None:
        rows = pack(np.asarray(lengths).tolist(), capacity, policy)
        counts = [len(documents) for documents in rows]
        self.documents = np.array([d for documents in rows for d in documents], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.capacity = capacity
        self.num_positions = int(np.sum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]

    @property
    def utilisation(self) -> float:
        """The share of all positions that documents take."""
        return self.num_positions / max(len(self) * self.capacity, 1)


# Tokens, and the weights of their losses, 0 for a token without a loss (None: all are 1).
Document = tuple[np.ndarray, np.ndarray | None]


def fill_rows(rows: Sequence[Sequence[Document]], length: int, pad: int) -> Batch:
    """Concatenate the documents of each row; every array is [rows, length].

    tokens, targets, positions (from 0 in each document) and segment_ids (from 1; 0 is padding) are
    int32; loss_mask is float32 and refers to the targets.
    """
    shape = (len(rows), length)
    batch = {"tokens": np.full(shape, pad, np.int32), "targets": np.full(shape, pad, np.int32)}
    batch |= {"positions": np.zeros(shape, np.int32), "loss_mask": np.zeros(shape, np.float32)}
    batch["segment_ids"] = np.zeros(shape, np.int32)
    for row, documents in enumerate(rows):
        at = 0
        for segment, (tokens, weights) in enumerate(documents, 1):
            end = at + len(tokens) - 1
            assert at < end <= length
            batch["tokens"][row, at:end] = tokens[:-1]
            batch["targets"][row, at:end] = tokens[1:]
            batch["positions"][row, at:end] = np.arange(end - at)
            batch["loss_mask"][row, at:end] = 1 if weights is None else weights[1:]
            batch["segment_ids"][row, at:end] = segment
            at = end
    return batch


class Documents(Protocol):
    """The interface of documents to pack: their lengths in tokens, at least 2, and each document
    by number."""

    lengths: np.ndarray

    def read(self, i: int) -> Document: ...


class PackedDataset(RecordedDataset, RebuiltInWorkers):
    """Batches of rows of whole documents. Row n depends on (n, seed) alone.

    The documents are packed once, in shuffled order if `shuffle`; every epoch then has the same
    rows, in another order. policy "none": one document per row.
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
        self.source, self.sequence_length, self.vocab_size = source, sequence_length, vocab_size
        lengths = np.asarray(source.lengths, np.int64) - 1
        count = len(lengths)
        self._order = shuffled(count, seed, _PLACED) if shuffle else np.arange(count)
        if policy == "none":
            self.packed = Packed(np.full(count, sequence_length), sequence_length, "greedy")
            self.packed.num_positions = int(lengths.sum())
        else:
            self.packed = Packed(lengths[self._order], sequence_length, policy)
        self._rows = EpochOrder(len(self.packed), seed, _ROWS, shuffle)
        self._pad, self._seed, self._shuffle, self._policy = pad, seed, shuffle, policy

    @property
    def num_tokens(self) -> int:
        """Positions that documents take in one epoch."""
        return self.packed.num_positions

    @property
    def samples_per_epoch(self) -> int:
        return len(self.packed)

    @functools.cached_property
    def description(self) -> Record:
        lengths = np.asarray(self.source.lengths, "<i8")
        return {
            "documents": [len(lengths), zlib.crc32(lengths.tobytes())],
            "packing": self._policy,
            "sequence_length": self.sequence_length,
            "seed": self._seed,
            **identify_weights(getattr(self.source, "corpora", ())),
        }

    def compare(self, saved: Sequence[Record], consumed: int) -> Difference:
        """Count documents, if both have the same ones."""
        if len(saved) != 1 or saved[0].get("documents") != self.description["documents"]:
            return super().compare(saved, consumed)
        (record,) = saved
        then = self.packed_as(record["packing"], record["sequence_length"], record["seed"])
        surplus = then.times_read(record["samples"]) - self.times_read(consumed)
        tokens = surplus * (np.asarray(self.source.lengths, np.int64) - 1)
        return Difference(int(tokens.clip(min=0).sum()), int(-tokens.clip(max=0).sum()))

    def packed_as(self, policy: str, sequence_length: int, seed: int) -> "PackedDataset":
        """The same documents, packed differently."""
        rest = (self._pad, self.vocab_size, seed, self._shuffle)
        return PackedDataset(self.source, sequence_length, policy, *rest)

    def times_read(self, count: int) -> np.ndarray:
        """How often rows 0 to count - 1 hold each document; int64."""
        num_epochs, rest = divmod(count, self.samples_per_epoch)
        is_read = np.full(self.samples_per_epoch, 0)
        is_read[self._rows.within_epoch(num_epochs, np.arange(rest))] = 1
        times = np.full(len(self._order), num_epochs, np.int64)
        times[self._order[self.packed.documents]] += np.repeat(is_read, np.diff(self.packed.starts))
        return times

    @property
    def utilisation(self) -> float:
        return self.packed.utilisation

    def batch(self, indices: np.ndarray) -> Batch:
        """The rows with these numbers, any >= 0: the arrays of `fill_rows`, with segment_ids
        only if a row can hold several documents. ValueError for an id beyond the vocabulary."""
        rows = [self.packed[row] for row in self._rows(indices)]
        documents = [[self.source.read(int(self._order[i])) for i in row] for row in rows]
        batch = fill_rows(documents, self.sequence_length, self._pad)

        def where(wrong: int) -> str:
            return f"row {indices[wrong // self.sequence_length]} of the packed documents"

        for name in ("tokens", "targets"):
            check_vocabulary(batch[name], self.vocab_size, where)
        if self._policy == "none":
            del batch["segment_ids"]
        return batch
