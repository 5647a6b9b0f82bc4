"""Datasets whose rows are whole documents: chats, labelled texts, and packed .bin/.idx files."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from maxmeg.config.data import DataConfig, Objective, Packing
from maxmeg.data.chat.answers import prepare
from maxmeg.data.chat.ends import log_ends
from maxmeg.data.chat.sft import CHATS, Chats
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.labelled.dataset import LabelledDataset, open_labelled
from maxmeg.data.samples.gpt import SPLITS
from maxmeg.data.samples.packing import Document, PackedDataset
from maxmeg.data.samples.sampling import split_range
from maxmeg.data.tokenizers.tokenizer import Tokenizer, padding_of
from maxmeg.data.workers import RebuiltInWorkers

logger = logging.getLogger("maxmeg")


@dataclasses.dataclass(frozen=True)
class Part:
    """One split (0 train, 1 validation, 2 test) of files."""

    names: Sequence[str]
    split: str
    index: int
    open: Callable[[str], IndexedDataset] = IndexedDataset


class StoredDocuments(RebuiltInWorkers):
    """Documents of .bin/.idx files; longer documents are divided into pieces of one row.

    Every token except a document's first is a target once. num_short: documents with less than two
    tokens, which have no target.
    """

    def __init__(self, part: Part, sequence_length: int) -> None:
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

    def __str__(self) -> str:
        return f"{len(self.lengths):,} pieces, {self.num_short:,} too short"

    def read(self, i: int) -> Document:
        start = int(self._starts[i])
        corpus = self.corpora[self._numbers[i]]
        return corpus.tokens[start : start + int(self.lengths[i])], None


def reads(config: DataConfig) -> bool:
    """Whether the samples of a run are whole documents."""
    is_packed = config.packing is not Packing.none
    return config.objective.is_labelled or config.objective is Objective.sft or is_packed


def check_chats(chats: Chats, names: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> None:
    """ValueError for a conversation with a token for which the model has no row."""
    for name, corpus in zip(names, chats.corpora, strict=True):
        (wrong,) = np.nonzero(corpus.tokens[: corpus.num_tokens] >= vocab_size)
        if len(wrong):
            token = int(corpus.tokens[wrong[0] : wrong[0] + 1][0])
            conversation = corpus.document_of(corpus.sequence_at(int(wrong[0]))) + 1
            raise ValueError(
                f"{name}, conversation {conversation}: token {token} "
                f"({tokenizer.decode([token])!r}) is not in the model's vocabulary of "
                f"{vocab_size}: leave this token out of the text or the chat template, or "
                "raise model.vocab_size"
            )


def open_rows(
    config: DataConfig, part: Part, tokenizer: Tokenizer, seed: int, vocab_size: int, cache_dir: str
) -> PackedDataset | LabelledDataset | None:
    """The rows of a split, shuffled for training; None where another split has no document.

    Logs how many documents are used. ValueError for damaged files, for invalid chats, and for a
    split in which no document can be used.
    """
    if not part.names:
        return None
    if config.objective.is_labelled:
        return open_labelled(
            config, part.names, (part.split, part.index), tokenizer, seed, vocab_size
        )
    length, name = config.sequence_length, SPLITS[part.index]
    if config.objective is Objective.sft:
        template = config.chat_template
        folders = [prepare(name, CHATS, tokenizer, cache_dir, template) for name in part.names]
        documents = Chats(folders, part.split, part.index, length, config.too_long.value)
        if vocab_size < tokenizer.vocab_size:
            check_chats(documents, part.names, tokenizer, vocab_size)
        if part.index == 0:
            log_ends(tokenizer, config)
        remedy = ", set data.too_long=truncate,"
    else:
        documents, remedy = StoredDocuments(part, length), ""
    if not len(documents.lengths):
        if part.index and not any(_ranges(documents, part)):
            return None
        raise ValueError(
            f"no {name} document of {', '.join(part.names)} is left ({documents}) with "
            f"data.split={part.split!r} and data.sequence_length={length}: raise the sequence "
            f"length{remedy} or give {name} more"
        )
    pad = padding_of(tokenizer, vocab_size)
    policy, shuffle = config.packing.value, part.index == 0
    data = PackedDataset(documents, length, policy, pad, vocab_size, seed, shuffle)
    logger.info(
        "%s documents: %s; %s rows of %s, %.1f %% of their positions in use",
        *(name, documents, f"{data.samples_per_epoch:,}", length, 100 * data.utilisation),
    )
    return data


def _ranges(documents: Chats | StoredDocuments, part: Part) -> list[int]:
    """The number of sequences, or of conversations, of each file in the split."""
    sizes = [
        corpus.num_documents if isinstance(documents, Chats) else len(corpus)
        for corpus in documents.corpora
    ]
    bounds = [split_range(part.split, part.index, size) for size in sizes]
    return [end - begin for begin, end in bounds]
