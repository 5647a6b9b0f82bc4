"""Chat templates of Hugging Face folders, which render conversations as text.

A chat template is a program written by whoever published the model. It runs in jinja2's sandbox, in
a separate process with limited time and memory; only the text that it renders comes back. Few such
processes are started: they wait for the next request.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from maxmeg.data.tokenizers.load import parse_spec
from maxmeg.data.tokenizers.tokenizer import Tokenizer, json_object

CHILD = Path(__file__).with_name("template_child.py")
CPU_SECONDS = 4  # CPU time of a rendering process
WALL_SECONDS = 60  # a limit for machines that are busy
MEMORY_BYTES = 512 * 2**20  # address space
MAX_CHARACTERS = 2**24  # in all texts of one process
MAX_TEMPLATE = 2**20  # characters
AT_ONCE = 256  # conversations per process
MOST_IDLE = 4  # processes that wait for the next request
VARIABLES = {"tools": None, "documents": None, "add_generation_prompt": True}
REMEDY = "a chat template should not need that; use a template that you trust"

Messages = Sequence[Mapping[str, typing.Any]]
_idle: "list[Renderer]" = []


class NoTemplateError(ValueError):
    """A tokenizer or a folder has no chat template."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template: its text, its source (for errors), and the special tokens it may use."""

    text: str
    source: str
    tokens: Mapping[str, str]

    def render(
        self,
        conversations: Sequence[Messages],
        each: Sequence[Mapping[str, typing.Any]] = (),
        **variables: typing.Any,
    ) -> list[str]:
        """Render each conversation with the prompt for the assistant's next turn.

        conversations: messages as `conversation.normalized` returns them. variables: others of the
        template for all conversations; each: others for one each, such as its tools.
        ValueError where the template fails, refuses the messages, or exceeds its limits.
        """
        texts: list[str] = []
        for start in range(0, len(conversations), AT_ONCE):
            requests = [
                {"messages": [dict(message) for message in messages]} | variables | dict(extras)
                for messages, extras in itertools.zip_longest(
                    conversations[start : start + AT_ONCE],
                    each[start : start + AT_ONCE],
                    fillvalue={},
                )
            ]
            answer = self.answer(requests)
            if "error" in answer:
                where = f" of conversation {start + answer['index'] + 1}" * (answer["index"] >= 0)
                raise ValueError(f"{self.source} cannot render text{where}: {answer['error']}")
            texts += answer["texts"]
        return texts

    def answer(self, conversations: list[dict], marks: tuple[str, str] = ("", "")) -> dict:
        """Render conversations in a child process and return its answer (see `template_child`).

        conversations: dicts with "messages" and any other variables of the template. marks: strings
        to write before and after the text of {% generation %} blocks.
        """
        request = {
            "template": self.text,
            "variables": {**self.tokens, **VARIABLES},
            "conversations": conversations,
            "marks": marks,
            "seconds": CPU_SECONDS,
            "bytes": MEMORY_BYTES,
            "characters": MAX_CHARACTERS,
        }
        return run_child(request, self.source)


class Renderer:
    """A process that answers requests, each in a fork of itself; it ends with this process."""

    def __init__(self) -> None:
        self.owner, pipe = os.getpid(), subprocess.PIPE
        command = [sys.executable, "-I", "-B", str(CHILD)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)

    def ask(self, request: dict) -> dict[str, typing.Any] | None:
        """Return the answer; None if there is none within WALL_SECONDS, and then end the process.
        EOFError if the process has ended."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps(request, default=str).encode() + b"\n")  # dates of tables
            requests.flush()
            if not select.select([answers], [], [], WALL_SECONDS)[0]:
                os.killpg(self.process.pid, signal.SIGKILL)
                return None
            line = answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """End the process, unless it belongs to the process that this one was forked from."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if self.owner == os.getpid():
            self.process.wait()


@contextlib.contextmanager
def borrowed() -> Iterator[Renderer]:
    """A renderer that nobody else uses meanwhile: one that is idle, else a new one."""
    renderer = None
    while _idle and renderer is None:
        with contextlib.suppress(IndexError):  # another thread took the last one
            renderer = _idle.pop()
            if renderer.owner != os.getpid():  # of the process that this one was forked from
                renderer = None
    renderer = renderer or Renderer()
    try:
        yield renderer
    finally:
        if renderer.process.poll() is None and len(_idle) < MOST_IDLE:
            _idle.append(renderer)
        else:
            renderer.close()


