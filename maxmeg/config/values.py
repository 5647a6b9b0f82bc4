"""The values of settings: read from text or YAML, written as text, and checked against a type."""

import contextlib
import difflib
import enum
import fractions
import math
import numbers
import os
import re
import typing

from maxmeg.config.hints import nearest, removed

EMPTY = "''"  # an empty value on a command line
_SUFFIXED = re.compile(r"([+-]?\d+(?:\.\d+)?)([KMBT])", re.IGNORECASE)
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBERS: typing.Any = numbers.Real  # NumPy's too
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def text(value: typing.Any) -> str:
    """Return a field's value as it is written on a command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, enum.Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def unknown_field(path: str, names: typing.Iterable[str]) -> str:
    """Return the message for a field that does not exist, with the nearest name."""
    if message := removed(path):
        return message
    match = nearest(path, names)
    return f"unknown field {path}: " + (
        f"did you mean {match}?" if match else "docs/config.md lists all fields"
    )


def convert(path: str, value: typing.Any, kind: typing.Any) -> typing.Any:
    """Return a value, or its text on a command line, as the type of a field.

    ValueError naming the path, the value and what was expected.
    """
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if value.strip() else []
        if not isinstance(value, list | tuple):
            raise mismatch(path, value, "a list")
        return tuple(convert(f"{path}[{i}]", part, item) for i, part in enumerate(value))
    if issubclass(kind, enum.Enum):
        return _to_enum(path, value, kind)
    if kind is bool:
        value = _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise mismatch(path, value, "true or false")
        return value
    if kind is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(value, str):
            raise mismatch(path, value, "a string: write it in quotes")
        return value
    return _to_number(path, value, kind)


def _to_enum(path, value, kind):
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if message := removed(f"{path}={value}"):
        raise ValueError(message)
    names = list(kind.__members__)
    matches = difflib.get_close_matches(str(value), names, 1)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    raise mismatch(path, value, f"one of {', '.join(names)}{hint}")


def whole_number(text: str) -> int:
    """Return the number that is written as 800, 1e4, 4M or 1.5k.

    ValueError for another text, OverflowError for infinity.
    """
    if match := _SUFFIXED.fullmatch(text):
        number = fractions.Fraction(match[1]) * _SUFFIXES[match[2].upper()]
    else:
        number = int(text) if text.lstrip("+-").isdecimal() else float(text)
    if number != int(number):
        raise ValueError(f"{text} is no whole number")
    return int(number)


def _to_number(path, value, kind):
    is_whole = kind is int
    number: typing.Any = value
    if isinstance(value, str):  # YAML reads 3e-4 as text
        with contextlib.suppress(ValueError, OverflowError):
            number = whole_number(value) if is_whole else float(value)
    expected = "a whole number" if is_whole else "a finite number"
    if isinstance(number, bool) or not isinstance(number, _NUMBERS):
        raise mismatch(path, value, expected)
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        if math.isfinite(number) and (not is_whole or number == int(number)):
            return int(number) if is_whole else float(number)
    raise mismatch(path, value, expected)


def mismatch(path, value, expected):
    return ValueError(f"{path}={value!r} ({type(value).__name__}): expected {expected}")
