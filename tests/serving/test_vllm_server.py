"""`vllm serve` answers with maxmeg's greedy text: real weights, their tokenizer, chat template."""

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

from smollm2 import converted, run

NEW_TOKENS = 24
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


def test_texts_and_chats_are_the_same(tmp_path):
    folder = converted(tmp_path)
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
