"""Rows of a query and its texts, and the special tokens around them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxmeg.config.data import HAS_TEXT, DataConfig
from maxmeg.data.corpus.indexed import check_vocabulary
from maxmeg.data.samples.sampling import Batch, empty_batch
from maxmeg.data.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Numbers of tokens. row: of a row. query, text: the most of a query and of a text. separate:
    whether queries have rows of their own."""

    row: int
    query: int
    text: int
    separate: bool = False


def lengths_of(config: DataConfig) -> Lengths:
    lengths = config.sequence_length, config.query_length, config.text_tokens
    return Lengths(*lengths, config.separate_queries)


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Puts a tokenizer's special tokens around texts, as Megatron-LM: [CLS] title [SEP] text
    [SEP], or [CLS] text [SEP]. A text that is too long is cut at its end."""

    first: int
    separator: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int = 0) -> "TextEncoder":
        """vocab_size: number of valid ids; 0 means the tokenizer's. ValueError for a tokenizer
        without these tokens."""
        if tokenizer.cls is None or tokenizer.sep is None:
            raise ValueError(
                f"{tokenizer.spec} has no class or separator token, which stand around the texts "
                "of a biencoder: use a tokenizer of BERT's kind"
            )
        return cls(tokenizer.cls, tokenizer.sep, vocab_size or tokenizer.vocab_size)

    def __call__(
        self, tokens: np.ndarray, room: int, title: np.ndarray | None = None
    ) -> np.ndarray:
        """int32, at most `room` tokens; a title takes at most half of them."""
        opening = [self.first]
        if title is not None:
            opening += [*title[: title_room(room)].tolist(), self.separator]
        text = tokens[: room - len(opening) - 1]
        return np.concatenate([opening, text, [self.separator]]).astype(np.int32)

    def check(self, tokens: np.ndarray, path: str) -> None:
        """ValueError for ids outside the vocabulary; path: of their file."""
        check_vocabulary(tokens, self.vocab_size, path)


def title_room(room: int) -> int:
    """Most tokens of a title in a text of `room` tokens."""
    return (room - 3) // 2


def empty_rows(count: int, lengths: Lengths, texts: int) -> Batch:
    """As `empty_batch`: targets stay 0, segment_ids become 1 for the query and 2, 3 ... for texts,
    loss_mask 1 at a row's first token. has_text_0 ... int32 [count]: 1 if the row has this text,
    the query's own first. Separate queries are the source."""
    batch = empty_batch(count, lengths.row, lengths.query if lengths.separate else 0)
    return batch | {f"{HAS_TEXT}{number}": np.zeros(count, np.int32) for number in range(texts)}


def fill_row(batch: Batch, row: int, texts: Sequence[np.ndarray]) -> None:
    """Put a query and its texts, one after the other, into a row of `empty_rows`."""
    at, is_separate = 0, "encoder_tokens" in batch
    for number, tokens in enumerate(texts):
        if is_separate and not number:
            batch["encoder_tokens"][row, : len(tokens)] = tokens
            batch["encoder_segment_ids"][row, : len(tokens)] = 1
            continue
        end = at + len(tokens)
        batch["tokens"][row, at:end] = tokens
        batch["positions"][row, at:end] = np.arange(len(tokens))
        batch["segment_ids"][row, at:end] = number + 1
        at = end
        if number:
            batch[f"{HAS_TEXT}{number - 1}"][row] = 1
    batch["loss_mask"][row, 0] = 1
