"""Documents to tokens: reads corpora, tokenizes them in processes, writes .bin and .idx."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import numpy as np

from maxmeg.data import documents
from maxmeg.data.documents import Record
from maxmeg.data.indexed import IndexedWriter
from maxmeg.data.tokenizers import Tokenizer, load_tokenizer
from maxmeg.data.workers import follow_parent

CHUNK_DOCUMENTS = 32
CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """How documents become sequences."""

    tokenizer: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    checksums: bool = True  # written beside the tokens, for `verify`


@dataclasses.dataclass
class Report:
    """What was written, and which lines were left out."""

    prefixes: dict[str, str]
    documents: int = 0
    tokens: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Encoded:
    """A document: for each key its tokens and the lengths of its sequences; or what is wrong."""

    parts: tuple[tuple[np.ndarray, list[int]], ...] = ()
    error: str = ""


def encode_record(record: Record, options: Options, tokenizer: Tokenizer) -> _Encoded:
    """Tokens of one document; `error` names the file and line of one that cannot be read."""
    try:
        texts = _texts(record, options)
        return _Encoded(tuple(_encode(t, options, tokenizer) for t in texts))
    except ValueError as error:
        return _Encoded(error=f"{record.place}: {error}")


def _texts(record: Record, options: Options) -> list[list[str]]:
    """Per key, the text or the texts that become sequences."""
    try:
        text = record.data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"invalid UTF-8 at byte {error.start} ({record.data[error.start]:#04x})"
        ) from None
    values = [text] if not record.line else _json_values(text, options.json_keys)
    texts = []
    for value in values:
        parts = value if isinstance(value, list) else [value]
        if options.split_sentences and not isinstance(value, list):
            parts = documents.split_sentences(value)
        texts.append(parts)
    return texts


def _json_values(line: str, keys: Sequence[str]) -> list[str | list[str]]:
    try:
        document = json.loads(line)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"a line must be a JSON object, not {type(document).__name__}")
    values = []
    for key in keys:
        if key not in document:
            raise ValueError(f"no key {key!r} among {sorted(document)[:8]}: see --json_keys")
        value = document[key]
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{key!r} must be a string or a list of strings")
        for part in parts:
            if not part.isascii():
                _check_unicode(key, part)
        values.append(value)
    return values


def _check_unicode(key: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key!r} has half a surrogate pair (\\u{ord(text[error.start]):04x}), "
            "which is no character"
        ) from None


def _encode(
    texts: list[str], options: Options, tokenizer: Tokenizer
) -> tuple[np.ndarray, list[int]]:
    ids = [ids for text in texts if len(ids := tokenizer.encode(text))]
    lengths = [len(part) for part in ids]
    if ids and options.append_eod:
        ids.append(np.array([tokenizer.eod], np.int32))
        lengths[-1] += 1
    return np.concatenate(ids) if ids else np.zeros(0, np.int32), lengths


_worker: tuple[Options, Tokenizer] | None = None  # of a pool's process, set when it starts


def _start_worker(options: Options) -> None:
    global _worker
    follow_parent()
    _worker = (options, load_tokenizer(options.tokenizer))


def _encode_chunk(records: list[Record]) -> list[_Encoded]:
    assert _worker is not None
    return [encode_record(record, *_worker) for record in records]


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record.data)
        if len(chunk) == CHUNK_DOCUMENTS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_all(
    records: Iterable[Record], options: Options, tokenizer: Tokenizer, workers: int
) -> Generator[_Encoded, None, None]:
    """Encodes documents in order: here with workers=0, else in processes, few chunks ahead."""
    if workers == 0:
        for record in records:
            yield encode_record(record, options, tokenizer)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (options,)
    )
    chunks = _chunks(records)
    try:
        first = itertools.islice(chunks, 2 * workers + 2)
        pending = collections.deque(pool.submit(_encode_chunk, chunk) for chunk in first)
        while pending:
            done = pending.popleft().result()
            pending.extend(pool.submit(_encode_chunk, c) for c in itertools.islice(chunks, 1))
            yield from done
    except concurrent.futures.process.BrokenProcessPool as error:
        raise RuntimeError(
            f"a tokenizing process died, perhaps for lack of memory: use fewer than {workers} "
            "--workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def output_prefix(output: str, key: str, split_sentences: bool = False) -> str:
    """Megatron-LM's name for the files of one JSON key."""
    return f"{output}_{key}_{'sentence' if split_sentences else 'document'}"


