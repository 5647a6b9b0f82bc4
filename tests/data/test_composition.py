"""What a run reads of its corpora, against numbers counted by hand."""

import re
import types
import typing

import numpy as np
import pytest

from maxmeg.config.data import Packing
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config
from maxmeg.data.build import open_corpus, split_weights
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.inspect.composition import (
    balance_text,
    composition_text,
    print_data,
    split_warnings,
    uses_of,
    vocabulary_warnings,
)
from maxmeg.data.samples.dataset import Dataset
from maxmeg.optim.schedules import Schedules

LENGTH = 9
DOCUMENTS = 100


@pytest.fixture
def config(make_corpus, tmp_path) -> Config:
    config = Config()
    config.run_dir = str(tmp_path / "run")
    config.data.tokenizer = "null:1000"
    config.data.paths = (make_corpus([[i] * LENGTH for i in range(DOCUMENTS)], "a"),)
    write_vocabulary(config.data.paths[0], "null:1000")
    config.data.split = "80,20,0"
    config.data.sequence_length = 8
    config.train.global_batch_size = 4
    config.train.num_steps = 45
    config.train.eval_every, config.train.eval_steps = 10, 3
    return config


@pytest.mark.parametrize("order", ["megatron", "native"])
def test_uses_of_one_corpus_are_counted(config, order):
    config.data.order = type(config.data.order)[order]
    train, validation = uses_of(config)
    assert (train.total.name, validation.total.name) == ("train", "validation")
    assert (train.total.documents, train.total.tokens) == (80, 80 * LENGTH)
    assert (train.total.samples, train.total.epochs) == (180, 2.0)  # 180 x 8 = 2 x 720
    assert (validation.total.documents, validation.total.samples) == (20, 12)
    assert train.corpora[0].tokens == train.total.tokens and train.corpora[0].epochs == 2.0
    lines = composition_text([train, validation]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["train", "80", "720", "180", "2.000"],
        ["validation,", "each", "time", "20", "180", "12", f"{12 * 8 / 180:.3f}"],
    ]


def test_uses_of_a_weighted_blend_are_counted(config, make_corpus):
    (a,), b = config.data.paths, make_corpus([[1] * LENGTH] * 50, "b")
    config.data.paths, config.data.split = ("0.25", a, "0.75", b), "1,0,0"
    (train,) = uses_of(config)
    assert [use.samples for use in train.corpora] == [45, 135]
    assert [use.epochs for use in train.corpora] == [45 * 8 / 900, 135 * 8 / 450]
    assert (train.total.documents, train.total.tokens) == (150, 150 * LENGTH)
    assert len(composition_text([train]).splitlines()) == 4


def test_uses_of_packed_documents_are_counted(config):
    config.data.packing, config.data.sequence_length = Packing.best_fit, 20
    train, validation = uses_of(config)
    assert (train.corpora, train.total.documents, train.total.samples) == ((), None, 180)
    assert train.total.epochs == 180 / 40  # two of the 80 documents in each row
    assert validation.total.epochs == 12 / 10
    assert " - " in composition_text([train])


def test_the_balance_of_attention_over_context_is_reported():
    """Rows of one long document and many short ones."""
    segments = np.tile(np.r_[np.zeros(32), np.arange(1, 33)].astype(np.int32), (6, 1))
    arrays = {"tokens": segments, "segment_ids": segments}
    data = types.SimpleNamespace(
        samples_per_epoch=6, batch=lambda n: {name: x[n] for name, x in arrays.items()}
    )
    config = Config(parallel=ParallelConfig(context=4, context_chunks=8))
    after, before = re.findall(r"\d\.\d{3}", balance_text(typing.cast(Dataset, data), config))
    # Areas of the eight chunks: 36, 100, 164, 228, 8, 8, 8, 8.
    assert float(before) == round(236 / 140, 3) and float(after) < 1.02


def test_misleading_splits_are_reported(config, make_corpus, capsys, caplog):
    """One long document at the end; few documents; shares of the tokens that are as they should."""
    weights = split_weights(config.data, list(config.data.paths))
    assert weights == {"train": 0.8, "validation": 0.2, "test": 0}
    assert not split_warnings(uses_of(config), weights)
    config.data.split = "90,9,1"
    validation, test = split_warnings(uses_of(config), split_weights(config.data, ["a"]))
    assert (
        "the validation split has 9 documents and 9 % of the tokens at a weight of 9 %"
        in validation
    )
    assert "the test split has 1 document and" in test and "--shuffle_documents=SEED" in test
    lengths = [LENGTH] * (DOCUMENTS - 1) + [10 * LENGTH * DOCUMENTS]
    config.data.paths = (make_corpus([[1] * n for n in lengths], "long"),)
    write_vocabulary(config.data.paths[0], "null:1000")
    config.data.split = "70,30,0"
    tokenizer, prefixes = open_corpus(config.data, config.run_dir)
    uses = uses_of(config)
    told = split_warnings(uses, split_weights(config.data, prefixes))
    assert [text.split(" % of")[0].split()[-1] for text in told] == ["6.37", "93.6"]

    config.data.train_paths = config.data.validation_paths = config.data.paths
    config.data.paths = ()
    assert split_weights(config.data, []) is None
    assert not split_warnings(uses_of(config), None)  # sets of their own are as they were chosen
    config.data.paths, config.data.train_paths = config.data.train_paths, ()
    config.data.validation_paths, config.data.split = (), "70,29,1"
    sets = {use.total.name: None for use in uses}
    config.model.vocab_size = 2000
    print_data(config, prefixes, tokenizer, sets, Schedules(config))
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["test,", "each"]
    assert caplog.text.count("its loss may be unlike") == 1 and len(caplog.records) == 1
    assert not vocabulary_warnings(config, tokenizer)
    config.model.vocab_size = 2001
    (warning,) = vocabulary_warnings(config, tokenizer)
    assert "model.vocab_size=2001, but data.tokenizer=null:1000 has only 1000 ids" in warning
