"""Prompts and chats, their tokens, and the tokens that end a generated text."""

import json
import typing
from collections.abc import Sequence

import numpy as np

from maxmeg.config.data import Objective
from maxmeg.config.schema import Config
from maxmeg.data.chat.template import Messages, hugging_face_folder, load_chat_template
from maxmeg.data.tokenizers.load import parse_spec
from maxmeg.data.tokenizers.tokenizer import SENTINEL, Tokenizer, json_object

Record = dict[str, typing.Any]  # has a "prompt" or "messages", and any other keys


def read_records(texts: Sequence[str], path: str) -> list[Record]:
    """Return the prompts in `texts` or in a file; ValueError for both, neither, or a bad line."""
    if bool(texts) == bool(path):
        raise ValueError("give either --prompt=TEXT, once or more, or --prompts=FILE.jsonl")
    if texts:
        return [{"prompt": text} for text in texts]
    with open(path, encoding="utf-8") as file:
        lines = list(enumerate(file, 1))
    records = [read_record(line, f"{path} line {n}") for n, line in lines if line.strip()]
    if not records:
        raise ValueError(f"{path} holds no prompt: write one JSON object per line")
    return records


def read_record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise ValueError(f'{where} is not an object with either "prompt" or "messages"')
    if not isinstance(record.get("prompt", ""), str):
        raise ValueError(f"{where}: prompt={record['prompt']!r} is not text")
    return record


def as_chat(record: Record) -> Record:
    """Return a prompt as a chat with one user message; chats are returned as they are."""
    if "messages" in record:
        return record
    rest = {name: value for name, value in record.items() if name != "prompt"}
    return {"messages": [{"role": "user", "content": record["prompt"]}], **rest}


def prompt_tokens(
    tokenizer: Tokenizer, config: Config, text: str, special: bool = True
) -> np.ndarray:
    """Return the tokens of a prompt, after the special tokens that open a text.

    Of an encoder-decoder it is the source: sentinels in it are tokens, and it is followed by the
    end of text, as sources of pairs and those of published T5 models are, but not those of
    objective=span_corruption. special: whether to add these tokens.
    """
    if not config.model.has_source_text:
        before = np.array(tokenizer.opening if special else (), np.int32)
        return np.concatenate((before, tokenizer.encode(text)))
    marks = {SENTINEL.format(number): token for number, token in enumerate(tokenizer.sentinels)}
    has_end = special and config.data.objective is not Objective.span_corruption
    end = np.array([tokenizer.eod] if has_end else [], np.int32)
    return np.concatenate((tokenizer.encode_marked(text, marks), end))


def encoded(
    tokenizer: Tokenizer,
    config: Config,
    records: Sequence[Record],
    system: str = "",
    special: bool = True,
) -> list[np.ndarray]:
    """Return the tokens of each record: `prompt_tokens` of a prompt.

    A chat is rendered by the template, which writes all special tokens itself. system: system
    message for the chats.
    """
    chats = [with_system(r["messages"], system) for r in records if "messages" in r]
    if system and not chats:
        raise ValueError(f"system={system!r} is for chats: add --chat, or give messages")
    template = load_chat_template(tokenizer, config.data.chat_template) if chats else None
    texts = iter(template.render(chats) if template else [])
    return [
        tokenizer.encode_marked(next(texts), tokenizer.added)
        if "messages" in record
        else prompt_tokens(tokenizer, config, record["prompt"], special)
        for record in records
    ]


def with_system(messages: Messages, system: str) -> Messages:
    """Prepend a system message, unless `system` is empty or the messages have one already."""
    if not system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def end_tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a generated text.

    They are the eos_token_id of generation_config.json, or of config.json, beside a tokenizer.json;
    without these files, or if data.tokenizer sets eod, the end of a document.
    """
    has_eod = "eod" in parse_spec(tokenizer.spec).roles
    folder = None if has_eod else hugging_face_folder(tokenizer)
    for name in ("generation_config.json", "config.json") if folder else ():
        assert folder is not None
        eos = json_object(folder / name).get("eos_token_id")
        if eos is None:
            continue
        ends = eos if isinstance(eos, list) else [eos]
        wrong = [i for i in ends if type(i) is not int or not 0 <= i < vocab_size]
        if wrong or not ends:
            raise ValueError(
                f"{folder / name}: eos_token_id={eos!r} must be one or a list of the model's "
                f"token ids, 0 to {vocab_size - 1}"
            )
        return tuple(ends)
    return (tokenizer.eod,)
