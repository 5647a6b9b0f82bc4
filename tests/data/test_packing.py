"""Packing: every document once and whole, in the row that the policy names; positions, masks."""

import pickle
import time

import numpy as np
import pytest

from maxmeg.data.packing import POLICIES, Packed, PackedDataset, fill_rows, packed_rows

CAPACITY = 16
LENGTHS = {
    "one": [5],
    "full": [16, 16, 16],
    "halves": [8, 9, 8, 7, 8],
    "ones": [1] * 40,
    "mixed": np.random.default_rng(0).integers(1, 17, 200).tolist(),
}
DOCUMENTS_PER_SECOND = 10_000  # at the least, also on a busy machine


def simple(lengths, policy: str, window: int) -> list[list[int]]:
    """The same by trying every open row."""
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for i, n in enumerate(lengths):
        fits = [r for r in sorted(room) if room[r] >= n]
        if policy == "best_fit":
            fits.sort(key=lambda r: room[r])
        if not fits:
            if len(room) == (1 if policy == "greedy" else window or -1):
                del room[min(room)]
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
@pytest.mark.parametrize("window", [0, 1, 3])
def test_rows_are_those_of_the_policy(policy, window, name):
    lengths = LENGTHS[name]
    packed = Packed(lengths, CAPACITY, policy, window)
    assert [row.tolist() for row in (packed[i] for i in range(len(packed)))] == simple(
        lengths, policy, window
    )
    assert sorted(packed.documents) == list(range(len(lengths)))
    used = [sum(lengths[d] for d in packed[i]) for i in range(len(packed))]
    assert max(used) <= CAPACITY
    assert packed.utilisation == sum(lengths) / (len(used) * CAPACITY)


def test_better_policies_use_more():
    share = {p: Packed(LENGTHS["mixed"], CAPACITY, p).utilisation for p in POLICIES}
    assert share["greedy"] < share["first_fit"] <= share["best_fit"] < 1
    assert len(Packed(LENGTHS["halves"], CAPACITY, "best_fit")) == 3  # 8 + 8, 9 + 7, 8


def test_a_window_streams():
    seen = []

    def endless():
        for i in range(10**6):
            seen.append(i)
            yield 5 + i % 7

    rows = packed_rows(endless(), CAPACITY, "best_fit", window=4)
    for _ in range(50):
        documents = next(rows)[1]
        assert len(seen) - documents[0] < 200
    assert len(seen) < 200


def test_many_documents_take_little_time():
    lengths = np.random.default_rng(1).integers(1, 4097, 20_000)
    for policy in POLICIES:
        start = time.process_time()
        Packed(lengths, 4096, policy)
        assert len(lengths) / (time.process_time() - start) > DOCUMENTS_PER_SECOND


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([4, 17], 16, "greedy"), "document 1 takes 17 positions, not 1 to 16"),
        (([0], 16, "greedy"), "document 0 takes 0"),
        (([1], 16, "worst_fit"), "packing='worst_fit' must be one of greedy, first_fit"),
        (([1], 0, "greedy"), "capacity=0"),
        (([1], 16, "greedy", -1), "window=-1"),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(ValueError, match=error):
        list(packed_rows(*arguments))


def test_a_row_by_hand():
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


def test_rows_that_are_not():
    with pytest.raises(ValueError, match="no document to pack"):
        PackedDataset(Counted([]), CAPACITY, "none", 0, 10)
    with pytest.raises(ValueError, match="sample -1 is negative"):
        PackedDataset(Counted([3]), CAPACITY, "none", 0, 10).batch(np.array([-1]))
