"""Tokenize a corpus, or one partition of it, in parts that survive an interruption."""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import operator
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import atomic_folder, write_atomically
from maxmeg.data.prepare import documents
from maxmeg.data.prepare.documents import TEXT
from maxmeg.data.prepare.encoding import (
    Chunk,
    Column,
    DocumentNames,
    Encoded,
    Options,
    Report,
    Tag,
    encode_all,
    output_prefix,
    write_all,
)
from maxmeg.data.prepare.merge import shuffled_documents
from maxmeg.data.prepare.pieces import Input, Piece, check_unchanged, chunks, cut, open_inputs
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.data.tokenizers.tokenizer import Tokenizer, find_marks

SKIP_HINT = "--skip_bad_lines skips such lines"
PART_BYTES = 256 << 20
_COUNTS = ("documents", "tokens", "bad_lines", "empty_rows")


@dataclasses.dataclass(frozen=True)
class Share:
    """Which of the `partitions` of a corpus to make, and the input bytes (as stored) of a part,
    which is not made again after an interruption."""

    partition: int = 0
    partitions: int = 1
    part_bytes: int = PART_BYTES

    def name(self, output: str) -> str:
        """The output prefix of this partition; the prefixes sort in the order of the partitions."""
        if self.partitions == 1:
            return output
        return f"{output}_{self.partition:05d}-of-{self.partitions:05d}"


WHOLE = Share()


def prepare(
    inputs: Sequence[str],
    output: str,
    options: Options,
    workers: int = 1,
    skip_bad_lines: bool = False,
    stdin_format: str = "jsonl",
    on_bad_line: Callable[[str], None] = lambda message: None,
    share: Share = WHOLE,
) -> Report:
    """Tokenize files into `{output}_{key}_document.bin` and `.idx`; writes all of them or none.

    ValueError, before any work, for inputs that do not exist, a tokenizer that cannot be read and
    an output that cannot be written; and for an invalid line unless `skip_bad_lines`.
    """
    if workers < 0:
        raise ValueError(f"workers={workers} is negative: 0 means this process alone")
    opened = open_inputs(documents.find_inputs(inputs), stdin_format)
    _check(opened, options, share)
    tokenizer = load_tokenizer(options.tokenizer)
    find_marks(tokenizer, options.placeholders)
    total = sum(file.width for file in opened)
    begin, end = (total * i // share.partitions for i in (share.partition, share.partition + 1))
    output = share.name(output)
    from_stdin = any(file.path == "-" for file in opened)
    with show_progress(None if from_stdin else end - begin) as show:
        work = _Work(opened, options, tokenizer, workers, skip_bad_lines, on_bad_line, show)
        if from_stdin or end - begin <= share.part_bytes:
            stream = (("", c) for c in chunks(cut(opened, begin, end), options.json_keys))
            with contextlib.closing(work.encode(stream)) as encoded:
                results = (result for _, result in encoded)
                write = _write_shuffled if options.shuffle_seed is not None else write_all
                report = write(results, output, options, tokenizer, share.partitions > 1)
        else:
            report = _in_parts(work, (begin, end), output, share)
    report.text_bytes, report.seconds = show.text, show.seconds
    return report


def _check(inputs: Sequence[Input], options: Options, share: Share) -> None:
    keys = options.json_keys
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"json_keys={list(keys)} must be one or more distinct keys")
    for key in keys:
        if not re.fullmatch(r"[^/\x00]+", key):
            raise ValueError(f"json key {key!r} cannot be part of a file name")
    for file in inputs:
        if file.kind == TEXT and len(keys) > 1:
            raise ValueError(
                f"{file.path} is plain text and has no keys, but json_keys={list(keys)}: give one "
                "key"
            )
        if file.path == "-" and share.partitions > 1:
            raise ValueError("standard input (-) cannot be read in partitions: name files")
    if options.shuffle_seed is not None and share.partitions > 1:
        raise ValueError(
            f"partitions={share.partitions} are shuffled when they are joined: leave out "
            "--shuffle_documents here, and give it to `maxmeg preprocess merge`"
        )
    if options.aligned and options.split_sentences:
        raise ValueError("aligned rows have one sequence per key: leave out split_sentences")
    if not 0 <= share.partition < share.partitions:
        raise ValueError(
            f"partition={share.partition} is not in [0, partitions={share.partitions}): number "
            "the jobs from 0"
        )
    if share.part_bytes < 1:
        raise ValueError(f"part_bytes={share.part_bytes} must be at least 1")


