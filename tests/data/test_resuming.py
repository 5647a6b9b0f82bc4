"""Interrupted runs that continue with other settings: which samples they read, token by token."""

import itertools
import json

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, DataOrder, Packing
from maxmeg.config.schema import Config
from maxmeg.data import resuming
from maxmeg.data.batch_sizes import Origin
from maxmeg.data.build import build_dataset, open_corpus, samples_asked
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.resuming import Difference, compare, record_order, warn_of_order
from maxmeg.data.samples.megatron_order import MegatronOrder, continued, make_samples, plan_epochs
from maxmeg.data.samples.sampling import GptSamples
from maxmeg.optim.schedules import Schedules

LENGTH, EPOCH = 4, 120  # tokens a sample; samples an epoch
TOKENS = LENGTH * EPOCH + 1
SEEDS = (3, 7)
SAME = Difference(0, 0)


@pytest.fixture
def corpora(make_corpus) -> dict[str, str]:
    """Corpora whose tokens are all different."""
    made = {}
    for number, name in enumerate("abc"):
        cuts = np.sort(np.random.default_rng(number).choice(np.arange(1, TOKENS), 40, False))
        made[name] = make_corpus(np.split(number * 1000 + np.arange(TOKENS), cuts), name, 4000)
        write_vocabulary(made[name], "null:4000")
    return made


def run_of(corpora, items=("a",), **changes) -> Config:
    data = DataConfig(sequence_length=LENGTH, tokenizer="null:4000", split="1")
    data.paths = tuple(corpora.get(item, item) for item in items)
    config = Config(data=data, seed=SEEDS[0])
    config.train.num_steps, config.train.global_batch_size = 20, 4
    return changed(config, **changes)


def changed(config: Config, **changes) -> Config:
    for path, value in changes.items():
        section, _, name = path.partition("__")
        setattr(getattr(config, section) if name else config, name or section, value)
    return config


class Checkpoint:
    """A run that was started or resumed, read up to a step; what its checkpoint says."""

    def __init__(self, config: Config, stop: int, before: "Checkpoint | None" = None) -> None:
        step, origin, saved = 0, Origin(), []
        if before is not None:
            step, metadata = before.step, json.loads(json.dumps(before.metadata))
            origin, saved = Origin.of_checkpoint(step, metadata), metadata["data_order"]
        self.schedules, self.step = Schedules(config, 1, origin), stop
        tokenizer, prefixes = open_corpus(config.data, "unused")
        asked = samples_asked(config, 0, self.schedules, saved)
        self.data = build_dataset(config.data, prefixes, tokenizer, 0, config.seed, 0, asked)
        steps = range(step, stop)
        self.sizes = [self.schedules.batch_size(step) for step in steps]
        firsts = [self.schedules.consumed_samples(step) for step in steps]
        numbers = [first + np.arange(n) for first, n in zip(firsts, self.sizes, strict=True)]
        self.numbers = np.concatenate([[], *numbers]).astype(int)
        self.read = self.data.batch(self.numbers)["tokens"] if steps else np.zeros((0, LENGTH), int)
        consumed = self.schedules.consumed_samples(stop)
        self.metadata = self.schedules.progress(stop)
        self.metadata["data_order"] = record_order(self.data, consumed)
        if before is not None:
            self.numbers = np.concatenate([before.numbers, self.numbers])
            if before.read.shape[1] == self.read.shape[1]:
                self.read = np.concatenate([before.read, self.read])

    def times(self, count: int | None = None) -> np.ndarray:
        """How often each token of corpus `a` is an input of the first `count` samples read."""
        return np.bincount(self.read[:count].ravel(), minlength=4000)[:TOKENS]


CHANGES = {  # (step at which the run stops, what is changed before it)
    "batch doubled": [(10, {}), (25, {"batch": 8, "steps": 25})],
    "batch halved": [(10, {}), (60, {"batch": 2, "steps": 60})],
    "shorter": [(15, {"steps": 95}), (61, {"steps": 61})],
    "grown again and again": [
        (20, {}), (45, {"steps": 45}), (60, {"steps": 70}), (90, {"steps": 90, "batch": 16}),
    ],
    "two epochs, then five": [(40, {"steps": 45}), (160, {"steps": 160})],
}  # fmt: skip


def run_through(config: Config, changes: list[tuple[int, dict]]) -> Checkpoint:
    """The last of the runs that each resume the one before with changed settings."""
    names, run = {"batch": "train__global_batch_size", "steps": "train__num_steps"}, None
    for stop, change in changes:
        before = run
        run = Checkpoint(changed(config, **{names[k]: v for k, v in change.items()}), stop, before)
        if before is not None:
            assert np.array_equal(run.read[: len(before.read)], before.read)
            assert compare(before.metadata["data_order"], run.data, len(before.numbers)) == SAME
    assert run is not None and run.numbers.tolist() == list(range(len(run.numbers)))
    assert run.metadata["consumed_samples"] == len(run.numbers)
    return run


