"""Tool calls: read from texts of each form, and the same whether a text comes in pieces or not."""

import itertools
import json
import re
import sys

import pytest

from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.grammar import Grammars
from maxmeg.server.answers import ChatChoice
from maxmeg.server.fields import Chat, Function, Message, PlainFormat, Tool
from maxmeg.server.tools import tool_form
from maxmeg.server.worker import Update

GRAMMARS = Grammars(load_tokenizer("bytes"), 257, (256,))
HERMES = tool_form("{{ tools }} <tool_call>")
MISTRAL = tool_form("[AVAILABLE_TOOLS] [TOOL_CALLS]")
LLAMA = tool_form('{% if tools %} {"name": ..., "parameters": ...}')
A, B = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {}}'
MARKS = "<tool_call>", "</tool_call>"
CALLS = [("a", {"x": 1}), ("b", {})]
TEXTS = [
    (HERMES, f"<tool_call>\n{A}\n</tool_call>", "", CALLS[:1]),
    (HERMES, f"Let me\n<tool_call>{A}</tool_call>\n<tool_call>{B}</tool_call>", "Let me", CALLS),
    (HERMES, "no <tool_call>{broken</tool_call> ", "no <tool_call>{broken</tool_call> ", []),
    (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (HERMES, A.join(MARKS).replace("1", "1e999"), "", [("a", {"x": sys.float_info.max})]),
    (HERMES, A.join(MARKS).replace("1", "NaN"), A.join(MARKS).replace("1", "NaN"), []),
    (HERMES, f"<tool_call>{A}", f"<tool_call>{A}", []),
    (MISTRAL, f"[TOOL_CALLS] [{A}, {B}]", "", CALLS),
    (LLAMA, A.replace("arguments", "parameters"), "", CALLS[:1]),
    (LLAMA, f"{A}; {B}".replace("arguments", "parameters"), "", CALLS),
    (LLAMA, "[] is empty", "[] is empty", []),
    (LLAMA, "say {1}", "say {1}", []),
]


def as_pairs(calls):
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_read(form, text, content, calls):
    found = form.parse(text, True)
    assert (found[0], as_pairs(found[1])) == (content, calls)
    ids = set()
    for count in (1, len(calls)):  # in a stream, of one call or of all
        choice = ChatChoice(load_tokenizer("bytes"), form, is_single=count < 2)
        updates = [Update(0, text[i : i + 1], [], [], [], [], [], "", "") for i in range(len(text))]
        updates.append(Update(0, "", [], [], [], [], [], "stop", ""))
        deltas = [choice.update(update, False)["delta"] for update in updates]
        new = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(delta.get("content", "") for delta in deltas) == content
        assert as_pairs(call["function"] for call in new) == calls[:count]
        assert [call["index"] for call in new] == [*range(len(new))]
        ids |= {call["id"] for call in new}
    assert len(ids) == len(calls[:1]) + len(calls)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)


def test_templates_without_a_known_form_have_none():
    assert tool_form("{{ messages }}") is None
    assert tool_form("{{ tools }} <tool_call> <function=name>") is None


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
def test_calls_follow_schemas_with_pointers(form):
    """Two schemas contain themselves, and have different definitions of one name."""
    schema, found = {"properties": {"x": {"$ref": "#/$defs/P"}, "y": {"$ref": "#"}}}, []
    numbers, booleans = (schema | {"$defs": {"P": {"type": t}}} for t in ("integer", "boolean"))
    functions, texts = [("a", numbers), ("b", booleans)], ('{"y": {"x": 1}}', '{"x": true}', "1")
    for is_single, name, arguments in itertools.product((False, True), "ab", texts):
        call = f'{{"name": "{name}", "{form.arguments}": {arguments}}}'
        text = f"[{call}]" if form.is_list else f"\n{call}\n" if form.closing else call
        matcher = GRAMMARS.compile("lark", form.grammar(functions, is_single)).start
        tokens = [*(form.opening + text + form.closing).encode()]
        if matcher.validate_tokens(tokens) == len(tokens):
            found.append((name, arguments))
    assert found == [*zip("ab", texts, strict=False)] * 2


def test_json_that_was_asked_for_is_no_call():
    tools = [Tool(type="function", function=Function(name="a"))]
    chat = Chat(messages=[Message(role="user", content="q")], tools=tools)
    wanted = PlainFormat(type="json_object")
    assert chat.may_call and not chat.model_copy(update={"response_format": wanted}).may_call
