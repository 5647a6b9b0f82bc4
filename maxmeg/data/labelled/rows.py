"""Token ids of labelled examples: texts between special tokens, cut to a row's length."""

import collections
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from maxmeg.config.data import DataConfig, Scored, TooLong
from maxmeg.data.labelled.files import ABSENT, Example, Words
from maxmeg.data.tokenizers.tokenizer import Tokenizer

USES = ("whole", "truncated", "dropped")
Text = tuple[np.ndarray, int, np.ndarray]  # ids, tokens before the second text, labels of tokens


@dataclasses.dataclass
class Rows:
    """Examples as arrays: texts of tokens [T], and examples of texts.

    labels [T]: class of each token that has one, else ABSENT. starts [texts + 1]: first token of
    each text. seconds [texts]: tokens of a text that are of type 0. firsts [examples + 1]: first
    text of each example.
    """

    ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    seconds: np.ndarray
    firsts: np.ndarray

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        return np.diff(self.starts[self.firsts])


class Encoder:
    """Encodes texts for one run.

    With a tokenizer of BERT's kind, [CLS] A [SEP] B [SEP]; RoBERTa's has two separators in the
    middle. Otherwise the tokenizer's opening tokens and A, and for a pair the end of a document and
    B. Texts that are too long are cut at their ends, of a pair the longer one, as in transformers.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.scored = tokenizer, config.scored
        self.cut, self.length = config.too_long is TooLong.truncate, config.sequence_length
        cls, sep = tokenizer.cls, tokenizer.sep
        if cls is None or sep is None:
            self.opening, self.end = list(tokenizer.opening), []
            self.middle = [tokenizer.eod]
        else:
            self.opening, self.end = [cls], [sep]
            self.middle = [sep] * (2 if tokenizer.token_id("<s>") == cls else 1)
        self.counts: collections.Counter[str] = collections.Counter()

    def pair(self, first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, int, int]:
        """(ids, those of type 0, tokens that exceed `room` and are cut)."""
        middle = self.middle if len(second) else []
        left = room - len(self.opening) - len(middle) - len(self.end)
        excess = len(first) + len(second) - left
        if excess > 0:
            few = max(left, 0)
            small = min(len(first), len(second), few // 2)
            is_first = len(first) > len(second)
            sizes = (few - small, small) if is_first else (small, few - small)
            first, second = first[: sizes[0]], second[: sizes[1]]
        parts = [self.opening, first, middle, second, self.end]
        before = len(self.opening) + len(first) + len(middle[:1] if self.end else middle)
        ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
        return ids, before if len(second) else len(ids), max(excess, 0)

    def example(self, example: Example) -> tuple[list[Text], int]:
        """(the texts of an example, tokens that are cut)."""
        encode = self.tokenizer.encode
        texts, cut, room = [], 0, self.length // len(example.texts)
        for number, pair in enumerate(example.texts):
            ids, before, excess = self.pair(encode(pair[0]), encode(pair[1]), room)
            labels = np.full(len(ids), ABSENT, np.int32)
            is_choice = len(example.texts) > 1
            if len(ids):
                labels[0 if self.scored is Scored.first else -1] = (
                    int(number == example.label) if is_choice else example.label
                )
            texts.append((ids, before, labels))
            cut += excess
        return texts, cut

    def words(self, words: Words) -> tuple[list[Text], int]:
        """(the sentence, tokens that are cut); a word's label is that of its first token."""
        text, begins = "", []
        for word in words.words:
            begins.append(len(text))
            text += f"{word} "
        ids, characters = self.tokenizer.encode_spans(text.rstrip())
        labels = np.full(len(ids), ABSENT, np.int32)
        ends = np.maximum(characters[:, 1], characters[:, 0] + 1)
        firsts = np.searchsorted(ends, begins, side="right")
        labels[firsts[firsts < len(ids)]] = np.array(words.labels)[firsts < len(ids)]
        row, _, excess = self.pair(ids, ids[:0], self.length)
        at, length = len(self.opening), len(ids) - excess
        placed = np.full(len(row), ABSENT, np.int32)
        placed[at : at + length] = labels[:length]
        return [(row, len(row), placed)], excess

    def encoded(self, example: Example | Words) -> list[Text]:
        """The texts of an example; none if it is too long, and not to be cut."""
        encode: Callable = self.words if isinstance(example, Words) else self.example
        texts, cut = encode(example)
        is_usable = (self.cut or not cut) and any((labels >= 0).any() for *_, labels in texts)
        self.counts["whole" if not cut else "truncated" if is_usable else "dropped"] += 1
        return texts if is_usable else []


def encode_all(
    config: DataConfig, tokenizer: Tokenizer, examples: Iterable[Example | Words], may_drop: bool
) -> tuple[Rows, str]:
    """(rows, how many are whole, truncated and dropped).

    ValueError for an example that is too long unless it is to be cut or `may_drop`, and for
    settings with which no example fits.
    """
    encoder = Encoder(config, tokenizer)
    texts: list[Text] = []
    firsts = [0]
    for example in examples:
        example_texts = encoder.encoded(example)
        if not (example_texts or may_drop):
            raise ValueError(
                f"{example.place}: the example is longer than data.sequence_length="
                f"{config.sequence_length}: raise it, or set data.too_long=truncate"
            )
        texts += example_texts
        firsts += [len(texts)] * bool(example_texts)
    summary = ", ".join(f"{encoder.counts[name]:,} {name}" for name in USES)
    if not texts:
        raise ValueError(
            f"no example fits data.sequence_length={config.sequence_length} ({summary}): raise it, "
            "or set data.too_long=truncate"
        )
    lengths = np.array([len(ids) for ids, *_ in texts], np.int64)
    rows = Rows(
        np.concatenate([ids for ids, *_ in texts]),
        np.concatenate([labels for *_, labels in texts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.array([before for _, before, _ in texts], np.int64),
        np.array(firsts, np.int64),
    )
    return rows, summary
