"""Packing: every document once and whole, in the row that the policy names; positions, masks."""

import pickle

import numpy as np
import pytest

from maxmeg.data.samples.packing import POLICIES, Packed, PackedDataset, fill_rows

CAPACITY = 16
LENGTHS = {
    "one": [5],
    "full": [16, 16, 16],
    "halves": [8, 9, 8, 7, 8],
    "ones": [1] * 40,
    "mixed": np.random.default_rng(0).integers(1, 17, 200).tolist(),
}


def simple(lengths, policy: str) -> list[list[int]]:
    """The same by trying every open row."""
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for i, n in enumerate(lengths):
        fits = [r for r in sorted(room) if room[r] >= n]
        if policy == "best_fit":
            fits.sort(key=lambda r: room[r])
        if not fits:
            if policy == "greedy":
                room.clear()
            fits = [len(rows)]
            rows.append([])
            room[fits[0]] = CAPACITY
        rows[fits[0]].append(i)
        room[fits[0]] -= n
        if not room[fits[0]]:
            del room[fits[0]]
    return rows


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_the_policy(policy, name):
    lengths = LENGTHS[name]
    packed = Packed(lengths, CAPACITY, policy)
    assert [packed[i].tolist() for i in range(len(packed))] == simple(lengths, policy)
    assert sorted(packed.documents) == list(range(len(lengths)))
    used = [sum(lengths[d] for d in packed[i]) for i in range(len(packed))]
    assert max(used) <= CAPACITY
    assert packed.utilisation == sum(lengths) / (len(used) * CAPACITY)


def test_better_policies_use_more():
    share = {p: Packed(LENGTHS["mixed"], CAPACITY, p).utilisation for p in POLICIES}
    assert share["greedy"] < share["first_fit"] <= share["best_fit"] < 1
    assert len(Packed(LENGTHS["halves"], CAPACITY, "best_fit")) == 3  # 8 + 8, 9 + 7, 8


def test_a_row_equals_one_packed_by_hand():
    documents = [(np.array([7, 8, 9]), None), (np.array([1, 2, 3, 4]), np.array([1, 0, 1, 1]))]
    batch = fill_rows([documents, []], 7, pad=0)
    expected = {
        "tokens": [7, 8, 1, 2, 3, 0, 0],
        "targets": [8, 9, 2, 3, 4, 0, 0],
        "positions": [0, 1, 0, 1, 2, 0, 0],
        "loss_mask": [1, 1, 0, 1, 1, 0, 0],
        "segment_ids": [1, 1, 2, 2, 2, 0, 0],
    }
    assert {name: array[0].tolist() for name, array in batch.items()} == expected
    assert not any(array[1].any() for array in batch.values())
    kinds = {name: array.dtype for name, array in batch.items()}
    assert kinds.pop("loss_mask") == np.float32 and set(kinds.values()) == {np.dtype(np.int32)}


class Counted:
    """Document i is [100 i, 100 i + 1, ...]."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def read(self, i):
        return 100 * i + np.arange(self.lengths[i]), None


@pytest.mark.parametrize("policy", ["none", *POLICIES])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_holds_every_document_once(policy, shuffle):
    source = Counted([5, 16, 17, 2, 9, 3, 8])
    data = PackedDataset(source, CAPACITY, policy, 0, 10**4, seed=3, shuffle=shuffle)
    epochs = []
    for epoch in range(2):
        batch = data.batch(np.arange(data.samples_per_epoch) + epoch * data.samples_per_epoch)
        pairs = np.stack([batch["tokens"], batch["targets"]], -1)[batch["loss_mask"] > 0]
        expected = [(100 * i + k, 100 * i + k + 1) for i, n in enumerate(source.lengths)
                    for k in range(n - 1)]  # fmt: skip
        assert sorted(map(tuple, pairs.tolist())) == expected
        assert data.num_tokens == len(expected)
        assert data.utilisation == len(expected) / batch["tokens"].size
        epochs.append(batch["tokens"].tolist())
    assert (epochs[0] == epochs[1]) != shuffle
    again = pickle.loads(pickle.dumps(data)).batch(np.arange(2))
    assert again["tokens"].tolist() == epochs[0][:2]


def test_negative_samples_are_refused():
    with pytest.raises(ValueError, match="sample -1 is negative"):
        PackedDataset(Counted([3]), CAPACITY, "none", 0, 10).batch(np.array([-1]))
