"""Which sentences make a sample: golden rows of Megatron-LM's, and what every mapping keeps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.data.masked.sentences import Mersenne64, SentenceOrder, SentenceSamples, shuffled_rows

LENGTHS = np.array([3, 4, 2, 5, 6, 1, 0, 2, 9, 9, 9, 2, 4, 600, 2, 2], np.int32)
ENDS = np.array([0, 4, 5, 5, 8, 13, 16])
# megatron-core 0.16.1: (longest, fewest, short_probability, seed, samples asked for)
GOLDEN = {
    (10, 1, 0.5, 7, 6): [
        [5, 8, 10], [0, 4, 10], [4, 5, 10], [10, 11, 3], [8, 9, 6], [5, 8, 10], [11, 13, 10],
        [0, 4, 10], [9, 10, 2], [10, 13, 10], [8, 10, 10], [4, 5, 10],
    ],
    (10, 2, 0.0, 1, 9): [
        [8, 10, 10], [5, 8, 10], [10, 13, 10], [8, 10, 10], [10, 13, 10], [5, 8, 10], [0, 4, 10],
        [8, 10, 10], [5, 8, 10], [10, 13, 10], [0, 4, 10], [0, 4, 10],
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_rows_equal_the_golden_ones(case):
    longest, fewest, probability, seed, requested = case
    samples = SentenceSamples(LENGTHS, ENDS, longest, fewest, probability)
    rows = samples.rows(SentenceOrder(seed, requested))
    assert rows.dtype == np.uint32 and rows.tolist() == GOLDEN[case]


def test_the_generator_is_the_standard_librarys():
    assert Mersenne64(5489).draw(10_000)[-1] == 9981545732273789042  # what C++ says of it
    in_parts = Mersenne64(9)
    drawn = [in_parts.draw(count) for count in (0, 1, 311, 312, 5, 700)]
    assert (np.concatenate(drawn) == Mersenne64(9).draw(1329)).all()
    assert sorted(shuffled_rows(1000, 3)) == list(range(1000))


documents = st.lists(st.lists(st.integers(0, 40), max_size=9), min_size=1, max_size=8)


@settings(max_examples=60)
@given(documents, st.integers(2, 60), st.integers(1, 2), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_an_epoch_holds_every_sentence_once(texts, longest, fewest, probability):
    lengths = np.array([n for text in texts for n in text], np.int32)
    bounds = np.cumsum([0] + [len(text) for text in texts])
    samples = SentenceSamples(lengths, bounds, longest, fewest, probability)
    usable = [(a, b) for a, b in itertools.pairwise(bounds) if b - a >= fewest]
    if not usable:
        with pytest.raises(ValueError, match="--split_sentences"):
            samples.rows(SentenceOrder())
        return
    rows = np.sort(samples.rows(SentenceOrder(5)).astype(int), axis=0)
    read = [i for first, end, _ in rows for i in range(first, end)]
    assert read == [i for first, end in usable for i in range(first, end)]
    for first, end, target in samples.rows(SentenceOrder(5)).tolist():
        assert end - first >= fewest and 2 <= target <= longest
        last = min(b for _, b in usable if b >= end)
        assert end == last or lengths[first:end].sum() >= target


def test_blocks_do_not_change_the_samples(monkeypatch, tmp_path):
    random = np.random.default_rng(0)
    bounds = np.cumsum([0, *random.integers(0, 9, 300)])
    lengths = random.integers(0, 30, bounds[-1]).astype(np.int32)
    samples = SentenceSamples(lengths, bounds, 50, 2, 0.3)
    whole = samples.rows(SentenceOrder(3, 900))
    monkeypatch.setattr("maxmeg.data.masked.sentences._BLOCK", 7)
    assert (samples.rows(SentenceOrder(3, 900)) == whole).all()
    monkeypatch.setattr("maxmeg.data.masked.sentences._SMALL", 0)
    for _ in range(2):
        kept = samples.rows(SentenceOrder(3, 900, str(tmp_path)))
        assert isinstance(kept, np.memmap) and (kept == whole).all()


@pytest.mark.parametrize(
    "longest, probability, order, words",
    [
        (1, 0.1, SentenceOrder(), "raise sequence_length"),
        (9, 0.1, SentenceOrder(-1), "seed=-1"),
        (9, 0.1, SentenceOrder(1, 0), "num_samples=0"),
    ],
)
def test_invalid_input_is_refused(longest, probability, order, words):
    with pytest.raises(ValueError, match=words):
        SentenceSamples(LENGTHS, ENDS, longest, 1, probability).rows(order)
