"""Tool calls: read from texts of each form, and the same whether a text comes in pieces or not."""

import json

import pytest

from maxmeg.server.fields import Function, Tool
from maxmeg.server.tools import schemas, tool_form

HERMES = tool_form("{{ tools }} <tool_call>")
MISTRAL = tool_form("[AVAILABLE_TOOLS] [TOOL_CALLS]")
LLAMA = tool_form('{% if tools %} {"name": ..., "parameters": ...}')
A, B = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {}}'
CALLS = [("a", {"x": 1}), ("b", {})]
TEXTS = [
    (HERMES, f"<tool_call>\n{A}\n</tool_call>", "", CALLS[:1]),
    (HERMES, f"Let me\n<tool_call>{A}</tool_call>\n<tool_call>{B}</tool_call>", "Let me", CALLS),
    (HERMES, "no <tool_call>{broken</tool_call> ", "no <tool_call>{broken</tool_call> ", []),
    (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
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
    for end in range(len(text)):  # what was sent before more text came cannot be taken back
        before, some = form.parse(text[:end], False)
        assert content.startswith(before)
        assert found[1][: len(some)] == some


def test_templates_without_a_known_form_have_none():
    assert tool_form("{{ messages }}") is None
    assert tool_form("{{ tools }} <tool_call> <function=name>") is None


def test_a_named_tool_must_be_there():
    tools = [Tool(type="function", function=Function(name="a"))]
    assert schemas(tools, "a") == {"a": {}}
    with pytest.raises(ValueError, match=r"names 'c', and tools has \['a'\]"):
        schemas(tools, "c")
