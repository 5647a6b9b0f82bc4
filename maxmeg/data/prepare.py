"""A corpus to .bin and .idx: all of it or one share, in parts that outlive an interruption."""

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
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from maxmeg.data import documents
from maxmeg.data.documents import TEXT, Progress
from maxmeg.data.encoding import (
    Chunk,
    Column,
    Encoded,
    Options,
    Places,
    Report,
    Tag,
    encode_all,
    output_prefix,
    write_all,
)
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.pieces import Input, Piece, check_unchanged, chunks, cut, open_inputs
from maxmeg.data.stored import appearing
from maxmeg.data.tokenizers import Tokenizer, find_marks, load_tokenizer

PART_BYTES = 256 << 20
_COUNTS = ("documents", "tokens", "bad_lines", "empty_rows")


@dataclasses.dataclass(frozen=True)
class Share:
    """Which of the `partitions` of a corpus is made, and how much of the inputs (bytes as stored)
    is one part, which need not be made again when a run was interrupted."""

    partition: int = 0
    partitions: int = 1
    part_bytes: int = PART_BYTES

    def name(self, output: str) -> str:
        """The prefix of what is written: partitions sort in their order."""
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
    """Tokenizes files into `{output}_{key}_document.bin` and `.idx`; all of them or nothing.

    ValueError before any work for inputs that do not exist, a tokenizer that cannot be read and
    an output that cannot be written; and for a bad line unless `skip_bad_lines`.
    """
    if workers < 0:
        raise ValueError(f"workers={workers} is negative: 0 works in this process")
    opened = open_inputs(documents.find_inputs(inputs), stdin_format)
    _check(opened, options, share)
    tokenizer = load_tokenizer(options.tokenizer)
    find_marks(tokenizer, options.placeholders)
    total = sum(one.width for one in opened)
    begin, end = (total * i // share.partitions for i in (share.partition, share.partition + 1))
    output = share.name(output)
    from_stdin = any(one.path == "-" for one in opened)
    progress = Progress(None if from_stdin else end - begin)
    with show_progress(progress) as show:
        work = _Work(opened, options, tokenizer, workers, skip_bad_lines, on_bad_line, show)
        if from_stdin or end - begin <= share.part_bytes:
            stream = (("", c) for c in chunks(cut(opened, begin, end), options.json_keys))
            with contextlib.closing(work.encode(stream)) as encoded:
                kept = (found for _, found in encoded)
                report = write_all(kept, output, options, tokenizer, share.partitions > 1)
        else:
            report = _in_parts(work, (begin, end), output, share)
    report.text_bytes, report.seconds = progress.text, show.seconds
    return report


def _check(inputs: Sequence[Input], options: Options, share: Share) -> None:
    keys = options.json_keys
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"json_keys={list(keys)} must be one or more different keys")
    for key in keys:
        if not re.fullmatch(r"[^/\x00]+", key):
            raise ValueError(f"json key {key!r} cannot be part of a file name")
    for one in inputs:
        if one.kind == TEXT and len(keys) > 1:
            raise ValueError(
                f"{one.path} is plain text and has no keys, but json_keys={list(keys)}: give one "
                "key"
            )
        if one.path == "-" and share.partitions > 1:
            raise ValueError("standard input (-) cannot be read in partitions: name files")
    if options.aligned and options.split_sentences:
        raise ValueError("aligned rows have one sequence a key: leave out split_sentences")
    if not 0 <= share.partition < share.partitions:
        raise ValueError(
            f"partition={share.partition} is not in [0, partitions={share.partitions}): number "
            "the jobs from 0"
        )
    if share.part_bytes < 1:
        raise ValueError(f"part_bytes={share.part_bytes} must be at least 1")


class _Work:
    """Encodes chunks, shows how far it is, and stops at bad documents or counts them."""

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
        places = Places()
        found = encode_all(stream, self.options, self.tokenizer, self._workers)
        with contextlib.closing(found):
            for tag, chunk, encoded in found:
                for place, message in encoded.bad:
                    message = f"{places.name(chunk, place)}: {message}"
                    if not self.skips:
                        raise ValueError(f"{message}; --skip_bad_lines leaves such lines out")
                    self._on_bad_line(message)
                self.show.add(chunk.stored, encoded.text_bytes)
                yield tag, encoded
        check_unchanged(self.inputs)


