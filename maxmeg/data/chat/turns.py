"""Render conversations as text, and find the spans of the text that the assistant wrote.

Each of the assistant's turns with a loss is rendered as the server would: its prompt holds the
messages before it and ends with the template's generation prompt, and the text up to the end of the
turn begins with this prompt. The turn is what follows the prompt, or what {% generation %} blocks
mark. Turns whose prompts continue the text of the turn before share one text. A template that
changes earlier turns, as Qwen 3's leaves out their thoughts, begins a new text.
"""

import bisect
import contextlib
import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

from maxmeg.data.chat.conversation import excerpt, normalized
from maxmeg.data.chat.forms import read_conversation
from maxmeg.data.chat.template import ChatTemplate
from maxmeg.data.corpus.loss_weights import weight_of
from maxmeg.data.prepare.documents import Record

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKS = ("\ufdd0", "\ufdd1")  # noncharacters of Unicode, which texts do not contain
MAX_ERRORS = 20  # bad rows after which reading stops
_LINES_OF_ERRORS = 8  # bad rows that an error names
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 8192, 2**23  # limits per request to the template's process

# "messages" and "tools" for the template; "weights": of each message's loss, 0 for one without a
# loss; "weight": of the row; "form": the name of the row's form
Row = dict[str, typing.Any]
Span = tuple[int, int, float]


@dataclasses.dataclass(frozen=True)
class Turns:
    """The text of a conversation up to the end of one of the assistant's turns, and its spans with
    a loss: (begin, end, weight of the loss), of characters [begin, end).

    has_end: append the end-of-document token, with a loss; chat templates write their own end.
    form: the name of the row's form.
    """

    text: str
    spans: list[Span]
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
    fields = f" with {' and '.join(map(json.dumps, names))}" * bool(names)
    actual = (
        f"one with {', '.join(row) or 'no field'}"[:200] if isinstance(row, dict) else excerpt(row)
    )
    raise BadRow(f"a row must be an object{fields}, not {actual}")


def bad_rows_error(problems: Sequence[str]) -> ValueError:
    """The error that names the first bad rows."""
    num_others = len(problems[:MAX_ERRORS]) - _LINES_OF_ERRORS
    lines = [*problems[:_LINES_OF_ERRORS], *[f"and {num_others} more"] * (num_others > 0)]
    return ValueError("\n".join([*lines, "fix these rows or remove them"]))


def read_row(record: Record) -> Row:
    """The conversation of a row of any form (`forms.FORMS`); BadRow for an invalid row."""
    row = read_object(record)
    with bad_rows():
        form, (messages, tools, first) = read_conversation(row)
        weight = weight_of(row)
    return conversation(messages, tools, first) | {"form": form, "weight": weight}


def conversation(messages: typing.Any, tools: typing.Any, first: int = 0) -> Row:
    """A row of weight 1 with these messages, in which those of the assistant from index `first` on
    have a loss with their own weights; BadRow."""
    with bad_rows():
        messages, tools = normalized(messages, tools, is_trained=True)
    weights = [_weight(m, f"messages[{i}]") * (i >= first) for i, m in enumerate(messages)]
    if not any(weights):
        raise BadRow(
            "no message has the role assistant and a weight above 0: no token would have a loss"
        )
    return {"messages": messages, "tools": tools, "weights": weights, "weight": 1}


def _weight(message: Row, field: str) -> float:
    """Remove a message's weight, which is not for the template, and return that of its loss."""
    role, weight = message["role"], message.pop("weight", 1)
    if role not in ROLES:
        raise BadRow(f"{field}.role={excerpt(role)} is unknown: known are {', '.join(ROLES)}")
    if role != "assistant" and weight not in (0, 1):
        raise BadRow(f"{field}.weight={weight}: only the assistant's messages have a loss")
    return weight * (role == "assistant")


def find_turns(
    template: ChatTemplate,
    records: Iterable[Record],
    read: Callable[[Record], Row | Turns] = read_row,
) -> Iterator[tuple[Record, list[Turns] | BadRow]]:
    """Yield every record in order, with the texts of its turns (none for a row of weight 0) or the
    reason why it is refused.

    read: returns the conversation of a record, or its turns where no template is needed. ValueError
    where the template itself is invalid.
    """
    batch: list[tuple[Record, Row | Turns | BadRow]] = []
    size = texts = 0
    for record in records:
        try:
            row: Row | Turns | BadRow = read(record)
            if isinstance(row, dict) and row["tools"] and "tools" not in template.text:
                raise BadRow(
                    "the chat template does not write tools: remove them from the row, or give "
                    "data.chat_template=FILE"
                )
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


@dataclasses.dataclass(frozen=True)
class _Text:
    """The text up to the end of a turn, and the spans of the turns in it that follow prompts.

    last: its index among the row's parts.
    """

    text: str
    spans: list[Span]
    last: int


def _turns_of(template: ChatTemplate, batch: list[tuple[Record, Row | Turns | BadRow]]):
    rows = [row for _, row in batch if isinstance(row, dict)]
    places = [record.place for record, row in batch if isinstance(row, dict)]
    turns = iter(_render_rows(template, rows, places) if rows else ())
    for record, row in batch:
        if isinstance(row, dict):
            yield record, next(turns)
        else:
            yield record, [row] if isinstance(row, Turns) else row


