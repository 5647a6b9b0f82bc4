"""Fine-tuning on conversations: what the assistant says in chats."""

import collections
import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from maxmeg.data.answers import Kind, open_prepared, prepare
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.packing import Document
from maxmeg.data.sampling import split_range
from maxmeg.data.tokenizers import Tokenizer
from maxmeg.data.turns import read_row

CHATS = Kind("conversations", (read_row,))


def prepare_chats(
    path: str,
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike,
    template_path: str = "",
    num_workers: int | None = None,
) -> str:
    """The folder in `cache_dir` with the conversations of a JSONL file (`answers.prepare`)."""
    return prepare(path, CHATS, tokenizer, cache_dir, template_path, num_workers)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What became of a split's conversations."""

    whole: int
    truncated: int
    dropped: int

    def __str__(self) -> str:
        return f"{self.whole:,} whole, {self.truncated:,} truncated, {self.dropped:,} dropped"


class Chats:
    """Conversations of one split of prepared folders, those that a sequence can hold.

    too_long: "drop" leaves out conversations with more than sequence_length + 1 tokens,
    "truncate" their ends, and those of which no loss is left.
    """

    def __init__(
        self,
        folders: Sequence[str],
        split: str,
        split_index: int,
        sequence_length: int,
        too_long: str,
    ) -> None:
        self._arguments = (folders, split, split_index, sequence_length, too_long)
        self._pairs = [open_prepared(folder) for folder in folders]
        longest, counts = sequence_length + 1, collections.Counter()
        corpora, sequences, lengths = [], [], []
        for number, (tokens, loss) in enumerate(self._pairs):
            begin, end = split_range(split, split_index, len(tokens))
            full = tokens.lengths[begin:end]
            keep = full <= longest
            counts["whole"] += int(keep.sum())
            for i in np.flatnonzero(~keep):
                can_stay = too_long == "truncate" and loss.get(begin + int(i), 1, longest - 1).any()
                counts["truncated" if can_stay else "dropped"] += 1
                keep[i] = can_stay
            kept = np.flatnonzero(keep)
            corpora.append(np.full(len(kept), number))
            sequences.append(kept + begin)
            lengths.append(np.minimum(full[kept], longest))
        self._corpus, self._sequence = np.concatenate(corpora), np.concatenate(sequences)
        self.lengths = np.concatenate(lengths)
        self.counts = Counts(counts["whole"], counts["truncated"], counts["dropped"])

    def __reduce__(self) -> tuple:
        return Chats, self._arguments

    def __str__(self) -> str:
        return str(self.counts)

    @property
    def corpora(self) -> list[IndexedDataset]:
        return [tokens for tokens, _ in self._pairs]

    def read(self, i: int) -> Document:
        """Tokens of a conversation, and which of them have a loss."""
        tokens, loss = self._pairs[self._corpus[i]]
        sequence, length = int(self._sequence[i]), int(self.lengths[i])
        return tokens.get(sequence, 0, length), loss.get(sequence, 0, length)
