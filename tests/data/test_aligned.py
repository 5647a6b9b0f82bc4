"""Pairs of texts: rows of source and target, pairs that are too long, corpora that do not match."""

import pickle

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, Objective
from maxmeg.data.build import build_dataset
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.resuming import record_order, warn_of_order
from maxmeg.data.samples.aligned import AlignedDataset
from maxmeg.data.tokenizers.load import load_tokenizer

SPEC = "bytes?pad=<pad>&bos=<s>"
TEXTS = [bytes([65 + n]) * (n + 1) for n in range(8)]  # A, BB, CCC, ...


@pytest.fixture
def names(make_corpus) -> list[str]:
    sources = [np.frombuffer(text, np.uint8).astype(np.int32) for text in TEXTS]
    targets = [tokens[::-1] + 32 for tokens in sources]
    return [make_corpus(part, name, 300) for part, name in ((sources, "a"), (targets, "b"))]


def opened(names: list[str], lengths: tuple[int, int], cuts: bool = False) -> AlignedDataset:
    corpora = [IndexedDataset(name) for name in names]
    return AlignedDataset(corpora, "1,0,0", 0, lengths, load_tokenizer(SPEC), cuts, seed=1)


def test_rows_hold_every_pair_once(names):
    data, tokenizer = opened(names, (12, 10)), load_tokenizer(SPEC)
    batch, seen = data.batch(np.arange(len(TEXTS))), set()
    for row in range(len(TEXTS)):
        source, target, targets = (
            batch[name][row][batch[mask][row] > 0].tolist()
            for name, mask in (
                ("encoder_tokens", "encoder_segment_ids"),
                ("tokens", "segment_ids"),
                ("targets", "loss_mask"),
            )
        )
        assert source.pop() == targets[-1] == tokenizer.eod and target.pop(0) == tokenizer.bos
        assert target == targets[:-1] == [token + 32 for token in source]
        seen.add(bytes(source))
    assert seen == set(TEXTS)
    again = pickle.loads(pickle.dumps(data)).batch(np.arange(len(TEXTS)))
    assert all((again[name] == batch[name]).all() for name in batch)
    assert (data.batch(np.arange(8, 16))["tokens"] != batch["tokens"]).any()  # the next epoch


def test_pairs_that_are_too_long_are_counted_and_left_out_or_cut(names):
    data = opened(names, (6, 5))
    assert (data.samples_per_epoch, data.num_long) == (4, 4)
    assert str(data) == "4 pairs, 4 too long"
    cut = opened(names, (6, 5), cuts=True).batch(np.arange(8))
    assert cut["encoder_segment_ids"].sum(1).max() == 6 and cut["loss_mask"].sum(1).max() == 5
    with pytest.raises(ValueError, match=r"all 8 pairs .* are too long for 1 tokens .*=truncate"):
        opened(names, (1, 5))


def test_settings_open_two_corpora_of_one_size(names, make_corpus, caplog):
    config = DataConfig(objective=Objective.seq2seq, sequence_length=12, split="6,2,0")
    tokenizer = load_tokenizer(SPEC)
    data = build_dataset(config, names, tokenizer, 0, seed=1)
    assert isinstance(data, AlignedDataset) and data.source_length == 12
    assert build_dataset(config, names, tokenizer, 1, 1).samples_per_epoch == 2
    assert build_dataset(config, names, tokenizer, 2, 1) is None
    saved = record_order(data, 3)
    caplog.clear()
    warn_of_order(saved, data, 3)
    assert not caplog.text
    warn_of_order(saved, build_dataset(config, names, tokenizer, 0, seed=2), 3)
    assert "changed: seed" in caplog.text
    with pytest.raises(ValueError, match="reads two corpora, SOURCE,TARGET, not 1"):
        build_dataset(config, names[:1], tokenizer, 0, seed=1)
    short = make_corpus([np.array([70])], "c", 300)
    with pytest.raises(ValueError, match=r"8 sequences and .* 1: make both by one .*--aligned"):
        build_dataset(config, [names[0], short], tokenizer, 0, seed=1)
