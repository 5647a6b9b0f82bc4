"""Read the documents of files or objects, compressed or not, in constant memory."""

import bz2
import contextlib
import dataclasses
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from maxmeg.data.corpus import storage
from maxmeg.data.prepare import arrays, tables

# A JSON document per line; a JSON array of documents; a whole file; Parquet; a stream of Arrow.
LINES, ARRAY, TEXT, ROWS, ARROW = "lines", "array", "text", "rows", "arrow"
_BLOCK = 1 << 20
_LINES = (".jsonl", ".json", ".ndjson")
_REMEDIES = {  # of lines at which other kinds of files begin
    "[": "; a file that is one array is named .json",
    "{": "; a row is one line (jq -c . FILE writes such lines)",
}
_TABLES = {".parquet": ROWS, ".arrow": ARROW}
# A sentence ends with . ! ? (and closing quotes or brackets) before white space and then a capital,
# a digit or an opening quote or bracket; or with 。！？; or with an empty line. Abbreviations are
# not recognized.
_SENTENCE_END = re.compile(
    r"""[.!?]["'”’)\]]*(?=\s+["'“‘(\[]*[^\W_a-z])|[。！？][”’」』）]*|(?=\n[ \t]*\n)"""  # noqa: RUF001
)


@dataclasses.dataclass(frozen=True)
class Record:
    """A row of a file as it was read: JSON text, or the columns of a table by name.

    line: number of the row, or of its line, from 1. size: its bytes, of a table about.
    """

    source: str
    line: int
    data: bytes | dict[str, Any]
    word: str = "line"
    size: int = 0

    @property
    def place(self) -> str:
        return f"{self.source} {self.word} {self.line}"

    def value(self) -> Any:
        """The JSON value of the row; ValueError for invalid UTF-8 or JSON."""
        return self.data if isinstance(self.data, dict) else parse_json(self.data)


@dataclasses.dataclass
class Progress:
    """How many stored bytes of a file have been read."""

    stored: int = 0


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files or objects that names, globs and folders of tables refer to, in order; `-` is
    standard input."""
    paths: list[str] = []
    for pattern in patterns:
        if pattern == "-" or storage.exists(pattern):
            paths.append(pattern)
        elif not storage.is_remote(pattern) and Path(pattern).is_dir():
            paths.extend(tables.files_of(pattern))
        else:
            matches = storage.glob(pattern)
            if not matches:
                raise ValueError(f"input {pattern} does not exist and matches no file")
            paths.extend(matches)
    if not paths:
        raise ValueError("no input: name at least one file, or - for standard input")
    if paths.count("-") > 1:
        raise ValueError("standard input (-) can be read only once: name it once")
    return paths


def find_row_files(patterns: Sequence[str], content: str) -> list[str]:
    """As `find_inputs`; ValueError for plain text, which has no rows. content: of the rows."""
    paths = find_inputs(patterns)
    for path in paths:
        if kind_of(path) == TEXT:
            raise ValueError(
                f"{path} is not named .jsonl (or .jsonl.gz, .jsonl.zst), .json, .parquet or "
                f".arrow: does it hold {content}?"
            )
    return paths


def packing(path: str) -> str:
    """The suffix of a compressed file; empty for other files."""
    suffix = Path(path).suffix.lower()
    return suffix if suffix in _UNPACK else ""


def kind_of(path: str, stdin_format: str = "jsonl") -> str:
    """The kind of a file by its name; a file named .json is an ARRAY if it begins with a
    bracket."""
    if path == "-":
        return LINES if stdin_format == "jsonl" else TEXT
    packed = packing(path)
    suffix = Path(path.lower().removesuffix(packed)).suffix
    if suffix in _TABLES and not packed:
        return _TABLES[suffix]
    if suffix == ".json" and arrays.is_array(read_blocks(path)):
        return ARRAY
    return LINES if suffix in _LINES else TEXT


def read_records(paths: Sequence[str]) -> Iterator[Record]:
    """The rows of the files, in order, in memory for some of them: lines of JSON, elements of a
    JSON array, rows of Parquet or Arrow. Blank lines are skipped."""
    for path in paths:
        source, kind = source_name(path), kind_of(path)
        if kind in (ROWS, ARROW):
            for number, (row, size) in enumerate(tables.read_rows(path, _BLOCK), 1):
                yield Record(source, number, row, "row", size)
            continue
        is_array = kind == ARRAY
        blocks = read_blocks(path)
        texts = arrays.elements(blocks, source) if is_array else _lines(blocks)
        for number, text in enumerate(texts, 1):
            if text.strip():
                yield Record(source, number, text, "row" if is_array else "line", len(text))


def source_name(path: str) -> str:
    """The name of an input in messages."""
    return "standard input" if path == "-" else path


def decode(data: bytes) -> str:
    """The text of UTF-8 bytes, without a byte order mark."""
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise ValueError(f"invalid UTF-8 at byte {at} ({error.object[at]:#04x})") from None


def parse_json(data: bytes) -> Any:
    """The JSON value of a line; ValueError for invalid UTF-8 or JSON."""
    text = decode(data)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}{_REMEDIES.get(text.strip(), '')}") from None


def check_unicode(text: str, name: str) -> None:
    """ValueError where a text, called `name`, holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair (\\u{ord(text[error.start]):04x}), which is no "
            "character"
        ) from None


