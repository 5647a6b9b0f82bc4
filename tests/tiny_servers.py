"""A tiny chat model whose tokens are bytes, and servers of it as processes of their own."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import tokenizers
from layouts import tiny
from tokenizers import decoders, models, pre_tokenizers

import maxmeg
from maxmeg.models.lm import LM

REPOSITORY = Path(__file__).parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALLS = ["<tool_call>", "</tool_call>"]
TEMPLATE = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.reasoning_content }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ reasoning_effort }}{{ enable_thinking }}{% endif %}"""
LENGTH = 1024
ENDLESS = {str(i): -100 for i in (256, 257, 258)}  # logit_bias: the model cannot end its reply
SIZES = ("--max_num_seqs=4", "--block_size=16", "--chunk=64")
ENDS_WITHIN = 120  # seconds


def make_run(folder: Path, template: str = TEMPLATE, **model) -> Path:
    """A run of random weights, which write something else everywhere."""
    words = tokenizers.Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL])
    words.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in CALLS])
    parts = folder / "tokenizer"
    parts.mkdir(parents=True)
    words.save(str(parts / "tokenizer.json"))
    (parts / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    if template:
        (parts / "chat_template.jinja").write_text(template)
    size = words.get_vocab_size()
    fields = {"vocab_size": size, "max_position": LENGTH, "init_std": 0.3, "num_layers": 1}
    config = tiny(fields | model)
    config.data.tokenizer = f"huggingface:{parts}/tokenizer.json"
    model = jax.jit(lambda key: LM(key, config.model))(jax.random.key(0))
    maxmeg.LanguageModel(model, config).save(folder / "tiny")
    return folder / "tiny"


class Answer:
    def __init__(self, response: http.client.HTTPResponse):
        self.status, self.headers = response.status, response.headers
        self.text = response.read().decode()

    @property
    def json(self):
        return json.loads(self.text)


class Server:
    """A process that serves at an address."""

    def __init__(self, process: subprocess.Popen[str], url: str, key: str = ""):
        self.process, self.url, self.key = process, url, key

    def is_running(self) -> bool:
        return self.process.poll() is None

    def start(self, path: str, body=None, key: str | None = None) -> http.client.HTTPConnection:
        """Send a request, POST if it has a body."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers |= {} if body is None else {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, content, headers)
        return connection

    def ask(self, path: str, body=None, key: str | None = None) -> Answer:
        connection = self.start(path, body, key)
        with contextlib.closing(connection):
            return Answer(connection.getresponse())

    def metrics(self) -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in self.ask("/metrics").text.splitlines()]
        return {
            name.removeprefix("maxmeg:"): float(value)
            for name, value in lines
            if not name.startswith("#")
        }

    def wait_until_warm(self) -> None:
        while (status := self.ask("/health").status) != 200:
            assert status == 503 and self.is_running()
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """The exit code and stderr, when it has ended, without what XLA says of its cache."""
        _, errors = self.process.communicate(timeout=ENDS_WITHIN)
        lines = errors.splitlines(keepends=True)
        return self.process.returncode, "".join(
            line for line in lines if "cpu_aot_loader" not in line
        )


@contextlib.contextmanager
def serving(
    run: Path,
    *flags: str,
    program: str = "",
    key: str = "",
    is_warm: bool = True,
    processes: int = 1,
    sizes: tuple[str, ...] = SIZES,
) -> Iterator[Server]:
    """A warm server of a run, which ends with the block. program: Python to run in its process
    before it serves. processes: number of them, with a device each."""
    launcher = [sys.executable, str(REPOSITORY / "launch/local.py"), f"-n{processes}"]
    launcher += ["--devices-per-process=1", "--"]
    start = ["-c", program + "\nfrom maxmeg.__main__ import main\nmain()"]
    command = [sys.executable, *start, "serve", str(run), "--port=0", *sizes, *flags]
    command += [f"--api_key={key}"] if key else []
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [*launcher * (processes > 1), *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        match = next(filter(None, (re.search(r"http://\S+:\d+", line) for line in lines)), None)
        if not match:
            raise AssertionError(process.communicate()[1])
        server = Server(process, match[0], key)
        if is_warm:
            server.wait_until_warm()
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
            process.communicate(timeout=ENDS_WITHIN)
        process.kill()