def _render_rows(
    template: ChatTemplate, rows: Sequence[Row], places: Sequence[str]
) -> Iterator[list[Turns] | BadRow]:
    parts = [_parts(row) for row in rows]
    rendered, has_blocks = _render(template, parts, places, ("", ""))
    texts = [
        _joined(of_row, texts_of_row, [w * row["weight"] for w in row["weights"] if w], has_blocks)
        for row, of_row, texts_of_row in zip(rows, parts, rendered, strict=True)
    ]
    marked: list[list[str | BadRow]] = [[] for _ in rows]
    if has_blocks:
        ends = [
            [of_row[text.last] for text in turns] if not isinstance(turns, BadRow) else []
            for of_row, turns in zip(parts, texts, strict=True)
        ]
        marked, _ = _render(template, ends, places, MARKS)
    for row, turns, of_row in zip(rows, texts, marked, strict=True):
        if isinstance(turns, BadRow):
            yield turns
            continue
        try:
            spans = _marked_spans(turns, of_row) if has_blocks else [t.spans for t in turns]
        except BadRow as error:
            yield error
            continue
        form = row.get("form", "")
        yield [Turns(t.text, each, form=form) for t, each in zip(turns, spans, strict=True)]


def _parts(row: Row) -> list[Row]:
    """The template's variables for each assistant turn with a loss: for its prompt, and for the
    messages up to its end."""
    messages, parts = row["messages"], []
    for number, weight in enumerate(row["weights"]):
        if weight * row["weight"]:
            for end, is_prompt in ((number, True), (number + 1, False)):
                part = {"messages": messages[:end], "tools": row["tools"]}
                parts.append({**part, "add_generation_prompt": is_prompt})
    return parts


def _render(
    template: ChatTemplate,
    parts: Sequence[list[Row]],
    places: Sequence[str],
    marks: tuple[str, str],
) -> tuple[list[list[str | BadRow]], bool]:
    """The texts of each row's parts, as `_texts` returns them."""
    part_places = [place for place, of_row in zip(places, parts, strict=True) for _ in of_row]
    texts, has_blocks = _texts(template, [*itertools.chain(*parts)], part_places, marks)
    rest = iter(texts)
    return [[*itertools.islice(rest, len(of_row))] for of_row in parts], has_blocks


def _joined(
    parts: list[Row], rendered: list[str | BadRow], weights: list[float], has_blocks: bool
) -> list[_Text] | BadRow:
    """The texts of a row's turns, each with all turns that it contains as the server would render
    them; or the reason why there are none. weights: of the turns."""
    texts: list[_Text] = []
    for i in range(0, len(rendered), 2):
        prompt, text = rendered[i : i + 2]
        if has_blocks and isinstance(prompt, BadRow) and not texts:
            prompt = ""  # templates may read messages[0], and the conversation may begin with this
        for part in (prompt, text):
            if isinstance(part, BadRow):
                return part
        assert isinstance(prompt, str) and isinstance(text, str)
        if not text.startswith(prompt) and not has_blocks:
            turn = _turn_after(prompt, text, parts[i + 1]["messages"])
            text = prompt + turn if turn else text
        if not text.startswith(prompt):
            return BadRow(
                f"the assistant's turn {i // 2 + 1} cannot be found: the prompt that asks for it "
                "is not a prefix of the text up to its end. Give a template whose turns of the "
                "assistant begin with its generation prompt (data.chat_template=FILE)"
            )
        spans = [(len(prompt), len(text), weights[i // 2])]
        if texts and prompt.startswith(texts[-1].text):
            spans = [*texts.pop().spans, *spans]
        texts.append(_Text(text, spans, i + 1))
    return texts


def _turn_after(prompt: str, text: str, messages: Sequence[Row]) -> str:
    """What a template writes after a prompt that it changes as soon as the answer follows, as
    Mistral's, which have the system message in the last question; "" where that is not clear.

    It is what follows the end of the prompt, from the last message before the answer on.
    """
    question, answer = (["", *(message["content"].strip() for message in messages)])[-2:]
    lengths = range(len(prompt) + 1)
    length = bisect.bisect_left(lengths, True, key=lambda n: prompt[len(prompt) - n :] not in text)
    shared = prompt[len(prompt) - length + 1 :]  # the longest end of the prompt in the text
    turn = text.rpartition(shared)[2] if shared else ""
    return turn if question and question in shared and answer in turn else ""


def _marked_spans(texts: list[_Text], marked: list[str | BadRow]) -> list[list[Span]]:
    """The spans of the {% generation %} blocks of each text's turns; marked: each text with
    marks."""
    spans = []
    for text, marks in zip(texts, marked, strict=True):
        if isinstance(marks, BadRow):
            raise marks
        spans.append([])
        for begin, end in _spans_by_marks(text.text, marks):
            weights = {weight for first, last, weight in text.spans if begin < last and first < end}
            if len(weights) > 1:
                raise BadRow("a {% generation %} block holds turns of different weights")
            spans[-1] += [(begin, end, weight) for weight in weights]
    return spans


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


def _spans_by_marks(text: str, marked: str) -> list[tuple[int, int]]:
    """The spans of the blocks of a text."""
    pieces = re.split(f"([{MARKS[0]}{MARKS[1]}])", marked)  # the odd elements are marks
    if tuple(pieces[1::2]) != MARKS * (len(pieces) // 4):
        raise BadRow("the template's {% generation %} blocks are nested")
    if "".join(pieces[::2]) != text:
        raise BadRow(
            "the template changes the text of {% generation %} blocks after rendering them"
        )
    ends = list(itertools.accumulate(len(piece) for piece in pieces[::2]))
    spans = zip(ends[0::2], ends[1::2], strict=False)
    return [(begin, end) for begin, end in spans if begin < end]
