"""Packing: every document once and whole, in the row that the policy names; positions, masks."""

import numpy as np
import pytest

from maxmeg.data.samples.packing import POLICIES, Packed, fill_rows

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
