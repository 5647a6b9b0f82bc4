"""Megatron-LM's order: golden arrays of its own code, and what every order must keep."""

import copy
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.samples import megatron_order
from maxmeg.data.samples.gpt import GptDataset
from maxmeg.data.samples.megatron_order import MegatronOrder, MegatronSamples, plan_epochs

LENGTHS = np.array([5, 0, 3, 9, 1, 4], np.int32)
# megatron-core 0.16.1, seed 1234; (samples asked for, sequence length): document index, places
# and offsets of the sample index, shuffle index
GOLDEN = {
    (None, 4): (
        [2, 1, 5, 0, 4, 3], [0, 2, 3, 4, 5, 5], [0, 1, 1, 0, 3, 7], [2, 0, 4, 3, 1],
    ),
    (8, 4): (  # the last epoch by itself
        [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1], [0, 2, 3, 4, 5, 5, 6, 8, 8, 8, 10],
        [0, 1, 1, 0, 3, 7, 2, 0, 4, 8, 0], [1, 3, 2, 0, 4, 6, 9, 8, 5, 7],
    ),
    (7, 10): (
        [1, 4, 2, 3, 1, 0, 5, 4, 0, 2, 1, 3, 4, 4, 2, 2, 5, 3, 5, 5, 0, 0, 1, 3],
        [0, 3, 6, 9, 12, 16, 17, 20, 23], [0, 6, 2, 2, 0, 2, 8, 1, 1], [6, 4, 1, 5, 3, 0, 2, 7],
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked, length", GOLDEN)
def test_arrays_are_megatrons(asked, length):
    samples = MegatronSamples(LENGTHS, length, 1234, MegatronOrder(asked))
    documents, places, offsets, shuffle = GOLDEN[asked, length]
    assert samples.documents.tolist() == documents and samples.shuffle.tolist() == shuffle
    assert (samples.documents.dtype, samples.shuffle.dtype) == (np.int32, np.uint32)
    actual = samples.boundaries(np.arange(samples.num_samples + 1))
    assert [part.tolist() for part in actual] == [places, offsets]


def test_rows_are_megatrons(make_corpus):
    """The first three of (8, 4); a token is its place in the corpus."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    prefix = make_corpus(np.arange(a, a + n) for a, n in zip(starts, LENGTHS, strict=True))
    order = MegatronOrder(8)
    dataset = GptDataset([IndexedDataset(prefix)], "1", 0, 4, 100, 1234, order=order)
    batch = dataset.batch(np.arange(3))
    assert batch["tokens"].tolist() == [[19, 20, 21, 0], [17, 8, 9, 10], [1, 2, 3, 4]]
    again = dataset.batch(np.arange(3) + dataset.num_samples)  # the first come again
    assert np.array_equal(again["targets"], batch["targets"])
    twin = copy.copy(dataset).batch(np.arange(3))  # as a worker process has it
    assert np.array_equal(twin["tokens"], batch["tokens"])


def test_validation_is_in_megatrons_order_too(make_corpus):
    prefix = make_corpus([np.full(5, i) for i in range(90)])
    order = MegatronOrder(9)
    one, two = (
        GptDataset([IndexedDataset(prefix)], split, 1, 4, 100, 3, order=order).batch(np.arange(9))
        for split in ("80,10,0", "0,10,0")
    )
    assert not (np.diff(one["tokens"][:, 0]) >= 0).all()
    assert set(one["tokens"].ravel().tolist()) <= set(range(80, 90))
    assert not np.array_equal(one["tokens"], two["tokens"])


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    st.integers(1, 25),
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
)
def test_samples_cover_what_their_epochs_hold(lengths, length, seed, asked):
    samples = MegatronSamples(np.array(lengths, np.int32), length, seed, MegatronOrder(asked))
    plan, tokens = samples.plan, sum(lengths)
    assert samples.num_samples >= asked and (plan.num_epochs - 1) * tokens < asked * length + 1
    assert sorted(samples.shuffle.tolist()) == list(range(samples.num_samples))
    first = samples.shuffle[: plan.first_samples]
    assert sorted(first.tolist()) == list(range(plan.first_samples))
    stream = [(int(d), i) for d in samples.documents for i in range(lengths[d])]
    assert sorted(samples.documents) == sorted(list(range(len(lengths))) * plan.num_epochs)
    for n in range(samples.num_samples):
        actual = [(s, o + i) for s, o, size in samples[n] for i in range(size)]
        start = int(samples.shuffle[n]) * length
        assert actual == stream[start : start + length + 1] and len(actual) == length + 1


def test_the_last_epoch_is_apart_below_four_fifths():
    """100 samples an epoch: 80 of the last are shuffled with the others, 79 are not."""
    for asked, first in ((100, 100), (179, 100), (180, 200), (200, 200), (279, 200), (280, 300)):
        plan = plan_epochs(1001, 10, asked)
        total = (plan.num_epochs * 1001 - 1) // 10
        assert (plan.first_samples, plan.num_samples) == (first, total)


def test_permutations_are_made_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_order, "_SMALL", 0)
    made = []
    make = MegatronSamples._make
    monkeypatch.setattr(MegatronSamples, "_make", lambda self: made.append(1) or make(self))

    def opened(seed=1, asked=8, lengths=LENGTHS):
        return MegatronSamples(lengths, 4, seed, MegatronOrder(asked, str(tmp_path)))

    one, two = opened(), opened(asked=7)  # seven come of the same epochs
    assert len(made) == 1 and isinstance(two.shuffle, np.memmap)
    assert isinstance(two.ends, np.memmap) and two.plan.has_separate_epoch
    plain = MegatronSamples(LENGTHS, 4, 1, MegatronOrder(8))
    for n in range(plain.num_samples):
        assert one[n] == two[n] == plain[n]
    assert len(made) == 2 and len(os.listdir(tmp_path)) == 2  # the order and the lock
    for other in ({"seed": 2}, {"asked": 16}, {"lengths": LENGTHS[::-1]}):
        before = len(made)
        opened(**other)
        assert len(made) == before + 1


@pytest.mark.parametrize("keep", [0, 6, 60, -1, 128])
@pytest.mark.parametrize("name", ["documents", "ends", "shuffle"])
def test_a_damaged_order_is_refused(tmp_path, monkeypatch, name, keep):
    """Cut at any place; at 128 the file is whole but for another order."""
    monkeypatch.setattr(megatron_order, "_SMALL", 0)
    order = MegatronOrder(8, str(tmp_path))
    MegatronSamples(LENGTHS, 4, 1, order)
    (file,) = tmp_path.glob(f"megatron_order-*/{name}.npy")
    if keep == 128:
        np.save(file, np.load(file)[1:])
    else:
        file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is damaged.*delete this folder"):
        MegatronSamples(LENGTHS, 4, 1, order)


def test_invalid_requests_are_explained():
    with pytest.raises(ValueError, match=r"6 sequences with 22 tokens .* one sample of 22 \+ 1"):
        MegatronSamples(LENGTHS, 22)
    assert MegatronSamples(LENGTHS, 22, 0, MegatronOrder(2)).plan.num_epochs == 3
    with pytest.raises(ValueError, match="2 sequences with 0 tokens"):
        MegatronSamples(np.zeros(2, np.int32), 4, 0, MegatronOrder(5))
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\^32\)"):
        MegatronSamples(LENGTHS, 4, -1)
    with pytest.raises(ValueError, match="num_samples=0"):
        MegatronSamples(LENGTHS, 4, 0, MegatronOrder(0))
    with pytest.raises(ValueError, match="negative"):
        MegatronSamples(LENGTHS, 4)[-1]
