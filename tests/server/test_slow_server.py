"""What takes long, or a process of its own: load, time limits, signals, fuzzing."""

import concurrent.futures
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_servers import ENDLESS, LENGTH, make_run, serving

pytestmark = pytest.mark.slow
REQUESTS, FIRST = 400, 150
GROWTH = 2**23  # bytes of memory after the first of them
GONE, REFUSED, LONG, RULED, STREAMED = (0, 5), (1,), (2,), (3,), (4, 5)  # number % 10
BAD = {"prompt": "a"}, {"prompt": [99999]}, {"prompt": "a", "n": 999}, {"prompt": "a", "regex": "("}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(run):
    with serving(run, "--max_queue=1000") as started:
        yield started


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


def test_four_hundred_requests_leave_nothing_behind(server):
    """Of all kinds, and some clients go away: replies are those alone, nothing fails, compiles or
    stays in the cache or in memory."""
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
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


def test_no_request_makes_a_server_error(server, tmp_path):
    """schemathesis, from the schema that the server publishes."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks=not_a_server_error", "--max-examples=20", "--seed=1", "--no-color"]
    command += ["--phases=examples,coverage,fuzzing", "--request-timeout=120"]  # busy machines
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert server.ask("/health").status == 200
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200


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
