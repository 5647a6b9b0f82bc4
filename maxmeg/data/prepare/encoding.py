"""Tokenize documents: chunks of a corpus are encoded in worker processes, and written in order.

Where possible (uncompressed lines, text files), a worker reads its chunk from the file itself. It
answers with arrays of many documents, so the writing process does little work per document.
"""

import array
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from maxmeg.data.corpus.indexed import IndexedWriter, token_dtype
from maxmeg.data.corpus.loss_weights import FIELD, weight_of
from maxmeg.data.corpus.vocabulary import write_vocabulary
from maxmeg.data.prepare import documents, tables
from maxmeg.data.prepare.documents import ARRAY, LINES, TEXT
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer, find_marks
from maxmeg.data.workers import in_processes

CHUNK_BYTES = 1 << 20
CHUNK_FILES = 32
Tag = TypeVar("Tag")


@dataclasses.dataclass(frozen=True)
class Options:
    """How documents become sequences."""

    tokenizer: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    checksums: bool = True  # write PREFIX.sums, for `verify`
    aligned: bool = False  # one sequence per key and row; a row with an empty text is left out
    placeholders: tuple[str, ...] = ()  # names that stand for special tokens in text
    shuffle_seed: int | None = None  # of a random order of the documents; None keeps their order


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Documents that are encoded together.

    LINES: JSON lines in `data`, the first with line number `first`; or, without data, the lines
    that begin in the byte range `span` of a file of `size` bytes. ARRAY: elements of an array as
    JSON lines in `data`, the first with number `first`. TEXT: `data`, or whole files. ROWS: Arrow
    data, the first row with number `first`. stored: bytes of the files that the chunk covers.
    """

    kind: str
    paths: tuple[str, ...]
    data: bytes | None = None
    first: int = 1
    span: tuple[int, int] = (0, 0)
    size: int = 0
    stored: int = 0


@dataclasses.dataclass(frozen=True)
class Column:
    """The documents of one key: tokens as they are stored, int32 lengths of the sequences, the
    int64 number of sequences up to the end of each document, and the float32 weights of the
    documents (None: all are 1)."""

    tokens: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    weights: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The result of encoding a chunk.

    bad: the position (see `DocumentNames`) and the error of each document that is left out. empty:
    rows that `aligned` leaves out.
    """

    columns: tuple[Column, ...]
    documents: int = 0
    bad: tuple[tuple[int, str], ...] = ()
    empty: int = 0
    text_bytes: int = 0


class _ColumnBuilder:
    """A column to which documents are added."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.lengths, self.ends = array.array("i"), array.array("q")

    def finish(self, tokenizer: Tokenizer, weights: array.array) -> Column:
        ids = np.concatenate(self.ids) if self.ids else np.zeros(0, np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise ValueError(
                f"the tokenizer returned ids from {ids.min()} to {ids.max()}, but has "
                f"{tokenizer.vocab_size} ids: its files do not belong together"
            )
        tokens = ids.astype(token_dtype(tokenizer.vocab_size), copy=False)
        lengths, ends = np.array(self.lengths, np.int32), np.array(self.ends, np.int64)
        return Column(tokens, lengths, ends, np.array(weights, np.float32))


def encode_chunk(chunk: Chunk, options: Options, tokenizer: Tokenizer) -> Encoded:
    """Tokenize the documents of a chunk."""
    columns = [_ColumnBuilder() for _ in options.json_keys]
    marks = find_marks(tokenizer, options.placeholders)
    bad, weights, empty, size = [], array.array("f"), 0, 0
    for place, length, document in read_documents(chunk):
        size += length
        try:
            row = parsed(chunk.kind, document)
            values = texts_of(chunk.kind, row, options)
            encoded = [_encode(value, tokenizer, marks) for value in values]
            has_weight = chunk.kind != TEXT and FIELD not in options.json_keys
            weight = weight_of(row) if has_weight else 1
        except ValueError as error:
            bad.append((place, str(error)))
            continue
        if options.aligned and not all(encoded):
            empty += 1
            continue
        weights.append(weight)
        for column, ids in zip(columns, encoded, strict=True):
            column.ids += ids
            column.lengths.extend(map(len, ids))
            if ids and options.append_eod:
                column.ids.append(np.array([tokenizer.eod], np.int32))
                column.lengths[-1] += 1
            column.ends.append(len(column.lengths))
    finished = tuple(column.finish(tokenizer, weights) for column in columns)
    return Encoded(finished, len(weights), tuple(bad), empty, size)


def read_documents(chunk: Chunk) -> Iterator[tuple[int, int, bytes | dict[str, Any]]]:
    """Yield (position, bytes of text, document) of a chunk; that of a table is a row's fields."""
    if chunk.kind in (LINES, ARRAY):
        at, data = chunk.first, chunk.data
        if data is None:
            at, data = documents.read_span(chunk.paths[0], *chunk.span, chunk.size)
        for line in data.split(b"\n"):
            if line.strip():
                yield at, len(line) + 1, line
            at += len(line) + 1 if chunk.data is None else 1
    elif chunk.kind == TEXT and chunk.data is not None:
        yield 0, len(chunk.data), chunk.data
    elif chunk.kind == TEXT:
        for place, path in enumerate(chunk.paths):
            data = b"".join(documents.read_blocks(path))
            yield place, len(data), data
    else:
        assert chunk.data is not None
        for place, row in enumerate(tables.rows(chunk.data), chunk.first):
            yield place, sum(len(v) for v in row.values() if isinstance(v, str)), row


