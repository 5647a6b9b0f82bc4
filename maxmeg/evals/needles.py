"""Needles in a haystack (Kamradt, 2023): does a model use the whole length of a row?

A row is random words that hide needles, a key and a word each. At its end the keys stand again, and
the model should continue each with the word of its needle. Random ids serve as words and keys, so
that nothing but the row tells the answer.
"""

from collections.abc import Sequence

import numpy as np

from maxmeg.inference.language_model import LanguageModel

KEYS = 32  # ids of keys: the last of the vocabulary
MOST = 8  # needles of a training row


class Needles:
    """A dataset of such rows, with a loss for the words that are asked for alone.

    depths: of the needles, from 0 (start of the row) to 1 (just before the questions); empty: 1, 2,
    4 or MOST needles anywhere.
    """

    samples_per_epoch = 1_000_000

    def __init__(self, vocab_size: int, length: int, depths: Sequence[float] = ()) -> None:
        if vocab_size <= 2 * KEYS or length < 4 * max(MOST, len(depths)):
            raise ValueError(
                f"needles need more than {2 * KEYS} ids and rows of at least "
                f"{4 * max(MOST, len(depths))} tokens: vocab_size={vocab_size}, length={length}"
            )
        self.vocab_size, self.sequence_length, self.depths = vocab_size, length, tuple(depths)

    @property
    def num_tokens(self) -> int:
        return self.samples_per_epoch * self.sequence_length

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(length + 1 ids, for each of the first `length` whether the next one is asked for)."""
        rng, words = np.random.default_rng(number), self.vocab_size - KEYS
        count = len(self.depths) or int(2 ** rng.integers(MOST.bit_length()))
        row = rng.integers(0, words, self.sequence_length + 1)
        hay = len(row) - 2 * count
        places = 2 * rng.permutation(hay // 2)[:count]
        if self.depths:
            places = 2 * (np.array(self.depths) * (hay // 2 - 1)).astype(int)
        row[places] = row[hay::2] = words + rng.permutation(KEYS)[:count]
        row[hay + 1 :: 2] = row[places + 1]
        is_asked = np.zeros(self.sequence_length, np.float32)
        is_asked[hay::2] = 1
        return row, is_asked

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows, is_asked = zip(*map(self.row, indices), strict=True)
        ids, place_L = np.stack(rows).astype(np.int32), np.arange(self.sequence_length)
        return {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "positions": np.tile(place_L.astype(np.int32), (len(rows), 1)),
            "loss_mask": np.stack(is_asked),
        }


def needles_found(
    model: LanguageModel, length: int, depths: Sequence[float], rows: int = 4
) -> list[float]:
    """Share of needles, of `rows` rows, whose word is the model's first choice, for each depth."""
    data = Needles(model.config.model.vocab_size, length, depths)
    is_found = []
    for number in range(rows):
        row, is_asked = data.row(number)
        places = np.nonzero(is_asked)[0]
        chosen = np.asarray(model.logits(row[:-1])[places].argmax(axis=-1))
        is_found.append(chosen == row[places + 1])
    return np.mean(is_found, axis=0).tolist()
