"""Labelled files: GLUE's and other tables, RACE, words in lines, and JSON lines."""

import collections
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxmeg.config.data import DataConfig, Objective
from maxmeg.config.labelled import GLUE, Format, Layout
from maxmeg.data.prepare.documents import check_unicode, decode, find_inputs, read_records

logger = logging.getLogger("maxmeg")
MAX_DAMAGED = 0.01  # share of the lines of a table that may have another number of columns
MAX_ERRORS = 5  # bad rows that an error lists
TEXTS, CHOICES = ("text", "text_pair", "label"), ("context", "question", "choices", "label")
WORDS = ("tokens", "labels")
PAIR = ("query", "text", "negatives")
ABSENT = -1  # label of a word without a class


class Example(NamedTuple):
    """A text or pair of texts and its class; or one for each choice, and the right one's number.

    place: file and line, for messages.
    """

    place: str
    texts: tuple[tuple[str, str], ...]  # the second is "" without a pair
    label: int


class Words(NamedTuple):
    """Words, and the class of each (ABSENT: none)."""

    place: str
    words: tuple[str, ...]
    labels: tuple[int, ...]


class BadRow(ValueError):
    """A row that cannot be used."""


def read_examples(config: DataConfig, path: str) -> list[Example | Words]:
    """The rows of a labelled file, or of a folder of RACE, in order.

    ValueError for a file that does not exist, for columns that are missing, for labels outside the
    classes and for damaged rows, whose lines it names.
    """
    kind = format_of(config, path)
    parse: Callable = {
        Objective.classify: classified,
        Objective.tag: tagged,
        Objective.choose: chosen,
        Objective.retrieve: retrieved,
    }[config.objective]
    rows = {"table": table_rows, "race": race_rows, "conll": word_rows, "json": json_rows}[kind]
    examples, problems, left_out = [], [], 0
    for place, row in rows(config, path):
        try:
            if isinstance(row, BadRow):
                raise row
            example = parse(config, place, row)
            examples += [] if example is None else [example]
            left_out += example is None
        except BadRow as error:
            problems.append(f"{place}: {error}")
            if len(problems) == MAX_ERRORS:
                break
    if problems:
        raise ValueError("\n".join(problems))
    if left_out:
        logger.warning("%s: left out %d rows without a text or a label", path, left_out)
    if not examples:
        raise ValueError(f"{path} holds no row: is it of data.format={config.format.value}?")
    return examples


def format_of(config: DataConfig, path: str) -> str:
    """The kind of a file; ValueError where the objective does not read it."""
    if not Path(path).exists():
        raise ValueError(f"data.paths: {path} does not exist")
    if config.format is Format.suffix:
        suffixes = {".tsv": "table", ".conll": "conll"}
        suffixes |= dict.fromkeys((".jsonl", ".json", ".parquet", ".arrow"), "json")
        kind = "json" if Path(path).is_dir() else suffixes.get(Path(path).suffix, "")
        if not kind:
            raise ValueError(
                f"{path}: data.format=suffix knows {', '.join(suffixes)}; rename it, or name its "
                "format with data.format"
            )
    else:
        kind = "table" if config.format in GLUE else config.format.value
    able = {"table": Objective.classify, "race": Objective.choose, "conll": Objective.tag}
    if able.get(kind, config.objective) is not config.objective:
        raise ValueError(
            f"{path} is a {kind} file, for data.objective={able[kind].value}, not "
            f"{config.objective.value}"
        )
    return kind


