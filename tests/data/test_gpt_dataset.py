"""Batches against plain loops: contents, document rules, several corpora, wrong ids."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import maxmeg
from maxmeg.data.corpus.indexed import HEADER, MAGIC, VERSION, IndexedDataset, IndexedWriter
from maxmeg.data.samples.gpt import DocumentRules, GptDataset

ROOT = Path(maxmeg.__file__).parents[1]
MOST_MB = 12  # of memory, for a corpus of 20,000 MB
EOD = 99
PLAIN = DocumentRules()


def documents(count: int, seed: int = 0) -> list[np.ndarray]:
    source = np.random.default_rng(seed)
    return [np.append(source.integers(0, EOD, source.integers(0, 30)), EOD) for _ in range(count)]


def open_dataset(prefix, split_index=0, length=16, split="90,10", rules=PLAIN, seed=3):
    return GptDataset([IndexedDataset(prefix)], split, split_index, length, 100, seed, rules)


def test_batch_is_what_the_pieces_say(make_corpus):
    texts = documents(60)
    dataset = open_dataset(make_corpus(texts))
    indices = np.array([0, 5, 4000, 17])
    batch = dataset.batch(indices)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        "tokens": ((4, 16), np.int32),
        "targets": ((4, 16), np.int32),
        "loss_mask": ((4, 16), np.float32),
        "positions": ((4, 16), np.int32),
    }
    for row, n in enumerate(indices):
        parts = [texts[s][o : o + length] for s, o, length in dataset.samples[int(n)]]
        expected = np.concatenate(parts)
        assert batch["tokens"][row].tolist() == expected[:-1].tolist()
        assert batch["targets"][row].tolist() == expected[1:].tolist()
    assert (batch["positions"] == np.arange(16)).all() and (batch["loss_mask"] == 1).all()


def test_corpora_are_each_split_and_joined_and_later_splits_keep_their_order(make_corpus):
    first = make_corpus([np.full(9, i) for i in range(10)], "first")
    second = make_corpus([np.full(9, 50 + i) for i in range(20)], "second", vocab_size=None)
    corpora = [IndexedDataset(first), IndexedDataset(second)]
    assert [c.dtype.itemsize for c in corpora] == [2, 4]
    parts = [GptDataset(corpora, "80,10,10", i, 4, 100, 0) for i in range(3)]
    assert parts[0].num_tokens == 9 * (8 + 16)
    train, validation, test = (
        part.batch(np.arange(part.samples_per_epoch))["tokens"].ravel() for part in parts
    )
    assert set(train.tolist()) == {*range(8), *range(50, 66)}
    assert set(validation.tolist()) == {8, 66, 67} and set(test.tolist()) == {9, 68, 69}
    assert (np.diff(validation) >= 0).all() and not (np.diff(train) >= 0).all()


@pytest.mark.parametrize(
    ("segments", "positions", "mask"),
    [(False, False, False), (True, True, False), (True, False, True), (False, True, True)],
)
def test_document_masks_follow_the_settings(make_corpus, segments, positions, mask):
    rules = DocumentRules(EOD, positions, segments, mask)
    dataset = open_dataset(make_corpus(documents(60)), rules=rules)
    batch = dataset.batch(np.arange(40))
    assert ("segment_ids" in batch) == segments
    for row, tokens in enumerate(batch["tokens"]):
        segment, position = 1, 0
        for i, token in enumerate(tokens):
            assert batch["positions"][row, i] == (position if positions else i)
            assert batch["loss_mask"][row, i] == (0 if mask and token == EOD else 1)
            if segments:
                assert batch["segment_ids"][row, i] == segment
            position += 1
            if token == EOD:  # belongs to the document before
                segment, position = segment + 1, 0
    assert all(values.dtype in (np.int32, np.float32) for values in batch.values())


def test_document_rules_need_ends_of_documents(make_corpus):
    prefix = make_corpus([np.arange(50)] * 4)
    with pytest.raises(ValueError, match="--append_eod"):
        open_dataset(prefix, rules=DocumentRules(EOD, reset_attention_mask=True))
    with pytest.raises(ValueError, match="end-of-document id"):
        open_dataset(prefix, rules=DocumentRules(None, eod_mask_loss=True))


@pytest.mark.parametrize("bad", [100, 60000])
def test_ids_beyond_the_vocabulary_are_named(make_corpus, bad):
    texts = [np.arange(20) for _ in range(10)]
    texts[6][13] = bad
    dataset = open_dataset(make_corpus(texts, vocab_size=65000), split="1")
    match = rf"corpus\.bin, sequence 6: id {bad} is not in the vocabulary \[0, 100\)"
    with pytest.raises(ValueError, match=match):
        dataset.batch(np.arange(dataset.samples_per_epoch))


def test_wide_and_signed_ids_are_checked_before_they_are_narrowed(tmp_path):
    for dtype, bad in ((np.int64, 2**32 + 1), (np.int32, -5)):
        with IndexedWriter(tmp_path / "x", dtype=dtype) as writer:
            writer.add_document(np.array([1] * 20 + [bad] * 3))
        with pytest.raises(ValueError, match=f"id {bad} "):
            open_dataset(tmp_path / "x", split="1", length=22).batch(np.array([0]))
    with IndexedWriter(tmp_path / "x", dtype=np.float32) as writer:
        writer.add_document(np.ones(30))
    with pytest.raises(ValueError, match="holds float32, not token ids"):
        open_dataset(tmp_path / "x", split="1")


def test_a_split_that_is_too_small_is_explained(make_corpus):
    prefix = make_corpus([np.arange(8)] * 10)
    with pytest.raises(ValueError, match=r"validation split '90,10' of .*corpus: 1 sequences"):
        open_dataset(prefix, 1)


READING = """
import sys, numpy as np
from maxmeg.config.data import DataConfig, DataOrder
from maxmeg.data.build import build_dataset, open_corpus

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

prefix, order, cache = sys.argv[1:]
config = DataConfig(paths=(prefix,), split="1", sequence_length=2048, tokenizer="null:1000")
config.order = DataOrder(order)
before = anonymous()
tokenizer, prefixes = open_corpus(config, cache)
data = build_dataset(config, prefixes, tokenizer, 0, 1, cache_dir=cache)
source = np.random.default_rng(0)
for _ in range(2):
    batch = data.batch(source.integers(0, data.samples_per_epoch, 32))
assert not batch["tokens"].any()
print(anonymous() - before)
"""


@pytest.mark.parametrize("order", ["megatron", "native"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, order):
    """Of 20 GB in 100,000 documents; without pages of files, which the system takes back."""
    prefix, size = str(tmp_path / "x"), 100_000
    lengths = np.full(100_000, size, "<i4")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.tobytes())
        file.write((np.arange(len(lengths), dtype="<i8") * 2 * size).tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * size * len(lengths))  # zeros that take no disk
    command = [sys.executable, "-c", READING, prefix, order, str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert float(done.stdout) < MOST_MB