def prepare(
    inputs: Sequence[str],
    output: str,
    options: Options,
    workers: int = 1,
    skip_bad_lines: bool = False,
    stdin_format: str = "jsonl",
    on_bad_line: Callable[[str], None] = lambda message: None,
) -> Report:
    """Tokenizes files into `{output}_{key}_document.bin` and `.idx`; all of them or nothing.

    ValueError before any work for inputs that do not exist, a tokenizer that cannot be read and
    an output that cannot be written; and for a bad line unless `skip_bad_lines`.
    """
    if workers < 0:
        raise ValueError(f"workers={workers} is negative: 0 works in this process")
    inputs = documents.find_inputs(inputs)
    _check_keys(inputs, options.json_keys, stdin_format)
    tokenizer = load_tokenizer(options.tokenizer)
    progress = documents.Progress(inputs)
    records = documents.read_records(inputs, progress, stdin_format)
    with show_progress(progress) as show:
        encoded = encode_all(records, options, tokenizer, workers)
        with contextlib.closing(encoded):
            report = write_all(
                _kept(encoded, skip_bad_lines, on_bad_line, show), output, options, tokenizer
            )
    report.bad_lines = show.bad_lines
    report.text_bytes, report.seconds = progress.text, show.seconds
    return report


def _kept(
    encoded: Iterable[_Encoded],
    skip_bad_lines: bool,
    on_bad_line: Callable[[str], None],
    show: "_Show",
) -> Iterator[_Encoded]:
    for document in encoded:
        if document.error:
            if not skip_bad_lines:
                raise ValueError(f"{document.error}; --skip_bad_lines leaves such lines out")
            on_bad_line(document.error)
            show.bad_lines += 1
        else:
            yield document
        show.update()


def write_all(
    encoded: Iterable[_Encoded], output: str, options: Options, tokenizer: Tokenizer
) -> Report:
    """Writes documents to one pair of files a key, which appear together at the end."""
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
        for document in encoded:
            for writer, (tokens, lengths) in zip(writers, document.parts, strict=True):
                writer.add_document(tokens, lengths)
            report.documents += 1
        report.tokens = sum(writer.num_tokens for writer in writers)
        for key, writer in zip(options.json_keys, writers, strict=True):
            if not writer.num_tokens:
                raise ValueError(
                    f"{report.documents} documents hold no text under {key!r}: nothing is written"
                )
    return report


def _check_keys(inputs: Sequence[str], keys: Sequence[str], stdin_format: str) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"json_keys={list(keys)} must be one or more different keys")
    for key in keys:
        if not re.fullmatch(r"[^/\x00]+", key):
            raise ValueError(f"json key {key!r} cannot be part of a file name")
    plain = [path for path in inputs if not documents.has_lines(path, stdin_format)]
    if plain and len(keys) > 1:
        raise ValueError(
            f"{plain[0]} is plain text and has no keys, but json_keys={list(keys)}: give one key"
        )


class _Show:
    """A progress bar on standard error; MB/s counts text, not stored bytes."""

    def __init__(self, progress: documents.Progress, bar, task) -> None:
        self.bad_lines = 0
        self.seconds = 0.0
        self._progress, self._bar, self._task = progress, bar, task
        self._start = time.monotonic()

    def update(self, last: bool = False) -> None:
        seconds = time.monotonic() - self._start
        if last or seconds - self.seconds > 0.1:
            self.seconds = seconds
            speed = f"{self._progress.text / 1e6 / max(seconds, 1e-9):.1f} MB/s"
            self._bar.update(self._task, completed=self._progress.stored, speed=speed)


@contextlib.contextmanager
def show_progress(progress: documents.Progress) -> Iterator[_Show]:
    """Shows a bar on standard error while the block runs; nothing where that is no terminal."""
    from rich import console
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("tokenizing"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[speed]}"),
        rich_progress.TimeRemainingColumn(),
    )
    target = console.Console(file=sys.stderr)
    with rich_progress.Progress(*columns, console=target, disable=not target.is_terminal) as bar:
        show = _Show(progress, bar, bar.add_task("", total=progress.total, speed=""))
        yield show
        show.update(last=True)