class _Work:
    """Encodes chunks, shows progress, and raises or reports errors in documents."""

    def __init__(
        self,
        inputs: Sequence[Input],
        options: Options,
        tokenizer: Tokenizer,
        workers: int,
        skips: bool,
        on_bad_line: Callable[[str], None],
        show: "_Show",
    ) -> None:
        self.inputs, self.options, self.tokenizer = inputs, options, tokenizer
        self.skips, self.show = skips, show
        self._workers, self._on_bad_line = workers, on_bad_line

    def encode(
        self, stream: Iterable[tuple[Tag, Chunk]]
    ) -> Generator[tuple[Tag, Encoded], None, None]:
        places = DocumentNames()
        results = encode_all(stream, self.options, self.tokenizer, self._workers)
        with contextlib.closing(results):
            for tag, chunk, encoded in results:
                for place, message in encoded.bad:
                    message = f"{places.name(chunk, place)}: {message}"
                    if not self.skips:
                        raise ValueError(f"{message}; {SKIP_HINT}")
                    self._on_bad_line(message)
                self.show.add(chunk.stored, encoded.text_bytes)
                yield tag, encoded
        check_unchanged(self.inputs)


def _in_parts(work: _Work, bounds: tuple[int, int], output: str, share: Share) -> Report:
    """Make the parts that are missing in the folder `output`.parts, then join all parts."""
    folder, options, begins = (
        Path(output + ".parts"),
        work.options,
        range(*bounds, share.part_bytes),
    )
    parts: dict[Path, list[Piece]] = {}
    for i, begin in enumerate(begins):
        if pieces := cut(work.inputs, begin, min(begin + share.part_bytes, bounds[1])):
            parts[folder / f"{i:06d}"] = pieces
    with _lock_parts(folder, _settings(work, share)):
        missing = [path for path in parts if not path.is_dir()]
        work.show.add(share.part_bytes * (len(parts) - len(missing)), 0)
        stream = (
            (path, chunk) for path in missing for chunk in chunks(parts[path], options.json_keys)
        )
        part_options = dataclasses.replace(options, checksums=True)
        with contextlib.closing(work.encode(stream)) as encoded:
            for path, group in itertools.groupby(encoded, key=operator.itemgetter(0)):
                with atomic_folder(path) as temporary:
                    encoded_part = (result for _, result in group)
                    report = write_all(
                        encoded_part, str(temporary / "part"), part_options, work.tokenizer, True
                    )
                    counts = {name: getattr(report, name) for name in _COUNTS}
                    write_atomically(temporary / "counts.json", json.dumps(counts).encode())
        report = _join(list(parts), output, work, share.partitions > 1)
        report.parts_found = len(parts) - len(missing)
        finished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        folder.rename(finished)
    shutil.rmtree(finished)
    return report


def _write_shuffled(
    encoded: Iterable[Encoded],
    output: str,
    options: Options,
    tokenizer: Tokenizer,
    may_be_empty: bool,
) -> Report:
    """Like `write_all`, but in a random order: writes the documents in order first, then
    shuffled."""
    folder = Path(output).parent
    with tempfile.TemporaryDirectory(prefix=f"{Path(output).name}.", dir=folder) as temporary:
        first = str(Path(temporary) / "in_order")
        report = write_all(encoded, first, options, tokenizer, may_be_empty)
        assert options.shuffle_seed is not None
        columns = [[IndexedDataset(prefix)] for prefix in report.prefixes.values()]
        documents = shuffled_documents(columns, options.shuffle_seed)
        final_report = write_all(documents, output, options, tokenizer, may_be_empty)
    return dataclasses.replace(report, prefixes=final_report.prefixes)


