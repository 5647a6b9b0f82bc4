"""The texts of a corpus that an index is built of: rows of files, or blocks of sentences."""

import hashlib
import json
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from maxmeg.config.data import DataConfig
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.vocabulary import check_vocabularies
from maxmeg.data.labelled.files import BadRow, titled
from maxmeg.data.prepare.documents import (
    LINES,
    TEXT,
    find_inputs,
    kind_of,
    packing,
    parse_json,
    read_records,
)
from maxmeg.data.retrieval.ict import Blocks
from maxmeg.data.retrieval.rows import TextEncoder
from maxmeg.data.tokenizers.tokenizer import Tokenizer

_BLOCK = 1 << 20


class Passages(Protocol):
    """Texts by row. hash: of the files, and of what decides how they become texts."""

    hash: str

    def __len__(self) -> int: ...

    def tokens(self, row: int) -> np.ndarray: ...

    def text(self, row: int) -> str: ...


class RowPassages:
    """One text a row: {"text": ..., "title": ... (optional)}, of the files that `preprocess` reads.

    Rows are read when they are needed: of one file of JSON lines there, of others in a temporary
    copy. Blank lines are left out. ValueError for a corpus without texts and for bad rows.
    """

    def __init__(self, path: str, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer, self._room = path, tokenizer, config.text_tokens
        self._encoder, digest = TextEncoder.of(tokenizer), hashlib.blake2b(digest_size=16)
        self._file = as_json_lines(path)
        weakref.finalize(self, self._file.close)
        starts, at = [], 0
        for line in self._file:
            digest.update(line)
            starts += [at] * bool(line.strip())
            at += len(line)
        if not starts:
            raise ValueError(f"{path} holds no text: it must have an object with a text a row")
        self._starts = np.array(starts, np.int64)
        self.hash = f"{digest.hexdigest()}-{self._room}"

    def __len__(self) -> int:
        return len(self._starts)

    def parts(self, row: int) -> tuple[str, str]:
        """(title or "", text)."""
        self._file.seek(int(self._starts[row]))
        try:
            return titled(parse_json(self._file.readline()), "the row")
        except (BadRow, ValueError) as error:
            raise ValueError(f"{self._path}, text {row + 1}: {error}") from None

    def tokens(self, row: int) -> np.ndarray:
        title, text = self.parts(row)
        opening = self._tokenizer.encode(title) if title else None
        return self._encoder(self._tokenizer.encode(text), self._room, opening)

    def text(self, row: int) -> str:
        return ": ".join(filter(None, self.parts(row)))


class BlockPassages:
    """The blocks of a .bin/.idx corpus of sentences in reading order, as training has them
    (`IctDataset`), of the whole corpus and without titles."""

    def __init__(self, prefix: str, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._corpus, self._tokenizer = IndexedDataset(prefix), tokenizer
        check_vocabularies([prefix], tokenizer, warns=True)
        self._encoder, self._room = TextEncoder.of(tokenizer), config.text_tokens
        bounds = np.asarray(self._corpus.document_indices, np.int64)
        rooms = np.full(len(bounds) - 1, self._room - 3)
        self.rows = Blocks(self._corpus.lengths, bounds, rooms).epoch()
        self.hash = f"{hash_of_files([f'{prefix}.bin', f'{prefix}.idx'])}-{self._room}"

    def __len__(self) -> int:
        return len(self.rows)

    def sentences(self, row: int) -> np.ndarray:
        first, end, _ = self.rows[row].tolist()
        return np.concatenate([self._corpus.get(number) for number in range(first, end)])

    def tokens(self, row: int) -> np.ndarray:
        tokens = self._encoder(self.sentences(row), self._room)
        self._encoder.check(tokens, f"{self._corpus.prefix}.bin")
        return tokens

    def text(self, row: int) -> str:
        return self._tokenizer.decode(self.sentences(row).tolist())


def open_passages(path: str, config: DataConfig, tokenizer: Tokenizer) -> Passages:
    """The texts of the rows of files, or of a corpus of sentences by its prefix. ValueError for
    others, and as from their classes."""
    kind = BlockPassages if Path(f"{path}.idx").is_file() else RowPassages
    return kind(path, config, tokenizer)


def as_json_lines(path: str) -> BinaryIO:
    """Open the rows of files as JSON lines: the one file of such lines, or a temporary copy."""
    paths = find_inputs([path])
    kinds = [kind_of(each) for each in paths]
    if TEXT in kinds:
        raise ValueError(
            f"the corpus {paths[kinds.index(TEXT)]} is neither a file of rows (.jsonl, .json, "
            ".parquet, .arrow, a saved dataset) nor the prefix of .bin/.idx files"
        )
    if kinds == [LINES] and Path(path).is_file() and not packing(path):
        return open(path, "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the passages)
    try:
        for record in read_records(paths):
            try:
                value = record.value()
            except ValueError as error:
                raise ValueError(f"{record.place}: {error}") from None
            file.write(json.dumps(value, default=str).encode() + b"\n")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def hash_of_files(paths: list[str]) -> str:
    result = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                result.update(block)
    return result.hexdigest()


def read_queries(path: str, passages: Passages) -> tuple[list[str], np.ndarray]:
    """(queries, row of each one's own text) of JSON lines with query and row, from 0, or query and
    text: its own text as the corpus has it. ValueError for rows that are not in the corpus."""
    queries, rows = [], []
    numbers: dict[str, int] = {}
    for record in read_records([path]):
        place = record.place
        try:
            row: Any = record.value()
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        query = row.get("query") if isinstance(row, dict) else None
        if not isinstance(query, str) or not query.strip():
            raise ValueError(f"{place}: a row is an object with a query, and with a row or text")
        at = row.get("row")
        if "text" in row:
            numbers = numbers or dict(texts_of(passages))
            at = numbers.get(row["text"] if isinstance(row["text"], str) else "", -1)
        if not isinstance(at, int) or not 0 <= at < len(passages):
            raise ValueError(
                f"{place}: the query's own text is not among the {len(passages)} of the corpus: "
                "give its row, from 0, or its text"
            )
        queries.append(query)
        rows.append(at)
    if not queries:
        raise ValueError(f"{path} holds no query")
    return queries, np.array(rows, np.int64)


def texts_of(passages: Passages) -> Iterator[tuple[str, int]]:
    """(text without its title, row), of equal texts the first row last."""
    for row in reversed(range(len(passages))):
        parts = getattr(passages, "parts", None)
        yield (parts(row)[1] if parts else passages.text(row)), row
