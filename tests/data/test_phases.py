"""Blends that change at a step: what comes before, at and after it, and what is refused."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_samples import Numbers

from maxmeg.config.data import DataConfig, DataOrder, Packing
from maxmeg.config.schema import Config
from maxmeg.config.validate import validate
from maxmeg.data.build import build_dataset, open_corpus, samples_asked
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.resuming import record_order, warn_of_order
from maxmeg.data.samples.blending import Blend, Phase, blending_index, normalized
from maxmeg.data.samples.phases import Change, parse_changes
from maxmeg.optim.schedules import Schedules

ORDERS = list(DataOrder)
SIZE = 120  # samples of a run
EPOCH = 40  # documents of each corpus


@st.composite
def plans(draw):
    """Starts, members and weights of phases of four corpora."""
    starts = sorted(draw(st.sets(st.integers(1, 99), min_size=0, max_size=4)))
    phases = []
    for start in (0, *starts):
        members = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        weights = [draw(st.floats(0.05, 1)) for _ in members]
        phases.append(Phase(start, tuple(members), tuple(weights)))
    return phases


@settings(max_examples=60)
@given(plans(), st.integers(0, 99))
def test_every_corpus_goes_on_with_its_next_sample(phases, resumed):
    blend = Blend([Numbers(i) for i in range(4)], phases, 100)
    read = blend.batch(np.arange(100))["tokens"]
    for corpus in range(4):
        mine = read[read[:, 0] == corpus, 1]
        assert mine.tolist() == list(range(len(mine)))
    assert np.bincount(read[:, 0], minlength=4).tolist() == blend.samples_of_members()
    before = np.bincount(read[:resumed, 0], minlength=4)
    assert blend.samples_before(resumed) == before.tolist()
    twice = before + 2 * np.array(blend.samples_of_members())
    assert blend.samples_before(200 + resumed) == twice.tolist()
    for phase, end in zip(phases, [*(p.start for p in phases[1:]), 100], strict=True):
        turns = blending_index(normalized(phase.weights), end - phase.start)
        assert read[phase.start : end, 0].tolist() == np.array(phase.members)[turns].tolist()
    again = pickle.loads(pickle.dumps(blend)).batch(np.arange(resumed, 100))["tokens"]
    assert np.array_equal(again, read[resumed:])
    past = [phase for phase in phases if phase.start < max(resumed, 1)]
    without = Blend([Numbers(i) for i in range(4)], past, 100)
    assert np.array_equal(without.batch(np.arange(resumed))["tokens"], read[:resumed])


@pytest.fixture
def three(make_corpus) -> dict[str, str]:
    """Corpora whose tokens say which they are, and their document."""
    made = {
        name: make_corpus([np.full(4, 100 * i + d) for d in range(EPOCH)], name)
        for i, name in enumerate("abc")
    }
    for prefix in made.values():
        write_vocabulary(prefix, "null:1000")
    return made


def settings_of(three, items, changes=(), **kind) -> Config:
    config = Config(data=DataConfig(sequence_length=4, tokenizer="null:1000", split="1", **kind))
    config.data.paths = tuple(three.get(item, item) for item in items)
    config.data.blend_changes = tuple(
        f"{head}{mark}{three.get(name, name)}"
        for head, mark, name in (item.rpartition(":") for item in changes)
    )
    config.train.num_steps, config.train.global_batch_size = SIZE // 2, 2
    return config


def opened(config: Config):
    validate(config, 1)
    tokenizer, prefixes = open_corpus(config.data, "unused")
    asked = samples_asked(config, 0, Schedules(config))
    return build_dataset(config.data, prefixes, tokenizer, 0, 3, 0, asked)


def read(dataset, begin=0, end=SIZE) -> np.ndarray:
    return dataset.batch(np.arange(begin, end))["tokens"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("items", [("0.75", "a", "0.25", "b"), ("a",)])
def test_a_run_changes_its_blend(three, items, order):
    """Before the change nothing is other than without it; then the new shares hold."""
    changes = ("20:0.5", "b", "0.5", "c", "40:c")
    blend = opened(settings_of(three, items, changes, order=order))
    changed = read(blend)
    unchanged = read(opened(settings_of(three, items, order=order)))
    assert np.array_equal(changed[:40], unchanged[:40])
    corpora = changed[:, 0] // 100
    assert np.bincount(corpora[40:80], minlength=3).tolist() == [0, 20, 20]
    assert set(corpora[80:].tolist()) == {2}
    for corpus in set(corpora.tolist()):  # the samples of each are its first ones, in its order
        mine = changed[corpora == corpus]
        member = next(m for m in blend.members if m.corpora[0].prefix == three["abc"[corpus]])
        assert np.array_equal(mine, read(member, 0, len(mine)))


def test_more_samples_than_an_order_has_are_reported(three, caplog):
    """They come again from the first, in whole rounds of the corpus."""
    caplog.set_level("INFO")
    changed = opened(settings_of(three, ("a",), ("20:b",)))
    assert "b: the blend takes 80 samples: 39 in Megatron-LM's order, which" in caplog.text
    tokens = read(changed, 40)
    assert np.array_equal(tokens[:39], tokens[39:78])
    caplog.clear()
    opened(settings_of(three, ("a",), ("20:b",), order=DataOrder.native))
    assert not caplog.text


def test_a_file_may_hold_the_blend(three, tmp_path):
    sets = {"train": [0.5, three["b"], 0.5, three["c"]], "valid": [three["a"]]}
    (tmp_path / "late.yaml").write_text(json.dumps(sets))
    by_file = settings_of(three, ("a",), (f"20:{tmp_path}/late.yaml",))
    by_items = settings_of(three, ("a",), ("20:0.5", "b", "0.5", "c"))
    assert np.array_equal(read(opened(by_file)), read(opened(by_items)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_resume_may_change_what_is_to_come_alone(three, order, caplog):
    base = ("0.75", "a", "0.25", "b")
    names = ("none", "at 20", "at 30")
    changes = ((), ("20:0.5", "b", "0.5", "c"), ("30:0.5", "b", "0.5", "c"))
    runs = {
        name: opened(settings_of(three, base, change, order=order))
        for name, change in zip(names, changes, strict=True)
    }
    for step, one, two, same in (
        (20, "none", "at 20", True),
        (20, "at 20", "none", True),
        (21, "at 20", "none", False),
        (20, "at 20", "at 30", True),
        (25, "at 20", "at 30", False),
    ):
        saved = json.loads(json.dumps(record_order(runs[one], 2 * step)))
        caplog.clear()
        warn_of_order(saved, runs[two], 2 * step)
        assert bool(caplog.text) == (not same), (step, one, two)
        equal = np.array_equal(read(runs[one], 0, 2 * step), read(runs[two], 0, 2 * step))
        assert equal or not same


def test_what_changes_may_be():
    assert parse_changes(()) == []
    assert parse_changes(("1000:0.5", "a", " 0.5", "s3://x/b", "5000:c")) == [
        Change(1000, ("a", "s3://x/b"), (0.5, 0.5)),
        Change(5000, ("c",), (1.0,)),
    ]


@pytest.mark.parametrize(
    "items, message",
    [
        (("0.5", "a"), "begins with '0.5': each change begins with its step"),
        (("0:a",), "step 0 after step 0: steps must increase, from 1 on"),
        (("9:a", "9:b"), "step 9 after step 9"),
        (("9:a", "b"), "step 9 has no weights: give each prefix one, as 9:0.5,a,0.5,b"),
        (("9:0", "a", "1", "b"), "step 9: weight 0 of a must be a positive number"),
        (("9:1", "a", "1", "a"), "step 9 names a twice: add up the two weights"),
        (("9:none.yaml",), "cannot read data.blend=none.yaml"),
    ],
)
def test_wrong_changes_are_explained(items, message):
    with pytest.raises(ValueError, match=message):
        parse_changes(items)


def test_changes_that_cannot_be_are_explained(three, make_corpus):
    for items, changes, kind, message in (
        (("a",), ("60:b",), {}, "step 60, but the run ends with step train.num_steps=60"),
        (("a", "b"), ("20:c",), {}, "2 corpora without weights, which are read once"),
        (("1", "a", "1", "a"), ("20:c",), {}, "the blend before data.blend_changes names .*/a twi"),
        (("a",), ("20:none",), {}, "none.idx does not exist"),
        (("a",), ("20:b",), {"packing": Packing.best_fit}, "data.blend_changes is for blends"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(settings_of(three, items, changes, **kind))
    small = make_corpus([np.full(9, 3)], "small")
    config = settings_of(three, ("a",), (f"20:{small}",))
    config.data.split = "1,5"
    with pytest.raises(ValueError, match=r"no sequence for train \(.*small has 1\)"):
        opened(config)
