"""Datasets whose rows are whole documents: chats, and .bin/.idx files that are packed."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from maxmeg.config.schema import DataConfig, Objective
from maxmeg.data.gpt import SPLITS
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.packing import Document, PackedDataset
from maxmeg.data.sampling import split_range
from maxmeg.data.sft import Chats, prepare_chats
from maxmeg.data.tokenizers import Tokenizer

logger = logging.getLogger("maxmeg")


@dataclasses.dataclass(frozen=True)
class Part:
    """A split (0 train, 1 validation, 2 test) of files, by a split string."""

    names: Sequence[str]
    split: str
    index: int
    open: Callable[[str], IndexedDataset] = IndexedDataset


class StoredDocuments:
    """Documents of .bin/.idx files; one that is longer than a row comes in pieces of a row.

    Every token but a document's first is a target once. num_short: documents of less than two
    tokens, which have none.
    """

    def __init__(self, part: Part, sequence_length: int) -> None:
        self._arguments = (part, sequence_length)
        self.corpora = [part.open(name) for name in part.names]
        numbers, starts, lengths, self.num_short = [], [], [], 0
        for number, corpus in enumerate(self.corpora):
            if corpus.dtype.kind not in "iu":
                raise ValueError(f"{corpus.prefix}.bin holds {corpus.dtype}, not token ids")
            begin, end = split_range(part.split, part.index, len(corpus))
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
            self.num_short += int((sizes < 2).sum())
        self._numbers, self._starts = np.concatenate(numbers), np.concatenate(starts)
        self.lengths = np.concatenate(lengths)

    def __reduce__(self) -> tuple:
        return StoredDocuments, self._arguments

    def __str__(self) -> str:
        return f"{len(self.lengths):,} pieces, {self.num_short:,} too short"

    def read(self, i: int) -> Document:
        start = int(self._starts[i])
        corpus = self.corpora[self._numbers[i]]
        return corpus.tokens[start : start + int(self.lengths[i])], None


def open_rows(
    config: DataConfig, part: Part, tokenizer: Tokenizer, seed: int, vocab_size: int, cache_dir: str
) -> PackedDataset | None:
    """Rows of a split, in the order of `seed` for training; None where another has no document.

    Says what became of the documents. ValueError for files that are damaged, chats that are none,
    and a split of which nothing is left.
    """
    if not part.names:
        return None
    length, name = config.sequence_length, SPLITS[part.index]
    if config.objective is Objective.sft:
        template = config.chat_template
        folders = [prepare_chats(n, tokenizer, cache_dir, template) for n in part.names]
        found = Chats(folders, part.split, part.index, length, config.too_long.value)
        remedy = ", set data.too_long=truncate,"
    else:
        found, remedy = StoredDocuments(part, length), ""
    if not len(found.lengths):
        if part.index and not any(_ranges(found, part)):
            return None
        raise ValueError(
            f"of the {name} documents of {', '.join(part.names)} none is left ({found}) with "
            f"data.split={part.split!r} and data.sequence_length={length}: raise that{remedy} or "
            f"give {name} more"
        )
    pad = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
    policy, shuffle = config.packing.value, part.index == 0
    data = PackedDataset(found, length, policy, pad, vocab_size, seed, shuffle)
    logger.info(
        "%s documents: %s; %s rows of %s, %.1f %% of their positions in use",
        *(name, found, f"{data.samples_per_epoch:,}", length, 100 * data.utilisation),
    )
    return data


def _ranges(found: Chats | StoredDocuments, part: Part) -> list[int]:
    """Sequences of each file that are in the split."""
    bounds = [split_range(part.split, part.index, len(corpus)) for corpus in found.corpora]
    return [end - begin for begin, end in bounds]
