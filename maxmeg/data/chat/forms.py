"""The forms of rows that hold a conversation, recognized by their fields.

Each becomes messages, tools and the index of the first message that may have a loss.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxmeg.data.chat.conversation import excerpt, normalized, parsed

# ShareGPT's names of who speaks, those of LLaMA-Factory and of the datasets on the Hub among them.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
SPEAKERS |= {"bing": "assistant", "model": "assistant", "observation": "tool"}
SPEAKERS |= {"function_response": "tool", "function_call": "assistant"}
SPEAKERS |= {role: role for role in ("system", "user", "assistant", "tool")}

Row = Mapping[str, Any]


class Conversation(NamedTuple):
    """The messages and tools of a row, and the index of its first message that may have a loss."""

    messages: Any
    tools: Any
    first: int = 0


def read_conversation(row: Row) -> tuple[str, Conversation]:
    """The name of a row's form, and its conversation; ValueError names the field that is wrong."""
    name = form_of(row)
    if not name:
        forms = "; ".join(f"{name}: {', '.join(fields)}" for name, (fields, _) in FORMS.items())
        null = [field for field, value in row.items() if value is None]
        fields = ", ".join(field for field in row if field not in null) or "none"
        fields += f"; null: {', '.join(null)}" if null else ""
        raise ValueError(f"its fields ({fields}) fit no form of a chat ({forms})"[:500])
    return name, FORMS[name][1](row)


def form_of(row: Row) -> str:
    """The name of a row's form; empty for rows of no known form."""
    return next(
        (
            name
            for name, (fields, _) in FORMS.items()
            if all(row.get(field) is not None for field in fields)
        ),
        "",
    )


def _messages(row: Row) -> Conversation:
    return Conversation(row["messages"], row.get("tools"))


def _share_gpt(row: Row) -> Conversation:
    turns = parsed(row["conversations"], "conversations")
    if not isinstance(turns, list | tuple):
        raise ValueError(f"conversations={excerpt(turns)} is not a list")
    messages = [_turn(turn, f"conversations[{number}]") for number, turn in enumerate(turns)]
    messages, tools = normalized(messages, row.get("tools"), True, "conversations")
    return Conversation([*_system(row), *messages], tools)


def _turn(turn: Any, field: str) -> Any:
    """The message of {"from": ..., "value": ...}; a turn that is a message stays as it is."""
    if isinstance(turn, Mapping) and turn.get("role") is not None:
        return turn
    if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
        raise ValueError(
            f'{field}={excerpt(turn)} is not an object like {{"from": "human", "value": "..."}}'
        )
    speaker, value = turn["from"], turn.get("value")
    if speaker not in SPEAKERS:
        raise ValueError(f"{field}.from={excerpt(speaker)} is unknown: known are {_names()}")
    if not isinstance(value, str):
        raise ValueError(f"{field}.value={excerpt(value)} is not text")
    message = {"role": SPEAKERS[speaker], "content": value}
    if speaker == "function_call":
        called = parsed(value, f"{field}.value")
        calls = called if isinstance(called, list) else [called]
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            raise ValueError(
                f"{field}.value={excerpt(value)} is not a call like "
                '{"name": "...", "arguments": {...}}'
            )
        message |= {"content": None, "tool_calls": calls}
    return message | {name: turn[name] for name in ("weight",) if turn.get(name) is not None}


def _names() -> str:
    return ", ".join(sorted(SPEAKERS))


def _alpaca(row: Row) -> Conversation:
    instruction, context = _text(row, "instruction"), _text(row, "input")
    messages = _system(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history={excerpt(history)} is not a list of pairs of texts")
    for number, pair in enumerate(history):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"history[{number}]={excerpt(pair)} is not a pair of texts")
        messages += _pair(*pair)
    messages += _pair("\n\n".join(filter(None, (instruction, context))), _text(row, "output"))
    return Conversation(messages, row.get("tools"))


def _completion(row: Row) -> Conversation:
    """Texts, or lists of messages; only the completion has a loss, as in trl."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation([*_system(row), *_pair(prompt, completion)], row.get("tools"))
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise ValueError(
            f"prompt={excerpt(prompt)}, completion={excerpt(completion)}: give two texts or two "
            "lists of messages"
        )
    prompt, tools = normalized(prompt, row.get("tools"), field="prompt")
    completion, _ = normalized(completion, None, True, "completion")
    return Conversation([*prompt, *completion], tools, len(prompt))


def _pair(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _system(row: Row) -> list[dict[str, Any]]:
    text = _text(row, "system")
    return [{"role": "system", "content": text}] if text else []


def _text(row: Row, name: str) -> str:
    """The text of a field; empty where it is null or absent."""
    value = row.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"{name}={excerpt(value)} is not text")
    return value or ""


# name of the form -> the fields by which a row is recognized, and what reads it
FORMS: dict[str, tuple[tuple[str, ...], Callable[[Row], Conversation]]] = {
    "messages": (("messages",), _messages),
    "ShareGPT": (("conversations",), _share_gpt),
    "Alpaca": (("instruction", "output"), _alpaca),
    "prompt and completion": (("prompt", "completion"), _completion),
}
