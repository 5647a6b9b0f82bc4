"""Reading corpora: files, compression and lines as a stream of records in constant memory."""

import contextlib
import dataclasses
import glob
import gzip
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

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

    def __init__(self, inputs: Sequence[str]) -> None:
        self.total = None if "-" in inputs else sum(Path(p).stat().st_size for p in inputs)
        self.stored = 0
        self.text = 0


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Files that the names and globs stand for, in order; `-` is standard input."""
    found: list[str] = []
    for pattern in patterns:
        if pattern == "-" or Path(pattern).is_file():
            found.append(pattern)
        elif Path(pattern).is_dir():
            raise ValueError(f"input {pattern} is a folder: name its files, like {pattern}/*.jsonl")
        else:
            matches = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
            if not matches:
                raise ValueError(f"input {pattern} does not exist and matches no file")
            found.extend(matches)
    if not found:
        raise ValueError("no input: name at least one file, or - for standard input")
    if found.count("-") > 1:
        raise ValueError("standard input (-) can be read only once: name it once")
    return found


def has_lines(path: str, stdin_format: str = "jsonl") -> bool:
    """Whether a file holds one JSON document a line, by its name."""
    if path == "-":
        return stdin_format == "jsonl"
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _LINES


def read_records(
    inputs: Sequence[str], progress: Progress, stdin_format: str = "jsonl"
) -> Iterator[Record]:
    """Every document of the files, in order; lines of white space are passed over."""
    for path in inputs:
        source = "standard input" if path == "-" else path
        blocks = _blocks(path, source, progress)
        if has_lines(path, stdin_format):
            for number, line in enumerate(_lines(blocks), 1):
                if line.strip():
                    yield Record(source, number, line)
        else:
            yield Record(source, 0, b"".join(blocks))


def split_sentences(text: str) -> list[str]:
    """The text's sentences by a simple rule (see `_SENTENCE_END`), without outer white space."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _blocks(path: str, source: str, progress: Progress) -> Iterator[bytes]:
    with _open(path, source) as file:
        before = progress.stored
        try:
            for block in _decompress(path, file):
                progress.text += len(block)
                progress.stored = before + (0 if path == "-" else file.tell())
                yield block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{source} is truncated or corrupt: {error}") from error


@contextlib.contextmanager
def _open(path: str, source: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}") from error
    with file:
        yield file


def _decompress(path: str, file: BinaryIO) -> Iterator[bytes]:
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as unzipped:
            while block := unzipped.read(_BLOCK):
                yield block
    elif suffix == ".zst":
        yield from _unzstd(file)
    else:
        while block := file.read(_BLOCK):
            yield block


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a .zst file; unlike the library's reader, notices a truncated last frame."""
    import zstandard

    frame = None
    try:
        while block := file.read(_BLOCK // 8):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if text := frame.decompress(block):
                    yield text
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if frame is not None:
        raise EOFError("the last zstd frame is not complete")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []
    for block in blocks:
        parts = block.split(b"\n")
        if len(parts) > 1:
            yield b"".join([*pending, parts[0]])
            yield from parts[1:-1]
            pending = []
        pending.append(parts[-1])
    last = b"".join(pending)
    if last:
        yield last
