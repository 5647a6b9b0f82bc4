"""Render conversations as text, and find the spans of the text that the assistant wrote.

Templates with {% generation %} blocks mark these spans. For other templates they are found by
rendering prefixes: the messages before a turn and the messages up to its end must each render to a
prefix of the whole text; otherwise the row is refused.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

from maxmeg.data.chat.conversation import normalized, shown
from maxmeg.data.chat.forms import read_conversation
from maxmeg.data.chat.template import ChatTemplate
from maxmeg.data.prepare.documents import Record

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKS = ("\ufdd0", "\ufdd1")  # noncharacters of Unicode, which texts do not contain
MAX_ERRORS = 20  # bad rows after which reading stops
_LINES_OF_ERRORS = 8  # bad rows that an error names
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 8192, 2**23  # limits per request to the template's process

# "messages"; "tools" for the template; "first": the index of the first message with a loss; "form":
# the name of the row's form
Row = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Turns:
    """The text of a conversation, and the character ranges [begin, end) that have a loss.

    has_end: append the end-of-document token, with a loss; chat templates write their own end.
    form: the name of the row's form.
    """

    text: str
    spans: list[tuple[int, int]]
    has_end: bool = False
    form: str = ""


class BadRow(ValueError):
    """The reason why a row cannot be used."""


@contextlib.contextmanager
def bad_rows() -> Iterator[None]:
    """Raise the ValueErrors of the block as BadRow."""
    try:
        yield
    except ValueError as error:
        raise BadRow(str(error)) from None


def read_object(record: Record, *names: str) -> Row:
    """The object of a row; BadRow unless it is an object with these fields."""
    with bad_rows():
        row = record.value()
    if isinstance(row, dict) and all(row.get(name) is not None for name in names):
        return row
    wanted = f" with {' and '.join(map(json.dumps, names))}" * bool(names)
    actual = (
        f"one with {', '.join(row) or 'no field'}"[:200] if isinstance(row, dict) else shown(row)
    )
    raise BadRow(f"a row must be an object{wanted}, not {actual}")


def bad_rows_error(problems: Sequence[str]) -> ValueError:
    """The error that names the first bad rows."""
    more = len(problems[:MAX_ERRORS]) - _LINES_OF_ERRORS
    lines = [*problems[:_LINES_OF_ERRORS], *[f"and {more} more"] * (more > 0)]
    return ValueError("\n".join([*lines, "fix these rows or remove them"]))


def read_row(record: Record) -> Row:
    """The conversation of a row of any form (`forms.FORMS`); BadRow for an invalid row."""
    row = read_object(record)
    _check_weight(row, "weight")
    with bad_rows():
        form, (messages, tools, first) = read_conversation(row)
        return conversation(messages, tools, first) | {"form": form}


def conversation(messages: typing.Any, tools: typing.Any, first: int = 0) -> Row:
    """A row of these messages, in which the messages from index `first` on may have a loss;
    BadRow."""
    with bad_rows():
        messages, tools = normalized(messages, tools, is_trained=True)
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    if all(message["role"] != "assistant" for message in messages[first:]):
        raise BadRow("no message has the role assistant: no token would have a loss")
    return {"messages": messages, "tools": tools, "first": first}


def _check_message(message: Row, field: str) -> None:
    role = message["role"]
    if role not in ROLES:
        raise BadRow(f"{field}.role={shown(role)} is unknown: known are {', '.join(ROLES)}")
    _check_weight(message, f"{field}.weight")


def _check_weight(fields: Row, name: str) -> None:
    """BadRow for a factor of the loss, which other trainers know."""
    if fields.get("weight") not in (None, 1):
        raise BadRow(f"{name}={shown(fields['weight'])}: weights are not supported, remove it")


def find_turns(
    template: ChatTemplate,
    records: Iterable[Record],
    read: Callable[[Record], Row | Turns] = read_row,
) -> Iterator[tuple[Record, Turns | BadRow]]:
    """Yield every record in order, with its turns or the reason why it is refused.

    read: returns the conversation of a record, or its turns where no template is needed. ValueError
    where the template itself is invalid.
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
            or size + num_turns * record.size > _CHARACTERS_AT_ONCE
        ):
            yield from _turns_of(template, batch)
            batch, size, texts = [], 0, 0
        batch.append((record, row))
        texts, size = texts + num_turns, size + num_turns * record.size
    yield from _turns_of(template, batch)


def _turns_of(template: ChatTemplate, batch: list[tuple[Record, Row | Turns | BadRow]]):
    rows = [row for _, row in batch if isinstance(row, dict)]
    places = [record.place for record, row in batch if isinstance(row, dict)]
    turns = iter(_render_rows(template, rows, places) if rows else ())
    for record, row in batch:
        yield record, next(turns) if isinstance(row, dict) else row