def _in_parts(work: _Work, bounds: tuple[int, int], output: str, share: Share) -> Report:
    """Makes the parts that are missing in `output`.parts, each of which appears whole, then joins
    them."""
    folder, options, begins = (
        Path(output + ".parts"),
        work.options,
        range(*bounds, share.part_bytes),
    )
    parts: dict[Path, list[Piece]] = {}
    for i, begin in enumerate(begins):
        if pieces := cut(work.inputs, begin, min(begin + share.part_bytes, bounds[1])):
            parts[folder / f"{i:06d}"] = pieces
    with _own(folder, _settings(work, share)):
        missing = [path for path in parts if not path.is_dir()]
        work.show.add(share.part_bytes * (len(parts) - len(missing)), 0)
        stream = (
            (path, chunk) for path in missing for chunk in chunks(parts[path], options.json_keys)
        )
        whole = dataclasses.replace(options, checksums=True)
        with contextlib.closing(work.encode(stream)) as encoded:
            for path, group in itertools.groupby(encoded, key=operator.itemgetter(0)):
                with appearing(path) as temporary:
                    found = (one for _, one in group)
                    report = write_all(found, str(temporary / "part"), whole, work.tokenizer, True)
                    counts = {name: getattr(report, name) for name in _COUNTS}
                    _write_json(temporary / "counts.json", counts)
        report = _join(list(parts), output, work, share.partitions > 1)
        report.parts_found = len(parts) - len(missing)
        finished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        folder.rename(finished)
    shutil.rmtree(finished)
    return report


def _join(folders: Sequence[Path], output: str, work: _Work, may_be_empty: bool) -> Report:
    totals = dict.fromkeys(_COUNTS, 0)

    def read(folder: Path) -> Encoded:
        try:
            counts = json.loads((folder / "counts.json").read_text())
            for name in _COUNTS:
                totals[name] += counts[name]
            columns = []
            for key in work.options.json_keys:
                prefix = output_prefix(str(folder / "part"), key, work.options.split_sentences)
                data = IndexedDataset(prefix, may_be_empty=True)
                data.verify()
                columns.append(Column(data.tokens, data.lengths, data.document_indices[1:]))
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{folder} is damaged: delete it and start again; {error}") from error
        if counts["bad_lines"] and not work.skips:
            raise ValueError(
                f"{folder} left out {counts['bad_lines']} bad lines: go on with --skip_bad_lines, "
                f"or delete {folder.parent}"
            )
        return Encoded(tuple(columns), counts["documents"])

    found = (read(folder) for folder in folders)
    report = write_all(found, output, work.options, work.tokenizer, may_be_empty)
    return dataclasses.replace(report, **totals)


def _settings(work: _Work, share: Share) -> dict:
    """What decides the parts."""
    options = dataclasses.asdict(work.options)
    del options["tokenizer"], options["checksums"]
    found = {
        "inputs": [[one.path, one.size, one.stamp] for one in work.inputs],
        "tokenizer": work.tokenizer.identity,
        **options,
        **dataclasses.asdict(share),
    }
    return json.loads(json.dumps(found))


@contextlib.contextmanager
def _own(folder: Path, settings: dict) -> Iterator[None]:
    """The folder of parts made with these settings, of this run alone while the block lasts."""
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
        _write_json(path, settings)
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder}") from error
    changed = [name for name in settings if found.get(name) != settings[name]]
    if changed:
        shown = [f"{name}: {found.get(name)} there, {settings[name]} now" for name in changed]
        shown = [text if len(text) < 200 else text.split(":")[0] for text in shown]
        raise ValueError(
            f"{folder} holds parts of an interrupted run with other settings ({'; '.join(shown)}): "
            "go on with those, or delete the folder"
        )


def _write_json(path: Path, content: dict) -> None:
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


class _Show:
    """A progress bar on standard error; MB/s counts text, not stored bytes."""

    def __init__(self, progress: Progress, bar, task) -> None:
        self.seconds = 0.0
        self._progress, self._bar, self._task = progress, bar, task
        self._start = time.monotonic()

    def add(self, stored: int, text: int) -> None:
        self._progress.stored += stored
        self._progress.text += text
        self.update()

    def update(self, last: bool = False) -> None:
        seconds = time.monotonic() - self._start
        if last or seconds - self.seconds > 0.1:
            self.seconds = seconds
            speed = f"{self._progress.text / 1e6 / max(seconds, 1e-9):.1f} MB/s"
            self._bar.update(self._task, completed=self._progress.stored, speed=speed)


@contextlib.contextmanager
def show_progress(progress: Progress) -> Iterator[_Show]:
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
