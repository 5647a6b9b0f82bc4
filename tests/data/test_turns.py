"""What the assistant said is found in the text of templates, or the template is refused."""

import itertools
import json
import re

import numpy as np
import pytest
from chats import TOKENS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from maxmeg.config.data import DataConfig
from maxmeg.config.schema import Config
from maxmeg.data.chat import template as chat
from maxmeg.data.chat import template_child, turns
from maxmeg.data.chat.answers import encode_turns
from maxmeg.data.chat.conversation import normalized
from maxmeg.data.chat.template import ChatTemplate, load_chat_template
from maxmeg.data.chat.turns import MARKS, BadRow, find_turns
from maxmeg.data.prepare.documents import Record
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.prompts import encoded

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
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one <b>"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two 東"},
]
QWEN3 = (  # earlier turns lose their thoughts
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}{% for m in messages %}<|im_start|>"
    "{{ m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.content.split('a')[0] }}</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EACH = "{% for m in messages %}{{ m.role }}-{{ m.content }}~{% endfor %}"
EACH += "{% if add_generation_prompt %}assistant-{% endif %}"
TEMPLATES = {
    "chatml": CHATML,
    "blocks": BLOCKS + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "macro": "{% macro say(m) %}{% generation %}{{ m.content }}.{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}[{{ say(m) if m.role == 'assistant' else m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[{% endif %}",
    "history and blocks": QWEN3,
    "history": QWEN3.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "space": EACH.replace("-", ": ").replace("~", "\n\n"),
    "lines": EACH.replace("-", "\n\n").replace("~", "</s>"),
    "instructions": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}"
    "{% endfor %}",
    "system in the last question": "{% for m in messages %}{% if m.role == 'assistant' %}"
    " {{ m.content }}</s>{% else %}[INST]{{ 'S' * loop.last }}{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}",
}


def record(row, line: int = 1) -> Record:
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return Record("chat.jsonl", line, data)


def found(text: str, *rows):
    template = ChatTemplate(text, "the template", TOKENS)
    turns = find_turns(template, [record(r, i) for i, r in enumerate(rows, 1)])
    return [t[0] if isinstance(t, list) and len(t) == 1 else t for _, t in turns]


