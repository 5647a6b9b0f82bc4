"""Preference pairs: rows of the usual formats, and what of them has a loss."""

import json
import pickle

import numpy as np
import pytest

from maxmeg.config.data import DataConfig, Objective
from maxmeg.data.build import build_dataset
from maxmeg.data.chat.answers import prepare
from maxmeg.data.chat.preferences import PREFERENCES, Preferences, read_side
from maxmeg.data.chat.turns import BadRow
from maxmeg.data.prepare.documents import Record
from maxmeg.data.resuming import Difference, compare, record_order
from maxmeg.data.tokenizers.load import load_tokenizer

END, LENGTH = 256, 24
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def say(*texts: str) -> list[dict]:
    """Messages of the user and the assistant in turns: "u:x", "a:y"."""
    roles = {"u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text[2:]} for text in texts]


# row -> of each side: text, what of it is learnt
ROWS = {
    "prompt and answers as messages": (
        {"prompt": say("u:q"), "chosen": say("a:yes"), "rejected": say("a:no")},
        [("u:q;a:yes;", "yes;"), ("u:q;a:no;", "no;")],
    ),
    "whole conversations": (
        {"chosen": say("u:q", "a:b", "u:c", "a:yes"), "rejected": say("u:q", "a:b", "u:c", "a:no")},
        [("u:q;a:b;u:c;a:yes;", "yes;"), ("u:q;a:b;u:c;a:no;", "no;")],
    ),
    "texts": (
        {"prompt": "q: ", "chosen": "yes", "rejected": "no"},
        [("q: yes", "yes$"), ("q: no", "no$")],
    ),
}


@pytest.mark.usefixtures("renders_here")
def test_preference_formats_are_read(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row, _ in ROWS.values()))
    arguments = (load_tokenizer("bytes"), tmp_path / "cache", str(tmp_path / "t.jinja"))
    made = prepare(str(tmp_path / "pairs.jsonl"), PREFERENCES, *arguments)
    data = Preferences([made], "0,1,0", 1, LENGTH, "drop", 257, END, seed=3)
    assert data.counts == f"{len(ROWS)} whole, 0 truncated, 0 dropped"
    batch = data.batch(np.arange(len(ROWS)))
    assert {values.shape for values in batch.values()} == {(2 * len(ROWS), LENGTH)}
    expected = [side for _, sides in ROWS.values() for side in sides]
    for row, (text, learnt) in enumerate(expected):
        used = batch["segment_ids"][row] == 1
        ids = [*batch["tokens"][row][used].tolist(), int(batch["targets"][row][used][-1])]
        assert bytes(i for i in ids if i != END).decode() == text
        has_loss = batch["loss_mask"][row] > 0
        said = [ord("$") if i == END else i for i in batch["targets"][row][has_loss]]
        assert bytes(said).decode() == learnt and not (has_loss & ~used).any()
    small = Preferences([made], "0,1,0", 1, LENGTH, "drop", 100, END)
    with pytest.raises(ValueError, match=r"the preferences: id \d+ is not in the vocabulary"):
        small.batch(np.arange(len(ROWS)))
    again = pickle.loads(pickle.dumps(data)).batch(np.arange(len(ROWS)))
    assert all((again[name] == batch[name]).all() for name in batch)


@pytest.mark.usefixtures("renders_here")
def test_the_settings_of_a_run_open_preferences(tmp_path):
    """Each epoch in another order, which checkpoints record."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"{n}: ", "chosen": "yes", "rejected": "no"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(objective=Objective.preferences, sequence_length=LENGTH, split="3,1,0")
    config.chat_template = str(tmp_path / "t.jinja")
    place = config, [str(tmp_path / "pairs.jsonl")], load_tokenizer("bytes")
    sets = [build_dataset(*place, n, 1, cache_dir=str(tmp_path / "cache")) for n in (0, 1, 2)]
    train, validation, test = sets
    assert (train.samples_per_epoch, validation.samples_per_epoch, test) == (6, 2, None)
    firsts = train.batch(np.arange(12))["tokens"][::2, 0].reshape(2, 6)
    assert firsts[0].tolist() != firsts[1].tolist() and set(firsts[0]) == set(map(ord, "012345"))
    saved = record_order(train, 4)
    assert compare(json.loads(json.dumps(saved)), train, 4) == Difference(0, 0)
    other = build_dataset(*place, 0, 2, cache_dir=str(tmp_path / "cache"))
    assert compare(saved, other, 4) == Difference(4 * LENGTH, 4 * LENGTH, is_bound=True)


def test_weights_of_pairs_are_refused():
    answers = {"prompt": say("u:q"), "chosen": say("a:yes"), "rejected": say("a:no")}
    heavy = [message | {"weight": 2} for message in answers["chosen"]]
    for row, message in (
        (answers | {"weight": 0}, "^weight=0: pairs of answers have no weights yet, remove it"),
        (answers | {"chosen": heavy}, "^a message's weight=2: pairs of answers have no weights"),
    ):
        with pytest.raises(BadRow, match=message):
            read_side("chosen", Record("x.jsonl", 1, json.dumps(row).encode()))
