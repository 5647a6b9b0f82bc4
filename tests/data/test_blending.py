"""Blends: what names them, whose turn it is, and what their batches hold."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_samples import Numbers

from maxmeg.data.samples import blending
from maxmeg.data.samples.blending import (
    blended,
    blending_index,
    exhaustive_index,
    member_sizes,
    normalized,
    parse_blend,
    read_blend,
)

# megatron-core 0.16.1: build_blending_indices, build_exhaustive_blending_indices
TURNS = {
    (0.2, 0.3, 0.5): [2, 1, 0, 2, 1, 2, 0, 2, 1, 2, 0, 2],
    (0.6, 0.4): [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1],
}
EXHAUSTIVE = {(2, 3, 5): [2, 1, 0, 2, 1, 2, 0, 2, 1, 2], (1, 1): [0, 1]}


def test_turns_are_megatrons():
    made = [(blending_index(weights, 12), turns) for weights, turns in TURNS.items()]
    made += [(exhaustive_index(sizes), turns) for sizes, turns in EXHAUSTIVE.items()]
    for actual, turns in made:
        assert actual.dtype == np.int16 and actual.tolist() == turns


def plain_turns(shares: list[float], size: int) -> list[int]:
    counts, turns = [0] * len(shares), []
    for i in range(size):
        lags = [share * max(i, 1) - count for share, count in zip(shares, counts, strict=True)]
        turns.append(max(range(len(shares)), key=lambda member: (lags[member], -member)))
        counts[turns[-1]] += 1
    return turns


@settings(max_examples=60)
@given(
    st.lists(st.floats(1e-3, 1) | st.integers(1, 3), min_size=1, max_size=20),
    st.integers(0, 400),
)
def test_every_member_gets_its_share(weights, size):
    shares = normalized(weights)
    turns = blending_index(shares, size)
    assert turns.tolist() == plain_turns(shares, size)
    counts = np.bincount(turns, minlength=len(shares))
    assert (counts <= np.array(shares) * size + 1 + 1e-6).all()
    longer = blending_index(shares, size + 50)  # a longer run has the same turns
    assert np.array_equal(longer[:size], turns)


@pytest.mark.parametrize(("members", "run_in"), [(1, 4), (2, 1), (5, 40), (13, 1), (13, 4)])
def test_pieces_side_by_side_are_the_whole(monkeypatch, members, run_in):
    """A run-in of one turn leaves wrong guesses, which are made again."""
    monkeypatch.setattr(blending, "_RUN_IN", run_in)
    monkeypatch.setattr(blending, "_LEAST_PIECES", 0)
    again, take_turns = [], blending._take_turns
    monkeypatch.setattr(
        blending, "_take_turns", lambda *rest: again.append(rest[1]) or take_turns(*rest)
    )
    random = np.random.default_rng(members)
    for kind in range(12):
        weights = random.random(members) ** kind + 1e-4
        shares = normalized((random.integers(1, 4, members) if kind % 4 == 3 else weights).tolist())
        size = int(random.integers(100, 1500))
        assert blending_index(shares, size).tolist() == plain_turns(shares, size)
    if members == 13:
        assert bool(again) or run_in == 40


@pytest.mark.parametrize("size", [1, 7, 8, 100, 4096, 10000])
def test_a_batch_holds_the_members_next_samples(monkeypatch, size):
    monkeypatch.setattr(blending, "_BLOCK", 8)
    weights = [3.0, 1.0, 2.0]
    blend = blended([Numbers(i) for i in range(3)], weights, size)
    turns = blending_index(normalized(weights), size)
    counts = np.zeros(3, int)
    expected = []
    for turn in turns:
        expected.append([turn, counts[turn]])
        counts[turn] += 1
    assert blend.samples_of_members() == counts.tolist()
    assert (
        len(blend.turns[0].members) == blend.samples_per_epoch == size and blend.num_tokens == 120
    )
    asked = np.random.default_rng(0).integers(0, 2 * size, 50)
    batch = blend.batch(asked)
    assert batch["tokens"].tolist() == [expected[n % size] for n in asked]
    assert (batch["mask"] == (batch["tokens"][:, 0] > 0)).all()
    assert blend.batch(np.array([], int))["tokens"].shape == (0, 2)
    with pytest.raises(ValueError, match="sample -1 is negative"):
        blend.batch(np.array([-1]))


def test_turns_are_made_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(blending, "_SMALL", 0)
    members = [Numbers(0), Numbers(1)]
    one = blended(members, [0.5, 0.5], 9000, str(tmp_path))
    monkeypatch.setattr(blending, "blending_index", None)  # from here on none is made
    twin = copy.copy(one)
    assert twin is not one and isinstance(twin.turns[0].members, np.memmap)
    asked = np.arange(8990, 9010)
    assert np.array_equal(one.batch(asked)["tokens"], twin.batch(asked)["tokens"])
    (file,) = tmp_path.glob("blend-*/turns.npy")
    np.save(file, np.load(file)[1:])
    with pytest.raises(ValueError, match="is damaged: delete this folder"):
        copy.copy(one)


def test_sizes_are_megatrons():
    assert member_sizes([0.3, 0.7], 1000, 0.005) == ([302, 704], 1000)
    assert member_sizes([1 / 3, 2 / 3], 10, 0.0) == ([4, 7], 11)
    assert normalized([30, 70]) == [0.3, 0.7]


@pytest.mark.parametrize(
    "items, prefixes, weights",
    [
        (["0.7", "a", "0.3", "b"], ["a", "b"], [0.7, 0.3]),
        ([30, "a ", 70, "b"], ["a", "b"], [30.0, 70.0]),
        (["a", "b"], ["a", "b"], None),
        (["1", "2", "3"], ["1", "2", "3"], None),  # odd: prefixes
        (["1", "2"], ["2"], [1.0]),
        (["a", "0.5"], ["a", "0.5"], None),
    ],
)
def test_items_of_a_blend_are_parsed(items, prefixes, weights):
    assert parse_blend(items) == (prefixes, weights)


@pytest.mark.parametrize("weight", ["-1", "0", "nan", "inf", "-inf"])
def test_weights_that_cannot_be_are_named(weight):
    for first, name in (("0.5", "b"), (weight, "a")):
        with pytest.raises(ValueError, match=f"weight {weight} of {name} must be a positive num"):
            parse_blend([first, "a", weight, "b"])


def test_half_of_the_weights_is_refused():
    with pytest.raises(ValueError, match="'c' in place of a weight"):
        parse_blend(["0.5", "a", "c", "b"])
    with pytest.raises(ValueError, match="at least one prefix"):
        parse_blend([])
    many = [item for i in range(32767) for item in (1, f"c{i}")]
    with pytest.raises(ValueError, match="at most 32766 corpora, not 32767"):
        parse_blend(many)


BLEND = [0.7, "a", 0.3, "b"]
FILES = {
    "[0.7, a, 0.3, b]": BLEND,
    "0.7 a 0.3 b\n": ["0.7", "a", "0.3", "b"],
    "- 0.7\n- a\n- 0.3\n- b\n": BLEND,
    json.dumps(BLEND): BLEND,
    "a": ["a"],
    "train: [0.7, a, 0.3, b]\nvalidation: c": {0: BLEND, 1: ["c"]},
    json.dumps({"train": BLEND, "valid": ["c"], "test": None}): {0: BLEND, 1: ["c"]},
}


@pytest.mark.parametrize("text", FILES)
def test_files_of_blends_are_read(tmp_path, text):
    (tmp_path / "blend").write_text(text)
    assert read_blend(str(tmp_path / "blend")) == FILES[text]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[0.5, [a]]", "is neither a list of weights and prefixes"),
        ("[true, a]", "is neither a list"),
        ("", "is neither a list"),
        ("7", "is neither a list"),
        ("train: []", "train: .* is neither a list"),
        ("{train: a, training: b}", "the set 'training': the sets are train, validation and test"),
        ("{valid: a, validation: b}", "the set 'validation'"),
        ("[0.5, a", "is neither YAML nor JSON"),
        ("!!python/object:os.system {}", "is neither YAML nor JSON"),
        ("\xff\xfe\x00", "is neither YAML nor JSON"),
    ],
)
def test_wrong_files_are_explained(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"cannot read data.blend=.*blend: No such file"):
        read_blend(str(tmp_path / "blend"))
    (tmp_path / "blend").write_text(text, "latin-1")
    with pytest.raises(ValueError, match=f"data.blend=.*blend.*{message}"):
        read_blend(str(tmp_path / "blend"))
