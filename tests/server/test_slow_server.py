"""What servers of their own show: errors of the device, load, time limits, signals, fuzzing."""

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import jsonschema
import openai
import pytest
from tiny_servers import LENGTH, make_run, serving

pytestmark = pytest.mark.slow
ENDLESS = {str(i): -100 for i in (256, 257, 258)}  # the model cannot end its reply
CHAT = [{"role": "user", "content": "Hi"}]


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


def test_replies_under_load_are_those_alone(server):
    """Tokens, log-probabilities and text of random requests, some of whose clients go away."""

    def request(number):
        draw = random.Random(number)
        body = {"prompt": [draw.randrange(256) for _ in range(draw.randint(1, 300))]}
        body |= {"max_tokens": draw.randint(1, 60), "seed": number, "logprobs": draw.randint(0, 3)}
        body |= {"temperature": draw.choice([0, 0.7, 1.5]), "top_p": draw.choice([0.8, 1])}
        body |= {"top_k": draw.choice([0, 5]), "frequency_penalty": draw.choice([0, 0.5])}
        return body | draw.choice([{}, {"stop": ["a", "\n"]}, {"n": 3}])

    def choices(number):
        return server.ask("/v1/completions", request(number)).json["choices"]

    def gone(number):
        connection = server.start("/v1/completions", request(number) | {"stream": True})
        time.sleep(0.02 * (number % 7))
        connection.close()

    async def together():
        jobs = [
            asyncio.to_thread(choices if i % 4 else gone, i)
            for i in random.Random(0).sample(range(120), 120)
        ]
        return await asyncio.gather(*jobs)

    order = random.Random(0).sample(range(120), 120)
    found = dict(zip(order, asyncio.run(together()), strict=True))
    for number in range(120):
        if number % 4:
            assert found[number] == choices(number), number
    counts = server.metrics()
    assert counts["kv_cache_usage_perc"] == counts["num_requests_waiting"] == 0
    assert counts["compiles_after_warm_up"] == 0 and counts["prefix_cache_hits_total"] > 0


def test_curl(server):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
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
    command += ["--checks=not_a_server_error", "--max-examples=60", "--seed=1", "--no-color"]
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
