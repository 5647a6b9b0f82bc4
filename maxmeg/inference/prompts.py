"""What to continue: prompts and chats, from a command line or a file with one in JSON a line."""

import json
import typing
from collections.abc import Sequence

import numpy as np

from maxmeg.data.chat import chat_template_of
from maxmeg.data.tokenizers import Tokenizer
from maxmeg.inference.chat import with_system

Record = dict[str, typing.Any]  # has a "prompt", or "messages", and whatever else


def read_records(texts: Sequence[str], path: str) -> list[Record]:
    """From either; ValueError where both are given or none, and for lines that are no prompt."""
    if bool(texts) == bool(path):
        raise ValueError(
            "give --prompt=TEXT, once or more, or --prompts=FILE.jsonl, one of the two"
        )
    if texts:
        return [{"prompt": text} for text in texts]
    with open(path, encoding="utf-8") as file:
        lines = list(enumerate(file, 1))
    records = [read_record(line, f"{path} line {n}") for n, line in lines if line.strip()]
    if not records:
        raise ValueError(f"{path} holds no prompt: write a JSON object a line")
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
    """A prompt as the message of a user; chats as they are."""
    if "messages" in record:
        return record
    rest = {name: value for name, value in record.items() if name != "prompt"}
    return {"messages": [{"role": "user", "content": record["prompt"]}], **rest}


def encoded(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    system: str = "",
    opening: bool = True,
    template: str = "",
) -> list[np.ndarray]:
    """Tokens of each record: of a chat those of its template's text, which names all special ones
    itself; of a prompt its own, after those that open a text. template: a file; empty: the
    tokenizer's."""
    before = np.array(tokenizer.opening if opening else (), np.int32)
    chats = [with_system(r["messages"], system) for r in records if "messages" in r]
    if system and not chats:
        raise ValueError(f"system={system!r} is for chats: add --chat, or give messages")
    texts = iter(chat_template_of(tokenizer, template).render(chats) if chats else [])
    return [
        tokenizer.encode_marked(next(texts), tokenizer.added)
        if "messages" in record
        else np.concatenate((before, tokenizer.encode(record["prompt"])))
        for record in records
    ]