def _render_rows(
    template: ChatTemplate, rows: Sequence[Row], places: Sequence[str]
) -> Iterator[Turns | BadRow]:
    whole = [_part(row, len(row["messages"]), False) for row in rows]
    texts, has_blocks = _texts(template, whole, places, ("", ""))
    parts = [_marked_parts(row) if has_blocks else _parts(row) for row in rows]
    all_parts = [part for row_parts in parts for part in row_parts]
    part_places = [place for place, own in zip(places, parts, strict=True) for _ in own]
    rendered = iter(_texts(template, all_parts, part_places, MARKS)[0])
    spans_of: Callable = _spans_by_marks if has_blocks else _spans_by_prefixes
    forms = [row.get("form", "") for row in rows]
    for text, row_parts, form in zip(texts, parts, forms, strict=True):
        part_texts = [next(rendered) for _ in row_parts]
        try:
            for part in (text, *part_texts):
                if isinstance(part, BadRow):
                    raise part
            assert isinstance(text, str)
            yield Turns(text, spans_of(text, part_texts), form=form)
        except BadRow as error:
            yield error


def _part(row: Row, end: int, opened: bool) -> Row:
    """The template's variables for the messages before index `end`."""
    variables = {"messages": row["messages"][:end], "tools": row["tools"]}
    return {**variables, "add_generation_prompt": opened}


def _parts(row: Row) -> list[Row]:
    """For each assistant turn with a loss: the messages before it, and the messages up to its end.

    The last part is left out where it is the whole conversation.
    """
    parts = []
    for number, message in enumerate(row["messages"]):
        if number >= row["first"] and message["role"] == "assistant":
            parts += [_part(row, number, True), _part(row, number + 1, False)]
    return parts[:-1] if parts and parts[-1]["messages"] == row["messages"] else parts


def _marked_parts(row: Row) -> list[Row]:
    """The whole conversation and, if earlier turns of the assistant have no loss, the messages
    before the first with a loss."""
    messages, first = row["messages"], row["first"]
    ends = [len(messages)]
    ends += [first] if any(m["role"] == "assistant" for m in messages[:first]) else []
    return [_part(row, end, False) for end in ends]


def _texts(
    template: ChatTemplate, parts: list[Row], places: Sequence[str], marks: tuple[str, str]
) -> tuple[list[str | BadRow], bool]:
    """The text of each part or the reason it failed, and whether the template has generation
    blocks."""
    texts: list[str | BadRow] = []
    has_blocks = False
    while len(texts) < len(parts):
        rest = parts[len(texts) :]
        answer = _answer(template, rest, places[len(texts) :], marks)
        has_blocks = answer["generation"]
        texts += answer["texts"]
        # A later one is tried again with the whole limit.
        if "error" in answer and answer["index"] < 1:
            if answer["index"] < 0:
                raise ValueError(f"{template.source} is not a valid template: {answer['error']}")
            texts.append(BadRow(f"{template.source} cannot render it: {answer['error']}"))
            if sum(isinstance(text, BadRow) for text in texts) >= MAX_ERRORS:
                unread = BadRow("not rendered, because too many rows before it failed")
                texts += [unread] * (len(parts) - len(texts))
    return texts, has_blocks


def _answer(
    template: ChatTemplate, parts: list[Row], places: Sequence[str], marks: tuple[str, str]
) -> dict[str, typing.Any]:
    """The answer of the template's process, for the first half of `parts` where all take too
    long."""
    while True:
        try:
            return template.answer(parts, marks)
        except ValueError as error:
            if len(parts) == 1:
                raise ValueError(f"{places[0]}: {error}") from None
            parts = parts[: len(parts) // 2]


def _spans_by_marks(text: str, marked: list[str]) -> list[tuple[int, int]]:
    pieces = re.split(f"([{MARKS[0]}{MARKS[1]}])", marked[0])  # the odd elements are marks
    if tuple(pieces[1::2]) != MARKS * (len(pieces) // 4):
        raise BadRow("the template's {% generation %} blocks are nested")
    if "".join(pieces[::2]) != text:
        raise BadRow(
            "the template changes the text of {% generation %} blocks after rendering them"
        )
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
            (before, up_to, "before it is not a prefix of the text up to its end"),
            (up_to, text, "up to its end is not a prefix of the whole text"),
        ):
            if not longer.startswith(shorter):
                raise BadRow(
                    f"the assistant's turn {turn} cannot be found: the text {names}. Give a "
                    "template with {% generation %} blocks around the assistant's text "
                    "(data.chat_template=FILE)"
                )
        spans.append((len(before), len(up_to)))
    return spans