def lines_of(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a text file from 1, blank ones included."""
    try:
        text = decode(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return enumerate((line.removesuffix("\r") for line in text.split("\n")), 1)


def table_rows(config: DataConfig, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a tab-separated file by column, without quoting, as GLUE's are.

    Lines with another number of columns, which published files have, are left out and counted.
    """
    layout = GLUE.get(config.format, Layout((), ()))
    lines = ((number, line.split("\t")) for number, line in lines_of(path) if line.strip())
    header = list(layout.header) or next(lines, (0, []))[1]
    if twice := [name for name, count in collections.Counter(header).items() if count > 1]:
        raise ValueError(f"{path}: the header line names {', '.join(twice)} twice")
    columns = config.columns or layout.columns
    if missing := [name for name in columns if name not in header]:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}, its header line has {', '.join(header)}: "
            "name the columns of the texts and the label with data.columns; a set without labels "
            "is for LanguageModel.classify"
        )
    damaged, count = [], 0
    for number, cells in lines:
        count += 1
        if len(cells) != len(header):
            damaged.append(number)
            continue
        yield f"{path}, line {number}", dict(zip(header, cells, strict=True))
    if len(damaged) > max(1, MAX_DAMAGED * count):
        raise ValueError(
            f"{path}: {len(damaged)} of {count} lines, first line {damaged[0]}, have not the "
            f"{len(header)} columns of the header line: is it tab-separated?"
        )
    if damaged:
        logger.warning(
            "%s: left out %d lines of another number of columns, first line %d",
            *(path, len(damaged), damaged[0]),
        )


def json_rows(config: DataConfig, path: str) -> Iterator[tuple[str, Any]]:
    """The objects of a file of JSON lines, a JSON array or a table, or of a folder of tables."""
    for record in read_records(find_inputs([path])):
        try:
            row = record.value()
            row = row if isinstance(row, dict) else BadRow(f"is a {type(row).__name__}, no object")
        except ValueError as error:
            row = BadRow(str(error))
        yield record.place, row


def race_rows(config: DataConfig, path: str) -> Iterator[tuple[str, Any]]:
    """The questions of RACE's passages: a file of JSON objects, or a folder of .txt files."""
    files = sorted(Path(path).rglob("*.txt")) if Path(path).is_dir() else [Path(path)]
    for file in files:
        for number, line in lines_of(str(file)):
            place = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                passage = json.loads(line)
                names = ("article", "questions", "options", "answers")
                article, *lists = (passage[name] for name in names)
                questions = list(zip(*lists, strict=True))
            except (ValueError, TypeError, KeyError) as error:
                yield place, BadRow(f"is no passage of RACE: {type(error).__name__}: {error}")
                continue
            for question, options, answer in questions:
                # The choice fills the gap of the question, or follows it, as in Megatron-LM.
                gap = isinstance(question, str) and "_" in question
                choices = [question.replace("_", c) if gap else f"{question} {c}" for c in options]
                row = {"context": article, "question": "", "choices": choices, "label": answer}
                yield place, row


def word_rows(config: DataConfig, path: str) -> Iterator[tuple[str, Any]]:
    """Sentences of lines "word ... label", with blank lines between them, as CoNLL's."""
    words: list[str] = []
    labels: list[str] = []
    first = 0
    for number, line in [*lines_of(path), (0, "")]:
        cells = line.split()
        if not cells or cells[0] == "-DOCSTART-":
            if words:
                yield f"{path}, line {first}", {"tokens": words, "labels": labels}
            words, labels = [], []
            continue
        first = first if words else number
        if len(cells) < 2:
            yield f"{path}, line {number}", BadRow(f"{line!r} is no word with a label")
            continue
        words.append(cells[0])
        labels.append(cells[-1])


def classified(config: DataConfig, place: str, row: Mapping[str, Any]) -> Example | None:
    """A row of a table or an object of one or two texts and a label. None for rows of published
    sets that have no text, or no label on which the annotators agreed."""
    layout = GLUE.get(config.format)
    columns = config.columns or (layout.columns if layout else TEXTS)
    *names, label = columns
    optional = {"text_pair"} if columns is TEXTS else set()
    texts = [field(row, name, str) for name in names if name in row or name not in optional]
    value = field(row, label, (str, int))
    if layout is not None and (not all(texts) or value == (layout.skipped or None)):
        return None
    if not 1 <= len(texts) <= 2:
        raise BadRow(f"data.columns={','.join(columns)} names {len(texts)} texts: 1 or 2")
    for name, text in zip(names, texts, strict=False):
        if not text.strip():
            raise BadRow(f"{name} is empty")
    numbered = layout is None or layout.numbered
    pair = (texts[0], texts[1] if texts[1:] else "")
    return Example(place, (pair,), class_of(config, value, numbered))


