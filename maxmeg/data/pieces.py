"""Where a corpus can be cut: the same documents in the same order, whoever reads which piece.

All inputs, one after the other, are a line of bytes as they are stored. A document belongs to the
piece in which it begins: lines that are not packed begin anywhere, the documents of a packed or
plain text file at its start, the rows of a Parquet file's row groups evenly over it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from maxmeg.data import documents, storage
from maxmeg.data.documents import LINES, ROWS, TEXT, Progress
from maxmeg.data.encoding import CHUNK_BYTES, CHUNK_FILES, Chunk, parquet

_REMOTE_BYTES = 8 * CHUNK_BYTES  # read by one request


@dataclasses.dataclass(frozen=True)
class Input:
    """A file: its bytes as stored, when it was written, and for Parquet how many rows come before
    each row group, and all rows at the end."""

    path: str
    kind: str
    size: int
    stamp: str = ""
    rows: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Bytes on the line; an empty file is a document too."""
        return max(self.size, 1)

    @property
    def is_cut_anywhere(self) -> bool:
        return self.kind == LINES and self.path != "-" and not documents.packing(self.path)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Of an input: bytes [begin, end) that lines begin in, row groups [begin, end), or all."""

    input: Input
    begin: int
    end: int


def open_inputs(paths: Sequence[str], stdin_format: str = "jsonl") -> list[Input]:
    """What there is to read."""
    files = [path for path in paths if path != "-"]
    found = dict(zip(files, storage.states(files), strict=True))
    inputs = []
    for path in paths:
        kind = documents.kind_of(path, stdin_format)
        rows = parquet.rows_before(path) if kind == ROWS else ()
        inputs.append(Input(path, kind, *found.get(path, (0, "")), rows))
    return inputs


def check_unchanged(inputs: Sequence[Input]) -> None:
    """ValueError where a file was written while it was read."""
    files = [one for one in inputs if one.path != "-"]
    for one, state in zip(files, storage.states([one.path for one in files]), strict=True):
        if state != (one.size, one.stamp):
            raise ValueError(
                f"{one.path} was changed while it was read: start again when it is whole"
            )


def cut(inputs: Sequence[Input], begin: int, end: int) -> list[Piece]:
    """The pieces whose documents begin in bytes [begin, end) of the line of all inputs."""
    pieces, at = [], 0
    for one in inputs:
        low, high = max(begin - at, 0), min(end - at, one.width)
        at += one.width
        if low >= high:
            continue
        if one.is_cut_anywhere:
            pieces.append(Piece(one, low, min(high, one.size)))
        elif one.kind == ROWS:
            starts = [one.width * before // max(one.rows[-1], 1) for before in one.rows[:-1]]
            groups = [
                i for i, start in enumerate(starts) if low <= min(start, one.width - 1) < high
            ]
            if groups:
                pieces.append(Piece(one, groups[0], groups[-1] + 1))
        elif low == 0:
            pieces.append(Piece(one, 0, one.size))
    return pieces


def chunks(pieces: Sequence[Piece], keys: Sequence[str]) -> Iterator[Chunk]:
    """What is encoded at once, in order; never nothing, though packed files may hold nothing."""
    found = _chunks(pieces, keys)
    yield next(found, Chunk(LINES, ("",), b""))
    yield from found


def _chunks(pieces: Sequence[Piece], keys: Sequence[str]) -> Iterator[Chunk]:
    files: list[Input] = []
    for piece in pieces:
        is_file = piece.input.kind == TEXT and piece.input.path != "-"
        is_full = len(files) == CHUNK_FILES or sum(one.size for one in files) >= CHUNK_BYTES
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
    stored = sum(one.width for one in files)
    return Chunk(TEXT, tuple(one.path for one in files), stored=stored)


def _chunks_of(piece: Piece, keys: Sequence[str]) -> Iterator[Chunk]:
    one = piece.input
    paths = (one.path,)
    if one.is_cut_anywhere:
        step = _REMOTE_BYTES if storage.is_remote(one.path) else CHUNK_BYTES
        for begin in range(piece.begin, piece.end, step):
            span = (begin, min(begin + step, piece.end))
            yield Chunk(LINES, paths, span=span, size=one.size, stored=span[1] - begin)
    elif one.kind == ROWS:
        groups, first = (piece.begin, piece.end), one.rows[piece.begin]
        for data, rows in parquet.batches(one.path, groups, keys, CHUNK_BYTES):
            stored = one.width * rows // max(one.rows[-1], 1)
            yield Chunk(ROWS, paths, data, first + 1, stored=stored)
            first += rows
    else:
        progress, first, seen = Progress(), 1, 0
        blocks = documents.read_blocks(one.path, progress)
        if one.kind == TEXT:
            yield Chunk(TEXT, paths, b"".join(blocks))
            return
        for data in documents.whole_lines(blocks):
            yield Chunk(LINES, paths, data, first, stored=progress.stored - seen)
            first, seen = first + data.count(b"\n"), progress.stored
