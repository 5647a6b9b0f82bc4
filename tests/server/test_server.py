"""A server, asked over its socket by OpenAI's client: one for all tests of this file."""

import contextlib
import itertools
import json
import re
import socket
import time
import urllib.parse
from pathlib import Path
from typing import Literal

import openai
import pytest
from lora_runs import write_lora_run
from pydantic import create_model
from threaded import serving_here
from tiny_servers import ENDLESS, LENGTH, SPECIAL, make_run

from maxmeg import serve
from maxmeg.__main__ import main
from maxmeg.config import files
from maxmeg.config.options import Serve
from maxmeg.inference.engine import Engine
from maxmeg.inference.sampling import Sampling

KEY = "a key"
NAME = "tiny"
ADAPTERS = "polite", "terse"
CHAT = [{"role": "user", "content": "Hi 😀"}]
OWN_TEMPLATE = "{{ messages[0].content }}{{ raise_exception('one alone') if messages[1:] }}"
TOWNS = {"weather": ("Rome", "Oslo"), "time": ("Bonn", "Graz")}
PLACES = [create_model("Place", town=(Literal[names], ...)) for names in TOWNS.values()]
TOOLS = [
    openai.pydantic_function_tool(create_model(name, place=(place, ...)))
    for name, place in zip(TOWNS, PLACES, strict=True)
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def adapters(run) -> str:
    """The option that serves ADAPTERS."""
    (run.parent / "own.jinja").write_text(OWN_TEMPLATE)
    for rank, name in enumerate(ADAPTERS, 1):
        config = files.load(run / "config.yaml")
        config.checkpoint.init_from = str(run)
        config.data.chat_template = str(run.parent / "own.jinja") if rank > 1 else ""
        write_lora_run(run.parent / name, config, rank=rank, targets=("mixers.*",))
    return "--adapters=" + ",".join(f"{name}={run.parent / name}" for name in ADAPTERS)


@pytest.fixture(scope="module")
def server(run, adapters):
    log = f"--log={run.parent}/log.jsonl"
    flags = (log, "--max_body_mb=0.1", "--max_grammar=2000", "--max_queue=28", adapters)
    with serving_here(run, *flags, key=KEY) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as connected:
        yield connected


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stream_is_the_whole_reply_in_pieces(client):
    for settings in ({"seed": 1}, {"seed": 2, "n": 2, "stop": ["a", "é", "7"]}, {"temperature": 0}):
        request = {"model": NAME, "prompt": "Hi 😀", "max_tokens": 40, "logprobs": 1} | settings
        whole = client.completions.create(**request)
        chunks = [*client.completions.create(**request, stream=True)]
        for choice in whole.choices:
            mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
            assert "".join(piece.text for piece in mine) == choice.text
            logprobs = [x for c in mine if c.logprobs for x in c.logprobs.token_logprobs]
            begins = [x for c in mine if c.logprobs for x in c.logprobs.text_offset]
            assert logprobs == choice.logprobs.token_logprobs
            assert begins == choice.logprobs.text_offset
            assert mine[-1].finish_reason == choice.finish_reason
            assert not any(stop in choice.text for stop in settings.get("stop", ()))
        assert len(chunks) > 20 or "stop" in settings


def test_prompts_are_text_or_ids_alone_or_several(client, server):
    ids = server.ask("/tokenize", {"prompt": "Hi"}).json["tokens"]
    assert server.ask("/detokenize", {"tokens": ids}).json == {"prompt": "Hi"}
    texts = []
    for prompt in ("Hi", ids, ["Hi"], [ids]):
        reply = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, seed=3)
        texts += [reply.choices[0].text]
        assert reply.usage.prompt_tokens == 2 and reply.usage.completion_tokens <= 8
    assert len(set(texts)) == 1
    both = client.completions.create(model=NAME, prompt=["Hi", "Ho"], max_tokens=8, seed=3)
    assert both.choices[0].text == texts[0] and len(both.choices) == 2


def test_an_end_token_is_one_of_many_on_request(server):
    body = {"prompt": "a", "max_tokens": 8, "logit_bias": dict.fromkeys(("257", "258"), 100)}
    found = [server.ask("/v1/completions", body | {"ignore_eos": on}).json for on in (False, True)]
    assert [f["choices"][0]["finish_reason"] for f in found] == ["stop", "length"]
    assert found[1]["usage"]["completion_tokens"] == 8


