"""What --help prints, in at most 25 lines: a command, the options that a first use needs, the
settings that are changed most, and how to see the others."""

import collections
import dataclasses
import textwrap
import typing
from collections.abc import Iterator, Sequence

from maxmeg.config import values
from maxmeg.config.hints import nearest
from maxmeg.config.named import EXAMPLES
from maxmeg.config.schema import Config
from maxmeg.config.setting import walk

WIDTH, LINES = 80, 25
EMPTY = '""'
_FLAGS = {"--help", "-h", "-help", "--helpfull"}
_EVERY, _TOP = "all", "run"  # all groups; the group of the settings without a section
COMMON = (
    *("run_dir", "data.paths", "data.tokenizer", "train.num_steps", "train.global_batch_size"),
    *("optim.lr", "parallel.tensor", "parallel.pipe", "lora.rank"),
)


class Option(typing.NamedTuple):
    """An option of a command. name: with dashes. is_rare: --help leaves it out."""

    name: str
    default: str
    doc: str
    is_rare: bool = False


def options_of(options: type | None) -> list[Option]:
    """Return the options that the fields of a dataclass declare."""
    return [
        Option(
            f"--{field.name}",
            "required" if field.default is dataclasses.MISSING else values.text(field.default),
            field.metadata["doc"],
            "rare" in field.metadata,
        )
        for field in (dataclasses.fields(options) if options else ())
    ]


def asked_help(arguments: Sequence[str]) -> str | None:
    """Return the GROUP of --help=GROUP, "" for --help alone; None without either."""
    for argument in arguments:
        flag, _, group = argument.partition("=")
        if flag in _FLAGS:
            return group or _EVERY * (flag == "--helpfull")
    return None


def describe(
    summary: str,
    options: Sequence[Option] = (),
    has_settings: bool | None = True,
    group: str = "",
) -> str:
    """Return the help text of a command, in lines of at most WIDTH columns, and LINES of them.

    summary: the command's docstring. has_settings: whether it takes those of a run; None: with
    --config. group: "all": every option and setting; or the group of settings to list instead.
    ValueError for an unknown group.
    """
    if group and group != _EVERY:
        return "\n".join(_lines_of(group, has_settings))
    lines = [*paragraphs(summary)]
    selection = [option for option in options if group == _EVERY or not option.is_rare]
    lines += ["", "options:"] if options else []
    for option in selection:
        lines += _entry(option.name, option.default, option.doc)
    if len(selection) < len(options):
        lines.append(f"  --help=all for the other {len(options) - len(selection)}")
    if has_settings is False:
        return "\n".join(lines)
    names = f"--config names the run: configs/gpt.py (in short gpt), {EXAMPLES}. "
    names += "--print_config prints its settings, --print_config=diff those that are changed."
    lines += ["", *textwrap.wrap(names, WIDTH)]
    if group == _EVERY:
        for name in _groups():
            lines += ["", f"{name}:", *_lines_of(name, has_settings)]
        return "\n".join(lines)
    counts = ", ".join(f"{name} {count}" for name, count in _groups().items())
    hint = f"All settings: --help=all. Those of a group: --help=GROUP, one of {counts}."
    footer = ["", *textwrap.wrap(hint, WIDTH)]
    room = LINES - len(lines) - len(footer) - 2
    if has_settings and room > 0:
        lines += ["", "settings that are changed most (defaults):"]
        declared = {path: (value, field) for path, value, field in walk(Config())}
        for path in COMMON[:room]:
            value, field = declared[path]
            lines.append(_brief(path, values.text(value), field.metadata["doc"]))
    return "\n".join([*lines, *footer])


def _groups() -> dict[str, int]:
    """Return the number of settings of each group."""
    sections = (path.partition(".") for path, _, _ in walk(Config()))
    return collections.Counter(name if dot else _TOP for name, dot, _ in sections)


def _lines_of(group: str, has_settings: bool | None) -> Iterator[str]:
    """Yield the settings of a group, or of a part of it such as model.attention."""
    if has_settings is False:
        raise ValueError(f"--help={group}: this command takes no settings of a run: write --help")
    entries = [
        (path, value, field)
        for path, value, field in walk(Config())
        if path.startswith(f"{group}.") or (group == _TOP and "." not in path)
    ]
    if not entries:
        match = nearest(group, _groups())
        hint = f"did you mean {match}? " if match else ""
        raise ValueError(
            f"--help={group}: no group of settings has this name: {hint}There are "
            f"{', '.join(_groups())}, and all"
        )
    for path, value, field in entries:
        yield from _entry(f"--{path}", values.text(value), field.metadata["doc"])


def _entry(name: str, default: str, doc: str) -> list[str]:
    return _wrapped(f"{name} ({default or EMPTY}): {doc}", "  ", "      ")


def _brief(name: str, default: str, doc: str) -> str:
    """Return the first clauses of an entry that fit on one line."""
    head = f"  --{name} ({default or EMPTY}): "
    for end in ("; ", ": ", ", "):
        doc = doc if len(head + doc) <= WIDTH else doc.partition(end)[0]
    return head + textwrap.shorten(doc, WIDTH - len(head), placeholder=" ...")


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    indents: dict[str, typing.Any] = {"initial_indent": first, "subsequent_indent": rest}
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, **indents)


def paragraphs(summary: str) -> Iterator[str]:
    """Yield the lines of a docstring; indented ones, which are commands, as they stand."""
    for number, paragraph in enumerate(summary.strip().split("\n\n")):
        yield from [""] * bool(number)
        if paragraph.startswith(" "):
            yield from paragraph.splitlines()
        else:
            yield from _wrapped(" ".join(paragraph.split()), "", "")
