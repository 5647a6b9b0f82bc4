"""Supervised fine-tuning data: the texts of prepared folders that fit into a sequence."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxmeg.data.chat.answers import Kind, open_prepared, prepare
from maxmeg.data.chat.ends import log_ends
from maxmeg.data.chat.turns import read_row
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.opening import Opening
from maxmeg.data.samples.packing import Document, PackedDataset
from maxmeg.data.samples.rows import packed
from maxmeg.data.samples.sampling import split_range
from maxmeg.data.workers import RebuiltInWorkers

USES = ("whole", "truncated", "dropped")  # of the rows of a split
CHATS = Kind("conversations", (read_row,))


class FittingRows(RebuiltInWorkers):
    """The rows of one split of prepared folders (`answers.prepare`) that fit into a sequence.

    num_texts: texts per row; with 1, each text of a document is a row. too_long: "drop" drops a row
    if one of its texts has more than sequence_length + 1 tokens; "truncate" cuts the ends of such
    texts and drops the row only if one of them then has no target with a loss. rows: (folder, row)
    numbers, [N, 2]; lengths: tokens of each row's texts after truncation, [N, num_texts].
    """

    def __init__(
        self,
        folders: Sequence[str],
        split: str,
        split_index: int,
        sequence_length: int,
        too_long: str,
        num_texts: int = 1,
    ) -> None:
        self._datasets = [open_prepared(folder) for folder in folders]
        self._longest, self._num_texts = sequence_length + 1, num_texts
        counts, rows, lengths = collections.Counter(), [], []
        for folder, (tokens, *_) in enumerate(self._datasets):
            begin, end = split_range(split, split_index, tokens.num_documents)
            first, last = tokens.document_indices[[begin, end]].tolist()
            full, begin = tokens.lengths[first:last].reshape(-1, num_texts), first // num_texts
            keep = np.asarray(full.max(axis=1) <= self._longest)
            counts["whole"] += int(keep.sum())
            for i in np.flatnonzero(~keep).tolist():
                keep[i] = too_long == "truncate" and self._has_loss(folder, begin + i)
                counts["truncated" if keep[i] else "dropped"] += 1
            indices = np.flatnonzero(keep)
            rows.append(np.stack([np.full(len(indices), folder), begin + indices], axis=1))
            lengths.append(np.minimum(full[indices], self._longest))
        self.rows, self.lengths = np.concatenate(rows), np.concatenate(lengths)
        self._counts = counts

    def __str__(self) -> str:
        return ", ".join(f"{self._counts[name]:,} {name}" for name in USES)

    @property
    def corpora(self) -> list[IndexedDataset]:
        """The tokens of each folder."""
        return [tokens for tokens, *_ in self._datasets]

    def read_text(self, folder: int, row: int, text: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of one text of a row after truncation, and the weights of their losses."""
        tokens, loss, weights = self._datasets[folder]
        sequence = self._num_texts * row + text
        length = min(int(tokens.lengths[sequence]), self._longest)
        of_loss = weights if weights.lengths[sequence] else loss
        return tokens.get(sequence, 0, length), of_loss.get(sequence, 0, length)

    def _has_loss(self, folder: int, row: int) -> bool:
        """Whether each text of a row has a target with a loss after truncation."""
        texts = (self.read_text(folder, row, text) for text in range(self._num_texts))
        return all(weights[1:].any() for _, weights in texts)


class Chats(FittingRows):
    """The texts of the conversations of one split of prepared folders, as documents to pack."""

    def __init__(self, *part: Any) -> None:
        """part: the arguments of `FittingRows`, without num_texts."""
        super().__init__(*part)
        self.lengths = self.lengths[:, 0]

    def read(self, i: int) -> Document:
        """Tokens of text i, and the weights of their losses."""
        folder, row = self.rows[i].tolist()
        return self.read_text(folder, row, 0)


def open_chats(opening: Opening) -> PackedDataset | None:
    """The conversations of a split of files; None where another split than training has none.

    ValueError for invalid chats, and for tokens for which the model has no row.
    """
    config, tokenizer = opening.config, opening.tokenizer
    documents = Chats(prepared(opening, CHATS), *split_of(opening))
    if opening.num_ids < tokenizer.vocab_size:
        check_tokens(documents, opening)
    if opening.index == 0:
        log_ends(tokenizer, config)
    sizes = [corpus.num_documents for corpus in documents.corpora]
    return packed(opening, documents, sizes, ", set data.too_long=truncate,")


def prepared(opening: Opening, kind: Kind) -> list[str]:
    """The folders with the tokens of the files."""
    rest = opening.tokenizer, opening.cache_dir, opening.config.chat_template
    return [prepare(name, kind, *rest) for name in opening.names]


def split_of(opening: Opening) -> tuple[str, int, int, str]:
    """The arguments of `FittingRows` after the folders."""
    config = opening.config
    return opening.split, opening.index, config.sequence_length, config.too_long.value


def check_tokens(rows: FittingRows, opening: Opening) -> None:
    """ValueError for a conversation with a token for which the model has no row."""
    vocab_size = opening.num_ids
    for name, corpus in zip(opening.names, rows.corpora, strict=True):
        (wrong,) = np.nonzero(corpus.tokens[: corpus.num_tokens] >= vocab_size)
        if len(wrong):
            token = int(corpus.tokens[wrong[0] : wrong[0] + 1][0])
            conversation = corpus.document_of(corpus.sequence_at(int(wrong[0]))) + 1
            raise ValueError(
                f"{name}, conversation {conversation}: token {token} "
                f"({opening.tokenizer.decode([token])!r}) is not in the model's vocabulary of "
                f"{vocab_size}: leave this token out of the text or the chat template, or "
                "raise model.vocab_size"
            )
