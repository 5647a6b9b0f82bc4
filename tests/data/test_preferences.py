"""Preference pairs: rows of the usual formats, what of them has a loss, and what is refused."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from maxmeg.data.chat.answers import prepare
from maxmeg.data.chat.preferences import PREFERENCES, Preferences
from maxmeg.data.tokenizers.load import load_tokenizer

END, LENGTH = 256, 24
CHATML = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + ';' }}{% endgeneration %}"
    "{% else %}{{ m.content + ';' }}{% endif %}{% endfor %}"
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
    "whole conversations beside their prompt": (
        {"prompt": "q", "chosen": say("u:q", "a:yes"), "rejected": say("u:q", "a:no")},
        [("u:q;a:yes;", "yes;"), ("u:q;a:no;", "no;")],
    ),
    "messages and texts": (
        {"messages": say("u:q", "a:b", "u:c"), "chosen": "yes", "rejected": "no"},
        [("u:q;a:b;u:c;a:yes;", "yes;"), ("u:q;a:b;u:c;a:no;", "no;")],
    ),
    "several turns": (
        {"prompt": say("u:q"), "chosen": say("a:b", "u:c", "a:d"), "rejected": say("a:no")},
        [("u:q;a:b;u:c;a:d;", "b;d;"), ("u:q;a:no;", "no;")],
    ),
    "texts": (
        {"prompt": "q: ", "chosen": "yes", "rejected": "no"},
        [("q: yes", "yes$"), ("q: no", "no$")],
    ),
    "texts that begin alike": (
        {"chosen": "q is yes", "rejected": "q is no"},
        [("q is yes", " yes$"), ("q is no", " no$")],
    ),
}
BAD = {
    "the same": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
    "one missing": ({"prompt": "q", "chosen": "a"}, '"chosen" and "rejected"'),
    "mixed": ({"chosen": "a", "rejected": say("a:b")}, "both be texts or both lists"),
    "numbers": ({"chosen": 1, "rejected": 2}, "both be texts or both lists"),
    "no text": ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt='3' is not text"),
    "nothing shared": ({"chosen": say("a:x"), "rejected": say("a:y")}, "begin with 0 equal ones"),
    "another prompt": (
        {"prompt": "z", "chosen": say("u:q", "a:x"), "rejected": say("u:q", "a:y")},
        "'z' is not one of them",
    ),
    "not of the assistant": (
        {"prompt": say("u:q"), "chosen": say("u:x"), "rejected": say("a:y")},
        "no message has the role assistant",
    ),
    "an unknown role": (
        {"prompt": [{"role": "x", "content": ""}], "chosen": say("a:x"), "rejected": say("a:y")},
        "unknown role 'x'",
    ),
}


def opened(tmp_path, rows: list[dict], template=CHATML, length=LENGTH, too_long="drop", index=1):
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = (load_tokenizer("bytes"), tmp_path / "cache", str(tmp_path / "t.jinja"))
    made = prepare(str(tmp_path / "pairs.jsonl"), PREFERENCES, *arguments)
    split = ",".join(str(int(i == index)) for i in range(3))
    return Preferences([made], split, index, length, too_long, 257, END, seed=3)


@pytest.mark.parametrize("template", [CHATML, BLOCKS], ids=["chatml", "blocks"])
def test_preference_formats_are_read(tmp_path, template):
    data = opened(tmp_path, [row for row, _ in ROWS.values()], template)
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
    again = pickle.loads(pickle.dumps(data)).batch(np.arange(len(ROWS)))
    assert all((again[name] == batch[name]).all() for name in batch)


def test_bad_rows_are_named_by_line(tmp_path):
    good, _ = ROWS["texts"]
    with pytest.raises(ValueError) as raised:
        opened(tmp_path, [good, *(row for row, _ in BAD.values())])
    lines = str(raised.value).splitlines()
    for number, (line, (_, error)) in enumerate(zip(lines[:8], BAD.values(), strict=False), 2):
        assert f"line {number}: " in line and error in line
    assert lines[-2:] == ["and 1 more", "fix these rows or remove them"]


def test_long_pairs_are_dropped_or_cut_together(tmp_path):
    def pair(prompt: int, chosen: int, rejected: int) -> dict:
        return {"prompt": "p" * prompt, "chosen": "c" * chosen, "rejected": "r" * rejected}

    rows = [pair(4, 4, 3), pair(4, 20, 3), pair(4, 3, 20), pair(20, 1, 2), pair(4, 12, 12)]
    data = opened(tmp_path, rows, length=16)
    assert data.counts == "2 whole, 0 truncated, 3 dropped" and data.samples_per_epoch == 2
    data = opened(tmp_path, rows, length=16, too_long="truncate")
    assert data.counts == "2 whole, 2 truncated, 1 dropped"
    losses = data.batch(np.arange(4))["loss_mask"].sum(1).astype(int).tolist()
    assert losses == [5, 4, 13, 4, 4, 13, 13, 13]
    assert data.num_tokens == 8 + 7 + 16 + 7 + 7 + 16 + 16 + 16
    with pytest.raises(ValueError, match=r"is left \(0 whole, 0 truncated, 5 dropped\)"):
        opened(tmp_path, rows, length=5)


def test_every_epoch_has_every_pair_in_an_order_of_its_own(tmp_path):
    rows = [{"prompt": "p", "chosen": f"{i:02}", "rejected": f"-{i}"} for i in range(40)]
    data = opened(tmp_path, rows, index=0)
    numbers = data.batch(np.arange(120))["targets"][::2, :2].tolist()
    epochs = [[bytes(number) for number in numbers[i : i + 40]] for i in (0, 40, 80)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 40 for epoch in epochs)
    with pytest.raises(ValueError, match="sample -1 is negative"):
        data.batch(np.array([-1]))
    assert len(list(Path(tmp_path / "cache").glob("pairs-*"))) == 1
