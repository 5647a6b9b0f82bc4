"""What servers of their own show: errors of the device, load, time limits, signals, fuzzing."""

import asyncio
import concurrent.futures
import json
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import openai
import pytest
from tiny_servers import LENGTH, make_run, serving

pytestmark = pytest.mark.slow
ENDLESS = {str(i): -100 for i in (256, 257, 258)}  # the model cannot end its reply
CHAT = [{"role": "user", "content": "Hi"}]
REQUESTS, FIRST = 400, 150
GROWTH = 2**23  # bytes of memory after the first of them
GONE, REFUSED, LONG, RULED, STREAMED = (0, 5), (1,), (2,), (3,), (4, 5)  # number % 10
BAD = (
    {"prompt": "a"},  # and too many new tokens
    {"prompt": ""},
    {"prompt": [99999]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a" * 2 * LENGTH},
    {"prompt": "a", "n": 999},
    {"prompt": "a", "regex": "("},
    {"prompt": "a", "unknown": 1},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(run):
    with serving(run, "--max_queue=1000") as started:
        yield started


def schema_of(draw: random.Random, depth: int = 0) -> dict:
    """A random JSON schema of values of limited size."""
    kinds = ["enum", "boolean", "integer", "null"] + ["object", "array", "anyOf"] * (depth < 3)
    kind = "object" if depth == 0 else draw.choice(kinds)
    if kind == "enum":
        return {"enum": draw.sample(["a", "é", "😀", 3, -2.5, None, True, "x y"], 3)}
    if kind == "integer":
        return {"type": "integer", "minimum": draw.randint(-99, 0), "maximum": draw.randint(1, 99)}
    if kind == "anyOf":
        return {"anyOf": [schema_of(draw, depth + 1) for _ in range(2)]}
    if kind == "array":
        return {"type": "array", "items": schema_of(draw, depth + 1), "minItems": 1, "maxItems": 3}
    if kind != "object":
        return {"type": kind}
    names = draw.sample("abcdé", draw.randint(1, 4))
    properties = {name: schema_of(draw, depth + 1) for name in names}
    rest = {"required": names[:2], "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


def test_replies_fit_50_schemas(server):
    """Of a model of random weights at temperature 2; half of the requests stream."""

    async def answers():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(number):
                schema = schema_of(random.Random(number))
                wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                request = {"model": "tiny", "messages": CHAT, "response_format": wanted}
                request |= {"temperature": 2.0, "seed": number}
                if number % 2:
                    pieces = await client.chat.completions.create(**request, stream=True)
                    deltas = [piece.choices[0].delta.content or "" async for piece in pieces]
                    return schema, "".join(deltas)
                reply = await client.chat.completions.create(**request)
                return schema, reply.choices[0].message.content

            return await asyncio.gather(*map(one, range(50)))

    for schema, text in asyncio.run(answers()):
        jsonschema.validate(json.loads(text), schema)


def request_of(number: int) -> dict:
    draw = random.Random(number)
    body: dict = {"prompt": [draw.randrange(256) for _ in range(draw.randint(1, 300))]}
    body |= {"max_tokens": draw.randint(1, 40), "seed": number, "logprobs": draw.randint(0, 3)}
    body |= {"temperature": draw.choice([0, 0.7, 1.5]), "top_p": draw.choice([0.8, 1])}
    body |= {"top_k": draw.choice([0, 5]), "frequency_penalty": draw.choice([0, 0.5])}
    body |= {"stream": number % 10 in STREAMED}
    if number % 10 in REFUSED:
        return draw.choice(BAD) | {"max_tokens": LENGTH + number}
    if number % 10 in LONG:
        body["prompt"] = [draw.randrange(256) for _ in range(LENGTH - body["max_tokens"])]
    if number % 10 in RULED:
        return body | {"regex": f"[a-f]{{1,{number % 70}}}[0-9]", "n": 2}
    return body | draw.choice([{}, {"stop": ["a", "\n"]}, {"n": 3}])


def answer_of(server, number: int) -> tuple[int, str]:
    """Status and text of the answer, without what differs each time."""
    path = "/v1/completions"
    if number % 10 in GONE:
        connection = server.start(path, request_of(number))
        time.sleep(0.02 * (number % 7))
        connection.close()
        return 0, ""
    answer = server.ask(path, b"{" if number % 50 == 1 else request_of(number))
    return answer.status, re.sub(r'"id":"[^"]*"|"created":\d+', "", answer.text)


def resident_bytes(server) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_four_hundred_requests_leave_nothing_behind(run):
    """Of all kinds, and some clients go away: replies are those alone, nothing fails, compiles or
    stays in the cache or in memory."""
    with (
        serving(run, "--max_queue=1000") as server,
        concurrent.futures.ThreadPoolExecutor(16) as threads,
    ):
        order = random.Random(0).sample(range(REQUESTS), REQUESTS)
        answers = [*threads.map(lambda number: answer_of(server, number), order[:FIRST])]
        before = resident_bytes(server)
        answers += threads.map(lambda number: answer_of(server, number), order[FIRST:])
        for number, answer in zip(order, answers, strict=True):
            kind = number % 10
            assert answer[0] == (0 if kind in GONE else 400 if kind in REFUSED else 200), answer
            if number % 20 > 10 and kind not in STREAMED:
                assert answer == answer_of(server, number), number
        while (counts := server.metrics())["num_requests_running"]:
            time.sleep(0.1)
        assert counts["kv_cache_usage_perc"] == counts["num_requests_waiting"] == 0
        assert counts["compiles_after_warm_up"] == 0 and counts["prefix_cache_hits_total"] > 0
        assert resident_bytes(server) - before < GROWTH


def test_curl(server):
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    body = json.dumps({"messages": CHAT, "max_tokens": 4, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-d", body]
    command += ["-H", "Content-Type: application/json"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    events = [line for line in out.splitlines() if line]
    assert all(line.startswith("data: ") for line in events) and events[-1] == "data: [DONE]"
    assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"


def test_no_request_makes_a_server_error(server, tmp_path):
    """schemathesis, from the schema that the server publishes."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks=not_a_server_error", "--max-examples=20", "--seed=1", "--no-color"]
    command += ["--phases=examples,coverage,fuzzing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert server.ask("/health").status == 200
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200


BREAKS = """
from maxmeg.inference.programs import Programs
decode, count = Programs.decode, 0
def broken(self, rows):
    global count
    count += 1
    if count in (60, 90):
        self.cache = None  # donated to the step that failed
        raise RuntimeError("the device is gone")
    return decode(self, rows)
Programs.decode = broken
"""


def test_an_error_of_the_device_ends_its_requests_alone(run):
    with serving(run, program=BREAKS) as server:
        body = {"prompt": "a", "max_tokens": 200, "seed": 1, "logit_bias": ENDLESS}
        failed = server.ask("/v1/completions", body)
        assert failed.status == 500 and failed.json["error"]["type"] == "server_error"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.APIError, match="engine failed"):
            [*client.completions.create(**body, model="tiny", stream=True)]
        first, second = (server.ask("/v1/completions", body) for _ in range(2))
        assert first.status == 200 and first.json["choices"] == second.json["choices"]
        assert server.metrics()["kv_cache_usage_perc"] == 0


def test_requests_that_outlast_the_draining_are_cut(run):
    with serving(run, "--drain_seconds=1", program="import time" + SLOW) as server:
        body = {"prompt": "a", "max_tokens": LENGTH - 9, "logit_bias": ENDLESS, "stream": True}
        connection = server.start("/v1/completions", body)
        assert connection.getresponse().readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.ended()
        connection.close()
        assert code == 0


def test_a_signal_before_the_engine_is_warm_ends_the_server(run):
    with serving(run, is_warm=False) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == (0, "")


SLOW = """
from maxmeg.inference.engine import Engine
step = Engine.step
def slow(self):
    time.sleep(0.05)
    return step(self)
Engine.step = slow
"""


def test_a_model_without_a_template_has_no_chats(tmp_path):
    with serving(make_run(tmp_path, template="")) as server:
        answer = server.ask("/v1/chat/completions", {"messages": CHAT})
        assert answer.status == 400
        assert "has no chat template" in answer.json["error"]["message"]
        assert server.ask("/v1/completions", {"prompt": "a"}).status == 200
