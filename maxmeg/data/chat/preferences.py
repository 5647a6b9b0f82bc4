"""Preference pairs for DPO and related objectives: a chosen and a rejected answer to one prompt.

A row of a JSONL file is {"prompt", "chosen", "rejected"}. If chosen and rejected are lists of
messages, the chat template renders them; strings are used as they are, followed by the
end-of-document token. Without "prompt" (or "messages"), the prompt is the common beginning of both
answers.
"""

import functools
import itertools
import logging
import typing
import zlib
from collections.abc import Sequence

import numpy as np

from maxmeg.data.chat.answers import Kind, open_prepared
from maxmeg.data.chat.conversation import excerpt, normalized
from maxmeg.data.chat.sft import FittingRows, prepared, split_of
from maxmeg.data.chat.turns import BadRow, Row, Turns, bad_rows, conversation, read_object
from maxmeg.data.corpus.indexed import check_vocabulary
from maxmeg.data.opening import Opening
from maxmeg.data.prepare import documents
from maxmeg.data.samples.dataset import EpochRows, Record
from maxmeg.data.samples.packing import fill_rows
from maxmeg.data.samples.sampling import Batch, EpochOrder
from maxmeg.data.tokenizers.tokenizer import padding_of
from maxmeg.data.workers import RebuiltInWorkers

logger = logging.getLogger("maxmeg")
SIDES = ("chosen", "rejected")
_UNWEIGHTED = "pairs of answers have no weights yet, remove it"
_ROWS = 4  # key of the permutation; sampling and packing have other keys


def read_side(side: str, record: documents.Record) -> Row | Turns:
    """The prompt with one of the answers; only the answer has a loss."""
    row = read_object(record, *SIDES)
    if row.get("weight") not in (None, 1):
        raise BadRow(f"weight={excerpt(row['weight'])}: {_UNWEIGHTED}")
    prompt = row.get("messages") if row.get("prompt") is None else row["prompt"]
    answers = [row[name] for name in SIDES]
    if all(isinstance(messages, list) for messages in answers):
        for number, name in enumerate(SIDES):  # equal messages may be written in several ways
            with bad_rows():
                answers[number] = normalized(answers[number], None, True, name)[0]
    if answers[0] == answers[1]:
        raise BadRow("chosen and rejected are equal: there is no preference")
    answer = answers[SIDES.index(side)]
    if isinstance(prompt, list) and all(isinstance(text, str) for text in answers):
        answer = [{"role": "assistant", "content": answer}]
        return _conversation([*prompt, *answer], row, len(prompt))
    if all(isinstance(messages, list) for messages in answers):
        if not isinstance(prompt, list):
            shared = _shared(*answers)
            _check_prompt(prompt, answer[:shared])
            return _conversation(answer, row, shared)
        return _conversation([*prompt, *answer], row, len(prompt))
    if not all(isinstance(text, str) for text in answers) or isinstance(prompt, list):
        values = ", ".join(map(excerpt, answers))
        raise BadRow(f"chosen and rejected must both be texts or both lists of messages: {values}")
    if prompt is None:
        prompt = answer[: _shared(*answers)].rstrip(" ")  # a space belongs to the next word
        answer = answer[len(prompt) :]
    if not isinstance(prompt, str):
        raise BadRow(f"prompt={excerpt(prompt)} is not text")
    return Turns(prompt + answer, [(len(prompt), len(prompt + answer), 1)], has_end=True)


def _conversation(messages: list[typing.Any], row: Row, first: int) -> Row:
    answer = conversation(messages, row.get("tools"), first)
    if weights := set(answer["weights"]) - {0, 1}:
        raise BadRow(f"a message's weight={weights.pop()}: {_UNWEIGHTED}")
    return answer


def _shared(chosen: Sequence, rejected: Sequence) -> int:
    """The length of the common prefix of both answers."""
    pairs = zip(chosen, rejected, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _check_prompt(prompt: typing.Any, shared: list[typing.Any]) -> None:
    """Refuse a prompt beside whole conversations unless it is one of the messages they share."""
    contents = [m.get("content") for m in shared if isinstance(m, dict)]
    if not shared or (prompt is not None and prompt not in contents):
        raise BadRow(
            f"chosen and rejected are messages that begin with {len(shared)} equal ones, and the "
            f"prompt {excerpt(prompt)} is not one of them: give the prompt as messages"
        )


PREFERENCES = Kind("preferences", tuple(functools.partial(read_side, side) for side in SIDES))


class Preferences(EpochRows, RebuiltInWorkers):
    """Batches of pairs of one split (0 train, 1 validation, 2 test) of prepared folders.

    too_long: as in `FittingRows`. The pairs of the train split come in another order each epoch, a
    function of (n, seed).
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
        self._pairs = FittingRows(*part, num_texts=len(SIDES))
        self.counts = str(self._pairs)
        self.num_tokens = int((self._pairs.lengths - 1).sum())
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self._pad, self._seed = pad, seed
        if not len(self._pairs.rows):
            raise ValueError(
                f"no pair of {', '.join(folders)} is left ({self.counts}) with split={split!r} and "
                f"sequence_length={sequence_length}: raise sequence_length, choose "
                "too_long=truncate or another split"
            )
        self._order = EpochOrder(len(self._pairs.rows), seed, _ROWS, shuffle=split_index == 0)

    @property
    def description(self) -> Record:
        lengths = self._pairs.lengths.astype("<i8")
        return {
            "order": "preferences",
            "documents": [len(lengths), zlib.crc32(lengths.tobytes())],
            "sequence_length": self.sequence_length,
            "seed": self._seed,
        }

    def batch(self, indices: np.ndarray) -> Batch:
        """The pairs with these numbers, any >= 0, as rows [2 * len(indices), sequence_length]: the
        chosen text of each pair, then the rejected one.

        The arrays are those of `fill_rows`: loss_mask is 1 where the target belongs to the answer,
        segment_ids is 1 where there is text.
        """
        pairs = self._pairs.rows[self._order(indices)].tolist()
        sides = range(len(SIDES))
        texts = [
            self._pairs.read_text(folder, row, side) for folder, row in pairs for side in sides
        ]
        rows = [[text] for text in texts]
        batch = fill_rows(rows, self.sequence_length, self._pad)
        check_vocabulary(batch["tokens"], self.vocab_size, "the preferences")
        return batch


def open_preferences(opening: Opening) -> Preferences | None:
    """The pairs of a split of files; None where another split than training has none."""
    folders, size = prepared(opening, PREFERENCES), opening.num_ids
    if all(opening.may_skip(open_prepared(folder)[0].num_documents) for folder in folders):
        return None
    pad = padding_of(opening.tokenizer, size)
    data = Preferences(folders, *split_of(opening), size, pad, opening.seed)
    logger.info("%s pairs of answers: %s", opening.name, data.counts)
    return data
