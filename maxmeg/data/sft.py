"""Fine-tuning on conversations: chat JSONL to tokens and a mask of what the assistant said.

Tokens and mask are made once, as two .bin/.idx pairs in the cache, one document a conversation.
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import sys
import time
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxmeg.data.chat import ChatTemplate, chat_template_of
from maxmeg.data.documents import Progress, find_inputs, has_lines, read_records
from maxmeg.data.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.packing import Document
from maxmeg.data.sampling import split_range
from maxmeg.data.stored import appearing
from maxmeg.data.tokenizers import Tokenizer
from maxmeg.data.turns import MAX_ERRORS, BadRow, Turns, find_turns

LAYOUT = b"1"  # of what is kept; another number makes it again
_LINES_OF_ERRORS = 8


@typing.runtime_checkable
class Spanned(typing.Protocol):
    """A tokenizer that knows where its tokens lie in a text."""

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]: ...


def prepare_chats(
    path: str, tokenizer: Tokenizer, cache_dir: str | os.PathLike, template_path: str = ""
) -> str:
    """The folder in `cache_dir` with the conversations of a JSONL file, made on first use.

    ValueError that names file and line of the rows that are none; all or nothing is made.
    """
    if not isinstance(tokenizer, Spanned):
        raise NotImplementedError(
            f"tokenizer {tokenizer.spec!r} does not say where its tokens lie in a text: "
            "fine-tuning on chats can use huggingface:FILE and bytes"
        )
    if not cache_dir:
        raise ValueError("give cache_dir, a folder to keep the tokens of chats in")
    (path,) = find_inputs([path])
    if not has_lines(path):
        raise ValueError(f"{path} is not named .jsonl (or .jsonl.gz, .jsonl.zst): is it chats?")
    template = chat_template_of(tokenizer, template_path)
    folder = Path(cache_dir)
    final = folder / f"{Path(path).name.split('.')[0]}-{_digest(path, tokenizer, template)}"
    if final.is_dir():
        return str(final)
    with appearing(final) as temporary:
        _write(path, tokenizer, template, temporary)
    return str(final)


def _digest(path: str, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    found = hashlib.sha256(LAYOUT + tokenizer.identity.encode())
    for part in (template.text, *itertools.chain(*sorted(template.tokens.items()))):
        found.update(len(part).to_bytes(8, "little") + part.encode())
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()[:16]


def _write(path: str, tokenizer: Tokenizer, template: ChatTemplate, folder: Path) -> None:
    start, problems, count = time.monotonic(), [], 0
    tokens = IndexedWriter(folder / "tokens", tokenizer.vocab_size)
    with tokens, IndexedWriter(folder / "loss", dtype=np.uint8) as loss:
        for record, turns in find_turns(template, read_records([path], Progress([path]))):
            try:
                if isinstance(turns, BadRow):
                    raise turns
                ids, has_loss = encode_turns(tokenizer, turns)
            except BadRow as error:
                problems.append(f"{record.place}: {error}")
                if len(problems) == MAX_ERRORS:
                    break
                continue
            tokens.add_document(ids)
            loss.add_document(has_loss)
            count += 1
        if problems:
            more = f"\nand {len(problems) - _LINES_OF_ERRORS} more" * (
                len(problems) > _LINES_OF_ERRORS
            )
            raise ValueError(
                "\n".join(problems[:_LINES_OF_ERRORS]) + more + "\nmend these rows or remove them"
            )
        if not count:
            raise ValueError(f"{path} holds no conversations: write a JSON object a line")
    print(
        f"chats: {count:,} conversations of {path}, {tokens.num_tokens:,} tokens, made in "
        f"{time.monotonic() - start:.1f} s in {folder.parent}",
        file=sys.stderr,
    )


def encode_turns(tokenizer: Tokenizer, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the whole text, and which of them touch what the assistant said (uint8)."""
    assert isinstance(tokenizer, Spanned)
    try:
        turns.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            f"half a surrogate pair (\\u{ord(turns.text[error.start]):04x}) is no character"
        ) from None
    ids, places = tokenizer.encode_spans(turns.text)
    has_loss = np.zeros(len(ids), np.uint8)
    for begin, end in turns.spans:
        has_loss[(places[:, 0] < end) & (np.maximum(places[:, 1], places[:, 0] + 1) > begin)] = 1
    if not has_loss[1:].any():
        raise BadRow("none of its tokens has a loss: the template marks nothing of the assistant")
    return ids, has_loss


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
        self._pairs = [tuple(_open(folder)) for folder in folders]
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


def _open(folder: str) -> list[IndexedDataset]:
    try:
        tokens, loss = (IndexedDataset(os.path.join(folder, n)) for n in ("tokens", "loss"))
        if not np.array_equal(tokens.lengths, loss.lengths):
            raise ValueError(f"{folder}: tokens and loss have different lengths")
    except ValueError as error:
        raise ValueError(f"{error}; or delete {folder}, which makes it again") from None
    return [tokens, loss]