class DocumentNames:
    """Names documents in messages by file and line; counts lines where only a byte offset is
    known."""

    def __init__(self) -> None:
        self._path, self._at, self._lines = "", 0, 0

    def name(self, chunk: Chunk, place: int) -> str:
        """For example `FILE line 3`."""
        if chunk.kind == TEXT:
            return documents.source_name(chunk.paths[place])
        path = chunk.paths[0]
        if chunk.kind == LINES and chunk.span != (0, 0):
            return f"{path} line {self._line(path, place)}"
        word = "line" if chunk.kind == LINES else "row"
        return f"{documents.source_name(path)} {word} {place}"

    def _line(self, path: str, offset: int) -> int:
        if path != self._path or offset < self._at:
            self._path, self._at, self._lines = path, 0, 0
        while self._at < offset:
            end = min(self._at + 16 * CHUNK_BYTES, offset)
            self._lines += documents.storage.read_range(path, self._at, end).count(b"\n")
            self._at = end
        return self._lines + 1


def parsed(kind: str, document: bytes | dict[str, Any]) -> Any:
    """The text of a plain text file, or the row of another document."""
    if not isinstance(document, bytes):
        return document
    return documents.decode(document) if kind == TEXT else documents.parse_json(document)


def texts_of(kind: str, row: Any, options: Options) -> list[list[str]]:
    """The texts that a document has under each key; each text becomes one sequence. row: the
    document as `parsed` returns it."""
    values = []
    for value in [row] if kind == TEXT else _values_of_keys(row, options.json_keys):
        parts = value if isinstance(value, list) else [value]
        if options.aligned and len(parts) != 1:
            raise ValueError(f"{len(parts)} texts under one key cannot be aligned: give one")
        if options.split_sentences and not isinstance(value, list):
            parts = documents.split_sentences(value)
        values.append(parts)
    return values


def _values_of_keys(document: Any, keys: Sequence[str]) -> list[str | list[str]]:
    """The strings, or lists of strings, under the keys of a document; ValueError for others."""
    if not isinstance(document, dict):
        hint = "; a file that is one array is named .json" * isinstance(document, list)
        raise ValueError(f"a row must be a JSON object, not {type(document).__name__}{hint}")
    values = []
    for key in keys:
        if key not in document:
            raise ValueError(tables.without_key(key, document))
        value = document[key]
        value = documents.decode(value) if isinstance(value, bytes) else value  # from Parquet
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{key!r} must be a string or a list of strings")
        for part in parts:
            if not part.isascii():
                documents.check_unicode(part, repr(key))
        values.append(value)
    return values


def _encode(texts: list[str], tokenizer: Tokenizer, marks: Mapping[str, int]) -> list[np.ndarray]:
    if marks:
        return [ids for text in texts if len(ids := tokenizer.encode_marked(text, marks))]
    return [ids for text in texts if len(ids := tokenizer.encode(text))]


def _encoder(options: Options) -> Callable[[tuple[Any, Chunk]], Encoded]:
    tokenizer = load_tokenizer(options.tokenizer)
    return lambda item: encode_chunk(item[1], options, tokenizer)


def encode_all(
    chunks: Iterable[tuple[Tag, Chunk]], options: Options, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Tag, Chunk, Encoded], None, None]:
    """Encode chunks in order: in this process with workers=0, otherwise in processes that read
    ahead."""
    if workers == 0:
        yield from ((tag, chunk, encode_chunk(chunk, options, tokenizer)) for tag, chunk in chunks)
        return
    died = (
        f"a tokenizing process died, perhaps for lack of memory: use fewer than {workers} --workers"
    )
    with contextlib.closing(in_processes(chunks, workers, _encoder, (options,), died)) as results:
        for (tag, chunk), encoded in results:
            yield tag, chunk, encoded


def output_prefix(output: str, key: str, split_sentences: bool = False) -> str:
    """Megatron-LM's name for the files of a JSON key."""
    return f"{output}_{key}_{'sentence' if split_sentences else 'document'}"


@dataclasses.dataclass
class Report:
    """What was written, and how many lines and rows were left out."""

    prefixes: dict[str, str]
    documents: int = 0
    tokens: int = 0
    bad_lines: int = 0
    empty_rows: int = 0
    text_bytes: int = 0
    seconds: float = 0.0
    parts_found: int = 0  # parts that an interrupted run had made


def write_all(
    encoded: Iterable[Encoded],
    output: str,
    options: Options,
    tokenizer: Tokenizer,
    may_be_empty: bool = False,
) -> Report:
    """Write documents to one pair of files per key; the files appear together at the end."""
    prefixes = {
        key: output_prefix(output, key, options.split_sentences) for key in options.json_keys
    }
    report = Report(prefixes)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                IndexedWriter(prefix, tokenizer.vocab_size, checksums=options.checksums)
            )
            for prefix in prefixes.values()
        ]
        for prefix in prefixes.values():  # of an older corpus, which is replaced
            write_vocabulary(prefix, "")
        for chunk in encoded:
            for writer, column in zip(writers, chunk.columns, strict=True):
                writer.add_documents(column.tokens, column.lengths, column.ends, column.weights)
            report.documents += chunk.documents
            report.bad_lines += len(chunk.bad)
            report.empty_rows += chunk.empty
            report.text_bytes += chunk.text_bytes
        report.tokens = sum(writer.num_tokens for writer in writers)
        for key, writer in zip(options.json_keys, writers, strict=True):
            if not writer.num_tokens and not may_be_empty:
                raise ValueError(
                    f"{report.documents} documents hold no text under {key!r}: nothing is written"
                )
    for prefix in prefixes.values():
        write_vocabulary(prefix, tokenizer.identity)
    return report
