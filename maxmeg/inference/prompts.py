"""Prompts and chats, and their tokens."""

import json
import typing
from collections.abc import Sequence

import numpy as np

from maxmeg.config.data import Objective
from maxmeg.config.schema import Config
from maxmeg.data.chat.conversation import excerpt, normalized
from maxmeg.data.chat.template import Messages, load_chat_template
from maxmeg.data.prepare import documents
from maxmeg.data.tokenizers.tokenizer import SENTINEL, Tokenizer

Record = dict[str, typing.Any]  # has a "prompt" or "messages", and any other keys


def read_records(texts: Sequence[str], path: str) -> list[Record]:
    """Return the prompts in `texts`, or the rows of a file; ValueError for both, neither, or a bad
    row."""
    if bool(texts) == bool(path):
        raise ValueError("give either --prompt=TEXT, once or more, or --prompts=FILE.jsonl")
    if texts:
        return [{"prompt": text} for text in texts]
    records = []
    for row in documents.read_records(documents.find_inputs([path])):
        try:
            records.append(checked(row.value()))
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
    if not records:
        raise ValueError(f"{path} holds no prompt: write one JSON object per line")
    return records


def checked(record: typing.Any) -> Record:
    """Return a prompt or a chat as it is; ValueError names the field that is wrong."""
    is_object = isinstance(record, dict)
    names = [n for n in ("prompt", "messages") if is_object and record.get(n) is not None]
    if len(names) != 1:
        raise ValueError('a row must be an object with either "prompt" or "messages"')
    if names == ["messages"]:
        conversation = normalized(record["messages"], record.get("tools"))
        text = json.dumps(conversation, ensure_ascii=False, default=str)
    elif not isinstance(text := record["prompt"], str):
        raise ValueError(f"prompt={excerpt(text)} is not text")
    documents.check_unicode(text, names[0])
    return record


def is_chat(record: Record) -> bool:
    return record.get("messages") is not None


def as_chat(record: Record) -> Record:
    """Return a prompt as a chat with one user message; chats are returned as they are."""
    if is_chat(record):
        return record
    rest = {name: value for name, value in record.items() if name not in ("prompt", "messages")}
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

    A chat is rendered by the template, with its tools; the template writes all special tokens
    itself. system: system message for the chats.
    """
    chats = [normalized(r["messages"], r.get("tools")) for r in records if is_chat(r)]
    if system and not chats:
        raise ValueError(f"system={system!r} is for chats: add --chat, or give messages")
    for record in records:
        if not is_chat(checked(record)) and record.get("tools"):
            raise ValueError(
                f"tools of the prompt {excerpt(record['prompt'])} are for chats: add --chat, or "
                "give messages"
            )
    template = load_chat_template(tokenizer, config.data.chat_template) if chats else None
    conversations = [with_system(messages, system) for messages, _ in chats]
    tools = [{"tools": tools} for _, tools in chats]
    if template and "tools" not in template.text and any(tools for _, tools in chats):
        raise ValueError(
            f"{template.source} does not write tools: leave them out of the prompts, or "
            "give the model a chat template that does"
        )
    texts = iter(template.render(conversations, tools) if template else [])
    return [
        tokenizer.encode_marked(next(texts), tokenizer.added)
        if is_chat(record)
        else prompt_tokens(tokenizer, config, record["prompt"], special)
        for record in records
    ]


def with_system(messages: Messages, system: str) -> Messages:
    """Prepend a system message, unless `system` is empty or the messages have one already."""
    if not system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]
