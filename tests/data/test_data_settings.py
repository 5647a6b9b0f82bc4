"""From settings to datasets: sets by split, by paths and by file; blends; what is refused."""

import json

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, DataOrder, Objective, Packing, TooLong
from maxmeg.config.schema import Config
from maxmeg.config.validate import validate
from maxmeg.data.build import (
    Request,
    build_dataset,
    build_validation,
    cache_folder,
    open_corpus,
    read_whole,
    samples_asked,
)
from maxmeg.optim.schedules import Schedules

ORDERS = list(DataOrder)
MOCK = {"mock": True}
SFT = {"objective": Objective.sft, "paths": ("chats.jsonl",)}
FIM = {"paths": ("a",), "fim_rate": 1.0, "fim_tokens": ("257", "258", "259", "260")}


@pytest.fixture
def three(make_corpus) -> dict[str, str]:
    """Corpora whose tokens say which they are, and their document."""
    return {
        name: make_corpus([np.full(9, 100 * i + d) for d in range(count)], name)
        for i, (name, count) in enumerate((("a", 40), ("b", 20), ("c", 3)))
    }


def settings(three, items=(), **kind) -> DataConfig:
    config = DataConfig(sequence_length=4, tokenizer="null:1000", **kind)
    config.paths = tuple(three.get(item, item) for item in items)
    return config


def opened(config: DataConfig, index: int, num_samples=None, seed: int = 3):
    tokenizer, prefixes = open_corpus(config, "unused")
    return build_dataset(config, prefixes, tokenizer, index, seed, 0, num_samples)