@pytest.mark.parametrize("name", CHANGES)
def test_every_sample_once_in_an_epoch(corpora, name):
    run = run_through(run_of(corpora, data__order=DataOrder.native), CHANGES[name])
    for epoch in range(1, len(run.read) // EPOCH + 1):
        times = run.times(epoch * EPOCH)
        assert times.max() == epoch and times.sum() == epoch * EPOCH * LENGTH
    assert len(run.read) >= EPOCH


@pytest.mark.parametrize("name", CHANGES)
def test_every_sample_once_in_the_epochs_shuffled_together(corpora, name):
    """Of the length that the first run asked for, then of what each longer run adds."""
    run = run_through(run_of(corpora), CHANGES[name])
    epochs, parts = 0, run.data.samples.order["parts"]
    for i, (start, asked) in enumerate(parts, 1):
        plan = plan_epochs(TOKENS, LENGTH, asked)
        epochs += plan.num_epochs
        if start + plan.num_samples > len(run.read):
            assert i == len(parts)  # the run ends within the last part
            break
        times = run.times(start + plan.num_samples)
        assert times.max() == epochs
        assert times.sum() == (start + plan.num_samples) * LENGTH
    assert len(parts) == {"shorter": 1, "grown again and again": 3}.get(name, 2)


BLENDS = {
    "weights": (("0.7", "a", "0.3", "b"), ()),
    "a change to come": (("0.7", "a", "0.3", "b"), ("16:0.5", "a", "0.5", "c")),
    "a change that is over": (("0.7", "a", "0.3", "b"), ("5:0.2", "b", "0.8", "c")),
    "a twice": (("0.4", "a", "0.4", "a", "0.2", "b"), ()),
}


@pytest.mark.parametrize("order", DataOrder)
@pytest.mark.parametrize("name", BLENDS)
def test_every_corpus_of_a_blend_continues_with_its_next_sample(corpora, order, name):
    """Whatever the new batch size; and a change comes before the step that it names."""
    items, changes = BLENDS[name]
    config = run_of(corpora, items, data__order=order)
    config.data.blend_changes = tuple(
        f"{head}{mark}{corpora.get(item, item)}"
        for head, mark, item in (word.rpartition(":") for word in changes)
    )
    first = Checkpoint(config, 10)
    for size in (8, 2):
        for steps in (20, 90):
            resumed = {"train__global_batch_size": size, "train__num_steps": steps}
            run = Checkpoint(changed(config, **resumed), 20, first)
            assert compare(first.metadata["data_order"], run.data, 40) == SAME
            assert np.array_equal(run.read[:40], first.read)
            members, numbers = run.data.locate(run.numbers)
            for member in range(len(run.data.members)):
                mine = numbers[members == member]
                assert mine.tolist() == list(range(len(mine)))
            begins = {"a change to come": 40 + 6 * size, "a change that is over": 20}.get(name)
            has_c = np.flatnonzero(run.read[:, 0] >= 2000)
            assert (begins is None) == (not has_c.size)
            assert not has_c.size or begins <= has_c[0] <= begins + 1


OTHERS = {
    "seed": ({"seed": SEEDS[1]}, "changed: seed"),
    "length": ({"data__sequence_length": 7}, "changed: data.sequence_length"),
    "order": ({"data__order": DataOrder.native}, "changed: data.order"),
    "split": ({"data__split": "70,30"}, "changed: corpora or data.split"),
    "weights": ({"items": ("0.5", "a", "0.5", "b")}, "changed: weights of the blend"),
    "corpora": ({"items": ("0.5", "c", "0.5", "b")}, "changed: corpora or data.split"),
    "without weights": ({"items": ("a",)}, "changed: corpora or data.split"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("steps", [11, 50], ids=["one epoch", "several"])
def test_another_order_is_reported_with_the_tokens_that_it_costs(corpora, name, steps, caplog):
    """Counted by hand: what was read and does not count as read by the new order; the reverse."""
    first = Checkpoint(run_of(corpora, ("0.8", "a", "0.2", "b"), train__num_steps=60), steps)
    consumed = first.metadata["consumed_samples"]
    changes, told = OTHERS[name]
    items = changes.get("items", ("0.8", "a", "0.2", "b"))
    rest = {path: value for path, value in changes.items() if path != "items"}
    other = Checkpoint(run_of(corpora, items, train__num_steps=60, **rest), 60, first)
    counts_as_read = other.data.batch(np.arange(consumed))["tokens"]
    was, now = (
        np.bincount(np.ravel(rows), minlength=4000) for rows in (first.read, counts_as_read)
    )
    members = getattr(other.data, "members", [other.data])
    there = [corpus.prefix for member in members for corpus in member.corpora]
    for corpus, path in enumerate(corpora.values()):
        if path not in there:  # of a corpus that is gone nothing is repeated
            was[1000 * corpus : 1000 * (corpus + 1)] = 0
    surplus = was - now
    expected = Difference(int(surplus.clip(min=0).sum()), int(-surplus.clip(max=0).sum()))
    assert compare(first.metadata["data_order"], other.data, consumed) == expected != SAME
    warn_of_order(first.metadata["data_order"], other.data, consumed)
    (record,) = caplog.records
    assert told in record.message
    for tokens in (expected.repeated, expected.left_out):
        assert (
            f" {tokens:,} tokens ({-(-tokens // other.data.sequence_length):,} s" in record.message
        )


def test_large_corpora_are_compared_by_some_of_their_tokens(corpora, monkeypatch, caplog):
    first = Checkpoint(run_of(corpora), 20)
    saved = first.metadata["data_order"]
    other = Checkpoint(run_of(corpora, seed=SEEDS[1]), 20)
    exact = compare(saved, other.data, 80)
    monkeypatch.setattr(resuming, "_PLACES", 240)
    about = compare(saved, other.data, 80)
    assert not about.is_exact and about.repeated == pytest.approx(exact.repeated, rel=0.2)
    warn_of_order(saved, other.data, 80)
    assert f"about {about.repeated:,} tokens" in caplog.text


def test_bounds_where_what_was_read_is_gone(corpora):
    """Of corpora without weights, read as one, the lengths of those that are gone are unknown."""
    native = {"data__order": DataOrder.native}
    saved = Checkpoint(run_of(corpora, ("a", "b"), **native), 5).metadata["data_order"]
    one, three = (
        Checkpoint(run_of(corpora, items, **native), 5).data for items in (("a",), ("a", "b", "c"))
    )
    assert compare(saved, one, 20) == Difference(80, 80, is_bound=True)
    assert not compare(saved, three, 20).is_bound  # all that was read is there
    gone = compare(saved, Checkpoint(run_of(corpora, ("c",), **native), 5).data, 20)
    assert gone == Difference(0, 80)
    packed = run_of(corpora, ("a",), data__packing=Packing.best_fit)
    packed.data.sequence_length = 60
    rows = Checkpoint(packed, 2)
    assert compare(saved, rows.data, 20) == Difference(80, 20 * 60, is_bound=True)
    assert compare(rows.metadata["data_order"], one, 20).is_bound


def test_packed_documents_are_resumed(corpora):
    """The same rows after a change of the batch size; else documents are counted."""
    config = run_of(corpora, data__packing=Packing.best_fit, data__sequence_length=60)
    first = Checkpoint(config, 3)
    saved, consumed = first.metadata["data_order"], len(first.numbers)
    assert 1 < consumed / first.data.samples_per_epoch < 2
    doubled = Checkpoint(changed(config, train__global_batch_size=8), 5, first)
    assert compare(saved, doubled.data, consumed) == SAME
    assert np.array_equal(doubled.read[:consumed], first.read)
    for changes in ({"seed": 7}, {"data__packing": Packing.greedy}):
        other = Checkpoint(changed(config, **{"seed": SEEDS[0], **changes}), 5, first)
        batches = [data.batch(np.arange(consumed)) for data in (first.data, other.data)]
        was, now = (
            np.bincount(b["targets"][b["loss_mask"] > 0], minlength=1000)[:1000] for b in batches
        )
        expected = Difference(
            *(int((x - y).clip(min=0).sum()) for x, y in ((was, now), (now, was)))
        )
        assert compare(saved, other.data, consumed) == expected != SAME


def test_a_repeated_order_is_continued_after_its_last_whole_round():
    """A member of a changing blend that was read beyond its samples."""
    assert continued([(0, 30)], (TOKENS, LENGTH), 100, 200) == ((0, 30), (120, 80))
    assert continued([(0, 30)], (TOKENS, LENGTH), 130, 200) == ((0, 30),)
    assert continued([(0, 30)], (TOKENS, LENGTH), 130, 300) == ((0, 30), (240, 60))
    assert continued([(0, None)], (TOKENS, LENGTH), 130, None) == ((0, None),)


def test_times_read_of_every_order():
    """Against the samples themselves, at any count."""
    lengths = np.array([5, 0, 3, 9, 1, 4, 7])
    starts = np.cumsum(lengths) - lengths
    parts = ((0, 8), (14, 5), (21, 9))
    orders = [
        GptSamples(lengths, 4, 3),
        make_samples(lengths, 4, 3, MegatronOrder(9)),
        make_samples(lengths, 4, 3, MegatronOrder(parts=parts)),
    ]
    for samples, count in itertools.product(orders, (0, 1, 6, 7, 20, 33)):
        times = np.zeros(lengths.sum(), int)
        for n in range(count):
            inputs = [starts[s] + o + i for s, o, size in samples[n] for i in range(size)][:-1]
            np.add.at(times, inputs, 1)
        assert samples.times_read(np.arange(len(times)), count).tolist() == times.tolist()


def test_a_checkpoint_without_a_record_is_not_compared(corpora, caplog):
    warn_of_order(None, Checkpoint(run_of(corpora), 1).data, 4)
    assert not caplog.text