def _join(folders: Sequence[Path], output: str, work: _Work, may_be_empty: bool) -> Report:
    totals = dict.fromkeys(_COUNTS, 0)

    def check(folder: Path) -> list[IndexedDataset]:
        """The part's dataset for each key."""
        try:
            counts = json.loads((folder / "counts.json").read_text())
            for name in _COUNTS:
                totals[name] += counts[name]
            datasets = []
            for key in work.options.json_keys:
                prefix = output_prefix(str(folder / "part"), key, work.options.split_sentences)
                datasets.append(IndexedDataset(prefix, may_be_empty=True))
                datasets[-1].verify()
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{folder} is damaged: delete it and start again; {error}") from error
        if counts["bad_lines"] and not work.skips:
            raise ValueError(
                f"{folder} left out {counts['bad_lines']} bad lines: continue with "
                f"--skip_bad_lines, or delete {folder.parent}"
            )
        return datasets

    if (seed := work.options.shuffle_seed) is not None:
        columns = list(zip(*map(check, folders), strict=True))
        documents = shuffled_documents(columns, seed)
    else:  # a part is open only while it is copied
        documents = (
            Encoded(
                tuple(Column(d.tokens, d.lengths, d.document_indices[1:], d.weights) for d in part)
            )
            for part in map(check, folders)
        )
    report = write_all(documents, output, work.options, work.tokenizer, may_be_empty)
    return dataclasses.replace(report, **totals)


def _settings(work: _Work, share: Share) -> dict:
    """The settings that decide the contents of the parts."""
    options = dataclasses.asdict(work.options)
    del options["tokenizer"], options["checksums"], options["shuffle_seed"]
    settings = {
        "inputs": [[file.path, file.size, file.stamp] for file in work.inputs],
        "tokenizer": work.tokenizer.identity,
        **options,
        **dataclasses.asdict(share),
    }
    return json.loads(json.dumps(settings))


@contextlib.contextmanager
def _lock_parts(folder: Path, settings: dict) -> Iterator[None]:
    """Hold the lock of the folder of parts; ValueError if its parts were made with other
    settings."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"cannot write {folder}: {error.strerror or error}; choose an --output that is writable"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some network file systems have no locks
            if isinstance(error, BlockingIOError):
                raise ValueError(
                    f"another run is writing {folder}: wait for it, or choose another --output"
                ) from None
        _check_settings(folder, settings)
        for left in (*folder.glob("*.tmp"), *folder.parent.glob(f"{folder.name}.*.tmp")):
            shutil.rmtree(left, ignore_errors=True)
        try:
            yield
        finally:
            if folder.is_dir() and not any(path.is_dir() for path in folder.iterdir()):
                shutil.rmtree(folder)


def _check_settings(folder: Path, settings: dict) -> None:
    path = folder / "settings.json"
    if not path.exists():
        write_atomically(path, json.dumps(settings).encode())
        return
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder}") from error
    changed = [name for name in settings if saved.get(name) != settings[name]]
    if changed:
        changes = [f"{name}: {saved.get(name)} there, {settings[name]} now" for name in changed]
        changes = [text if len(text) < 200 else text.split(":")[0] for text in changes]
        raise ValueError(
            f"{folder} holds parts of an interrupted run with other settings "
            f"({'; '.join(changes)}): continue with those settings, or delete the folder"
        )


class _Show:
    """A progress bar on standard error; its MB/s are uncompressed text."""

    def __init__(self, bar, task) -> None:
        self.text = 0
        self._bar, self._task, self._start = bar, task, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def add(self, stored: int, text: int) -> None:
        self.text += text
        speed = f"{self.text / 1e6 / max(self.seconds, 1e-9):.1f} MB/s"
        self._bar.update(self._task, advance=stored, speed=speed)


@contextlib.contextmanager
def show_progress(total: int | None) -> Iterator[_Show]:
    """Show a progress bar while the block runs, if standard error is a terminal.

    total: bytes to read, as stored; None if unknown.
    """
    from rich import console, progress

    columns = (
        progress.TextColumn("tokenizing"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[speed]}"),
        progress.TimeRemainingColumn(),
    )
    target = console.Console(file=sys.stderr)
    with progress.Progress(*columns, console=target, disable=not target.is_terminal) as bar:
        yield _Show(bar, bar.add_task("", total=total, speed=""))