def test_a_prompt_is_scored_as_it_was_written(client):
    """The log-probabilities of greedy tokens are those of the same tokens in a prompt."""
    request = {"model": NAME, "temperature": 0, "logprobs": 2, "echo": True}
    new = client.completions.create(**request, prompt="Hi", max_tokens=12).choices[0]
    assert new.logprobs.token_logprobs[0] is None and new.logprobs.top_logprobs[0] is None
    ids = client.completions.create(
        model=NAME, prompt="Hi", temperature=0, max_tokens=12, extra_body={"top_k": 1}
    )
    assert new.text == "Hi" + ids.choices[0].text
    scored = client.completions.create(**request, prompt=[*b"Hi"], max_tokens=0)
    assert len(scored.choices[0].logprobs.tokens) == 2
    assert scored.usage.completion_tokens == 0
    assert new.logprobs.text_offset[:3] == [0, 1, 2]
    for values, top in zip(
        new.logprobs.token_logprobs[2:], new.logprobs.top_logprobs[2:], strict=True
    ):
        assert values == max(top.values())


def test_chats(client):
    request = {"model": NAME, "messages": CHAT, "max_completion_tokens": 12, "seed": 4}
    reply = client.chat.completions.create(**request, logprobs=True, top_logprobs=2, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].message.content != reply.choices[1].message.content
    assert reply.choices[0].message.role == "assistant" and reply.usage.prompt_tokens > 10
    for entry in reply.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**request, **options)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply.choices[0].message.content
    assert last.choices == [] and last.usage.prompt_tokens == reply.usage.prompt_tokens


def test_a_template_gets_variables_and_reasoning(client):
    def size(**fields) -> int:
        request = {"model": NAME, "messages": CHAT, "max_tokens": 1} | fields
        return client.chat.completions.create(**request).usage.prompt_tokens

    more, plain = {"extra_body": {"chat_template_kwargs": {"enable_thinking": "é"}}}, size()
    thought = {"role": "assistant", "content": "a", "reasoning_content": "why"}
    for text, fields in (
        ("highTrue", {"reasoning_effort": "high"}),
        ("noneFalse", {"reasoning_effort": "none", "metadata": {"a": "b"}, "store": True}),
        ("lowé", more | {"reasoning_effort": "low"}),
        ("<assistant\nwhya>\n", {"messages": [*CHAT, thought]}),
    ):
        assert size(**fields) == plain + len(text.encode()), text


def test_a_request_chooses_the_model_or_an_adapter(client, run):
    models = [*client.models.list()]
    assert [(m.id, m.parent) for m in models] == [(NAME, None), *((a, NAME) for a in ADAPTERS)]
    assert {model.max_model_len for model in models} == {LENGTH}
    texts = set()
    for model in models:
        request = {"model": model.id, "temperature": 0, "max_tokens": 12}
        replies = [client.completions.create(**request, prompt="Hi") for _ in range(2)]
        assert replies[0].choices[0].text == replies[1].choices[0].text
        assert replies[0].model == model.id
        chat = client.chat.completions.create(**request, messages=CHAT)
        texts |= {replies[0].choices[0].text, chat.choices[0].message.content}
        assert (chat.usage.prompt_tokens == 7) == (model.id == "terse")  # "Hi 😀" alone
    assert len(texts) == 2 * len(models)
    with pytest.raises(ValueError, match="adapters: tiny is the name of the model"):
        serve.main(Serve(run_dir=str(run), adapters=(f"tiny={run}",)))


@pytest.mark.parametrize("name", [None, "time"])
def test_tools_that_are_required_are_called(client, name):
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    request = {"model": NAME, "messages": CHAT, "tools": TOOLS, "seed": 5}
    request |= {"tool_choice": choice, "parallel_tool_calls": False}
    reply = client.chat.completions.parse(**request).choices[0]
    assert reply.finish_reason == "tool_calls" and not reply.message.content
    (call,) = reply.message.tool_calls
    assert call.function.name == (name or call.function.name)
    assert call.function.parsed_arguments.place.town in TOWNS[call.function.name]
    with client.chat.completions.stream(**request) as stream:
        message = stream.get_final_completion().choices[0].message
    (streamed,) = message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    history = [*CHAT, message, {"role": "tool", "tool_call_id": streamed.id, "content": "7"}]
    request |= {"messages": history, "tool_choice": "auto", "max_tokens": 3, "tools": TOOLS[:1]}
    assert client.chat.completions.create(**request).choices[0].message.content


def test_replies_follow_a_schema_a_regex_and_a_grammar(client):
    pair = create_model("Pair", a=PLACES[0], b=(Literal["é", 2] | PLACES[0], ...), c=bool)
    request = {"model": NAME, "messages": CHAT, "temperature": 2.0, "response_format": pair}
    request |= {"tools": TOOLS[:1], "seed": 1}
    reply = client.chat.completions.parse(**request).choices[0]
    assert reply.finish_reason == "stop" and isinstance(reply.message.parsed, pair)
    with client.chat.completions.stream(**request) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == reply.message.parsed
    request |= {"response_format": {"type": "json_object"}, "max_tokens": 1}
    assert client.chat.completions.create(**request).choices[0].message.content == "{"
    for field, text, answers in (
        ("regex", "(yes|no)", ("yes", "no")),
        ("grammar", 'start: "x" | "yy"', ("x", "yy")),
    ):
        reply = client.completions.create(model=NAME, prompt="?", extra_body={field: text})
        assert reply.choices[0].text in answers