def split_sentences(text: str) -> list[str]:
    """The sentences of a text by a simple rule (see `_SENTENCE_END`), without surrounding white
    space."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def read_blocks(path: str, progress: Progress | None = None) -> Iterator[bytes]:
    """The uncompressed bytes of a file, in blocks of at most some megabytes."""
    opened = storage.open_input(path) if path != "-" else contextlib.nullcontext(sys.stdin.buffer)
    with opened as file:
        for block in _unpacked(packing(path), source_name(path), file):
            if progress is not None and path != "-":
                progress.stored = file.tell()
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
_PADDED = (".gz", ".xz")  # formats that allow zeros between members
# Bytes that are decompressed at once: zlib gives up to 1,032 bytes for one, and zstd 32,768.
_PACKED_BLOCKS = {".gz": 1 << 12, ".zst": 1 << 10}


def _unpacked(packed: str, source: str, file: BinaryIO) -> Iterator[bytes]:
    """All members of a compressed file; unlike Python's readers, refuses data after the last
    one."""
    if not packed:
        while block := file.read(_BLOCK):
            yield block
        return
    member = None
    while block := file.read(_PACKED_BLOCKS.get(packed, _BLOCK // 8)):
        while block:
            if member is None and packed in _PADDED:
                block = block.lstrip(b"\0")
                if not block:
                    break
            try:
                member = member or _UNPACK[packed]()
                yield from _decompressed(member, block)
            except Exception as error:  # zlib.error, OSError, LZMAError, ZstdError
                raise ValueError(f"{source} is truncated or corrupt: {error}") from error
            block = member.unused_data if member.eof else b""
            member = None if member.eof else member
    if member is not None:
        raise ValueError(f"{source} is truncated or corrupt: it ends within a member")


def _decompressed(member: Any, block: bytes) -> Iterator[bytes]:
    """Yield what a member of a file decompresses a block to, in pieces of at most 32 MiB."""
    bounds = (_BLOCK,) if hasattr(member, "needs_input") else ()  # bz2 and xz keep the other input
    text = member.decompress(block, *bounds)
    while text:
        yield text
        text = member.decompress(b"", *bounds) if bounds and not member.eof else b""


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    for block in whole_lines(blocks):
        lines = block.split(b"\n")
        yield from lines if lines[-1] else lines[:-1]


def whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that end at the ends of lines."""
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
    """The lines that begin in bytes [begin, end) of a file of `size` bytes: (start of the first,
    lines).

    Adjacent spans together hold every line exactly once.
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
