"""`maxmeg preprocess chats`: rows of messages that are trained as the rows they were made of."""

import json

import pytest
from chats import TOKENS

from maxmeg import preprocess
from maxmeg.data.chat.template import ChatTemplate
from maxmeg.data.chat.turns import find_turns
from maxmeg.data.prepare.documents import read_records

pytestmark = pytest.mark.usefixtures("renders_here")
SHOWS_ALL = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:"
    "{% generation %}{{ m | tojson }};{% endgeneration %}{% endfor %}"
)
SAID = {"role": "assistant", "content": "c", "weight": 2}
CALLED = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}', "weight": 0.5}
TOOLS = [{"name": "f", "parameters": {}}]
ROWS = {
    "Alpaca": {
        "instruction": "a",
        "input": "é\n",
        "output": "c",
        "system": "s",
        "history": [["d", "e"]],
        "weight": 0,
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}, CALLED, {"from": "gpt", "value": ""}],
        "tools": json.dumps(TOOLS),
        "weight": 2.5,
        "id": 7,
    },
    "prompt and completion": {
        "prompt": [{"role": "user", "content": ["x", "y"]}, SAID],
        "completion": [{"role": "user", "content": "d"}, SAID],
    },
    "messages": {"messages": [{"role": "developer", "content": "x", "name": None}, SAID]},
}


def turns(path) -> list:
    template = ChatTemplate(SHOWS_ALL, "the template", TOKENS)
    found = [of_row for _, of_row in find_turns(template, read_records([str(path)]))]
    return [[(turn.text, turn.spans) for turn in of_row] for of_row in found]


def test_chats_of_every_form_become_messages_with_the_same_tokens_and_weights(tmp_path, capsys):
    source, output = tmp_path / "a.json", tmp_path / "b.jsonl"
    source.write_text(json.dumps([*ROWS.values()]))
    assert preprocess.main(["chats", f"--input={source}", f"--output={output}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("wrote 4 conversations (1 Alpaca, 1 ShareGPT, 1 prompt and completion,")
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert rows[0] == {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": "e"},
            {"role": "user", "content": "a\n\né\n"},
            {"role": "assistant", "content": "c"},
        ],
        "weight": 0,
    }
    assert [message.get("weight") for message in rows[1]["messages"]] == [None, 0.5, None]
    assert [message.get("weight") for message in rows[2]["messages"]] == [None, 0, None, 2]
    trained = turns(source)
    assert turns(output) == trained and list(map(len, trained)) == [0, 1, 1, 1]
    assert preprocess.main(["chats", f"--input={output}", f"--output={tmp_path}/c.jsonl"]) == 0
    assert (tmp_path / "c.jsonl").read_text("utf-8") == output.read_text("utf-8")


def test_rows_that_cannot_be_converted_are_named_or_left_out(tmp_path, capsys):
    good, bad = ROWS["ShareGPT"], ROWS["Alpaca"]
    lines = [good, bad | {"output": 3}, bad | {"weight": "2"}, bad | {"output": "\ud800"}]
    lines += [good | {"conversations": [CALLED, {"from": "x", "value": ""}]}]
    source, output = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    errors = (
        "line 2: output=3 is not text",
        "line 3: weight='2' must be 0, or a number",
        "line 4: the conversation has half a surrogate pair",
        "line 5: conversations[1].from='x' is unknown",
    )
    command = ["chats", f"--input={source}", f"--output={output}"]
    assert preprocess.main(command) == 2
    shown = capsys.readouterr().err
    assert all(f"{source} {error}" in shown for error in errors) and not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert preprocess.main([*command, "--skip_bad_lines"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("4 bad rows left out\nwrote 1 conversations (1 ShareGPT)")
    assert all(f"left out: {source} {error}" in shown.err for error in errors)
    for words, error in (
        ([f"--output={tmp_path}/b.json"], "must be named .jsonl"),
        ([f"--input={__file__}"], "is not named .jsonl"),
    ):
        assert preprocess.main([*command, *words]) == 2
        assert error in capsys.readouterr().err
