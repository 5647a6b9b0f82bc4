"""Chat templates of Hugging Face folders: conversations as text.

A chat template is a program of whoever published the model. It runs in jinja2's sandbox, in a
process of its own with little time and memory, and what it writes is all that comes back.
"""

import dataclasses
import json
import signal
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxmeg.data.tokenizers import Tokenizer, json_object, parse_spec

CHILD = Path(__file__).with_name("template_child.py")
CPU_SECONDS = 4  # of the process that renders, its start among them
WALL_SECONDS = 60  # on a machine that is busy with other things
MEMORY_BYTES = 512 * 2**20  # address space
MAX_CHARACTERS = 2**24  # of all that one process writes
MAX_TEMPLATE = 2**20  # characters
AT_ONCE = 256  # conversations to a process
SHOWN = 80  # characters of a message in an error
REMEDY = "it does not do what templates are for; use one you trust"

Messages = Sequence[Mapping[str, typing.Any]]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Jinja text of `source` (for errors), and the special tokens it may name."""

    text: str
    source: str
    tokens: Mapping[str, str]

    def render(self, conversations: Sequence[Messages]) -> list[str]:
        """The text of each, up to where the assistant goes on; ValueError where the template fails,
        refuses the messages, or does not keep to its bounds."""
        for number, messages in enumerate(conversations):
            check_messages(messages, f"conversation {number + 1} of {len(conversations)}")
        texts: list[str] = []
        for start in range(0, len(conversations), AT_ONCE):
            part = conversations[start : start + AT_ONCE]
            given = [{"messages": [dict(message) for message in m]} for m in part]
            texts += self._rendered(given, start)
        return texts

    def _rendered(self, conversations: list[dict], first: int) -> list[str]:
        answer = self.answer(conversations)
        if "error" in answer:
            where = f" of conversation {first + answer['index'] + 1}" * (answer["index"] >= 0)
            raise ValueError(f"{self.source} cannot make text{where}: {answer['error']}")
        return answer["texts"]

    def answer(self, conversations: list[dict], marks: tuple[str, str] = ("", "")) -> dict:
        """What the process says of conversations, each an object of "messages" and of what else
        its template may read; marks: what to write around {% generation %} blocks."""
        request = {
            "template": self.text,
            "variables": {
                **self.tokens,
                **{"tools": None, "documents": None, "add_generation_prompt": True},
            },
            "conversations": conversations,
            "marks": marks,
            "seconds": CPU_SECONDS,
            "bytes": MEMORY_BYTES,
            "characters": MAX_CHARACTERS,
        }
        return run_child(request, self.source)


def run_child(request: dict, source: str) -> dict[str, typing.Any]:
    """The child's answer; ValueError where it was ended for what it used."""
    command = [sys.executable, "-I", "-B", str(CHILD)]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=WALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{source} ran for more than {WALL_SECONDS} s: {REMEDY}") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError(f"{source} ran for more than {CPU_SECONDS} s of CPU: {REMEDY}")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ValueError(f"{source} ended its process by {name}: {REMEDY}")
    if done.returncode:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing said"])[-1]
        raise ValueError(f"{source} ended its process with exit code {done.returncode}: {last}")
    return json.loads(done.stdout)


def check_messages(messages: typing.Any, where: str) -> None:
    """ValueError unless these are [{"role": "user", ...}, ...]; the rest a template reads."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{where}: {str(messages)[:SHOWN]!r} is not a list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where}: message {str(message)[:SHOWN]!r} is not an object like "
                '{"role": "user", "content": "..."}'
            )


def chat_template_of(tokenizer: Tokenizer, path: str = "") -> ChatTemplate:
    """The template in a file, with the tokenizer's special tokens; without one the tokenizer's."""
    if not path:
        return load_chat_template(tokenizer)
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read: {error}") from None
    folder = hugging_face_folder(tokenizer)
    config = json_object(folder / "tokenizer_config.json") if folder else {}
    tokens = special_tokens(config) | roles_of(tokenizer)
    return ChatTemplate(bounded(text, path), path, tokens)


def load_chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The template beside a tokenizer.json: chat_template.jinja, else tokenizer_config.json's."""
    folder = hugging_face_folder(tokenizer)
    if folder is None:
        raise ValueError(
            f"tokenizer {tokenizer.spec!r} has no chat template: a chat needs a model whose "
            "tokenizer is huggingface:FOLDER/tokenizer.json"
        )
    config = json_object(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    if path.is_file():
        text, source = path.read_text("utf-8"), str(path)
    else:
        text, source = config.get("chat_template"), str(folder / "tokenizer_config.json")
    if isinstance(text, list):
        text = default_of(text, source)
    if text is None:
        raise ValueError(
            f"{folder} has no chat template, neither chat_template.jinja nor one in "
            "tokenizer_config.json: the model was not made for chats; give a plain prompt"
        )
    tokens = special_tokens(config) | roles_of(tokenizer)
    return ChatTemplate(bounded(text, source), source, tokens)


def bounded(text: typing.Any, source: str) -> str:
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE:
        raise ValueError(f"{source}: a chat template is text of at most {MAX_TEMPLATE} characters")
    return text


def special_tokens(config: Mapping[str, typing.Any]) -> dict[str, str]:
    """Those of a tokenizer_config.json that a template may name."""
    tokens = {}
    for key, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            tokens[key] = value
    return tokens


def roles_of(tokenizer: Tokenizer) -> dict[str, str]:
    """Those that the options of its spec name instead."""
    roles = parse_spec(tokenizer.spec).roles
    return {f"{'eos' if role == 'eod' else role}_token": name for role, name in roles.items()}


def default_of(named: list, source: str) -> str:
    """The one named default of [{"name": ..., "template": ...}, ...]."""
    found = {}
    for entry in named:
        if not isinstance(entry, dict) or {"name", "template"} - entry.keys():
            raise ValueError(f"{source}: {entry!r} of chat_template has no name and template")
        found[entry["name"]] = entry["template"]
    if "default" not in found:
        raise ValueError(f"{source}: of the chat templates {sorted(found)} none is named default")
    return found["default"]


def hugging_face_folder(tokenizer: Tokenizer) -> Path | None:
    spec = parse_spec(tokenizer.spec)
    if spec.kind != "huggingface":
        return None
    path = Path(spec.argument)
    return path if path.is_dir() else path.parent
