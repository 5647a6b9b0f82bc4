"""Reading corpora: files or objects, packed or not, and their documents in constant memory."""

import bz2
import contextlib
import dataclasses
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from maxmeg.data import storage

LINES, TEXT, ROWS = "lines", "text", "rows"  # a JSON document a line; a whole file; Parquet
_BLOCK = 1 << 20
_LINES = (".jsonl", ".json", ".ndjson")
# A sentence ends with . ! ? (and closing quotes or brackets) before white space and then a capital,
# a digit or an opening quote or bracket; or with 。！？; or with an empty line. Abbreviations are
# not known.
_SENTENCE_END = re.compile(
    r"""[.!?]["'”’)\]]*(?=\s+["'“‘(\[]*[^\W_a-z])|[。！？][”’」』）]*|(?=\n[ \t]*\n)"""  # noqa: RUF001
)


@dataclasses.dataclass(frozen=True)
class Record:
    """One document as it was read: a JSON line or a whole text file."""

    source: str
    line: int  # from 1; 0 for a whole file
    data: bytes

    @property
    def place(self) -> str:
        return f"{self.source} line {self.line}" if self.line else self.source


class Progress:
    """How far reading has come: bytes of the files as stored, and as text."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.stored = 0
        self.text = 0


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Files or objects that the names and globs stand for, in order; `-` is standard input."""
    found: list[str] = []
    for pattern in patterns:
        if pattern == "-" or storage.exists(pattern):
            found.append(pattern)
        elif not storage.is_remote(pattern) and Path(pattern).is_dir():
            raise ValueError(f"input {pattern} is a folder: name its files, like {pattern}/*.jsonl")
        else:
            matches = storage.glob(pattern)
            if not matches:
                raise ValueError(f"input {pattern} does not exist and matches no file")
            found.extend(matches)
    if not found:
        raise ValueError("no input: name at least one file, or - for standard input")
    if found.count("-") > 1:
        raise ValueError("standard input (-) can be read only once: name it once")
    return found


def packing(path: str) -> str:
    """The suffix that says how a file is compressed; empty where it is not."""
    suffix = Path(path).suffix.lower()
    return suffix if suffix in _UNPACK else ""


def kind_of(path: str, stdin_format: str = "jsonl") -> str:
    """LINES, TEXT or ROWS, by a file's name."""
    if path == "-":
        return LINES if stdin_format == "jsonl" else TEXT
    packed = packing(path)
    suffix = Path(path.lower().removesuffix(packed)).suffix
    if suffix == ".parquet" and not packed:
        return ROWS
    return LINES if suffix in _LINES else TEXT


def has_lines(path: str, stdin_format: str = "jsonl") -> bool:
    """Whether a file holds one JSON document a line, by its name."""
    return kind_of(path, stdin_format) == LINES


def read_records(
    inputs: Sequence[str], progress: Progress, stdin_format: str = "jsonl"
) -> Iterator[Record]:
    """Every document of the files, in order; lines of white space are passed over."""
    for path in inputs:
        source = source_name(path)
        if has_lines(path, stdin_format):
            for number, line in enumerate(_lines(read_blocks(path, progress)), 1):
                if line.strip():
                    yield Record(source, number, line)
        else:
            yield Record(source, 0, b"".join(read_blocks(path, progress)))


def source_name(path: str) -> str:
    """What messages call an input."""
    return "standard input" if path == "-" else path


def split_sentences(text: str) -> list[str]:
    """The text's sentences by a simple rule (see `_SENTENCE_END`), without outer white space."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def read_blocks(path: str, progress: Progress) -> Iterator[bytes]:
    """The text of a file, unpacked, in blocks of some megabytes."""
    source, before = source_name(path), progress.stored
    opened = storage.open_input(path) if path != "-" else contextlib.nullcontext(sys.stdin.buffer)
    with opened as file:
        for block in _unpacked(packing(path), source, file):
            progress.text += len(block)
            progress.stored = before + (0 if path == "-" else file.tell())
            yield block


def _unzstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


_UNPACK: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _unzstd,
}
_PADDED = (".gz", ".xz")  # zeros may stand between their members


def _unpacked(packed: str, source: str, file: BinaryIO) -> Iterator[bytes]:
    """All members of a packed file; unlike Python's readers, notices what follows the last one."""
    if not packed:
        while block := file.read(_BLOCK):
            yield block
        return
    member = None
    while block := file.read(_BLOCK // 8):
        while block:
            if member is None and packed in _PADDED:
                block = block.lstrip(b"\0")
                if not block:
                    break
            try:
                member = member or _UNPACK[packed]()
                text = member.decompress(block)
            except Exception as error:  # zlib.error, OSError, LZMAError, ZstdError
                raise ValueError(f"{source} is truncated or corrupt: {error}") from error
            if text:
                yield text
            block = member.unused_data if member.eof else b""
            member = None if member.eof else member
    if member is not None:
        raise ValueError(f"{source} is truncated or corrupt: it ends before its last member does")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for whole in whole_lines(blocks):
        lines = whole.split(b"\n")
        yield from lines if lines[-1] else lines[:-1]


def whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that end with a line."""
    pending: list[bytes] = []
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*pending, block[:end]])
            pending = []
        pending.append(block[end:])
    last = b"".join(pending)
    if last:
        yield last


def read_span(path: str, begin: int, end: int, size: int) -> tuple[int, bytes]:
    """Lines that begin in bytes [begin, end) of a file of `size`: where the first does, and they.

    Spans side by side hold every line once, wherever they meet.
    """
    start, stop = max(begin - 1, 0), min(end + _BLOCK // 16, size)
    data = storage.read_range(path, start, stop)
    first = data.find(b"\n", 0, end - 1 - start) + 1 if begin else 0
    if begin and not first:
        return begin, b""
    step, searched = _BLOCK, max(end - 1 - start, 0)
    blocks = [data]
    while (at := blocks[-1].find(b"\n", searched)) < 0 and stop < size:
        blocks.append(storage.read_range(path, stop, min(stop + step, size)))
        stop, searched, step = min(stop + step, size), 0, 2 * step
    if at >= 0:
        blocks[-1] = blocks[-1][: at + 1]
    return start + first, b"".join(blocks)[first:]