CANCELLED = 'request_success_total{finished_reason="cancelled"}'
# After 16 tokens it has more meanings than llguidance follows.
AMBIGUOUS = f"start: {'s ' * 12}\ns: " + " | ".join("s " * n for n in range(2, 20)) + ' | "a"'
AMBIGUOUS = {"prompt": "a", "grammar": AMBIGUOUS, "max_tokens": 50, "logit_bias": ENDLESS}
BAD_SCHEMA = {"properties": {"a": {"pattern": "("}}}
TWICE = {"type": "json_schema", "json_schema": {"schema": {"minProperties": 2}}}
NO_TOOL = {"type": "function", "function": {"name": "c"}}
BAD_TOOL, ARRAY, LENIENT = (
    {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for parameters in (BAD_SCHEMA, {"type": "array"}, {"x-guidance": {}})
)
BAD = [
    ({"prompt": "a", "best_of": 2}, 400, "best_of", "Extra inputs"),
    ({"prompt": "a", "max_tokens": 0}, 400, None, "at least 1"),
    ({"prompt": [10**6]}, 400, None, "vocabulary"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token id"),
    ({"prompt": "a", "n": 1000}, 400, "n", "exceeds 16"),
    ({"prompt": "a", "model": "gpt"}, 404, "model", "only 'tiny', 'polite', 'terse'"),
    ({"prompt": "a", "max_tokens": LENGTH}, 400, None, "exceed the context"),
    ({"prompt": "a" * 90_000}, 400, None, f"a text of 90000 characters has more than {LENGTH}"),
    ({"prompt": "a", "logit_bias": {"9999": 1}}, 400, None, "vocabulary"),
    ({"prompt": "a", "regex": "a" * 3000}, 400, None, "exceeds 2000"),
    ({"prompt": "a", "regex": "a", "grammar": "b"}, 400, None, "one of"),
    ({"prompt": "a", "regex": "a", "ignore_eos": True}, 400, "ignore_eos", "a grammar decides"),
    (AMBIGUOUS, 400, None, "the grammar cannot be followed"),
    ({"prompt": "\ud800"}, 400, None, "surrogates"),
    ({"chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs", "cannot set tools"),
    ({"reasoning_effort": "a"}, 400, "reasoning_effort", "'none', 'minimal'"),
    ({"metadata": {"a": 1}}, 400, "metadata.a", "string"),
    ({"messages": [CHAT[0] | {"reasoning": 1}]}, 400, "messages.0.reasoning", "string"),
    ({"tools": [BAD_TOOL], "tool_choice": "required"}, 400, "tools", "tools: regex parse error"),
    ({"tools": [LENIENT], "tool_choice": "required"}, 400, "tools", "tools: x-guidance is not"),
    ({"tools": [BAD_TOOL], "tool_choice": NO_TOOL}, 400, None, "names 'c', and tools has ['f']"),
    ({"tools": [ARRAY]}, 400, "tools.0.function.parameters", "is 'object', not 'array'"),
    ({"response_format": TWICE}, 400, "response_format", "a reply could write one name twice"),
    ({"model": "terse", "messages": CHAT * 2}, 400, None, "the chat template cannot render"),
    ({"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream=true"),
    (b"{", 400, None, "JSON"),
    (b"[" * 50_000, 400, None, "pars"),
    (b'{"prompt": "' + b"a" * 200_000 + b'"}', 413, None, "exceeds 100000 bytes"),
]


@pytest.mark.parametrize(("body", "status", "field", "text"), BAD)
def test_a_bad_request_is_answered_and_changes_nothing(server, run, body, status, field, text):
    is_chat = isinstance(body, dict) and "prompt" not in body
    body = {"messages": CHAT} | body if is_chat else body
    answer = server.ask("/v1/chat/completions" if is_chat else "/v1/completions", body)
    error = answer.json["error"]
    message = error["message"]
    assert answer.status == status and text in message
    assert not re.search(f"\n|%json|{run.parent}", message)
    assert (error["param"] or "").startswith(field or "")
    assert {*error} == {"message", "type", "param", "code"} and answer.headers["x-request-id"]
    assert server.ask("/health").status == 200


def test_other_endpoints(client, server):
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=NAME, input="a")
    info = server.ask("/tokenizer_info").json
    assert info["eos_token"] == SPECIAL[2] and "tool_call" in info["chat_template"]
    assert "<title>" in server.ask("/", key="").text
    assert server.ask("/v1/nothing", {}).status == 404
    for key in ("", "another", "a keys"):
        answer = server.ask("/v1/completions", {"prompt": "a"}, key)
        assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"


def test_replies_of_clients_that_have_gone_end(server):
    """Of two clients, one reads a stream; while they wait, a third finds the queue full. The server
    notices that they have gone one after the other."""
    before = server.metrics().get(CANCELLED, 0)
    body = {"prompt": "a", "max_tokens": LENGTH - 9, "n": 16, "logit_bias": ENDLESS}
    connections = [server.start("/v1/completions", body | {"stream": s}) for s in (False, True)]
    wait_until(lambda: server.metrics()["num_requests_waiting"] == 28)
    assert server.metrics()["num_requests_running"] == 4
    full = server.ask("/v1/completions", {"prompt": "a"})
    assert full.status == 429 and full.headers["Retry-After"] == "1"
    for connection in connections:
        connection.close()
    wait_until(lambda: server.metrics().get(CANCELLED, 0) == before + 32)
    wait_until(lambda: server.metrics()["num_requests_running"] == 0)
    now = server.metrics()
    assert now["num_requests_waiting"] == 0
    assert now["kv_cache_usage_perc"] == now["compiles_after_warm_up"] == 0


def test_connections_without_a_request_are_closed(server, monkeypatch):
    monkeypatch.setattr("maxmeg.server.connections.OPEN_SECONDS", 0.2)
    body = {"prompt": "a", "max_tokens": 400, "logit_bias": ENDLESS, "stream": True}
    working = server.start("/v1/completions", body)
    address = urllib.parse.urlsplit(server.url)
    for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "):
        with socket.create_connection((address.hostname, address.port), timeout=10) as idle:
            idle.sendall(sent)
            assert not idle.recv(1)
    with contextlib.closing(working):
        assert "[DONE]" in working.getresponse().read().decode()


def test_an_error_of_the_device_ends_its_requests_alone(server, client, monkeypatch):
    programs = server.worker.engine.programs
    decode, steps = programs.decode, itertools.count(1)

    def broken(rows):
        if next(steps) in (10, 15):
            programs.cache = None  # donated to the step that failed
            raise RuntimeError("the device is gone")
        return decode(rows)

    monkeypatch.setattr(programs, "decode", broken)
    body = {"prompt": "a", "max_tokens": 30, "seed": 1, "logit_bias": ENDLESS}
    failed = server.ask("/v1/completions", body)
    assert failed.status == 500 and failed.json["error"]["type"] == "server_error"
    with pytest.raises(openai.APIError, match="engine failed"):
        [*client.completions.create(**body, model=NAME, stream=True)]
    first, second = (server.ask("/v1/completions", body) for _ in range(2))
    assert first.status == 200 and first.json["choices"] == second.json["choices"]
    assert server.metrics()["kv_cache_usage_perc"] == 0


def test_a_server_drains_and_its_log_is_replayed(server, client, run, capsys, monkeypatch):
    """The last test of this server. Its engine, which is idle by then, repeats the requests."""
    log = run.parent / "log.jsonl"
    for seed in range(4):
        body = {"prompt": "ab", "max_tokens": 9, "seed": seed, "n": 1 + seed % 2}
        assert server.ask("/v1/completions", body).status == 200
    request = {"model": NAME, "prompt": "a", "max_tokens": 120, "seed": 6, "stream": True}
    stream = client.completions.create(**request, logit_bias={"258": -100})
    first = next(stream)
    server.terminate()
    rest = [chunk.choices[0] for chunk in stream]
    assert first.choices and rest[-1].finish_reason == "length"
    server.wait()
    engine = server.worker.engine

    def load(options: Serve) -> Engine:
        assert (options.max_num_seqs, options.block_size, options.chunk) == (4, 16, 64)
        assert options.run_dir == str(run) and len(options.adapters) == len(ADAPTERS)
        return engine

    monkeypatch.setattr(serve, "load", load)
    main(["replay", str(log)])
    out = capsys.readouterr().out
    assert out.endswith(" requests, 0 of them not the same\n") and out.count(": the same\n") >= 5
    lines = log.read_text().splitlines()
    changed = json.loads(lines[-1])
    changed["seed"] += 1
    former = lines[0].replace("max_num_seqs", "lanes").replace("block_size", "slots")
    log.write_text("\n".join([former, json.dumps(changed)]))
    with pytest.raises(SystemExit):
        main(["replay", str(log)])
    assert "reply 0: token " in capsys.readouterr().out
    assert Sampling(**changed["request"]["sampling"]).temperature == 1
