"""Chat templates: what they write, and what they may not do; tokens that end a text."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from chats import CHATS, PLAIN, TEMPLATES, TOKENS
from tokenizer_files import WORDS, folder

from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.schema import Config
from maxmeg.data.chat import template as chat
from maxmeg.data.chat.ends import end_tokens, log_ends
from maxmeg.data.chat.template import ChatTemplate, load_chat_template
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.inference.prompts import encoded

ONE = CHATS["one"]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, "the template", TOKENS)


def test_chats_are_rendered():
    first, second = template(PLAIN).render([ONE, CHATS["several"]])
    assert first == '<|user|>Hi "you" <b>é</b></s>\n<|assistant|>'
    assert second == (
        "<|system|>Be brief.</s>\n<|user|>banana</s>\n<|assistant|>a</s>\n<|user|>and?</s>\n"
        "<|assistant|>"
    )
    everything = template("\n".join(TEMPLATES.values())).render([CHATS["several"]])[0]
    assert "[Be brief.]1system" in everything and "TrueTrueFalse" in everything


def test_many_chats_are_rendered_in_order(monkeypatch):
    monkeypatch.setattr(chat, "AT_ONCE", 2)
    chats = [[{"role": "user", "content": str(i)}] for i in range(3)]
    assert template("{{ messages[0].content }}").render(chats) == ["0", "1", "2"]


HOSTILE = {
    "attribute": ("{{ ''.__class__ }}", "reads the attribute '__class__' of a str"),
    "attribute by filter": ("{{ messages | attr('__class__') }}", "reads the attribute"),
    "attribute by map": ("{{ messages | map(attribute='__len__') | list }}", "reads the attribute"),
    "attribute by format": ("{{ '{0.__class__}'.format(1) }}", "reads the attribute"),
    "globals of a function": ("{{ raise_exception.__globals__ }}", "reads the attribute"),
    "namespace": ("{% set n = namespace(__class__=1) %}", "sets the attribute '__class__'"),
    "change of a message": ("{{ messages.append(1) }}", "SecurityError"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "one long operation": ("{{ 9 ** (9 ** 9) }}", "more than 1 s of CPU"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    "memory": ("{{ ('a' * 10**10) | length }}", "needs more than 512 MiB"),
    "long text": ("{{ 'a' * 10**6 }}" * 20, "renders more than 16777216 characters"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_keeps_to_its_bounds(name, monkeypatch):
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    text, error = HOSTILE[name]
    with pytest.raises(ValueError, match=error) as raised:
        template(text).render([ONE])
    assert str(raised.value).startswith("the template ") and len(str(raised.value)) < 1000


def test_processes_are_used_again_and_replaced():
    def pids() -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda text: template(text).render([ONE]), ["{{ 1 }}"] * 40)
        assert [*found] == [["1"]] * 40
        return sorted(renderer.process.pid for renderer in chat._idle)

    before = pids()
    assert 0 < len(before) <= chat.MOST_IDLE
    with pytest.raises(ValueError, match="needs more than"):
        template("{{ ('a' * 10**10) | length }}").render([ONE])
    assert {*pids()} & {*before}
    for renderer in chat._idle:
        os.kill(renderer.process.pid, signal.SIGKILL)
        renderer.process.wait()
    assert {*pids()}.isdisjoint(before)
    chat.close_idle()
    assert not chat._idle


def test_the_failing_chat_is_numbered():
    picky = "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(ValueError, match=r"of conversation 2: TemplateError: no"):
        template(picky).render([ONE, CHATS["several"]])


def test_chat_templates_are_found_in_all_places(tmp_path):
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    tokenizer = folder(tmp_path / "a", {**special, "chat_template": named})
    found = load_chat_template(tokenizer)
    assert found.text == "d" and found.tokens == TOKENS
    folder(tmp_path / "a", {**special, "chat_template": "one"})
    assert load_chat_template(tokenizer).text == "one"
    (tmp_path / "a" / "chat_template.jinja").write_text(PLAIN)
    found = load_chat_template(load_tokenizer(f"huggingface:{tmp_path / 'a'}"))
    assert found.text == PLAIN and found.source.endswith("chat_template.jinja")


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({}, "has no chat template"),
        ({"chat_template": []}, r"none of the chat templates \[\] is named default"),
        ({"chat_template": ["x"]}, "has no name and template"),
        ({"chat_template": {"a": 1}}, "a chat template is text"),
        ({"chat_template": "x" * (chat.MAX_TEMPLATE + 1)}, "at most 1048576 characters"),
    ],
)
def test_folders_without_a_template(config, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        load_chat_template(folder(tmp_path, config))
    with pytest.raises(ValueError, match="tokenizer 'bytes' has no chat template"):
        load_chat_template(load_tokenizer("bytes"))


def test_special_tokens_of_the_text_are_tokens_and_none_is_added(tmp_path):
    tokenizer = folder(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    text = "{{ bos_token }}" + PLAIN
    found = template(text).render([[{"role": "user", "content": "a b"}]])[0]
    assert tokenizer.encode(found).tolist() == [0, 2, 4, 5, 1, 3]


def test_added_tokens_count_in_chats_alone(tmp_path):
    folder(tmp_path)
    spec = f"huggingface:{tmp_path / 'tokenizer.json'}?special_tokens=<|x|>"
    tokenizer = load_tokenizer(spec)
    (tmp_path / "t.jinja").write_text("<|x|>{{ messages[0].content }}")
    records = [{"messages": [{"role": "user", "content": "a b"}]}, {"prompt": "<|x|>a"}]
    config = Config(data=DataConfig(chat_template=str(tmp_path / "t.jinja")))
    chat, prompt = encoded(tokenizer, config, records)
    assert chat.tolist() == [len(WORDS), 4, 5]
    assert tokenizer.added["<|x|>"] not in prompt
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    assert load_chat_template(tokenizer).text == PLAIN
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    assert end_tokens(tokenizer, DataConfig(), 9) == (1,)
    ended = load_tokenizer(f"{spec}&eod=<|x|>")
    assert end_tokens(ended, DataConfig(), 9) == (ended.eod,) == (len(WORDS),)
    assert load_chat_template(ended).tokens == {"eos_token": "<|x|>", "bos_token": "<s>"}


POST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        word: {"id": word, "ids": [i], "tokens": [word]} for i, word in enumerate(WORDS[:2])
    },
}
BOS = {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("processor", "config", "opening"),
    [
        (None, None, ()),
        (POST, BOS, (0,)),
        (None, {**BOS, "add_bos_token": True}, ()),
        (POST, {**BOS, "add_bos_token": False}, (0,)),
    ],
)
def test_opening_tokens_follow_the_post_processor(processor, config, opening, tmp_path):
    tokenizer = folder(tmp_path, config, tokenizer={"post_processor": processor})
    assert tokenizer.opening == opening
    assert tokenizer.encode("a").tolist() == [4]


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (1,)),
        ({"config": {"eos_token_id": 3}}, (3,)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [2, 4]}}, (2, 4)),
        ({"config": {"eos_token_id": [3]}, "generation_config": {"eos_token_id": None}}, (3,)),
        ({"config": {}, "generation_config": {}}, (1,)),
    ],
)
def test_end_tokens_come_from_the_generation_config(files, ends, tmp_path):
    assert end_tokens(folder(tmp_path, {"eos_token": "</s>"}, **files), DataConfig(), 7) == ends
    assert end_tokens(load_tokenizer("bytes"), DataConfig(), 257) == (256,)


TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}END{% endfor %}"
BLOCK = (
    "{% for m in messages %}{% generation %}{{ m.content }}END{% endgeneration %}</s>{% endfor %}"
)
TURNS = {  # template, text in place of END -> end tokens, what is logged
    (TURN, "<|user|>\n"): ((1, 2), "turns with '<|user|>': it ends generation, as '</s>'"),
    (TURN, "</s>\n"): ((1,), "^$"),
    (TURN, ""): ((1,), "WARNING .*turn ends without a token, and generation ends at '</s>'"),
    (TURN, " b"): ((1,), "WARNING .*turn ends with ' b', which is no special token"),
    (BLOCK, "<|user|>"): ((1, 2), "turns with '<|user|>'"),
    (BLOCK, ""): ((1,), "WARNING .*turn ends without a token"),
}


@pytest.mark.parametrize("case", TURNS)
def test_the_end_of_trained_turns_ends_generation(case, tmp_path, caplog):
    tokenizer, (ends, logged) = folder(tmp_path, {"eos_token": "</s>"}), TURNS[case]
    (tmp_path / "t.jinja").write_text(case[0].replace("END", case[1]))
    data = DataConfig(chat_template=str(tmp_path / "t.jinja"))
    assert end_tokens(tokenizer, data, 7) == (1,)
    data.objective = Objective.sft
    assert end_tokens(tokenizer, data, 7) == ends
    with caplog.at_level("INFO", "maxmeg"):
        log_ends(tokenizer, data)
    assert re.search(logged, caplog.text.strip())


WRONG = [{"eos_token_id": i} for i in (7, -1, "2", True, 2.0, [], [1, 7], {"a": 1})]


@pytest.mark.parametrize("text", [*map(json.dumps, WRONG), "[1]", "{", '"x"'])
def test_wrong_end_tokens_are_shown(text, tmp_path):
    tokenizer = folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    error = "eos_token_id=.* 0 to 6|is not valid JSON|not an object"
    with pytest.raises(ValueError, match=rf"generation_config.json.*({error})"):
        end_tokens(tokenizer, DataConfig(), 7)