REFUSED = {
    "another opening": (CHATML.replace("assistant\n", "assistant\n<t>"), "turn 2 cannot be found"),
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


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_a_message_of_weight_0_has_no_loss(text):
    """OpenAI's format: the turn is in the text, as the others are."""
    chat = [*CHAT, {"role": "user", "content": "3?"}, {"role": "assistant", "content": "three"}]
    every = trained_texts(text, chat)
    assert len(every) == 3
    for left_out, number in enumerate((2, 4, 6)):
        weighted = [m | {"weight": int(i != number)} for i, m in enumerate(chat)]
        rest = [turn for i, turn in enumerate(every) if i != left_out]
        assert trained_texts(text, weighted) == rest


WRONG = (-1, float("nan"), float("inf"), 1e-7, 1001, "2", True, [1])
PLACES = {  # the field that an error names -> a row with a weight there
    "weight": lambda weight: {"messages": [USER, SAID], "weight": weight},
    "messages[1].weight": lambda weight: {"messages": [USER, {**SAID, "weight": weight}]},
    "conversations[0].weight": lambda weight: shared(
        {"from": "gpt", "value": "y", "weight": weight}
    ),
}


@pytest.mark.parametrize("field", PLACES)
def test_a_weight_that_is_no_weight_is_named_with_its_field(field):
    rows = [PLACES[field](weight) for weight in WRONG]
    for weight, error in zip(WRONG, found(CHATML, *rows), strict=True):
        wanted = f"{field}={weight!r} must be 0, or a number from 1e-06 to 1000"
        assert (
            isinstance(error, BadRow) and str(error).startswith(wanted) and "\n" not in str(error)
        )
    for weight, wanted in ((None, 1), (1000, 1000), (1e-6, 1e-6), (2, 2)):  # null is absent
        (turn,) = found(CHATML, PLACES[field](weight))
        assert [span[2] for span in turn.spans] == [wanted]


def test_turns_of_one_block_have_one_weight():
    template = (
        "{% generation %}{% for m in messages %}{{ m.content }};{% endfor %}{% endgeneration %}"
    )
    rows = [{"messages": [SAID, {**SAID, "weight": weight}]} for weight in (1, 2)]
    one, two = found(template, *rows)
    assert one.spans == [(0, 4, 1)] and "turns of different weights" in str(two)


def trained_texts(template: str, chat: list) -> list[str]:
    (turns,) = found(template, {"messages": chat})
    turns = turns if isinstance(turns, list) else [turns]
    return [turn.text[begin:end] for turn in turns for begin, end, _ in turn.spans]


USER = {"role": "user", "content": "x"}
SAID = {"role": "assistant", "content": "y"}


def shared(turn) -> dict:
    return {"conversations": [turn]}


ROWS = {
    "no json": (b'{"messages": [', "invalid JSON"),
    "no utf-8": (b'{"messages": "\xff"}', "invalid UTF-8 at byte 14"),
    "deep": (b"[" * 100_000, "too deeply|invalid JSON"),
    "a list": ([USER], "a row must be an object, not "),
    "a null": (
        {"instruction": "x", "output": None},
        r"its fields \(instruction; null: output\) fit no form of a chat",
    ),
    "tools unread": (
        {"messages": [USER, SAID], "tools": [{"type": "function", "function": {"name": "f"}}]},
        "the chat template does not write tools",
    ),
    "no form": ({"text": "x", "output": ""}, r"its fields \(text, output\) fit no form of a chat"),
    "none": ({"messages": []}, r"messages=\[\] is not a list of messages"),
    "a text": ({"messages": "x"}, "messages='x' is not JSON"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role, a text"),
    "unknown role": ({"messages": [{**USER, "role": "bot"}, SAID]}, "0.*role='bot' is unknown"),
    "an image": (
        {"messages": [{**USER, "content": ["a", {"type": "image"}]}, SAID]},
        r"messages\[0\]\.content\[1\]=\{'type': 'image'\} is not a text part",
    ),
    "nothing": ({"messages": [{"role": "user"}, SAID]}, r"messages\[0\] has no content"),
    "silence": ({"messages": [USER, {**SAID, "content": None, "tool_calls": []}]}, "no content"),
    "no assistant": ({"messages": [USER]}, "no message has the role assistant"),
    "no weight": ({"messages": [USER, {**SAID, "weight": 0}]}, "a weight above 0"),
    "a weight of the user": (
        {"messages": [{**USER, "weight": 0.5}, SAID]},
        r"messages\[0\].weight=0.5: only the assistant's messages have a loss",
    ),
    "tools": ({"messages": [USER, SAID], "tools": "x"}, "tools='x' is not JSON"),
    "a speaker": (shared({"from": "x", "value": ""}), r"conversations\[0\]\.from='x' is unknown"),
    "no call": (shared({"from": "function_call", "value": "[1]"}), r"value='\[1\]' is not a call"),
    "a prompt": ({"prompt": "", "completion": []}, r"prompt='', completion=\[\]: give two texts"),
    "a mark": ({"messages": [USER, {**SAID, "content": MARKS[0]}]}, "are nested"),
}


def test_bad_rows_are_reported_and_the_others_kept():
    good = {"messages": [USER, SAID]}
    rows = [good, *(row for row, _ in ROWS.values()), good]
    first, *bad, last = found(BLOCKS, *rows)
    assert first == last and first.text[slice(*first.spans[0][:2])] == "y</s>"
    for (_, error), name, turn in zip(ROWS.values(), ROWS, bad, strict=True):
        with pytest.raises(BadRow, match=error):
            assert isinstance(turn, BadRow), name
            raise turn


CALLS = [{"name": "f", "arguments": {}}, {"function": {"name": "f", "arguments": "{}"}}]
TOOLS = [{"name": "f", "parameters": {}}, {"function": {"name": "f", "parameters": "{}"}}]
EVERY_FIELD = [
    {"messages": [{**USER, "name": "n"}, {**SAID, "tool_calls": CALLS}], "tools": TOOLS},
    {"conversations": [{"from": "human", "value": "x"}, SAID], "system": "s", "tools": TOOLS},
    {"instruction": "x", "input": "x", "output": "y", "history": [["x", "y"]], "system": "s"},
    {"prompt": [USER], "completion": [{**SAID, "content": ["y", {"type": "text", "text": "y"}]}]},
]


def with_numbers(value, name: str = ""):
    """A number in place of each part of a value: (the name of the field, the value)."""
    for key in value if isinstance(value, dict) else range(len(value)):
        field = f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}"
        deeper = with_numbers(value[key], field) if isinstance(value[key], dict | list) else ()
        for place, item in [(field, 1.5), *deeper]:
            changed = {**value} if isinstance(value, dict) else [*value]
            changed[key] = item
            yield place, changed


@pytest.mark.parametrize("row", EVERY_FIELD, ids=lambda row: next(iter(row)))
def test_a_wrong_type_is_named_with_its_field(row):
    names, wrong = zip(*with_numbers(row), strict=True)
    good, *bad = found(BLOCKS + "{% if tools %}{% endif %}", row, *wrong)
    assert not isinstance(good, BadRow) and len(bad) > 4
    for name, error in zip(names, bad, strict=True):
        field = re.sub(r"(.)(\.\w+|\[\d\])$", r"\1", name[1:])  # or the one around it
        assert isinstance(error, BadRow) and field in str(error) and "\n" not in str(error), name


TEXT = st.text('ab"{é \n', max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=2)
ASKING = st.sampled_from(["user", "tool"])


@st.composite
def spellings(draw):
    """A row as templates take it, and the same row in another spelling."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    def shuffled(fields: dict, *nulls: str) -> dict:
        fields = {name: None for name in nulls if draw(st.booleans())} | fields
        return dict(draw(st.permutations([*fields.items()])))

    messages, theirs = [], []
    roles = draw(st.lists(st.sampled_from(["system", "user", "tool"]), max_size=3))
    for role in (*roles, "assistant"):
        text, arguments = draw(TEXT), draw(st.lists(OBJECTS, max_size=2)) * (role == "assistant")
        calls, fields = [], {"role": one_of(role, "developer") if role == "system" else role}
        for known in arguments:
            absent = [] if known else [None, ""]
            function = {"name": "f", "arguments": one_of(known, json.dumps(known), *absent)}
            flat = shuffled(function, "strict")
            calls.append(shuffled({"id": "1", **one_of(flat, {"function": flat})}, "type"))
        absent = [None] if calls and not text else []
        parts = [text[:2], {"type": "text", "text": text[2:], "image_url": None}]
        fields |= {"content": one_of(text, parts, *absent)}
        fields |= {"tool_calls": calls} if calls else {}
        thought = draw(st.sampled_from([{}, {"reasoning": text}, {"reasoning_content": text}]))
        fields |= thought
        theirs.append(shuffled(fields, "name", "tool_calls", "tool_call_id", "weight"))
        calls = [{"name": "f", "arguments": known} for known in arguments]
        calls = [{"id": "1", "type": "function", "function": call} for call in calls]
        messages.append({"role": role, "content": text} | ({"tool_calls": calls} if calls else {}))
        messages[-1] |= {"reasoning_content": text, "reasoning": text} if thought else {}
    functions = [{"name": "f", "parameters": s} for s in draw(st.lists(OBJECTS, max_size=2))]
    tools = [shuffled(f | {"parameters": json.dumps(f["parameters"])}) for f in functions]
    tools = [one_of(f, {"function": f, "type": None}) for f in tools]
    row = {
        "messages": theirs,
        "tools": one_of(tools, json.dumps(tools)) if tools else one_of(None, []),
    }
    tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": messages, "tools": tools or None}, shuffled(row)


SHOWS_ALL = (
    "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}.{% endgeneration %}{% endif %}{% endfor %}"
)


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(spellings())
def test_every_spelling_of_a_conversation_is_the_same_text(tmp_path, rows):
    plain, _ = rows
    one, two = found(SHOWS_ALL, *rows)
    shown = [json.dumps(v, ensure_ascii=False) for v in (plain["tools"], *plain["messages"])]
    assert one == two and normalized(**plain) == (plain["messages"], plain["tools"])
    assert one.text == "".join(shown) + plain["messages"][-1]["content"] + "."
    (tmp_path / "t.jinja").write_text(SHOWS_ALL)
    config = Config(data=DataConfig(chat_template=str(tmp_path / "t.jinja")))
    ids = encoded(load_tokenizer("bytes"), config, rows)
    assert [bytes(i.tolist()).decode() for i in ids] == [one.text] * 2


@pytest.fixture(scope="module")
def joining(tmp_path_factory):
    """A tokenizer with tokens of two line ends and of a space before a letter."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "Ġa"]
    merges = [("Ċ", "Ċ"), ("Ġ", "a")]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("joining") / "tokenizer.json"
    made.save(str(path))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return load_tokenizer(f"huggingface:{path}")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(says=st.lists(st.tuples(ASKING, TEXT, TEXT), min_size=1, max_size=3))
def test_every_turn_follows_the_tokens_of_its_prompt(tmp_path, joining, name, says):
    (tmp_path / "t.jinja").write_text(TEMPLATES[name])
    config = Config(data=DataConfig(chat_template=str(tmp_path / "t.jinja")))
    pairs = [[{"role": r, "content": f"q{q}"}, {**SAID, "content": a}] for r, q, a in says]
    messages = [*itertools.chain(*pairs)]
    template = load_chat_template(joining, config.data.chat_template)
    ((_, turns),), actual = find_turns(template, [record({"messages": messages})]), {}
    for ids, has_loss in encode_turns(joining, turns):
        edges = np.flatnonzero(np.diff(has_loss, prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2):
            assert tuple(ids[:begin]) not in actual
            actual[tuple(ids[:begin])] = joining.decode(ids[begin:end])
    ends = range(1, len(messages), 2)
    prompts = encoded(joining, config, [{"messages": messages[:end]} for end in ends])
    befores = template.render([messages[:end] for end in ends])
    wholes = template.render([messages[: end + 1] for end in ends], add_generation_prompt=False)
    assert len(actual) == len(says)
    for ids, before, whole, (*_, said) in zip(prompts, befores, wholes, says, strict=True):
        text = actual[tuple(ids)]
        if "loop.last" in TEMPLATES[name]:  # the question changes with the answer
            assert text == f" {said}</s>"
            continue
        assert whole in (before + text, before + text + "\n", before + text + "]")


def test_many_and_long_rows_in_small_parts(monkeypatch):
    picky = (
        "{% if messages[-1].content == 'yyyyy' %}{{ raise_exception('no') }}{% endif %}" + BLOCKS
    )
    monkeypatch.setattr(turns, "_TEXTS_AT_ONCE", 7)
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 100)
    sizes = [0, 60, 50, 5, 120, *range(10, 14)]
    texts = found(picky, *({"messages": [USER, {**SAID, "content": "y" * n}]} for n in sizes))
    said = [isinstance(t, turns.Turns) and t.text.count("y") for t in texts]
    assert said == [n if n not in (5, 120) else False for n in sizes]
    for bad, error in ((texts[3], "no"), (texts[4], "renders more than 100 characters")):
        with pytest.raises(BadRow, match=error):
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
