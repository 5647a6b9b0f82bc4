"""Tokenize JSONL rows of chats or preferences, and mark the tokens that have a loss.

Tokens and loss masks are made once per node, in parallel processes, and kept in the cache as two
.bin/.idx pairs: one document per row, one sequence per text of the row.
"""

import dataclasses
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from maxmeg.data.chat.template import ChatTemplate, load_chat_template
from maxmeg.data.chat.turns import MAX_ERRORS, BadRow, Row, Turns, bad_rows_error, find_turns
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter, token_dtype
from maxmeg.data.corpus.stored import atomic_folder, locked_folder
from maxmeg.data.prepare.documents import (
    LINES,
    Record,
    check_unicode,
    find_inputs,
    kind_of,
    read_records,
)
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.data.workers import Arrays, Workers

LAYOUT = b"1"  # version of the files in the cache; a new version is made again
MAX_WORKERS = 16
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 22  # limits of a chunk
_AHEAD = 2  # encoded chunks of each process that wait to be written
_REMEDY = "give the job more memory or fewer cores, then start again"

Encoded = tuple[np.ndarray, np.ndarray]  # a text's tokens, and which of them have a loss


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of rows: its name in messages, and one reader for each text of a row."""

    name: str
    readers: tuple[Callable[[Record], Row | Turns], ...]


def prepare(
    path: str,
    kind: Kind,
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike,
    template_path: str = "",
    num_workers: int | None = None,
) -> str:
    """Tokenize a JSONL file on first use; returns the folder in `cache_dir` that holds the result.

    num_workers: processes to use; 0 works in this process; None chooses by file size and cores. The
    result does not depend on it. ValueError that names file and line of the invalid rows; then
    nothing is written.
    """
    tokenizer.encode_spans("")  # NotImplementedError for a tokenizer without spans
    if not cache_dir:
        raise ValueError(f"give cache_dir, a folder to keep the tokens of {kind.name} in")
    (path,) = find_inputs([path])
    if kind_of(path) != LINES:
        raise ValueError(
            f"{path} is not named .jsonl (or .jsonl.gz, .jsonl.zst): does it hold {kind.name}?"
        )
    template = load_chat_template(tokenizer, template_path)
    folder = Path(cache_dir)
    final = folder / f"{Path(path).name.split('.')[0]}-{_digest(path, kind, tokenizer, template)}"
    if final.is_dir():
        return str(final)
    try:
        with locked_folder(folder):
            if not final.is_dir():
                with atomic_folder(final) as temporary:
                    _write(_Chunks(path, kind, tokenizer.spec, template), num_workers, temporary)
    except ChildProcessError:  # it names the process and the remedy
        raise
    except OSError as error:
        raise ValueError(
            f"cannot keep the tokens of {kind.name} in {cache_dir}: {error.strerror or error}; "
            "name a folder that can be written with data.cache_dir"
        ) from error
    return str(final)


def _digest(path: str, kind: Kind, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    digest = hashlib.sha256(LAYOUT + kind.name.encode() + tokenizer.identity.encode())
    for part in (template.text, *itertools.chain(*sorted(template.tokens.items()))):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


class _Chunks:
    """The rows of a file in encoded chunks; reading the chunks in order reads the file once."""

    def __init__(self, path: str, kind: Kind, spec: str, template: ChatTemplate) -> None:
        self.path, self.kind, self.spec, self.template = path, kind, spec, template
        self._size = (_ROWS_AT_ONCE, _BYTES_AT_ONCE)
        self._count = sum(1 for _ in self._read())
        self._unread: Iterator[list[Record]] | None = None
        self._next = 0

    def __len__(self) -> int:
        return self._count

    def _read(self) -> Iterator[list[Record]]:
        (most_rows, most_bytes), chunk, size = self._size, [], 0
        for record in read_records([self.path]):
            if len(chunk) == most_rows or (chunk and size + len(record.data) > most_bytes):
                yield chunk
                chunk, size = [], 0
            chunk.append(record)
            size += len(record.data)
        if chunk:
            yield chunk

    def __getitem__(self, index: int, /) -> Arrays:
        """Encode one chunk of rows.

        tokens and loss: of all texts, concatenated; lengths: of each text; ends: number of texts up
        to the end of each row; problems: UTF-8 messages about invalid rows, separated by NUL bytes.
        """
        if self._unread is None or index < self._next:
            self._unread, self._next = self._read(), 0
            self._tokenizer = load_tokenizer(self.spec)
        records = next(itertools.islice(self._unread, index - self._next, None))
        self._next = index + 1
        sides = [find_turns(self.template, records, read) for read in self.kind.readers]
        texts, ends, problems = [(np.empty(0, np.int32), np.empty(0, np.uint8))], [], []
        for record, *row in zip(records, *sides, strict=True):
            try:
                texts += [self._encode(turns) for _, turns in row]
                ends.append(len(texts) - 1)
            except BadRow as error:
                problems.append(f"{record.place}: {error}")
        lengths = [len(tokens) for tokens, _ in texts]
        lines = "\0".join(problems[:MAX_ERRORS]).encode("utf-8", "backslashreplace")
        tokens, loss = (np.concatenate(parts) for parts in zip(*texts, strict=True))
        return {
            "tokens": tokens.astype(token_dtype(self._tokenizer.vocab_size)),
            "loss": loss,
            "lengths": np.array(lengths[1:], np.int64),
            "ends": np.array(ends, np.int64),
            "problems": np.frombuffer(lines, np.uint8),
        }

    def _encode(self, turns: Turns | BadRow) -> Encoded:
        if isinstance(turns, BadRow):
            raise turns
        return encode_turns(self._tokenizer, turns)


def _write(chunks: _Chunks, num_workers: int | None, folder: Path) -> None:
    start, name = time.monotonic(), chunks.kind.name
    if num_workers is None:
        num_workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS, len(chunks) // 2)
    vocab_size = load_tokenizer(chunks.spec).vocab_size
    if num_workers < 2:
        encoded = map(chunks.__getitem__, range(len(chunks)))
        count, num_tokens = _write_all(encoded, vocab_size, folder, chunks.path)
    else:
        workers = Workers(chunks, num_workers, _AHEAD, f"process for {name}", _REMEDY)
        try:
            encoded = (next(workers) for _ in range(len(chunks)))
            count, num_tokens = _write_all(encoded, vocab_size, folder, chunks.path)
        finally:
            workers.close()
    if not count:
        raise ValueError(f"{chunks.path} holds no {name}: write one JSON object per line")
    print(
        f"chats: {count:,} {name} of {chunks.path}, {num_tokens:,} tokens, made in "
        f"{time.monotonic() - start:.1f} s in {folder.parent}",
        file=sys.stderr,
    )


def _write_all(
    chunks: Iterable[Arrays], vocab_size: int, folder: Path, path: str
) -> tuple[int, int]:
    """Write all chunks and return the numbers of rows and tokens; ValueError that names invalid
    rows."""
    count, problems = 0, []
    tokens = IndexedWriter(folder / "tokens", vocab_size)
    with tokens, IndexedWriter(folder / "loss", dtype=np.uint8) as loss:
        for chunk in chunks:
            tokens.add_documents(chunk["tokens"], chunk["lengths"], chunk["ends"])
            loss.add_documents(chunk["loss"], chunk["lengths"], chunk["ends"])
            count += len(chunk["ends"])
            problems += [line for line in chunk["problems"].tobytes().decode().split("\0") if line]
            if len(problems) >= MAX_ERRORS:
                break
        if problems:
            raise bad_rows_error(problems, path)
    return count, tokens.num_tokens


def encode_turns(tokenizer: Tokenizer, turns: Turns) -> Encoded:
    """Tokens of the whole text, and a uint8 mask of the tokens that overlap a span with a loss."""
    try:
        check_unicode(turns.text, "the conversation")
    except ValueError as error:
        raise BadRow(str(error)) from None
    ids, characters = tokenizer.encode_spans(turns.text, tokenizer.added)
    has_loss = np.zeros(len(ids), np.uint8)
    starts, ends = characters[:, 0], np.maximum(characters[:, 1], characters[:, 0] + 1)
    for begin, end in turns.spans:
        has_loss[(starts < end) & (ends > begin)] = 1
    if turns.has_end:
        ids, has_loss = np.append(ids, np.int32(tokenizer.eod)), np.append(has_loss, np.uint8(1))
    if not has_loss[1:].any():
        raise BadRow("none of its tokens has a loss: the template marks no text of the assistant")
    return ids, has_loss


def open_prepared(folder: str) -> tuple[IndexedDataset, IndexedDataset]:
    """The tokens and the loss mask in a folder that `prepare` wrote."""
    try:
        tokens, loss = (IndexedDataset(os.path.join(folder, n)) for n in ("tokens", "loss"))
        if not np.array_equal(tokens.lengths, loss.lengths):
            raise ValueError(f"{folder}: tokens and loss have different lengths")
    except ValueError as error:
        raise ValueError(f"{error}; or delete {folder}, and it is made again") from None
    return tokens, loss