def tagged(config: DataConfig, place: str, row: Mapping[str, Any]) -> Words:
    """Words and a label for each."""
    names = config.columns or WORDS
    words, labels = (field(row, name, list) for name in names)
    if len(words) != len(labels) or not words:
        raise BadRow(f"{len(words)} {names[0]} and {len(labels)} {names[1]}: one label for each")
    if not all(isinstance(word, str) and word.strip() for word in words):
        raise BadRow(f"{names[0]} must be words that are not empty")
    return Words(place, tuple(words), tuple(class_of(config, label) for label in labels))


def chosen(config: DataConfig, place: str, row: Mapping[str, Any]) -> Example:
    """A question, its choices and the right one: its number from 0, or a letter from A."""
    context, question, choices, label = config.columns or CHOICES
    question_text = " ".join(part for part in (field(row, question, str, ""),) if part)
    options, answer = field(row, choices, list), field(row, label, (str, int))
    if not all(isinstance(option, str) and option.strip() for option in options):
        raise BadRow(f"{choices} must be texts that are not empty")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(options)]
    indices = {**{str(i): i for i in range(len(options))}, **{c: i for i, c in enumerate(letters)}}
    if len(options) < 2 or str(answer) not in indices:
        raise BadRow(
            f"{label}={answer!r} is none of its {len(options)} {choices}, from 0 or from A"
        )
    passage = field(row, context, str, "")
    candidates = [f"{question_text} {option}".strip() for option in options]
    texts = tuple((text, passage) for text in candidates)
    return Example(place, texts, indices[str(answer)])


def retrieved(config: DataConfig, place: str, row: Mapping[str, Any]) -> Example:
    """A query, its text and hard negatives, each as ("" or its title, text). A text is a string or
    an object; of several texts that answer the query, as in DPR's files, the first is taken."""
    query, text, negatives = config.columns or PAIR
    query_text = field(row, query, str)
    answer = field(row, text, (str, dict, list))
    others = field(row, negatives, list, [])
    if isinstance(answer, list):
        if not answer:
            raise BadRow(f"{text} is empty")
        answer = answer[0]
    texts = [titled(answer, text), *(titled(other, negatives) for other in others)]
    if not query_text.strip():
        raise BadRow(f"{query} is empty")
    return Example(place, (("", query_text), *texts), 0)


def titled(value: Any, name: str) -> tuple[str, str]:
    """(title or "", text) of a text, which is a string or an object of both."""
    parts = value if isinstance(value, dict) else {"text": value}
    title, text = field(parts, "title", str, ""), parts.get("text")
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"{name} must be texts, or objects of title and text, that are not empty")
    return title, field(parts, "text", str)


def field(row: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """The value of a column; BadRow where it is missing or of another type."""
    value = row.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = "/".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        content = f"{value!r:.80}" if name in row else f"missing; it has {', '.join(row)}"
        raise BadRow(f"{name} must be a {kinds}, and is {content} (data.columns names the columns)")
    if isinstance(value, str):
        try:
            check_unicode(value, name)
        except ValueError as error:
            raise BadRow(str(error)) from None
    return value


def class_of(config: DataConfig, value: Any, numbered: bool = True) -> int:
    """The class of a label: a name of the classes, or, where files hold numbers, its number."""
    names: Sequence[str] = config.class_names
    if isinstance(value, str) and value in names:
        return names.index(value)
    is_number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
    if numbered and is_number and 0 <= int(value) < len(names):
        return int(value)
    raise BadRow(
        f"label {value!r} is none of the classes {', '.join(names)}: name all of them with "
        "data.labels"
    )
