"""What the assistant said is found in the text of templates, or the template is refused."""

import json

import pytest
from chats import TOKENS

from maxmeg.data.chat import template as chat
from maxmeg.data.chat import template_child, turns
from maxmeg.data.chat.template import ChatTemplate
from maxmeg.data.chat.turns import MARKS, BadRow, find_turns
from maxmeg.data.prepare.documents import Record

pytestmark = pytest.mark.usefixtures("renders_here")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}\n"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# template -> what of CHAT the assistant is found to have said
TEMPLATES = {
    "chatml": (CHATML, ["one <b><|im_end|>\n", "two 東<|im_end|>\n"]),
    "blocks": (BLOCKS, ["one <b></s>", "two 東</s>"]),
    "blocks in a macro": (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}[{% if m.role == 'assistant' %}{{ say(m) }}{% else %}"
        "{{ m.content }}{% endif %}]{% endfor %}",
        ["one <b>", "two 東"],
    ),
    "instructions": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        [" one <b></s>", " two 東</s>"],
    ),
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one <b>"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two 東"},
]
WITHOUT_EARLIER_THOUGHTS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content.split('</t>')[-1] if not loop.last else "
    "m.content }}\n{% endfor %}"
)


def record(row, line: int = 1) -> Record:
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return Record("chat.jsonl", line, data)


def found(text: str, *rows):
    template = ChatTemplate(text, "the template", TOKENS)
    return [t for _, t in find_turns(template, [record(r, i) for i, r in enumerate(rows, 1)])]


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_messages_of_the_assistant_have_a_loss(name):
    text, said = TEMPLATES[name]
    (one,) = found(text, {"messages": CHAT, "id": 7})
    assert [one.text[begin:end] for begin, end in one.spans] == said
    plain = ChatTemplate(text, "", TOKENS).answer([{"messages": CHAT, "add_generation_prompt": 0}])
    assert one.text == plain["texts"][0]


def test_tools_reach_the_template():
    text = "{{ tools }}{% for m in messages %}{{ m.role }}{% endfor %}"
    one, two = found(text, {"messages": CHAT, "tools": [1]}, {"messages": CHAT})
    assert one.text.startswith("[1]") and two.text.startswith("None")


REFUSED = {
    "earlier turns change": (WITHOUT_EARLIER_THOUGHTS, "turn 1 cannot be found: the text up to"),
    "another opening": (CHATML.replace("assistant\n", "assistant\n<t>"), "the text before it is"),
    "text changed afterwards": (
        "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}",
        "changes the text",
    ),
    "blocks in blocks": (
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        "are nested",
    ),
    "refusal": ("{{ raise_exception('no system') }}", "the template cannot render it: .*no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_do_not_tell(name):
    text, error = REFUSED[name]
    thinking = [*CHAT[:2], {"role": "assistant", "content": "<t>hm</t>one"}, *CHAT[3:]]
    (bad,) = found(text, {"messages": thinking})
    with pytest.raises(BadRow, match=error):
        raise bad


USER = {"role": "user", "content": "x"}
SAID = {"role": "assistant", "content": "y"}
ROWS = {
    "no json": (b'{"messages": [', "invalid JSON"),
    "no utf-8": (b'{"messages": "\xff"}', "invalid UTF-8 at byte 14"),
    "deep": (b"[" * 100_000, "too deeply|invalid JSON"),
    "a list": ([USER], 'an object with "messages"'),
    "no messages": ({"text": "x"}, 'an object with "messages"'),
    "none": ({"messages": []}, "is not a list of messages"),
    "no role": ({"messages": [{"content": "x"}]}, "is not an object like"),
    "unknown role": ({"messages": [USER, {"role": "bot", "content": ""}]}, "message 2 .* 'bot'"),
    "number": ({"messages": [{"role": "user", "content": 1}, SAID]}, "content '1', which is not"),
    "nothing": ({"messages": [{"role": "user"}, SAID]}, "content 'None'"),
    "no assistant": ({"messages": [USER]}, "no message has the role assistant"),
    "weight": ({"messages": [USER, {**SAID, "weight": 0}]}, "weight=0"),
    "tools": ({"messages": [USER, SAID], "tools": "x"}, "tools='x' is not a list"),
    "a mark": ({"messages": [USER, {**SAID, "content": MARKS[0]}]}, "are nested"),
}


def test_bad_rows_are_reported_and_the_others_kept():
    good = {"messages": [USER, SAID]}
    rows = [good, *(row for row, _ in ROWS.values()), good]
    first, *bad, last = found(BLOCKS, *rows)
    assert first == last and first.text[slice(*first.spans[0])] == "y</s>"
    for (_, error), name, turn in zip(ROWS.values(), ROWS, bad, strict=True):
        with pytest.raises(BadRow, match=error):
            assert isinstance(turn, BadRow), name
            raise turn


def test_calls_of_tools_have_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    text = "{% for m in messages %}{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    (one,) = found(text, {"messages": [USER, call, {"role": "tool", "content": "1"}]})
    assert [one.text[a:b] for a, b in one.spans] == ['[{"name": "f"}]']


def test_many_rows_in_small_parts(monkeypatch):
    picky = "{% if messages[-1].content == '5' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    monkeypatch.setattr(turns, "_TEXTS_AT_ONCE", 7)
    rows = [{"messages": [USER, {**SAID, "content": str(i)}]} for i in range(9)]
    texts = found(picky, *rows)
    assert isinstance(texts.pop(5), BadRow)
    said = [t.text[slice(*t.spans[0])] for t in texts]
    assert said == [f"{i}<|im_end|>\n" for i in range(9) if i != 5]


def test_rows_that_are_long_together(monkeypatch):
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 100)
    rows = [{"messages": [USER, {**SAID, "content": "y" * n}]} for n in (60, 50, 120, 10)]
    one, two, bad, last = found(BLOCKS, *rows)
    assert [t.text.count("y") for t in (one, two, last)] == [60, 50, 10]
    with pytest.raises(BadRow, match="renders more than 100 characters"):
        raise bad


def test_a_template_without_end_is_named_with_the_row(monkeypatch):
    def run_child(request: dict, source: str) -> dict:
        if "endless" in str(request["conversations"]):
            raise ValueError(f"{source} ran for more than 1 s of CPU")
        return template_child.render(request)

    monkeypatch.setattr(chat, "run_child", run_child)
    row = {"messages": [{**USER, "content": "endless"}, SAID]}
    with pytest.raises(ValueError, match=r"chat\.jsonl line 2: the template ran for more than 1"):
        found(CHATML, {"messages": [USER, SAID]}, row)
    with pytest.raises(
        ValueError, match="the template is not a valid template: TemplateSyntaxError"
    ):
        found("{% for %}", {"messages": [USER, SAID]})
