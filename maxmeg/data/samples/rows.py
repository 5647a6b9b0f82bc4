"""Rows of whole documents: pieces of packed .bin/.idx files, and what chats share with them."""

import logging
from collections.abc import Sequence

import numpy as np

from maxmeg.data.corpus import remote
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.loss_weights import report_no_loss
from maxmeg.data.opening import Opening
from maxmeg.data.samples.dataset import SPLITS
from maxmeg.data.samples.packing import Document, Documents, PackedDataset
from maxmeg.data.samples.sampling import split_range
from maxmeg.data.tokenizers.tokenizer import padding_of
from maxmeg.data.workers import RebuiltInWorkers

logger = logging.getLogger("maxmeg")


class StoredDocuments(RebuiltInWorkers):
    """Documents of one split (0 train, 1 validation, 2 test) of .bin/.idx files; longer documents
    are divided into pieces of one row.

    Every token except a document's first is a target once. num_short: documents with less than two
    tokens, which have no target.
    """

    def __init__(
        self, corpora: Sequence[IndexedDataset], split: str, split_index: int, sequence_length: int
    ) -> None:
        self.corpora = list(corpora)
        numbers, starts, lengths, weights, self.num_short = [], [], [], [], 0
        for number, corpus in enumerate(self.corpora):
            if corpus.dtype.kind not in "iu":
                raise ValueError(f"{corpus.prefix}.bin holds {corpus.dtype}, not token ids")
            begin, end = split_range(split, split_index, len(corpus))
            bounds = np.unique(np.clip(corpus.document_indices, begin, end))
            begins = np.full(len(bounds), corpus.num_tokens, np.int64)
            begins[bounds < len(corpus)] = corpus.starts(bounds[bounds < len(corpus)])
            sizes = np.diff(begins)
            pieces = np.maximum(0, -(-(sizes - 1) // sequence_length))
            owner = np.repeat(np.arange(len(sizes)), pieces)
            first = np.repeat(np.cumsum(pieces) - pieces, pieces)
            offsets = (np.arange(len(owner)) - first) * sequence_length
            numbers.append(np.full(len(owner), number))
            starts.append(begins[owner] + offsets)
            lengths.append(np.minimum(sizes[owner] - offsets, sequence_length + 1))
            weights.append(corpus.weights_of(bounds[owner]))
            self.num_short += int((sizes < 2).sum())
        self._numbers, self._starts = np.concatenate(numbers), np.concatenate(starts)
        self.lengths = np.concatenate(lengths)
        self._weights = np.concatenate(weights)
        if len(self.lengths) and not self._weights.any():
            report_no_loss(SPLITS[split_index], [corpus.prefix for corpus in self.corpora])

    def __str__(self) -> str:
        return f"{len(self.lengths):,} pieces, {self.num_short:,} too short"

    def read(self, i: int) -> Document:
        start, length = int(self._starts[i]), int(self.lengths[i])
        corpus = self.corpora[self._numbers[i]]
        return corpus.tokens[start : start + length], np.full(length, self._weights[i])


def open_documents(opening: Opening) -> PackedDataset | None:
    """Packed documents of a split of .bin/.idx files; None where another split than training has
    none."""
    corpora = [remote.open_dataset(n, opening.config, opening.cache_dir) for n in opening.names]
    split, length = (opening.split, opening.index), opening.config.sequence_length
    return packed(opening, StoredDocuments(corpora, *split, length), list(map(len, corpora)))


def packed(
    opening: Opening, documents: Documents, sizes: Sequence[int], remedy: str = ""
) -> PackedDataset | None:
    """Rows of these documents, shuffled for training; None where another split has none of `sizes`
    sequences, or conversations, of each file.

    Logs how many documents are used. ValueError for a split in which no document can be used;
    remedy: what else can be done.
    """
    length, name, is_training = opening.config.sequence_length, opening.name, opening.index == 0
    if not len(documents.lengths):
        if all(map(opening.may_skip, sizes)):
            return None
        raise ValueError(
            f"no {name} document of {', '.join(opening.names)} is left ({documents}) with "
            f"data.split={opening.split!r} and data.sequence_length={length}: raise the sequence "
            f"length{remedy} or give {name} more"
        )
    pad, policy = padding_of(opening.tokenizer, opening.num_ids), opening.config.packing.value
    data = PackedDataset(documents, length, policy, pad, opening.num_ids, opening.seed, is_training)
    logger.info(
        "%s documents: %s; %s rows of %s, %.1f %% of their positions in use",
        *(name, documents, f"{data.samples_per_epoch:,}", length, 100 * data.utilisation),
    )
    return data
