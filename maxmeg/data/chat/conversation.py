"""The one form of messages and tools in which chat templates receive them.

Rows, prompts and requests write a conversation in several ways: content as text or as a list of
text parts, arguments of a tool call as an object or as JSON text, fields that are null or absent.
All of them become the same messages, so that training and serving render the same text.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maxmeg.data.corpus.loss_weights import weight_of

SHOWN = 80  # characters of a value in an error
_REASONING = ("reasoning_content", "reasoning")  # two names of one text; templates read either
_MESSAGE = ("role", "content", "name", "tool_call_id", "tool_calls", *_REASONING)
_CALL, _CALLED = ("id", "type", "function"), ("name", "arguments")
_TOOL, _TOOL_FUNCTION = ("type", "function"), ("name", "description", "parameters", "strict")

Fields = dict[str, Any]


def normalized(
    messages: Any, tools: Any = None, is_trained: bool = False, field: str = "messages"
) -> tuple[list[Fields], list[Fields] | None]:
    """Messages and tools in the form of OpenAI's API, with arguments of calls as objects.

    Fields that are null are left out, text parts are joined, JSON text is parsed where an object
    belongs, `developer` becomes `system`, calls and tools without "function" get it, and known
    fields come in a fixed order. `reasoning_content` is also `reasoning`, and the reverse. Other
    fields stay as they are. is_trained: whether an assistant's message without content and without
    any other field, such as tool_calls, is an error. field: the name of the messages in errors.
    ValueError names the field that is wrong.
    """
    entries = parsed(messages, field)
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ValueError(f"{field}={excerpt(messages)} is not a list of messages")
    result = [_message(m, f"{field}[{i}]", is_trained) for i, m in enumerate(entries)]
    return result, _list(tools, "tools", _tool) or None


def parsed(value: Any, field: str) -> Any:
    """The value of JSON text, None for an empty text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise ValueError(f"{field}={excerpt(value)} is not JSON") from None


def excerpt(value: Any) -> str:
    """A value in an error, cut to `SHOWN` characters."""
    return repr(value)[:SHOWN]


def _message(message: Any, field: str, is_trained: bool) -> Fields:
    fields = _object(message, field, 'an object like {"role": "user", "content": "..."}')
    role = fields["role"] = _text(fields, "role", field)
    if role == "developer":
        fields["role"] = "system"
    if calls := _list(fields.pop("tool_calls", None), f"{field}.tool_calls", _call):
        fields["tool_calls"] = calls
    fields["content"] = _content(fields, field, is_trained)
    for name, other in (_REASONING, _REASONING[::-1]):
        if name in fields:
            fields.setdefault(other, fields[name])
    for name in ("name", "tool_call_id"):
        if name in fields and not _text(fields, name, field):
            del fields[name]
    if is_trained:
        weight_of(fields, f"{field}.weight")
    return _ordered(fields, _MESSAGE)


def _content(fields: Fields, field: str, is_trained: bool) -> str:
    """The text of a message; its parts are joined."""
    content, role = fields.get("content"), fields["role"]
    if isinstance(content, str):
        return content
    if content is None:
        says_more = fields.keys() - {"role", "name", "weight"}
        if role == "tool" or (role == "assistant" and (says_more or not is_trained)):
            return ""
        raise ValueError(f"{field} has no content, a text")
    if not isinstance(content, list | tuple):
        raise ValueError(f"{field}.content={excerpt(content)} is not text")
    texts = []
    for number, part in enumerate(content):
        text = part
        if isinstance(part, Mapping) and part.get("type") in (None, "text"):
            text = part.get("text")
        if not isinstance(text, str):
            raise ValueError(
                f"{field}.content[{number}]={excerpt(part)} is not a text part like "
                '{"type": "text", "text": "..."}'
            )
        texts.append(text)
    return "".join(texts)


def _call(call: Any, field: str) -> Fields:
    """A tool call; its arguments become an object."""
    fields = _nested(call, field, ("id", "type", "index"))
    function, place = fields["function"], f"{field}.function"
    _text(function, "name", place)
    arguments = function.get("arguments")
    value = parsed(arguments, f"{place}.arguments")
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{place}.arguments={excerpt(arguments)} is not a JSON object")
    function["arguments"] = dict(value or {})
    fields["function"] = _ordered(function, _CALLED)
    return _ordered(fields, _CALL)


def _tool(tool: Any, field: str) -> Fields:
    fields = _nested(tool, field, ("type",))
    function, place = fields["function"], f"{field}.function"
    _text(function, "name", place)
    if "parameters" in function:
        value = parsed(function["parameters"], f"{place}.parameters")
        if not isinstance(value, Mapping):
            parameters = excerpt(function["parameters"])
            raise ValueError(f"{place}.parameters={parameters} is not a JSON schema, an object")
        function["parameters"] = dict(value)
    fields["function"] = _ordered(function, _TOOL_FUNCTION)
    return _ordered(fields, _TOOL)


def _nested(value: Any, field: str, outer: Iterable[str]) -> Fields:
    """A call or a tool as {"type": "function", "function": {...}}, of which a flat one has the
    fields of "function" beside those named `outer`."""
    fields = _object(value, field, 'an object like {"type": "function", "function": {...}}')
    if "function" not in fields:
        function = {name: fields[name] for name in fields if name not in outer}
        fields = {name: fields[name] for name in outer if name in fields} | {"function": function}
    fields["function"] = _object(fields["function"], f"{field}.function", "an object with a name")
    fields.setdefault("type", "function")
    return fields


def _list(value: Any, field: str, read: Callable[[Any, str], Fields]) -> list[Fields]:
    entries = parsed(value, field)
    if entries is None:
        return []
    if not isinstance(entries, list | tuple):
        raise ValueError(f"{field}={excerpt(value)} is not a list")
    return [read(item, f"{field}[{number}]") for number, item in enumerate(entries)]


def _object(value: Any, field: str, kind: str) -> Fields:
    """The fields of an object that are not null."""
    fields = parsed(value, field) if isinstance(value, str) and value[:1] == "{" else value
    if not isinstance(fields, Mapping):
        raise ValueError(f"{field}={excerpt(value)} is not {kind}")
    return {name: item for name, item in fields.items() if item is not None}


def _text(fields: Fields, name: str, field: str) -> str:
    if name not in fields:
        raise ValueError(f"{field} has no {name}, a text")
    if not isinstance(fields[name], str):
        raise ValueError(f"{field}.{name}={excerpt(fields[name])} is not text")
    return fields[name]


def _ordered(fields: Fields, names: Sequence[str]) -> Fields:
    """The fields with these names first, in this order."""
    return {name: fields[name] for name in (*names, *fields) if name in fields}