@atexit.register
def close_idle() -> None:
    while _idle:
        _idle.pop().close()


def run_child(request: dict, source: str) -> dict[str, typing.Any]:
    """The answer of a renderer; ValueError where the template exceeded its limits."""
    answer = None
    for _ in range(1 + MOST_IDLE):  # idle processes may have been killed
        try:
            with borrowed() as renderer:
                answer = renderer.ask(request)
            break
        except EOFError:
            renderer.close()
    else:
        raise ValueError(f"{source}: its process ends before it answers: free memory")
    if answer is None:
        raise ValueError(f"{source} ran for more than {WALL_SECONDS} s: {REMEDY}")
    code = answer.get("status", 0)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError(f"{source} ran for more than {CPU_SECONDS} s of CPU: {REMEDY}")
    if code < 0:
        raise ValueError(f"{source} ended its process by {signal.Signals(-code).name}: {REMEDY}")
    if code:
        raise ValueError(f"{source} ended its process with exit code {code}: {REMEDY}")
    return answer


def load_chat_template(
    tokenizer: Tokenizer, path: str = "", folder: Path | None = None
) -> ChatTemplate:
    """The chat template in the file `path`, or, without a path, that of a folder: in
    chat_template.jinja, or "chat_template" in tokenizer_config.json.

    folder: by default that of the tokenizer's tokenizer.json. NoTemplateError where there is none.
    """
    folders = [each for each in (hugging_face_folder(tokenizer), folder) if each]
    configs = [json_object(each / "tokenizer_config.json") for each in folders]
    folder, config = (folders[-1], configs[-1]) if folders else (None, {})
    text, source = _read_template(path) if path else _own_template(tokenizer, folder, config)
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE:
        raise ValueError(f"{source}: a chat template is text of at most {MAX_TEMPLATE} characters")
    roles = parse_spec(tokenizer.spec).roles  # named by the options of the tokenizer's spec
    named = {f"{'eos' if role == 'eod' else role}_token": name for role, name in roles.items()}
    tokens = [special_tokens(each) for each in configs]
    return ChatTemplate(text, source, {k: v for each in [*tokens, named] for k, v in each.items()})


def has_chat_template(tokenizer: Tokenizer, path: str = "") -> bool:
    """Whether `load_chat_template` finds a template."""
    try:
        load_chat_template(tokenizer, path)
    except ValueError:
        return False
    return True


def _read_template(path: str) -> tuple[str, str]:
    try:
        return Path(path).read_text("utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read: {error}") from None


def _own_template(
    tokenizer: Tokenizer, folder: Path | None, config: Mapping[str, typing.Any]
) -> tuple[typing.Any, str]:
    if folder is None:
        raise NoTemplateError(
            f"tokenizer {tokenizer.spec!r} has no chat template: a chat needs a model whose "
            "tokenizer is huggingface:FOLDER/tokenizer.json (maxmeg generate continues text)"
        )
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8"), str(path)
    text, source = config.get("chat_template"), str(folder / "tokenizer_config.json")
    if text is None:
        raise NoTemplateError(
            f"{folder} has no chat template, neither chat_template.jinja nor one in "
            "tokenizer_config.json: the model was not made for chats; give a plain prompt, or "
            "train with data.chat_template=FILE"
        )
    return default_of(text, source) if isinstance(text, list) else text, source


def special_tokens(config: Mapping[str, typing.Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json that a template may use."""
    tokens = {}
    for key, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            tokens[key] = value
    return tokens


def default_of(named: list, source: str) -> str:
    """The template named "default" in [{"name": ..., "template": ...}, ...]."""
    templates = {}
    for entry in named:
        if not isinstance(entry, dict) or {"name", "template"} - entry.keys():
            raise ValueError(f"{source}: {entry!r} in chat_template has no name and template")
        templates[entry["name"]] = entry["template"]
    if "default" not in templates:
        raise ValueError(
            f"{source}: none of the chat templates {sorted(templates)} is named default"
        )
    return templates["default"]


def hugging_face_folder(tokenizer: Tokenizer) -> Path | None:
    """The folder of a Hugging Face tokenizer's files; None for other tokenizers."""
    spec = parse_spec(tokenizer.spec)
    if spec.kind != "huggingface":
        return None
    path = Path(spec.argument)
    return path if path.is_dir() else path.parent
