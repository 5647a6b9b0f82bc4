"""vLLM answers with maxmeg's greedy text: real weights, their tokenizer, chat template."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from smollm2 import REPOSITORY, converted, run

from maxmeg.config.model import DType
from maxmeg.inference.engine import Engine
from maxmeg.inference.load import load_run
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling

NEW_TOKENS = 24
PROMPTS, MORE_TOKENS = 64, 64
TIE = 1e-3  # nats between two tokens that rounding may exchange
MOST_TIES = 4  # prompts
STARTS = 300  # seconds, on a busy machine
TEXTS = ("The three primary colours are", "def fibonacci(n):\n")
QUESTION = "What is the capital of France?"


def ask(url: str, **body) -> dict:
    request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
    request.data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or "null")


@contextlib.contextmanager
def served(folder: Path, log: Path):
    """The address of a server of the model in a folder."""
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        port = actual.getsockname()[1]
    # `vllm serve` by the name of its module: the script asks for the version of another package.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--served-model-name=ours"]
    command += ["--dtype=float32", "--max-model-len=128", "--max-num-seqs=2", "--enforce-eager"]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as opened:
        server = subprocess.Popen(command, stdout=opened, stderr=opened, env=environment)
    try:
        end = time.monotonic() + STARTS
        while True:
            with contextlib.suppress(urllib.error.URLError):
                ask(f"http://127.0.0.1:{port}/v1/models")
                break
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def ours(folder: Path, *flags: str) -> list[str]:
    """What maxmeg writes after prompts."""
    written = folder / "written.jsonl"
    settings = (f"--run_dir={folder / 'run'}", f"--output={written}", "--dtype=float32")
    run("generate", *settings, "--temperature=0", f"--num_tokens={NEW_TOKENS}", *flags)
    return [json.loads(line)["completion"] for line in written.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return converted(tmp_path_factory.mktemp("smollm2"))


def test_many_prompts_have_the_same_greedy_tokens(folder):
    """Prompts of text and of random tokens, all at once. Where the tokens begin to differ, both of
    them are as likely as each other."""
    trained = load_run(str(folder / "run"), dtype=DType.float32)
    text = trained.tokenizer.encode((REPOSITORY / "LICENSE").read_text("utf-8"))
    rng, half = np.random.default_rng(0), PROMPTS // 2
    prompts = [text[i * 20 : i * 20 + 5 + i].tolist() for i in range(half)]
    prompts += [rng.integers(20, 49000, 5 + i).tolist() for i in range(half)]
    request = Request(MORE_TOKENS, Sampling(temperature=0, top_logprobs=2))
    replies = Engine(trained, lanes=16).generate([*map(np.array, prompts)], request)
    (folder / "jobs.json").write_text(json.dumps({"": (str(folder / "hf"), prompts, MORE_TOKENS)}))
    child = Path(__file__).with_name("vllm_child.py")
    command = [sys.executable, str(child), "jobs.json", "answers.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((folder / "answers.json").read_text())[""]["tokens"]
    differ = [pair for pair in zip(replies, theirs, strict=True) if pair[0].tokens != pair[1]]
    assert len(differ) <= MOST_TIES
    for reply, tokens in differ:
        pairs = enumerate(zip(reply.tokens, tokens, strict=True))
        place = next(i for i, (one, other) in pairs if one != other)
        (_, likeliest), (second, next_likely) = reply.top[place]
        assert second == tokens[place] and likeliest - next_likely <= TIE


def test_texts_and_chats_are_the_same(folder):
    greedy = {"model": "ours", "max_tokens": NEW_TOKENS, "temperature": 0}
    with served(folder / "hf", folder / "log.txt") as url:
        answer = ask(f"{url}/completions", prompt=list(TEXTS), **greedy)
        texts = [choice["text"] for choice in answer["choices"]]
        chat = [{"role": "user", "content": QUESTION}]
        answer = ask(f"{url}/chat/completions", messages=chat, **greedy)
        (choice,) = answer["choices"]
    assert texts == ours(folder, *(f"--prompt={text}" for text in TEXTS))
    assert [choice["message"]["content"]] == ours(folder, "--chat", f"--prompt={QUESTION}")
    assert "Paris" in choice["message"]["content"]
    assert all(len(text) > NEW_TOKENS for text in texts)
