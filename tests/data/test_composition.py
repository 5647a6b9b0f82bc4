"""What a run reads of its corpora, against numbers counted by hand."""

import pytest

from maxmeg.config.schema import Config, Packing
from maxmeg.data.composition import composition_text, uses_of

LENGTH = 9
DOCUMENTS = 100


@pytest.fixture
def config(make_corpus, tmp_path) -> Config:
    config = Config()
    config.run_dir = str(tmp_path / "run")
    config.data.tokenizer = "null:1000"
    config.data.paths = (make_corpus([[i] * LENGTH for i in range(DOCUMENTS)], "a"),)
    config.data.split = "80,20,0"
    config.data.sequence_length = 8
    config.train.global_batch_size = 4
    config.train.num_steps = 45
    config.train.eval_every, config.train.eval_steps = 10, 3
    return config


@pytest.mark.parametrize("order", ["megatron", "native"])
def test_one_corpus(config, order):
    config.data.order = type(config.data.order)[order]
    train, validation = uses_of(config)
    assert (train.whole.name, validation.whole.name) == ("train", "validation")
    assert (train.whole.documents, train.whole.tokens) == (80, 80 * LENGTH)
    assert (train.whole.samples, train.whole.epochs) == (180, 2.0)  # 180 x 8 = 2 x 720
    assert (validation.whole.documents, validation.whole.samples) == (20, 12)
    assert train.corpora[0].tokens == train.whole.tokens and train.corpora[0].epochs == 2.0
    lines = composition_text([train, validation]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["train", "80", "720", "180", "2.000"],
        ["validation,", "each", "time", "20", "180", "12", f"{12 * 8 / 180:.3f}"],
    ]


def test_a_blend_by_weight(config, make_corpus):
    (a,), b = config.data.paths, make_corpus([[1] * LENGTH] * 50, "b")
    config.data.paths, config.data.split = ("0.25", a, "0.75", b), "1,0,0"
    (train,) = uses_of(config)
    assert [use.samples for use in train.corpora] == [45, 135]
    assert [use.epochs for use in train.corpora] == [45 * 8 / 900, 135 * 8 / 450]
    assert (train.whole.documents, train.whole.tokens) == (150, 150 * LENGTH)
    assert len(composition_text([train]).splitlines()) == 4


def test_rows_of_whole_documents(config):
    config.data.packing, config.data.sequence_length = Packing.best_fit, 20
    train, validation = uses_of(config)
    assert (train.corpora, train.whole.documents, train.whole.samples) == ((), None, 180)
    assert train.whole.epochs == 180 / 40  # two of the 80 documents in each row
    assert validation.whole.epochs == 12 / 10
    assert " - " in composition_text([train])


def test_what_a_run_refuses_is_refused(config):
    config.data.split = "0,1,0"
    with pytest.raises(ValueError, match="leaves no sequence for train"):
        uses_of(config)
    config.data.split, config.data.tokenizer = "1,0,0", "null:50"
    with pytest.raises(ValueError, match="not in the vocabulary"):
        uses_of(config)
