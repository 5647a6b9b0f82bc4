"""Tokenize JSONL rows of chats or preferences, and mark the tokens that have a loss.

Tokens and loss masks are made once per node, in parallel processes, and kept in the cache as two
.bin/.idx pairs: one document per row, one sequence per text of the row.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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
from maxmeg.data.prepare.encoding import Column
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer
from maxmeg.data.workers import in_processes

LAYOUT = b"1"  # version of the files in the cache; a new version is made again
MAX_WORKERS = 16
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 22  # limits of a chunk
_REMEDY = "give the job more memory or fewer cores, then start again"


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
                    _write(path, num_workers, temporary, kind, template, tokenizer.spec)
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


def _chunks(path: str) -> Iterator[list[Record]]:
    """The rows of a file, some at a time."""
    chunk, size = [], 0
    for record in read_records([path]):
        if len(chunk) == _ROWS_AT_ONCE or (chunk and size + len(record.data) > _BYTES_AT_ONCE):
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += len(record.data)
    if chunk:
        yield chunk


def _encoder(
    kind: Kind, template: ChatTemplate, spec: str
) -> Callable[[list[Record]], tuple[Column, Column, list[str]]]:
    return functools.partial(_encode_rows, kind, template, load_tokenizer(spec))


def _encode_rows(
    kind: Kind, template: ChatTemplate, tokenizer: Tokenizer, records: list[Record]
) -> tuple[Column, Column, list[str]]:
    """The tokens of rows, which of them have a loss, and messages about invalid rows."""
    sides = [find_turns(template, records, read) for read in kind.readers]
    texts, ends, problems = [(np.empty(0, np.int32), np.empty(0, np.uint8))], [], []
    for record, *row in zip(records, *sides, strict=True):
        try:
            texts += [encode_turns(tokenizer, turns) for _, turns in row]
            ends.append(len(texts) - 1)
        except BadRow as error:
            problems.append(f"{record.place}: {error}")
    lengths = np.array([len(tokens) for tokens, _ in texts[1:]], np.int64)
    tokens, loss = (np.concatenate(parts) for parts in zip(*texts, strict=True))
    tokens, ends = tokens.astype(token_dtype(tokenizer.vocab_size)), np.array(ends, np.int64)
    return Column(tokens, lengths, ends), Column(loss, lengths, ends), problems


def _write(path: str, num_workers: int | None, folder: Path, *making: Any) -> None:
    """Encode the rows of a file and write them into a folder. making: of `_encoder`."""
    start, (kind, _, spec) = time.monotonic(), making
    if num_workers is None:
        most = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        num_workers = min(most, os.path.getsize(path) // _BYTES_AT_ONCE)
    if num_workers < 2:
        encode = _encoder(*making)
        results = ((chunk, encode(chunk)) for chunk in _chunks(path))
    else:
        died = f"a process for {kind.name} was killed, perhaps for lack of memory: {_REMEDY}"
        results = in_processes(_chunks(path), num_workers, _encoder, making, died)
    with contextlib.closing(results):
        vocab_size = load_tokenizer(spec).vocab_size
        count, num_tokens = _write_all((result for _, result in results), vocab_size, folder, path)
    if not count:
        raise ValueError(f"{path} holds no {kind.name}: write one JSON object per line")
    print(
        f"chats: {count:,} {kind.name} of {path}, {num_tokens:,} tokens, made in "
        f"{time.monotonic() - start:.1f} s in {folder.parent}",
        file=sys.stderr,
    )


def _write_all(
    chunks: Iterable[tuple[Column, Column, list[str]]], vocab_size: int, folder: Path, path: str
) -> tuple[int, int]:
    """Write all chunks and return the numbers of rows and tokens; ValueError that names invalid
    rows."""
    count, problems = 0, []
    tokens = IndexedWriter(folder / "tokens", vocab_size)
    with tokens, IndexedWriter(folder / "loss", dtype=np.uint8) as loss:
        for ids, has_loss, bad in chunks:
            tokens.add_documents(ids.tokens, ids.lengths, ids.ends)
            loss.add_documents(has_loss.tokens, has_loss.lengths, has_loss.ends)
            count += len(ids.ends)
            problems += bad
            if len(problems) >= MAX_ERRORS:
                break
        if problems:
            raise bad_rows_error(problems, path)
    return count, tokens.num_tokens


def encode_turns(tokenizer: Tokenizer, turns: Turns | BadRow) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the whole text, and a uint8 mask of the tokens that overlap a span with a loss."""
    if isinstance(turns, BadRow):
        raise turns
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
