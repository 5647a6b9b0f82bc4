"""The elements of JSON arrays that are files, in memory for one of them."""

import codecs
import itertools
import json
import re
from collections.abc import Iterable, Iterator

MAX_ELEMENT = 1 << 28  # characters
_NEAR = 16  # characters at the end of a part of a text in which a number or name may go on
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class _Incomplete(Exception):
    """The text ends before the element does."""


class _Wrong(ValueError):
    """The text is no array."""


def is_array(blocks: Iterable[bytes]) -> bool:
    """Whether the text of a file begins with a bracket."""
    starts = (block.removeprefix(b"\xef\xbb\xbf").lstrip() for block in blocks)
    return next(filter(None, starts), b"")[:1] == b"["


def elements(blocks: Iterable[bytes], source: str) -> Iterator[bytes]:
    """The elements of an array as JSON texts of one line each.

    ValueError, with the number of the element from 1, for invalid UTF-8 or JSON, for an array that
    does not end and for text after its end.
    """
    number, mark, text, at, least = 1, "[", "", 0, 0
    try:
        for part in itertools.chain(codecs.iterdecode(blocks, "utf-8-sig"), [None]):
            text, at = text[at:] + (part or ""), 0
            if part is not None and len(text) < least:
                continue
            while mark:
                try:
                    element, at, mark = _next(text, at, mark, part is None)
                except _Incomplete:
                    # Twice as much, so that a long element is not parsed again for each block.
                    least = min(2 * (len(text) - at), MAX_ELEMENT)
                    break
                if element is not None:
                    yield element
                    number, least = number + 1, 0
            if not mark and (rest := text[at:].strip()):
                raise _Wrong(f"text after the end of the array: {rest[:40]!r}")
            if len(text) - at > MAX_ELEMENT:
                raise _Wrong(f"no end within {MAX_ELEMENT:,} characters")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ValueError(f"{source} row {number} or later: invalid UTF-8 ({wrong:#04x})") from None
    except RecursionError:
        raise ValueError(f"{source} row {number}: JSON nested too deeply") from None
    except _Wrong as error:
        raise ValueError(f"{source} row {number}: invalid JSON: {error}") from None


def joined(texts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The texts as lines, in blocks of about `size` bytes."""
    lines, total = [], 0
    for text in texts:
        lines.append(text)
        total += len(text)
        if total >= size:
            yield b"\n".join(lines) + b"\n"
            lines, total = [], 0
    if lines:
        yield b"\n".join(lines) + b"\n"


def _next(text: str, at: int, mark: str, is_all: bool) -> tuple[bytes | None, int, str]:
    """The element after `mark`, which is [ or a comma: (its text, its end, the next mark).

    At the end of the array the element is None and the next mark empty.
    """
    begin = _skip(text, at, is_all)
    if mark == "," and text[begin] == "]":
        return None, begin + 1, ""
    if text[begin] != mark:
        raise _Wrong(f"{mark!r} is missing before {text[begin : begin + 40]!r}")
    begin = _skip(text, begin + 1, is_all)
    if mark == "[" and text[begin] == "]":
        return None, begin + 1, ""
    try:
        _, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated") or error.pos + _NEAR >= len(text)
        if is_cut and not is_all:
            raise _Incomplete from None
        raise _Wrong(error.msg) from None
    _skip(text, end, is_all)  # a number that ends with the text may go on
    # Between values JSON may have line feeds, in texts it has none.
    return text[begin:end].replace("\n", " ").encode(), end, ","


def _skip(text: str, at: int, is_all: bool) -> int:
    """The place of the next character that is no white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    if match.end() == len(text):
        if is_all:
            raise _Wrong("the array does not end")
        raise _Incomplete
    return match.end()
