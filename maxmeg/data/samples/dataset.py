"""What a dataset answers: its batches, its record in checkpoints, and what a run reads of it."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.samples.sampling import Batch, EpochOrder

SPLITS = ("train", "validation", "test")
_PROBES, _PROBE = 16, 64  # positions that identify a corpus, and tokens at each

# The plain JSON values that decide the order of a dataset, and "samples", the number that was read.
Record = dict[str, Any]


class Dataset(Protocol):
    """The interface of datasets for loaders and blends: a sample depends on its number alone."""

    vocab_size: int
    sequence_length: int

    @property
    def num_tokens(self) -> int: ...

    @property
    def samples_per_epoch(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Difference:
    """The tokens that a change of order repeats, and the tokens that it leaves out.

    is_exact: every token was counted; otherwise tokens were sampled evenly from a large corpus.
    is_bound: the numbers are upper bounds, because data that was read before is missing now.
    """

    repeated: int
    left_out: int
    is_exact: bool = True
    is_bound: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """What a run reads of a corpus or of a whole split. tokens: of one epoch."""

    name: str
    documents: int | None  # None: not counted
    tokens: int
    samples: float
    epochs: float


class RecordedDataset:
    """The base of datasets that settings name, whose order of samples checkpoints record."""

    @property
    def description(self) -> Record:
        """The values that decide which sample has which number; plain JSON values."""
        raise NotImplementedError

    def record(self, consumed: int) -> list[Record]:
        """The record of the first `consumed` samples; empty if there are none."""
        return [{**self.description, "samples": int(consumed)}] if consumed else []

    def compare(self, saved: Sequence[Record], consumed: int) -> Difference:
        """Compare the first `consumed` samples with those of a record that is not equal."""
        return bound(saved, self.record(consumed))

    def uses(self, samples: float) -> list[Use]:
        """What `samples` samples read of each corpus; empty if corpora are not told apart."""
        return []


class EpochRows(RecordedDataset):
    """The base of datasets that read each of their rows once an epoch."""

    _order: EpochOrder

    @property
    def samples_per_epoch(self) -> int:
        return self._order.size


def bound(saved: Sequence[Record], now: Sequence[Record]) -> Difference:
    """The largest difference that two records can have."""
    repeated, left_out = (
        sum(record["samples"] * record["sequence_length"] for record in records)
        for records in (saved, now)
    )
    return Difference(repeated, left_out, is_bound=True)


def identify_weights(corpora: Sequence[IndexedDataset]) -> Record:
    """The entry of a record for the weights of documents: a CRC-32 for each corpus, 0 for one whose
    weights are 1; empty if all are."""
    if all(corpus.weights is None for corpus in corpora):
        return {}
    sums = [0 if c.weights is None else zlib.crc32(c.weights.tobytes()) for c in corpora]
    return {"weights": sums}


def identify(
    corpora: Sequence[IndexedDataset], ranges: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Identifies corpora: sequences, tokens, CRC-32 of sampled tokens, and the range [begin,
    end)."""
    identities = []
    for corpus, (begin, end) in zip(corpora, ranges, strict=True):
        starts = np.linspace(0, max(corpus.num_tokens - _PROBE, 0), _PROBES).astype(np.int64)
        sizes = np.full(len(starts), min(_PROBE, corpus.num_tokens))
        corpus.expect(starts, sizes, now=True)
        parts = [np.asarray(corpus.tokens[at : at + _PROBE], "<i8").tobytes() for at in starts]
        checksum = zlib.crc32(b"".join(parts))
        identities.append([len(corpus), corpus.num_tokens, checksum, begin, end])
    return identities
