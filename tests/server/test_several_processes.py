"""Servers of two processes: the same replies as one process gives, and one end for both."""

import asyncio
import contextlib
import json
import random
import time
from http.client import HTTPException

import pytest
from tiny_servers import ENDLESS, LENGTH, make_run, serving

from maxmeg.__main__ import main

pytestmark = pytest.mark.slow
# 1 KiB a page and device, in each layout.
WHOLE = {"attention.num_kv_heads": 4}
EXPERTS = {
    "attention.num_kv_heads": 2,
    "layers": "*(attention,moe)",
    "moe.num_experts": 4,
    "moe.ffn_size": 24,
}
# The processes believe to have different amounts of free memory.
MEMORY = """
import os, types
from maxmeg.inference import programs
free = programs.free_bytes
size = (40, 36)[int(os.environ["MAXMEG_PROCESS_ID"])] * 1024
stats = lambda: {"bytes_limit": size, "bytes_in_use": 0}
devices = [types.SimpleNamespace(memory_stats=stats)]
mesh = types.SimpleNamespace(is_multi_process=True, local_devices=devices)
programs.free_bytes = lambda _: free(mesh)
"""
FAULTS = "os.kill(os.getpid(), signal.SIGKILL)", 'raise RuntimeError("the device is gone")'
FAULT = """
import os, signal
from maxmeg.inference.programs import Programs
start, count = Programs.start, 0
def broken(self, *arrays):
    global count
    count += 1
    if count == 40 and os.environ["MAXMEG_PROCESS_ID"] == "RANK":
        FAULT
    return start(self, *arrays)
Programs.start = broken
"""


def request(number: int) -> dict:
    draw = random.Random(number)
    body = {"prompt": [draw.randrange(256) for _ in range(draw.randint(1, 200))], "seed": number}
    body |= {"max_tokens": 30, "logprobs": 2, "temperature": draw.choice([0, 1.5])}
    kinds = [{}, {"n": 3}, {"regex": "([a-z]{2}[0-9])+"}, {"frequency_penalty": 1}, {"echo": True}]
    return body | kinds[number % 5] | ({"logit_bias": {"65": 3}} if number % 2 else {})


@pytest.mark.parametrize(("layout", "model"), [("--tensor=2", WHOLE), ("--expert=2", EXPERTS)])
def test_two_processes_serve_what_one_does(layout, model, tmp_path, capsys):
    """Bit for bit: requests together, some of whose clients go away, and one that outlasts
    SIGTERM, which all processes get."""
    run, log = make_run(tmp_path, **model), tmp_path / "log.jsonl"
    with serving(run, layout, f"--log={log}", program=MEMORY, processes=2) as server:

        def gone(number: int) -> None:
            body = request(number) | {"stream": True, "max_tokens": 200, "logit_bias": ENDLESS}
            connection = server.start("/v1/completions", body)
            with contextlib.closing(connection), connection.getresponse() as response:
                response.readline()

        def ask(number: int) -> int:
            body = request(number) | ({"regex": "("} if number % 7 == 5 else {})
            return server.ask("/v1/completions", body).status

        async def together():
            calls = [asyncio.to_thread(gone if i % 6 == 1 else ask, i) for i in range(20)]
            return await asyncio.gather(*calls)

        statuses = asyncio.run(together())
        counts = server.metrics()
        assert counts['request_success_total{finished_reason="cancelled"}'] > 0
        assert statuses.count(400) == 2 and statuses.count(200) == 14
        time.sleep(0.3)  # the other process waits
        body = {"prompt": "a", "max_tokens": 200, "logit_bias": ENDLESS, "stream": True}
        connection = server.start("/v1/completions", body)
        with contextlib.closing(connection), connection.getresponse() as response:
            response.readline()
            server.process.terminate()
            assert response.read().endswith(b"data: [DONE]\n\n")
        code, errors = server.ended()
        assert code == 0 and "error" not in errors
    (last,) = json.loads(log.read_text().splitlines()[-1])["replies"]
    assert len(last["tokens"]) == 200
    main(["replay", str(log)])
    assert capsys.readouterr().out.endswith(" requests, 0 of them not the same\n")


@pytest.mark.parametrize(("rank", "fault"), enumerate(FAULTS))
def test_a_process_that_fails_ends_the_others(rank, fault, tmp_path):
    program = FAULT.replace("FAULT", fault).replace("RANK", str(rank))
    with serving(make_run(tmp_path), "--data=2", program=program, processes=2) as server:
        body = {"prompt": "a", "max_tokens": LENGTH - 9, "logit_bias": ENDLESS, "stream": True}
        connection = server.start("/v1/completions", body)
        with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
            connection.getresponse().read()
        code, errors = server.ended()
    assert code
    assert f"[{1 - rank}] error: process {rank} has ended or cannot be reached" in errors
    assert ("the device is gone" in errors) == ("gone" in fault)
