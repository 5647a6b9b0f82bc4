"""Rows with needles: every question has one answer in the row, and finding it is counted."""

import types
import typing

import numpy as np
import pytest

from maxmeg.evals.needles import KEYS, Needles, needles_found
from maxmeg.inference.language_model import LanguageModel

VOCABULARY, LENGTH = 100, 64


def answers(row: np.ndarray) -> dict[int, int]:
    """The word after the first occurrence of every key."""
    keys = [int(key) for key in dict.fromkeys(row) if key >= VOCABULARY - KEYS]
    return {key: int(row[list(row).index(key) + 1]) for key in keys}


def test_questions_repeat_the_keys_of_the_needles():
    batch = Needles(VOCABULARY, LENGTH).batch(np.arange(50))
    counts = set()
    arrays = (batch[name] for name in ("tokens", "targets", "loss_mask"))
    for tokens, targets, mask in zip(*arrays, strict=True):
        places = np.nonzero(mask)[0]
        counts.add(len(places))
        assert places.tolist() == list(range(LENGTH - 2 * len(places) + 1, LENGTH, 2))
        found = answers(tokens)
        assert [found[key] for key in tokens[places]] == targets[places].tolist()
        assert (targets[places] < VOCABULARY - KEYS).all()
    assert counts == {1, 2, 4, 8}
    again = Needles(VOCABULARY, LENGTH).batch(np.array([7]))
    np.testing.assert_array_equal(again["tokens"][0], batch["tokens"][7])


def test_depths_are_those_of_the_needles():
    row, is_asked = Needles(VOCABULARY, LENGTH, (0.0, 0.5, 1.0)).row(3)
    hay = LENGTH + 1 - 6
    keys = row[np.nonzero(is_asked)[0]]
    places = [int(np.nonzero(row == key)[0][0]) for key in keys]
    assert places[0] == 0 and places[2] in (hay - 2, hay - 3) and abs(places[1] - hay / 2) <= 2


def reader(reach: int) -> LanguageModel:
    """A model that finds the word after the same key, among the last `reach` ids."""

    def logits(ids: np.ndarray) -> np.ndarray:
        scores_LV = np.zeros((len(ids), VOCABULARY))
        for place, key in enumerate(ids):
            earlier = [i for i in range(max(place - reach, 0), place) if ids[i] == key]
            scores_LV[place, ids[earlier[0] + 1] if earlier else 0] = 1
        return scores_LV

    config = types.SimpleNamespace(model=types.SimpleNamespace(vocab_size=VOCABULARY))
    return typing.cast(LanguageModel, types.SimpleNamespace(config=config, logits=logits))


def test_needles_within_reach_are_found():
    assert needles_found(reader(LENGTH), LENGTH, (0, 0.5, 1)) == [1, 1, 1]
    near = needles_found(reader(LENGTH // 4), LENGTH, (0, 0.5, 1), rows=8)
    assert near[2] == 1 and max(near[:2]) < 0.5


@pytest.mark.parametrize(("vocabulary", "length"), [(64, 100), (100, 31)])
def test_a_row_must_hold_its_needles(vocabulary, length):
    with pytest.raises(ValueError, match=f"vocab_size={vocabulary}, length={length}"):
        Needles(vocabulary, length)