def corpora_of(dataset, count: int) -> list[float]:
    """Of `count` samples, the share of each corpus."""
    tokens = dataset.batch(np.arange(count))["tokens"]
    return (np.bincount(tokens[:, 0] // 100, minlength=3) / count).tolist()


def test_weights_are_kept_over_as_many_samples_as_the_corpora_have(three):
    blend = opened(settings(three, ("3", "b", "1", "a"), split="1"), 0)
    assert blend.samples_per_epoch == (9 * 40 - 1 + 9 * 20 - 1) // 4 + 1
    assert corpora_of(blend, 40) == [0.25, 0.75, 0]


@pytest.mark.parametrize("order", ORDERS)
def test_corpora_without_weights_are_read_once(three, order):
    config = settings(three, ("a", "b", "c"), split="1", order=order)
    dataset = opened(config, 0)
    tokens = dataset.batch(np.arange(dataset.samples_per_epoch))["tokens"]
    actual, counts = np.unique(tokens, return_counts=True)
    assert len(actual) == 63 and counts.max() == 9
    fewer = opened(config, 0, 30)
    assert corpora_of(fewer, 30) == pytest.approx([0.63, 0.32, 0.05], abs=0.25)


@pytest.mark.parametrize("order", ORDERS)
def test_sets_of_their_own_are_read_whole(three, tmp_path, order):
    named = settings(three, order=order)
    named.train_paths = ("0.5", three["a"], "0.5", three["c"])
    named.validation_paths = (three["b"],)
    file = tmp_path / "blend.yaml"
    sets = {"train": [0.5, three["a"], 0.5, three["c"]], "valid": [three["b"]], "test": None}
    file.write_text(json.dumps(sets))
    for config in (named, settings(three, order=order, blend=str(file))):
        assert corpora_of(opened(config, 0, 40), 40) == [0.5, 0, 0.5]
        validation = opened(config, 1, 40)
        tokens = validation.batch(np.arange(validation.num_samples))["tokens"]
        assert set(tokens.ravel().tolist()) == set(range(100, 120))
        assert opened(config, 2, 40) is None
        read_whole(config, (three["c"],), 1)
        validation = opened(config, 1)
        tokens = validation.batch(np.arange(validation.num_samples))["tokens"]
        assert set(tokens.ravel().tolist()) == {200, 201, 202}


def test_validation_sets_by_name(three, tmp_path, make_corpus):
    def names(config):
        tokenizer, prefixes = open_corpus(config, "unused")
        sets = build_validation(Config(data=config, seed=3), prefixes, tokenizer, 30)
        return {name: corpora_of(data, 30) for name, data in sets.items()}

    config = settings(three, train_paths=(three["c"],), validation_paths=(three["a"], three["b"]))
    (joined,) = names(config).items()
    assert joined[0] == "" and min(joined[1][:2]) > 0
    config.validate_each = True
    assert names(config) == {"a": [1, 0, 0], "b": [0, 1, 0]}
    (tmp_path / "other").mkdir()
    config.validation_paths = (three["a"], make_corpus([np.full(9, 200)] * 9, "other/a"))
    assert list(names(config)) == list(config.validation_paths)  # two are called a
    config.validation_paths = ("0.5", three["a"], "0.5", three["b"])
    with pytest.raises(
        ValueError, match=r"data.validate_each=True cannot read .* with weights \[0.5, 0.5\]"
    ):
        names(config)
    file = tmp_path / "blend"
    file.write_text(f"{three['a']} {three['b']}")
    with pytest.raises(ValueError, match="and split='969,30,1': name prefixes without weights"):
        names(settings(three, validate_each=True, blend=str(file)))
    file.write_text(json.dumps({"train": [three["c"]]}))
    assert names(settings(three, validate_each=True, blend=str(file))) == {}
    assert names(settings(three, blend=str(file))) == {}


def test_a_plain_file_is_cut_by_split(three, tmp_path):
    (tmp_path / "blend").write_text(f"0.5 {three['a']} 0.5 {three['b']}")
    by_file = settings(three, blend=str(tmp_path / "blend"), split="8,2")
    by_paths = settings(three, ("0.5", "a", "0.5", "b"), split="8,2")
    for index in (0, 1):
        one, two = (opened(config, index, 60) for config in (by_file, by_paths))
        rows = [dataset.batch(np.arange(60))["tokens"] for dataset in (one, two)]
        assert np.array_equal(*rows)
        assert (rows[0].max() < 116) == (index == 0)


def test_sets_without_documents_are_explained(three, tmp_path):
    for items in (("a", "c"), ("1", "a", "1", "c")):
        config = settings(three, items, split="90,10")
        with pytest.raises(ValueError, match=r"no sequence for validation \(.*/c has 3\): give"):
            opened(config, 1, 10)
    assert opened(settings(three, ("c",), split="90,10"), 1, 10) is None
    with pytest.raises(ValueError, match="no sequence for train"):
        opened(settings(three, ("c",), split="0,10"), 0, 10)
    (tmp_path / "blend").write_text(json.dumps({"valid": [three["a"]]}))
    with pytest.raises(ValueError, match=r"data.blend=.*blend has no training set"):
        opened(settings(three, blend=str(tmp_path / "blend")), 0)


def test_more_than_a_blend_has_is_explained(three):
    config = settings(three, ("a", "b"), split="1")
    with pytest.raises(ValueError, match=r"500 samples, but one epoch of 2 corpora .* holds 133"):
        opened(config, 0, 500)
    assert opened(config, 1, 500) is None
    many = [word for i in range(200) for word in (f"{1 + i % 7}", "a")]
    config = settings(three, many, split="1", blend_surplus=0.0)
    assert opened(config, 0, 50).samples_per_epoch == 200  # one of each at least


def test_a_surplus_that_is_too_small_is_explained(three, monkeypatch):
    config = settings(three, ("1", "a", "1", "b"), split="1")
    monkeypatch.setattr("maxmeg.data.samples.texts.member_sizes", lambda *_: ([100, 10], 200))
    with pytest.raises(ValueError, match=r"blend takes 100 samples of .*/b, .* only 44 .* raise"):
        opened(config, 0, 200)


def test_samples_that_a_run_asks_for():
    config = Config()
    train = config.train
    train.num_steps, train.global_batch_size, train.batch_rampup = 100, 8, (4, 4, 80)
    train.eval_every, train.eval_steps = 30, 5
    schedules = Schedules(config)
    asked = [samples_asked(config, index, schedules) for index in range(3)]
    total = 4 * 20 + 8 * 80
    assert asked == [Request(total), Request((100 // 30 + 1) * 5 * 8), Request(5 * 8)]
    config.data.blend_changes = ("10:a", "80:b")
    assert samples_asked(config, 0, schedules) == Request(total, (40, total - 8 * 20))
    evaluations = [step for step in range(100) if (step + 1) % 30 == 0 or step == 99]
    starts = [schedules.evaluation_start(step) for step in evaluations]
    assert starts == [0, 40, 80, 120]  # each once, and no other
    assert starts[-1] + 40 == asked[1].num_samples
    assert schedules.evaluation_start(64) == 80  # stopped and validated early: its number counts
    config.data.order = DataOrder.native
    assert Schedules(config).evaluation_start(99) == 0
    train.eval_every, config.data.order = 0, DataOrder.megatron
    schedules = Schedules(config)
    assert samples_asked(config, 1, schedules) == Request(40)
    assert schedules.evaluation_start(99) == 0
    assert cache_folder(config.data, "run") == "run/data"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"paths": ("a",), "blend": "b"}, "data.paths and data.blend both name corpora"),
        ({"paths": ("a",), "train_paths": ("b",)}, "data.paths and data.train_paths both"),
        ({"validate_each": True}, "data.validate_each=True needs data.validation_paths"),
        ({"test_paths": ("b",)}, "data.test_paths without data.train_paths"),
        (MOCK | {"paths": ("a",)}, "data.paths and data.mock both name corpora"),
        (MOCK | {"packing": Packing.greedy}, "data.mock=True is for data.objective=gpt"),
        ({"objective": Objective.sft}, "needs chats: set data.paths=FILE.jsonl"),
        ({"objective": Objective.sft, "blend": "x.yaml"}, "data.blend is for .bin/.idx files"),
        (SFT | {"eod_mask_loss": True}, "data.eod_mask_loss=True is for samples"),
        ({"packing": Packing.greedy, "reset_attention_mask": True}, "keep documents apart"),
        ({"too_long": TooLong.truncate}, "data.too_long=truncate has no effect"),
        ({"chat_template": "x"}, "data.chat_template=x has no effect"),
        (FIM | {"fim_rate": 0.0}, r"data\.fim_tokens=.* has no effect without data\.fim_rate"),
        (FIM | {"fim_tokens": ()}, r"data\.fim_rate=1\.0 needs data\.fim_tokens"),
        (FIM | {"fim_fragment_rate": 0.9}, r"without data\.fim_split"),
        (FIM | {"objective": Objective.sft}, r"fim_rate=1\.0 is for samples that are cut"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(Config(data=DataConfig(**changes)), 1)


def test_megatrons_order_takes_its_seeds_alone():
    config = Config(seed=2**32)
    with pytest.raises(ValueError, match=r"seed=4294967296 must lie in \[0, 2\^32\)"):
        validate(config, 1)
    config.data.order = DataOrder.native
    validate(config, 1)
