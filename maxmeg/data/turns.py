"""Conversations in the messages format as text, with the parts that the assistant said.

A template says which those are by its {% generation %} blocks. Where it has none they are found by
rendering: the text of the messages before a turn, and that of the messages up to it, must each be
the beginning of the whole, or the template is refused.
"""

import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

from maxmeg.data.chat import SHOWN, ChatTemplate, check_messages
from maxmeg.data.documents import Record

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: no text holds them
MAX_ERRORS = 20  # bad rows that one error names
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 8192, 2**23  # given to one process

# "messages", "tools" where a template reads them, and "first", of those that may be learnt
Row = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Turns:
    """A conversation's text, and where in it the assistant speaks: [begin, end) of characters.

    has_end: the end of a document follows, which is learnt too; a template writes its own.
    """

    text: str
    spans: list[tuple[int, int]]
    has_end: bool = False


class BadRow(ValueError):
    """Why one row cannot be used."""


def read_object(record: Record, *names: str) -> Row:
    """A JSON line; BadRow for what is no object with these names."""
    try:
        row = json.loads(record.data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRow(f"invalid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise BadRow("JSON nested too deeply") from None
    except ValueError as error:
        raise BadRow(f"invalid JSON: {error}") from None
    if not isinstance(row, dict) or any(name not in row for name in names):
        raise BadRow(f"a row must be an object with {' and '.join(map(json.dumps, names))}")
    return row


def read_row(record: Record) -> Row:
    """A chat; BadRow for what is none."""
    row = read_object(record, "messages")
    return conversation(row["messages"], row.get("tools"))


def conversation(messages: typing.Any, tools: typing.Any, first: int = 0) -> Row:
    """A row of these messages, of which those from `first` on may be learnt; BadRow."""
    try:
        check_messages(messages, "messages")
    except ValueError as error:
        raise BadRow(str(error)) from None
    for number, message in enumerate(messages, 1):
        _check_message(message, f"message {number}")
    if all(message["role"] != "assistant" for message in messages[first:]):
        raise BadRow("no message is the assistant's: there is nothing to learn from it")
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"tools={str(tools)[:SHOWN]!r} is not a list")
    return {"messages": messages, "tools": tools or None, "first": first}


def _check_message(message: Row, where: str) -> None:
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise BadRow(f"{where} has the unknown role {role!r}: known are {', '.join(ROLES)}")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise BadRow(f"{where} has the content {str(content)[:SHOWN]!r}, which is no text")
    if message.get("weight", 1) != 1:
        raise BadRow(f"{where} has weight={message['weight']!r}: every turn counts once, remove it")


def find_turns(
    template: ChatTemplate,
    records: Iterable[Record],
    read: Callable[[Record], Row | Turns] = read_row,
) -> Iterator[tuple[Record, Turns | BadRow]]:
    """Every record in order with its turns, or why it has none.

    read: a record's conversation, or its turns where it needs no template. ValueError where the
    template as a whole is at fault.
    """
    batch: list[tuple[Record, Row | Turns | BadRow]] = []
    size = texts = 0
    for record in records:
        try:
            row: Row | Turns | BadRow = read(record)
        except BadRow as error:
            row = error
        num_turns = len(row["messages"]) if isinstance(row, dict) else 0
        if batch and (
            texts + num_turns > _TEXTS_AT_ONCE
            or size + num_turns * len(record.data) > _CHARACTERS_AT_ONCE
        ):
            yield from _turns_of(template, batch)
            batch, size, texts = [], 0, 0
        batch.append((record, row))
        texts, size = texts + num_turns, size + num_turns * len(record.data)
    yield from _turns_of(template, batch)


def _turns_of(template: ChatTemplate, batch: list[tuple[Record, Row | Turns | BadRow]]):
    rows = [row for _, row in batch if isinstance(row, dict)]
    places = [record.place for record, row in batch if isinstance(row, dict)]
    found = iter(_find(template, rows, places) if rows else ())
    for record, row in batch:
        yield record, next(found) if isinstance(row, dict) else row


def _find(
    template: ChatTemplate, rows: Sequence[Row], places: Sequence[str]
) -> Iterator[Turns | BadRow]:
    whole = [_part(row, len(row["messages"]), False) for row in rows]
    texts, has_blocks = _texts(template, whole, places, ("", ""))
    parts = [_marked_parts(row) if has_blocks else _parts(row) for row in rows]
    given = [part for mine in parts for part in mine]
    owners = [place for place, mine in zip(places, parts, strict=True) for _ in mine]
    others = iter(_texts(template, given, owners, MARKS)[0])
    spans_of: Callable = _spans_by_marks if has_blocks else _spans_by_prefixes
    for text, asked in zip(texts, parts, strict=True):
        mine = [next(others) for _ in asked]
        try:
            for part in (text, *mine):
                if isinstance(part, BadRow):
                    raise part
            assert isinstance(text, str)
            yield Turns(text, spans_of(text, mine))
        except BadRow as error:
            yield error


def _part(row: Row, end: int, opened: bool) -> Row:
    """What a template is given of the messages before `end`."""
    given = {"messages": row["messages"][:end], "tools": row["tools"]}
    return {**given, "add_generation_prompt": opened}


def _parts(row: Row) -> list[Row]:
    """For each turn of the assistant that may be learnt: the messages before it, and with it, but
    where that is the whole."""
    parts = []
    for number, message in enumerate(row["messages"]):
        if number >= row["first"] and message["role"] == "assistant":
            parts += [_part(row, number, True), _part(row, number + 1, False)]
    return parts[:-1] if parts and parts[-1]["messages"] == row["messages"] else parts


def _marked_parts(row: Row) -> list[Row]:
    """The whole, and those messages before the ones to learn that have the assistant's turns."""
    messages, first = row["messages"], row["first"]
    ends = [len(messages)]
    ends += [first] if any(m["role"] == "assistant" for m in messages[:first]) else []
    return [_part(row, end, False) for end in ends]


def _texts(
    template: ChatTemplate, given: list[Row], places: Sequence[str], marks: tuple[str, str]
) -> tuple[list[str | BadRow], bool]:
    """A text or a fault of each, and whether the template has {% generation %} blocks."""
    texts: list[str | BadRow] = []
    has_blocks = False
    while len(texts) < len(given):
        rest = given[len(texts) :]
        answer = _answer(template, rest, places[len(texts) :], marks)
        has_blocks = answer["generation"]
        texts += answer["texts"]
        if "error" in answer and answer["index"] < 1:  # a later one is tried with all the room
            if answer["index"] < 0:
                raise ValueError(f"{template.source} is no template: {answer['error']}")
            texts.append(BadRow(f"{template.source} cannot make text of it: {answer['error']}"))
            if sum(isinstance(text, BadRow) for text in texts) >= MAX_ERRORS:
                unread = BadRow("not tried, after many that failed")
                texts += [unread] * (len(given) - len(texts))
    return texts, has_blocks


def _answer(
    template: ChatTemplate, given: list[Row], places: Sequence[str], marks: tuple[str, str]
) -> dict[str, typing.Any]:
    """The template's process's answer; of fewer conversations where these take it too long."""
    while True:
        try:
            return template.answer(given, marks)
        except ValueError as error:
            if len(given) == 1:
                raise ValueError(f"{places[0]}: {error}") from None
            given = given[: len(given) // 2]


def _spans_by_marks(text: str, marked: list[str]) -> list[tuple[int, int]]:
    pieces = re.split(f"([{MARKS[0]}{MARKS[1]}])", marked[0])  # a mark at each odd place
    if tuple(pieces[1::2]) != MARKS * (len(pieces) // 4):
        raise BadRow("the template's {% generation %} blocks stand in each other")
    if "".join(pieces[::2]) != text:
        raise BadRow("the template changes the text of its {% generation %} blocks afterwards")
    ends = list(itertools.accumulate(len(piece) for piece in pieces[::2]))
    spans = list(zip(ends[0::2], ends[1::2], strict=False))
    if len(marked) > 1:
        spans = spans[marked[1].count(MARKS[0]) :]
    return [(begin, end) for begin, end in spans if begin < end]


def _spans_by_prefixes(text: str, parts: list[str]) -> list[tuple[int, int]]:
    spans = []
    parts = [*parts, text] if len(parts) % 2 else parts
    for turn, (before, up_to) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        for shorter, longer, names in (
            (before, up_to, "before it is not how the text up to its end begins"),
            (up_to, text, "up to its end is not how the whole begins"),
        ):
            if not longer.startswith(shorter):
                raise BadRow(
                    f"the assistant's turn {turn} cannot be found: the text {names}. Give a "
                    "template with {% generation %} blocks around what the assistant says "
                    "(data.chat_template=FILE)"
                )
        spans.append((len(before), len(up_to)))
    return spans
