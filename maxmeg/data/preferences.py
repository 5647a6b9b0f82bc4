"""Pairs of answers, of which one is preferred: what DPO and its relatives learn from.

A row of a JSONL file is {"prompt", "chosen", "rejected"}. Where chosen and rejected are messages
the chat template makes text of them; texts stand as they are and end with the end of a document.
Without a prompt (or "messages"), it is what both begin with.
"""

import collections
import functools
import itertools
import os
import typing
import zlib
from collections.abc import Sequence

import numpy as np

from maxmeg.data.answers import Kind, open_prepared, prepare
from maxmeg.data.chat import SHOWN
from maxmeg.data.documents import Record
from maxmeg.data.packing import Document, fill_rows
from maxmeg.data.sampling import Permutation, split_range
from maxmeg.data.sft import Counts
from maxmeg.data.tokenizers import Tokenizer
from maxmeg.data.turns import BadRow, Row, Turns, conversation, read_object

SIDES = ("chosen", "rejected")
_ROWS = 4  # key of their order, beside those of sampling and packing

Batch = dict[str, np.ndarray]


def read_side(side: str, record: Record) -> Row | Turns:
    """The prompt and one answer of a row, of which the answer is to be learnt."""
    row = read_object(record, *SIDES)
    prompt = row.get("prompt", row.get("messages"))
    answers = [row[name] for name in SIDES]
    if answers[0] == answers[1]:
        raise BadRow("chosen and rejected are the same: there is nothing to prefer")
    answer = row[side]
    if isinstance(prompt, list) and all(isinstance(text, str) for text in answers):
        return conversation(
            [*prompt, {"role": "assistant", "content": answer}], row.get("tools"), len(prompt)
        )
    if all(isinstance(messages, list) for messages in answers):
        if not isinstance(prompt, list):
            shared = _shared(*answers)
            _check_prompt(prompt, answer[:shared])
            return conversation(answer, row.get("tools"), shared)
        return conversation([*prompt, *answer], row.get("tools"), len(prompt))
    if not all(isinstance(text, str) for text in answers) or isinstance(prompt, list):
        shown = ", ".join(str(value)[:SHOWN] for value in answers)
        raise BadRow(f"chosen and rejected must both be texts or both lists of messages: {shown}")
    if prompt is None:
        prompt = answer[: _shared(*answers)].rstrip(" ")  # a space goes with the next word
        answer = answer[len(prompt) :]
    if not isinstance(prompt, str):
        raise BadRow(f"prompt={str(prompt)[:SHOWN]!r} is no text")
    return Turns(prompt + answer, [(len(prompt), len(prompt + answer))], has_end=True)


def _shared(chosen: Sequence, rejected: Sequence) -> int:
    """How far both are the same."""
    pairs = zip(chosen, rejected, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _check_prompt(prompt: typing.Any, shared: list[typing.Any]) -> None:
    """Refuses a prompt beside whole conversations that is not what they share."""
    contents = [m.get("content") for m in shared if isinstance(m, dict)]
    if not shared or (prompt is not None and prompt not in contents):
        raise BadRow(
            f"chosen and rejected are messages that begin with {len(shared)} equal ones, and the "
            f"prompt {str(prompt)[:SHOWN]!r} is none of them: give the prompt as messages"
        )


PREFERENCES = Kind("preferences", tuple(functools.partial(read_side, side) for side in SIDES))


def prepare_preferences(
    path: str,
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike,
    template_path: str = "",
    num_workers: int | None = None,
) -> str:
    """The folder in `cache_dir` with the pairs of a JSONL file (`answers.prepare`)."""
    return prepare(path, PREFERENCES, tokenizer, cache_dir, template_path, num_workers)


class Preferences:
    """Batches of pairs of one split (0 train, 1 validation, 2 test) of prepared folders.

    too_long: "drop" leaves out pairs of which one text has more than sequence_length + 1 tokens,
    "truncate" the ends of both, and pairs of which no answer would be left in one. Pairs of
    training come in another order each epoch, a function of (n, seed).
    """

    def __init__(
        self,
        folders: Sequence[str],
        split: str,
        split_index: int,
        sequence_length: int,
        too_long: str,
        vocab_size: int,
        pad: int,
        seed: int = 0,
    ) -> None:
        part = (folders, split, split_index, sequence_length, too_long)
        self._arguments = (*part, vocab_size, pad, seed)
        self._files = [open_prepared(folder) for folder in folders]
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self._pad, self._seed, self._shuffle = pad, seed, split_index == 0
        counts, pairs, self.num_tokens = collections.Counter(), [], 0
        for number, (tokens, _) in enumerate(self._files):
            begin, end = split_range(split, split_index, tokens.num_documents)
            lengths = tokens.lengths[2 * begin : 2 * end].reshape(-1, len(SIDES))
            keep = np.asarray(lengths.max(axis=1) <= sequence_length + 1)
            counts["whole"] += int(keep.sum())
            for i in np.flatnonzero(~keep).tolist():
                keep[i] = too_long == "truncate" and self._has_answers(number, begin + i)
                counts["truncated" if keep[i] else "dropped"] += 1
            kept = np.flatnonzero(keep)
            pairs.append(np.stack([np.full(len(kept), number), begin + kept], axis=1))
            self.num_tokens += int(np.minimum(lengths[kept] - 1, sequence_length).sum())
        self._pairs = np.concatenate(pairs)
        self.counts = Counts(counts["whole"], counts["truncated"], counts["dropped"])
        if not len(self._pairs):
            raise ValueError(
                f"of the pairs of {', '.join(folders)} none is left ({self.counts}) with "
                f"split={split!r} and sequence_length={sequence_length}: raise that, choose "
                "too_long=truncate or another split"
            )

    def __reduce__(self) -> tuple:
        return Preferences, self._arguments

    @property
    def samples_per_epoch(self) -> int:
        """Pairs."""
        return len(self._pairs)

    @property
    def identity(self) -> tuple:
        """What decides which pair has which number, as plain values."""
        pairs = zlib.crc32(self._pairs.astype("<i8").tobytes())
        return "preferences", self._shuffle, self.sequence_length, self._seed, pairs

    def batch(self, indices: np.ndarray) -> Batch:
        """Pairs by number, any >= 0; arrays are [2 * len(indices), sequence_length]: of each pair
        the chosen text, then the rejected one.

        What `fill_rows` gives: loss_mask is 1 where the target belongs to the answer, segment_ids
        1 where there is text.
        """
        epochs, places = np.divmod(np.asarray(indices, np.int64), self.samples_per_epoch)
        if places.size and epochs.min() < 0:
            raise ValueError(f"sample {np.min(indices)} is negative")
        rows: list[list[Document]] = []
        for epoch, place in zip(epochs.tolist(), places, strict=True):
            if self._shuffle:
                order = Permutation(self.samples_per_epoch, self._seed, epoch, _ROWS)
                place = order(place[None])[0]
            number, pair = self._pairs[place].tolist()
            for side in range(len(SIDES)):
                rows.append([self._read(number, pair, side)])
        return fill_rows(rows, self.sequence_length, self._pad)

    def _read(self, number: int, pair: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, loss = self._files[number]
        sequence = 2 * pair + side
        length = min(int(tokens.lengths[sequence]), self.sequence_length + 1)
        return tokens.get(sequence, 0, length), loss.get(sequence, 0, length)

    def _has_answers(self, number: int, pair: int) -> bool:
        """Whether something of both answers is left."""
        answers = [self._read(number, pair, side)[1] for side in range(len(SIDES))]
        return all(has_loss[1:].any() for has_loss in answers)
