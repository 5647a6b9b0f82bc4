"""Packed .bin/.idx files: every token but a document's first is a target once."""

import json
import pickle

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, Packing
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter
from maxmeg.data.samples.packing import PackedDataset
from maxmeg.data.samples.rows import StoredDocuments

LENGTH = 8
SIZES = [3, 0, 1, 8, 9, 10, 30, 2, 17, 5, 4, 4]


def documents(first: int) -> list[np.ndarray]:
    return [first + 50 * i + np.arange(n) for i, n in enumerate(SIZES)]


def targets(parts: list[np.ndarray]) -> list[int]:
    return sorted(np.concatenate([part[1:] for part in parts]).tolist())


def built(data: DataConfig, split: int):
    tokenizer, prefixes = open_corpus(data, "unused")
    return build_dataset(data, prefixes, tokenizer, split, seed=1)


@pytest.mark.parametrize("policy", [p for p in Packing if p is not Packing.none])
def test_every_target_once(policy, make_corpus):
    paths = (make_corpus(documents(0), "a"), make_corpus(documents(600), "b", 70_000))
    data = DataConfig(paths=paths, packing=policy, split="9,3,0", tokenizer="null:2000")
    data.sequence_length = LENGTH
    for split, part in enumerate((slice(0, 9), slice(9, None))):
        rows = built(data, split)
        assert isinstance(rows, PackedDataset)
        numbers = np.arange(rows.samples_per_epoch)
        batch, later = (rows.batch(numbers + n) for n in (0, len(numbers)))
        assert (later["tokens"] == batch["tokens"]).all() == bool(split)  # training is shuffled
        seen = batch["loss_mask"] > 0
        expected = targets(documents(0)[part] + documents(600)[part])
        assert sorted(batch["targets"][seen].tolist()) == expected
        assert rows.num_tokens == len(expected) == rows.utilisation * seen.size
        assert (batch["targets"][seen] == batch["tokens"][seen] + 1).all()
        again = pickle.loads(pickle.dumps(rows)).batch(np.arange(2))
        assert (again["tokens"] == batch["tokens"][:2]).all()
        with pytest.raises(ValueError, match="sample -1 is negative"):
            rows.batch(np.array([-1]))
    assert built(data, 2) is None
    orders = [(rows := built(data, 0)).description, built(data, 1).description]
    assert pickle.loads(pickle.dumps(rows)).description == orders[0]
    data.split = "8,4,0"
    orders.append(built(data, 0).description)
    assert len({json.dumps(order) for order in orders}) == len(orders)


def test_a_document_of_several_sequences(tmp_path):
    prefix = str(tmp_path / "c")
    with IndexedWriter(prefix, 100) as writer:
        writer.add_document(np.arange(7), [3, 4])
        writer.add_document(np.arange(20, 22), [1, 1])
    actual = StoredDocuments([IndexedDataset(prefix)], "1,0,0", 0, 4)
    assert [actual.read(i)[0].tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [4, 5, 6], [20, 21]]
    assert str(actual) == "3 pieces, 0 too short"


def test_ids_and_empty_splits(make_corpus):
    data = DataConfig(paths=(make_corpus(documents(0)),), packing=Packing.greedy)
    data.sequence_length, data.split, data.tokenizer = LENGTH, "1,0,0", "null:100"
    rows = built(data, 0)
    assert rows is not None
    with pytest.raises(ValueError, match=r"id \d+ is not in the vocabulary \[0, 100\)"):
        rows.batch(np.arange(rows.samples_per_epoch))
    data.paths = (make_corpus([[1], [2]], "short"),)
    with pytest.raises(ValueError, match=r"no train document .* is left \(0 pieces, 2 too short"):
        built(data, 0)
    with IndexedWriter(data.paths[0] + "f", dtype="f4") as writer:
        writer.add_document(np.array([1.5, 2.5]))
    with pytest.raises(ValueError, match="holds float32, not token ids"):
        StoredDocuments([IndexedDataset(data.paths[0] + "f")], "1,0,0", 0, LENGTH)
