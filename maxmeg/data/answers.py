"""What is to be learnt of rows in JSONL files: tokens, and which of them an answer has.

Tokens and mask are made once on a node, by processes side by side, as two .bin/.idx pairs in the
cache: a document a row, a sequence for each of its texts.
"""

import dataclasses
import hashlib
import itertools
import os
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from maxmeg.data.chat import ChatTemplate, chat_template_of
from maxmeg.data.documents import Progress, Record, find_inputs, has_lines, read_records
from maxmeg.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from maxmeg.data.stored import appearing, locked
from maxmeg.data.tokenizers import Tokenizer, load_tokenizer
from maxmeg.data.turns import MAX_ERRORS, BadRow, Row, Turns, find_turns
from maxmeg.data.workers import Arrays, Workers

LAYOUT = b"1"  # of what is kept; another number makes it again
MAX_WORKERS = 16
_LINES_OF_ERRORS = 8
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 22  # of a process
_AHEAD = 2  # results of each process that wait to be written
_REMEDY = "give the job more memory or fewer cores; what was made is made again"

Encoded = tuple[np.ndarray, np.ndarray]  # a text's tokens, and which of them have a loss


@typing.runtime_checkable
class Spanned(typing.Protocol):
    """A tokenizer that knows where its tokens lie in a text."""

    def encode_spans(
        self, text: str, marks: Mapping[str, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Kind:
    """Rows of one kind: their name in messages, and a reader for each of a row's texts."""

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
    """The folder in `cache_dir` with the rows of a JSONL file, made on first use.

    num_workers: processes that make it, 0 makes it here; by default as the file is large and the
    machine has cores. The result is the same. ValueError that names file and line of the rows
    that are none; all or nothing is made.
    """
    if not isinstance(tokenizer, Spanned):
        raise NotImplementedError(
            f"tokenizer {tokenizer.spec!r} does not say where its tokens lie in a text: "
            f"{kind.name} can use huggingface:FILE and bytes"
        )
    if not cache_dir:
        raise ValueError(f"give cache_dir, a folder to keep the tokens of {kind.name} in")
    (path,) = find_inputs([path])
    if not has_lines(path):
        raise ValueError(
            f"{path} is not named .jsonl (or .jsonl.gz, .jsonl.zst): does it hold {kind.name}?"
        )
    template = chat_template_of(tokenizer, template_path)
    folder = Path(cache_dir)
    final = folder / f"{Path(path).name.split('.')[0]}-{_digest(path, kind, tokenizer, template)}"
    if final.is_dir():
        return str(final)
    try:
        with locked(folder):
            if not final.is_dir():
                with appearing(final) as temporary:
                    _write(_Chunks(path, kind, tokenizer.spec, template), num_workers, temporary)
    except ChildProcessError:  # says what became of it
        raise
    except OSError as error:
        raise ValueError(
            f"cannot keep the tokens of {kind.name} in {cache_dir}: {error.strerror or error}; "
            "name a folder that can be written with data.cache_dir"
        ) from error
    return str(final)


def _digest(path: str, kind: Kind, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    found = hashlib.sha256(LAYOUT + kind.name.encode() + tokenizer.identity.encode())
    for part in (template.text, *itertools.chain(*sorted(template.tokens.items()))):
        found.update(len(part).to_bytes(8, "little") + part.encode())
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()[:16]


class _Chunks:
    """Rows of a file in chunks, encoded. Whoever asks for chunk after chunk reads it once."""

    def __init__(self, path: str, kind: Kind, spec: str, template: ChatTemplate) -> None:
        self.path, self.kind, self.spec, self.template = path, kind, spec, template
        self._size = (_ROWS_AT_ONCE, _BYTES_AT_ONCE)
        self._count = sum(1 for _ in self._read())
        self._left: Iterator[list[Record]] | None = None
        self._at = 0

    def __len__(self) -> int:
        return self._count

    def _read(self) -> Iterator[list[Record]]:
        (most_rows, most_bytes), chunk, size = self._size, [], 0
        for record in read_records([self.path], Progress()):
            if len(chunk) == most_rows or (chunk and size + len(record.data) > most_bytes):
                yield chunk
                chunk, size = [], 0
            chunk.append(record)
            size += len(record.data)
        if chunk:
            yield chunk

    def __getitem__(self, index: int, /) -> Arrays:
        """tokens and loss of all texts, lengths of these, ends (texts up to the end of each row)
        and problems, the lines of an error in UTF-8."""
        if self._left is None or index < self._at:
            self._left, self._at = self._read(), 0
            self._tokenizer = load_tokenizer(self.spec)
        records = next(itertools.islice(self._left, index - self._at, None))
        self._at = index + 1
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
        made = map(chunks.__getitem__, range(len(chunks)))
        count, num_tokens = _write_all(made, vocab_size, folder)
    else:
        workers = Workers(chunks, num_workers, _AHEAD, f"process for {name}", _REMEDY)
        try:
            made = (next(workers) for _ in range(len(chunks)))
            count, num_tokens = _write_all(made, vocab_size, folder)
        finally:
            workers.close()
    if not count:
        raise ValueError(f"{chunks.path} holds no {name}: write a JSON object a line")
    print(
        f"chats: {count:,} {name} of {chunks.path}, {num_tokens:,} tokens, made in "
        f"{time.monotonic() - start:.1f} s in {folder.parent}",
        file=sys.stderr,
    )


def _write_all(chunks: Iterable[Arrays], vocab_size: int, folder: Path) -> tuple[int, int]:
    """Numbers of rows and of tokens."""
    count, problems = 0, []
    tokens = IndexedWriter(folder / "tokens", vocab_size)
    with tokens, IndexedWriter(folder / "loss", dtype=np.uint8) as loss:
        for made in chunks:
            tokens.add_documents(made["tokens"], made["lengths"], made["ends"])
            loss.add_documents(made["loss"], made["lengths"], made["ends"])
            count += len(made["ends"])
            problems += [line for line in made["problems"].tobytes().decode().split("\0") if line]
            if len(problems) >= MAX_ERRORS:
                break
        if problems:
            more = len(problems[:MAX_ERRORS]) - _LINES_OF_ERRORS
            raise ValueError(
                "\n".join(problems[:_LINES_OF_ERRORS])
                + f"\nand {more} more" * (more > 0)
                + "\nmend these rows or remove them"
            )
    return count, tokens.num_tokens


def encode_turns(tokenizer: Tokenizer, turns: Turns) -> Encoded:
    """Tokens of the whole text, and which of them touch what is to be learnt (uint8)."""
    assert isinstance(tokenizer, Spanned)
    try:
        turns.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            f"half a surrogate pair (\\u{ord(turns.text[error.start]):04x}) is no character"
        ) from None
    ids, places = tokenizer.encode_spans(turns.text, tokenizer.added)
    has_loss = np.zeros(len(ids), np.uint8)
    for begin, end in turns.spans:
        has_loss[(places[:, 0] < end) & (np.maximum(places[:, 1], places[:, 0] + 1) > begin)] = 1
    if turns.has_end:
        ids, has_loss = np.append(ids, np.int32(tokenizer.eod)), np.append(has_loss, np.uint8(1))
    if not has_loss[1:].any():
        raise BadRow("none of its tokens has a loss: the template marks nothing of the assistant")
    return ids, has_loss


def open_prepared(folder: str) -> tuple[IndexedDataset, IndexedDataset]:
    """Tokens and loss of a folder that `prepare` made."""
    try:
        tokens, loss = (IndexedDataset(os.path.join(folder, n)) for n in ("tokens", "loss"))
        if not np.array_equal(tokens.lengths, loss.lengths):
            raise ValueError(f"{folder}: tokens and loss have different lengths")
    except ValueError as error:
        raise ValueError(f"{error}; or delete {folder}, which makes it again") from None
    return tokens, loss
