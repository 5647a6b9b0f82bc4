"""Tokenize rows of chats or preferences, and mark the tokens that have a loss.

Tokens and loss masks are made once per node, in parallel processes, and kept in the cache as
.bin/.idx pairs: one document per row, one sequence per text of the row. The tokens before a turn
with a loss are those of its prompt, which `generate` and the server would send. `loss` is a mask of
0 and 1; `weights` has other weights of the tokens' losses, and empty sequences if there are none.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxmeg.data.chat.template import ChatTemplate, load_chat_template
from maxmeg.data.chat.turns import MAX_ERRORS, BadRow, Row, Turns, bad_rows_error, find_turns
from maxmeg.data.corpus import storage
from maxmeg.data.corpus.indexed import IndexedDataset, IndexedWriter, token_dtype
from maxmeg.data.corpus.stored import atomic_folder, locked_folder
from maxmeg.data.prepare.documents import Record, check_unicode, find_row_files, read_records
from maxmeg.data.prepare.encoding import Column
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer, special_name
from maxmeg.data.workers import in_processes

LAYOUT = b"4"  # version of the files in the cache; a new version is made again
MAX_WORKERS = 16
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 22  # limits of a chunk
_REMEDY = "give the job more memory or fewer cores, then start again"
_SEVERAL_TEXTS = (
    "an answer has several turns of the assistant, and the prompt of a later one does not continue "
    "the tokens of the turn before: give an answer of one turn, or a template that does not change "
    "earlier turns (data.chat_template=FILE)"
)
# Tokens of rows, float32 weights of their losses, rows of each form, messages about invalid rows.
Encoded = tuple[np.ndarray, np.ndarray]
Made = tuple[Column, Column, collections.Counter[str], list[str]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of rows: its name in messages, and its readers.

    With one reader a row has one text or more, with several readers one text for each.
    """

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
    """Tokenize the rows of a file, or of the files that a glob or a folder of tables names, on
    first use; returns the folder in `cache_dir` that holds the result.

    num_workers: processes to use; 0 works in this process; None chooses by file size and cores. The
    result does not depend on it. ValueError that names file and line of the invalid rows; then
    nothing is written.
    """
    tokenizer.encode_spans("")  # NotImplementedError for a tokenizer without spans
    if not cache_dir:
        raise ValueError(f"give cache_dir, a folder to keep the tokens of {kind.name} in")
    files = find_row_files([path], kind.name)
    template = load_chat_template(tokenizer, template_path)
    folder, name = Path(cache_dir), Path(path).name.split(".")[0].replace("*", "")
    final = folder / f"{name}-{_digest(files, kind, tokenizer, template)}"
    if final.is_dir():
        return str(final)
    try:
        with locked_folder(folder):
            if not final.is_dir():
                with atomic_folder(final) as temporary:
                    _write(files, num_workers, temporary, kind, template, tokenizer.spec)
    except ChildProcessError:  # it names the process and the remedy
        raise
    except OSError as error:
        raise ValueError(
            f"cannot keep the tokens of {kind.name} in {cache_dir}: {error.strerror or error}; "
            "name a folder that can be written with data.cache_dir"
        ) from error
    return str(final)


