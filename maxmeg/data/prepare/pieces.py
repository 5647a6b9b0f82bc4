"""Cut the input files into pieces, so that any division gives the same documents in the same order.

The positions in all inputs, one after the other, form a line of stored bytes. A document belongs to
the piece in which it begins: uncompressed lines begin where they are in the file, documents of
compressed or plain text files, of JSON arrays and of Arrow files at the start of the file, and the
row groups of a Parquet file at equal distances.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from maxmeg.data.corpus import storage
from maxmeg.data.prepare import arrays, documents, tables
from maxmeg.data.prepare.documents import ARRAY, ARROW, LINES, ROWS, TEXT, Progress
from maxmeg.data.prepare.encoding import CHUNK_BYTES, CHUNK_FILES, Chunk

_REMOTE_BYTES = 8 * CHUNK_BYTES  # bytes per request


@dataclasses.dataclass(frozen=True)
class Input:
    """An input file: size in bytes as stored, a stamp that changes when it is written, and for
    Parquet the number of rows before each row group, then of all rows."""

    path: str
    kind: str
    size: int
    stamp: str = ""
    rows: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Bytes on the line of all inputs; an empty file is a document too."""
        return max(self.size, 1)

    @property
    def is_cut_anywhere(self) -> bool:
        return self.kind == LINES and self.path != "-" and not documents.packing(self.path)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of an input: lines that begin in bytes [begin, end), row groups [begin, end), or
    all."""

    input: Input
    begin: int
    end: int


def open_inputs(paths: Sequence[str], stdin_format: str = "jsonl") -> list[Input]:
    """Describe the input files."""
    files = [path for path in paths if path != "-"]
    states = dict(zip(files, storage.states(files), strict=True))
    inputs = []
    for path in paths:
        kind = documents.kind_of(path, stdin_format)
        rows = tables.rows_before(path) if kind == ROWS else ()
        inputs.append(Input(path, kind, *states.get(path, (0, "")), rows))
    return inputs


def check_unchanged(inputs: Sequence[Input]) -> None:
    """ValueError where a file was changed while it was read."""
    files = [file for file in inputs if file.path != "-"]
    for file, state in zip(files, storage.states([file.path for file in files]), strict=True):
        if state != (file.size, file.stamp):
            raise ValueError(
                f"{file.path} was changed while it was read: start again when it is complete"
            )


def cut(inputs: Sequence[Input], begin: int, end: int) -> list[Piece]:
    """The pieces with the documents that begin in bytes [begin, end) of the line of all inputs."""
    pieces, file_start = [], 0
    for file in inputs:
        low, high = max(begin - file_start, 0), min(end - file_start, file.width)
        file_start += file.width
        if low >= high:
            continue
        if file.is_cut_anywhere:
            pieces.append(Piece(file, low, min(high, file.size)))
        elif file.kind == ROWS:
            starts = [file.width * before // max(file.rows[-1], 1) for before in file.rows[:-1]]
            groups = [
                i for i, start in enumerate(starts) if low <= min(start, file.width - 1) < high
            ]
            if groups:
                pieces.append(Piece(file, groups[0], groups[-1] + 1))
        elif low == 0:
            pieces.append(Piece(file, 0, file.size))
    return pieces


def chunks(pieces: Sequence[Piece], keys: Sequence[str]) -> Iterator[Chunk]:
    """The chunks of the pieces, in order; at least one, which may be empty."""
    all_chunks = _chunks(pieces, keys)
    yield next(all_chunks, Chunk(LINES, ("",), b""))
    yield from all_chunks


def _chunks(pieces: Sequence[Piece], keys: Sequence[str]) -> Iterator[Chunk]:
    files: list[Input] = []
    for piece in pieces:
        is_file = piece.input.kind == TEXT and piece.input.path != "-"
        is_full = len(files) == CHUNK_FILES or sum(file.size for file in files) >= CHUNK_BYTES
        if files and (is_full or not is_file):
            yield _whole_files(files)
            files = []
        if is_file:
            files.append(piece.input)
        else:
            yield from _chunks_of(piece, keys)
    if files:
        yield _whole_files(files)


def _whole_files(files: list[Input]) -> Chunk:
    stored = sum(file.width for file in files)
    return Chunk(TEXT, tuple(file.path for file in files), stored=stored)


def _chunks_of(piece: Piece, keys: Sequence[str]) -> Iterator[Chunk]:
    file = piece.input
    paths = (file.path,)
    if file.is_cut_anywhere:
        step = _REMOTE_BYTES if storage.is_remote(file.path) else CHUNK_BYTES
        for begin in range(piece.begin, piece.end, step):
            span = (begin, min(begin + step, piece.end))
            yield Chunk(LINES, paths, span=span, size=file.size, stored=span[1] - begin)
    elif file.kind == ROWS:
        groups, first = (piece.begin, piece.end), file.rows[piece.begin]
        for data, rows in tables.batches(file.path, groups, keys, CHUNK_BYTES):
            stored = file.width * rows // max(file.rows[-1], 1)
            yield Chunk(ROWS, paths, data, first + 1, stored=stored)
            first += rows
    elif file.kind == ARROW:
        first, offset = 1, 0
        for data, rows, stored in tables.arrow_batches(file.path, keys, CHUNK_BYTES):
            yield Chunk(ROWS, paths, data, first, stored=stored - offset)
            first, offset = first + rows, stored
    else:
        progress, first, offset = Progress(), 1, 0
        blocks = documents.read_blocks(file.path, progress)
        if file.kind == TEXT:
            yield Chunk(TEXT, paths, b"".join(blocks))
            return
        if file.kind == ARRAY:
            elements = arrays.elements(blocks, file.path)
            blocks = arrays.joined(elements, CHUNK_BYTES)
        for data in documents.whole_lines(blocks):
            yield Chunk(file.kind, paths, data, first, stored=progress.stored - offset)
            first, offset = first + data.count(b"\n"), progress.stored
