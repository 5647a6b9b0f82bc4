"""Splits, permutations and the arithmetic that finds a sample, against plain loops."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.data.samples.sampling import GptSamples, Permutation, parse_split, shuffled, split_range


def test_split_is_megatrons():
    assert parse_split("969, 30, 1") == [0.969, 0.03, 0.001]
    assert parse_split("99,1") == [0.99, 0.01, 0.0]
    assert parse_split("1") == [1.0, 0.0, 0.0]
    assert [split_range("969,30,1", i, 1000) for i in range(3)] == [
        (0, 969), (969, 999), (999, 1000)
    ]  # fmt: skip
    assert [split_range("99,1", i, 50) for i in range(3)] == [(0, 50), (50, 50), (50, 50)]
    assert split_range("1,1", 0, 5) == (0, 2)  # Python rounds halves to even


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a", "-1,2", "1..2,3"])
def test_wrong_splits_are_explained(split):
    with pytest.raises(ValueError, match="like '969,30,1'"):
        parse_split(split)


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_permutation_is_a_bijection(size, seed, epoch):
    values = Permutation(size, seed, epoch)(np.arange(size))
    assert values.dtype == np.int64
    assert np.array_equal(np.sort(values), np.arange(size))


def test_permutation_is_fixed_for_ever():
    """A change here changes the data order of every run that is resumed."""
    assert Permutation(10, 1234, 0)(np.arange(10)).tolist() == [6, 8, 2, 9, 7, 0, 1, 3, 4, 5]
    assert shuffled(10, 1234, 0).tolist() == [3, 6, 7, 2, 1, 5, 9, 8, 0, 4]
    assert len(np.unique(Permutation(10**12, 3, 0)(np.arange(10**5)))) == 10**5


def flat_tokens(samples: GptSamples, n: int) -> list[tuple[int, int]]:
    return [(s, o + i) for s, o, length in samples[n] for i in range(length)]


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda x: sum(x) > 8),
    st.integers(1, 7),
    st.integers(0, 2**32),
)
def test_an_epoch_reads_each_token_as_input_at_most_once(lengths, sequence_length, seed):
    samples = GptSamples(np.array(lengths, np.int32), sequence_length, seed)
    count = samples.samples_per_epoch
    assert count == (sum(lengths) - 1) // sequence_length
    for epoch in range(2):
        inputs, pairs = [], set()
        for n in range(epoch * count, (epoch + 1) * count):
            tokens = flat_tokens(samples, n)
            assert len(tokens) == sequence_length + 1
            inputs += tokens[:-1]
            pairs |= set(itertools.pairwise(tokens))
        assert len(inputs) == len(set(inputs)) == count * sequence_length
        assert len(pairs) == count * sequence_length
        assert set(inputs) <= {(s, i) for s, size in enumerate(lengths) for i in range(size)}


def test_any_batch_equals_single_samples():
    lengths = np.random.default_rng(0).integers(0, 40, 50)
    samples = GptSamples(lengths, 16, seed=5)
    asked = np.array([700, 3, 3, 0, 61, 10**9, 250, 64])  # several epochs, in no order
    pieces = samples.pieces(asked)
    for row, n in enumerate(asked):
        mine = pieces.rows == row
        columns = (pieces.sequences[mine], pieces.offsets[mine], pieces.lengths[mine])
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == samples[int(n)]
    assert np.array_equal(pieces.rows, np.sort(pieces.rows))
    assert len(samples.pieces(np.array([], int)).rows) == 0


def test_epochs_and_seeds_differ():
    lengths = np.full(20, 50)
    one, two = GptSamples(lengths, 10, 1), GptSamples(lengths, 10, 2)
    count = one.samples_per_epoch
    assert [one[i] for i in range(10)] == [GptSamples(lengths, 10, 1)[i] for i in range(10)]
    assert [one[i] for i in range(10)] != [two[i] for i in range(10)]
    assert [one[i] for i in range(10)] != [one[count + i] for i in range(10)]


def test_too_small_and_negative_are_explained():
    with pytest.raises(ValueError, match=r"2 sequences with 8 tokens .* one sample of 8 \+ 1"):
        GptSamples(np.array([4, 4]), 8)
    assert GptSamples(np.array([4, 5]), 8).samples_per_epoch == 1
    with pytest.raises(ValueError, match="negative"):
        GptSamples(np.array([40]), 8)[-1]