def _digest(files: Sequence[str], kind: Kind, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    digest = hashlib.sha256(LAYOUT + kind.name.encode() + tokenizer.identity.encode())
    for part in (template.text, *itertools.chain(*sorted(template.tokens.items()))):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    for path, (size, _) in zip(files, storage.states(files), strict=True):
        digest.update(size.to_bytes(8, "little"))
        with storage.open_input(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def _chunks(files: Sequence[str]) -> Iterator[list[Record]]:
    """The rows of files, some at a time."""
    chunk, size = [], 0
    for record in read_records(files):
        if len(chunk) == _ROWS_AT_ONCE or (chunk and size + record.size > _BYTES_AT_ONCE):
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += record.size
    if chunk:
        yield chunk


def _encoder(kind: Kind, template: ChatTemplate, spec: str) -> Callable[[list[Record]], Made]:
    return functools.partial(_encode_rows, kind, template, load_tokenizer(spec))


def _encode_rows(
    kind: Kind, template: ChatTemplate, tokenizer: Tokenizer, records: list[Record]
) -> Made:
    sides = [find_turns(template, records, read) for read in kind.readers]
    texts, ends, problems = [(np.empty(0, np.int32), np.empty(0, np.float32))], [], []
    forms: collections.Counter[str] = collections.Counter()
    for record, *row in zip(records, *sides, strict=True):
        try:
            encoded = [encode_turns(tokenizer, turns) for _, turns in row]
            if len(encoded) > 1 and any(len(side) > 1 for side in encoded):
                raise BadRow(_SEVERAL_TEXTS)
            texts += itertools.chain(*encoded)
            ends.append(len(texts) - 1)
            for _, turns in row[:1]:
                forms[turns[0].form if turns else "of weight 0"] += 1
        except BadRow as error:
            problems.append(f"{record.place}: {error}")
    lengths = np.array([len(tokens) for tokens, _ in texts[1:]], np.int64)
    tokens, weights = (np.concatenate(parts) for parts in zip(*texts, strict=True))
    tokens, ends = tokens.astype(token_dtype(tokenizer.vocab_size)), np.array(ends, np.int64)
    return Column(tokens, lengths, ends), Column(weights, lengths, ends), forms, problems


def _write(files: Sequence[str], num_workers: int | None, folder: Path, *making: Any) -> None:
    """Encode the rows of files and write them into a folder. making: of `_encoder`."""
    start, (kind, _, spec) = time.monotonic(), making
    if num_workers is None:
        most = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        num_workers = min(most, sum(size for size, _ in storage.states(files)) // _BYTES_AT_ONCE)
    if num_workers < 2:
        encode = _encoder(*making)
        results = ((chunk, encode(chunk)) for chunk in _chunks(files))
    else:
        died = f"a process for {kind.name} was killed, perhaps for lack of memory: {_REMEDY}"
        results = in_processes(_chunks(files), num_workers, _encoder, making, died)
    with contextlib.closing(results):
        vocab_size = load_tokenizer(spec).vocab_size
        forms, num_texts, num_tokens = _write_all((r for _, r in results), vocab_size, folder)
    path = files[0] + f" and {len(files) - 1} more" * (len(files) > 1)
    if not forms:
        raise ValueError(f"{path} holds no {kind.name}: write one JSON object per line")
    if not num_texts:
        raise ValueError(f"{path}: all {forms.total():,} rows have weight 0, which trains nothing")
    named = {name: count for name, count in forms.items() if name}
    counts = ", ".join(f"{count:,} {name}" for name, count in named.items())
    detail = f" ({counts if len(named) > 1 else ''.join(named)})" * bool(named)
    divided = f" as {num_texts:,} texts" * (num_texts > forms.total() * len(kind.readers))
    print(
        f"chats: {forms.total():,} {kind.name} of {path}{detail}{divided}, {num_tokens:,} tokens, "
        f"made in {time.monotonic() - start:.1f} s in {folder.parent}",
        file=sys.stderr,
    )


def _write_all(
    chunks: Iterable[Made], vocab_size: int, folder: Path
) -> tuple[collections.Counter[str], int, int]:
    """Write all chunks and return the rows of each form, and the numbers of texts and tokens;
    ValueError that names invalid rows."""
    forms: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    num_texts = 0
    tokens = IndexedWriter(folder / "tokens", vocab_size)
    loss = IndexedWriter(folder / "loss", dtype=np.uint8)
    with tokens, loss, IndexedWriter(folder / "weights", dtype=np.float32) as weights:
        for ids, of_loss, of_forms, bad in chunks:
            tokens.add_documents(ids.tokens, ids.lengths, ids.ends)
            has_loss = of_loss.tokens > 0
            loss.add_documents(has_loss.astype(np.uint8), ids.lengths, ids.ends)
            is_weighted = not np.array_equal(of_loss.tokens, has_loss)  # or all are 0 or 1
            values = of_loss.tokens if is_weighted else np.empty(0, np.float32)
            weights.add_documents(values, ids.lengths * is_weighted, ids.ends)
            forms += of_forms
            num_texts += len(ids.lengths)
            problems += bad
            if len(problems) >= MAX_ERRORS:
                break
        if problems:
            raise bad_rows_error(problems)
    return forms, num_texts, tokens.num_tokens


def encode_turns(tokenizer: Tokenizer, turns: list[Turns] | BadRow) -> list[Encoded]:
    """Tokens of each text, and the float32 weights of their losses, 0 for tokens without a loss."""
    if isinstance(turns, BadRow):
        raise turns
    encoded = [each for text in turns for each in _encode_text(tokenizer, text)]
    if turns and not any(weights[1:].any() for _, weights in encoded):
        raise BadRow("none of its tokens has a loss: the template marks no text of the assistant")
    return [each for each in encoded if each[1][1:].any()]


def _encode_text(tokenizer: Tokenizer, turns: Turns) -> Iterator[Encoded]:
    """The tokens of a text, and the weights of their losses.

    Where a token of the whole text joins a prompt's end and a span's beginning, as in an answer
    after "Assistant: ", the span has a text of its own, in which the tokens begin anew at the span.
    """
    try:
        check_unicode(turns.text, "the conversation")
    except ValueError as error:
        raise BadRow(str(error)) from None
    end = np.array([tokenizer.eod] if turns.has_end else [], np.int32)
    ids, characters = tokenizer.encode_spans(turns.text, tokenizer.added)
    weights, starts = np.zeros(len(ids), np.float32), characters[:, 0]
    is_special = np.isin(ids, [*tokenizer.special_ids, *tokenizer.added.values()])
    for begin, stop, weight in turns.spans:
        first, last = np.searchsorted(starts, (begin, stop)).tolist()
        # What precedes a special token does not change the tokens after it.
        anchor = np.flatnonzero(is_special[:first]).max(initial=0)
        prompt = turns.text[starts[anchor] * (anchor > 0) : begin]
        if np.array_equal(tokenizer.encode_marked(prompt, tokenizer.added), ids[anchor:first]):
            weights[first:last] = weight
            continue
        prompt = tokenizer.encode_marked(turns.text[:begin], tokenizer.added)
        answer = np.append(_encode_after(tokenizer, turns.text[begin:stop]), end)
        here = np.repeat(np.array([0, weight], np.float32), (len(prompt), len(answer)))
        yield np.append(prompt, answer), here
    if weights.any():
        of_end = np.full(len(end), turns.spans[-1][2], np.float32)
        yield np.append(ids, end), np.append(weights, of_end)


def _encode_after(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens of a text that does not begin a document."""
    mark = special_name(tokenizer, tokenizer.eod)
    ids, characters = tokenizer.encode_spans(mark + text, tokenizer.added)
    if len(ids) and ids[0] == tokenizer.eod and characters[0, 1] == len(mark):
        return ids[1:]
    return tokenizer.encode_marked(text, tokenizer.added)


def open_prepared(folder: str) -> tuple[IndexedDataset, IndexedDataset, IndexedDataset]:
    """The tokens, the loss mask and the weights of losses in a folder that `prepare` wrote."""
    try:
        tokens, loss = (IndexedDataset(os.path.join(folder, n)) for n in ("tokens", "loss"))
        weights = IndexedDataset(os.path.join(folder, "weights"), may_be_empty=True)
        if not np.array_equal(tokens.lengths, loss.lengths):
            raise ValueError(f"{folder}: tokens and loss have different lengths")
    except ValueError as error:
        raise ValueError(f"{error}; or delete {folder}, and it is made again") from None
    return tokens, loss, weights
