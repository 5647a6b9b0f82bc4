"""Corpora in object storage: .idx is copied whole, .bin is read in chunks that a cache folder
keeps.

All processes of a node share the cache. A chunk appears by a rename; when the cache is full, the
chunks that were read longest ago are removed. The names of cached files include the version of the
object, so that chunks of a replaced object are never used.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from maxmeg.config.data import DataConfig
from maxmeg.data.corpus import checksum, loss_weights, storage
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.corpus.stored import atomic_folder, digest, locked_folder

logger = logging.getLogger("maxmeg")
_THREADS = 16  # concurrent requests of a process; each has a high latency
_BLOCK = 1 << 24  # bytes of an .idx per request
_SHARE = 0.1  # share of the cache that the chunks of a later batch may take
_FILLED = 0.9  # share of the cache that is in use after old chunks were removed
_STALE = 600  # seconds after which an unfinished chunk counts as abandoned
_CHECKED = 10  # seconds between checks that an object is unchanged
_DIGITS = 20
_NOW, _LATER = 0, 1


@dataclasses.dataclass(frozen=True)
class Room:
    """The cache: its folder, its limit in bytes, and the bytes per chunk."""

    folder: str
    limit: int
    chunk: int


def room_of(config: DataConfig, folder: str) -> Room:
    """The cache of a run. folder: the folder for the run's derived files, where data.cache_dir
    is empty."""
    folder = config.cache_dir or folder
    if not folder:
        raise ValueError(
            "object storage needs a folder for the chunks that are read: data.cache_dir"
        )
    limit, chunk = int(config.cache_gb * 1e9), config.chunk_kb << 10
    return Room(os.path.join(folder, "objects"), limit, chunk)


@dataclasses.dataclass(frozen=True)
class RemoteCorpus:
    """A corpus in object storage: `local` is the prefix of the copied .idx, .sums and .weights.npy;
    size and stamp identify its .bin."""

    prefix: str
    local: str
    size: int
    stamp: str
    room: Room

    def tokens(self, dtype: np.dtype, count: int) -> "RemoteTokens":
        """The tokens, which are read on demand."""
        return RemoteTokens(self, dtype, count)


def open_remote(prefix: str, room: Room) -> RemoteCorpus:
    """Find a corpus, and copy its `.idx`, `.sums` and `.weights.npy` once per node."""
    optional = (suffix for suffix in (checksum.SUFFIX, loss_weights.SUFFIX) if _has(prefix, suffix))
    states = [_state(prefix, suffix) for suffix in (".idx", ".bin", *optional)]
    final = Path(room.folder, digest(prefix, states))
    try:
        with locked_folder(final.parent):
            if not final.is_dir():
                with atomic_folder(final) as folder:
                    folder.mkdir()
                    for suffix, size, _ in states:
                        if suffix != ".bin":
                            _copy(prefix + suffix, folder / f"corpus{suffix}", size)
    except OSError as error:
        raise ValueError(
            f"cannot keep {prefix}.idx in {room.folder}: {error.strerror or error}; name a folder "
            "that can be written and has space with data.cache_dir"
        ) from error
    return RemoteCorpus(prefix, str(final / "corpus"), *states[1][1:], room)


def open_dataset(
    prefix: str, config: DataConfig, folder: str, vocab_size: int | None = None
) -> IndexedDataset:
    """Open a corpus from files, or from object storage with a cache in `folder`.

    ValueError as from IndexedDataset, and where the object store refuses access.
    """
    if not storage.is_remote(prefix):
        return IndexedDataset(prefix, vocab_size=vocab_size)
    corpus = open_remote(prefix, room_of(config, folder))
    try:
        return IndexedDataset(prefix, vocab_size=vocab_size, remote=corpus)
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from error


def _state(prefix: str, suffix: str) -> tuple[str, int, str]:
    return suffix, *storage.state(prefix + suffix)


def _has(prefix: str, suffix: str) -> bool:
    try:
        return storage.exists(prefix + suffix)
    except ValueError as error:  # without permission to list, missing objects are "forbidden"
        logger.info(f"{prefix}.idx is read without {suffix}: {error}")
        return False


def _copy(source: str, target: Path, size: int) -> None:
    starts = range(0, size, _BLOCK)
    with target.open("wb") as file, concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:

        def copy(begin: int) -> None:
            data = storage.read_range(source, begin, min(begin + _BLOCK, size))
            os.pwrite(file.fileno(), data, begin)

        for _ in threads.map(copy, starts):
            pass
        os.fsync(file.fileno())


class RemoteTokens:
    """An array-like view of a .bin file in object storage: `tokens[begin:end]` and `tokens[i]`."""

    def __init__(self, corpus: RemoteCorpus, dtype: np.dtype, count: int) -> None:
        self.dtype, self._count, self._corpus = dtype, count, corpus
        self.nbytes = count * dtype.itemsize
        if corpus.size != self.nbytes:
            raise ValueError(
                f"{corpus.prefix}.bin has {corpus.size} bytes, but its .idx describes "
                f"{self.nbytes} ({count} tokens of {dtype}): it is truncated or belongs to another "
                ".idx; copy both files again"
            )
        self._path, self._chunk = f"{corpus.prefix}.bin", corpus.room.chunk
        self._folder = Path(os.path.dirname(corpus.local), f"chunks-{self._chunk}")
        self._folder.mkdir(exist_ok=True)
        self._coming: dict[int, concurrent.futures.Future[bytes]] = {}
        self._lock, self._checked = threading.Lock(), time.monotonic()
        self._warned = False

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice | int) -> np.ndarray:
        if not isinstance(where, slice):
            place = range(self._count)[where]  # IndexError, as from an array
            return self[place : place + 1][0]
        begin, end, stride = where.indices(self._count)
        if stride != 1:
            raise ValueError(f"{self._path} is read forwards, not with step {stride}")
        size, parts = self.dtype.itemsize, []
        begin, end = begin * size, max(begin, end) * size
        for number in range(begin // self._chunk, -(-end // self._chunk)):
            at = number * self._chunk
            first, last = max(begin - at, 0), min(end - at, self._chunk)
            parts.append(self._part(number, first, last))
        return np.frombuffer(b"".join(parts), self.dtype)

    def _part(self, number: int, begin: int, end: int) -> bytes:
        try:
            with open(self._file(number), "rb", buffering=0) as file:
                os.utime(file.fileno())  # the time of the last read
                return os.pread(file.fileno(), end - begin, begin)
        except FileNotFoundError:
            return self._come(number, _NOW).result()[begin:end]

    def expect(self, starts: np.ndarray, lengths: np.ndarray, now: bool = False) -> None:
        """Announce that tokens [start, start + length) will be read soon, or with `now` at once."""
        numbers: set[int] = set()
        begins, ends = (starts * self.dtype.itemsize, (starts + lengths) * self.dtype.itemsize)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            numbers.update(range(begin // self._chunk, -(-end // self._chunk)))
        when = _NOW if now else _LATER
        limit, size = self._corpus.room.limit, len(numbers) * self._chunk
        if when == _LATER and size > _SHARE * limit:
            return  # chunks would be removed before they are read
        if when == _NOW and size > limit and not self._warned:
            self._warned = True
            logger.warning(
                f"{len(numbers)} chunks of {self._path} are read together, {size / 1e9:.3g} GB, "
                f"more than data.cache_gb={limit / 1e9:g} allows: they are fetched repeatedly; "
                "raise data.cache_gb, or lower data.chunk_kb"
            )
        for number in sorted(numbers):
            if not self._file(number).exists():
                self._come(number, when)

    def _file(self, number: int) -> Path:
        return self._folder / str(number)

    def _come(self, number: int, when: int) -> "concurrent.futures.Future[bytes]":
        """Request a chunk; a repeated request that is more urgent is served first."""
        with self._lock:
            future = self._coming.get(number)
            if future is None:
                future = self._coming[number] = concurrent.futures.Future()
            elif when == _LATER or future.running():
                return future
        _requests().put((when, next(_order), functools.partial(self._fetch, number, future)))
        return future

    def _fetch(self, number: int, future: "concurrent.futures.Future[bytes]") -> None:
        with self._lock:
            if future.running() or future.done():
                return  # requested twice
            future.set_running_or_notify_cancel()
        try:
            future.set_result(self._load(number))
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                del self._coming[number]

    def _load(self, number: int) -> bytes:
        begin = number * self._chunk
        end = min(begin + self._chunk, self.nbytes)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            return self._file(number).read_bytes()
        try:
            data = storage.read_range(self._path, begin, end)
        except ValueError as error:
            raise ValueError(f"bytes [{begin}, {end}): {error}") from error
        # After the read, so that a change during the read is noticed.
        if time.monotonic() > self._checked + _CHECKED:
            self._checked = time.monotonic()
            if storage.state(self._path)[1] != self._corpus.stamp:
                raise ValueError(
                    f"{self._path} was replaced while it was read: put the old object back, or "
                    "start a new run"
                )
        _keep(self._corpus.room, self._file(number), data)
        return data


_order = itertools.count()  # order of requests with equal urgency


@functools.cache
def _requests() -> "queue.PriorityQueue[tuple[int, int, Callable[[], None]]]":
    """The queue of this process's fetching threads, most urgent first; the threads are daemons."""
    requests: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()

    def serve() -> None:
        while True:
            requests.get()[2]()

    for _ in range(_THREADS):
        threading.Thread(target=serve, daemon=True).start()
    return requests


def _keep(room: Room, path: Path, data: bytes) -> None:
    """Write a chunk into the cache, after removing old chunks where space is needed."""
    with _locked(room.folder) as usage:
        if usage.value + len(data) > room.limit:
            usage.value = _evict(room, len(data))
        usage.value += len(data)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError as error:
        raise ValueError(
            f"cannot keep a chunk in {room.folder}: {error.strerror}; choose a disk with more "
            f"space (data.cache_dir), or less than {room.limit / 1e9:g} GB (data.cache_gb)"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


@dataclasses.dataclass
class _Used:
    value: int


@contextlib.contextmanager
def _locked(folder: str):
    """The bytes that all chunks take; one process per node at a time may change this number."""
    file = os.open(os.path.join(folder, "used"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        digits = os.pread(file, _DIGITS, 0)
        usage = _Used(int(digits) if digits else sum(size for _, size, _ in _files(folder)))
        yield usage
        # Always _DIGITS bytes, so a write is never partial.
        os.pwrite(file, b"%0*d" % (_DIGITS, usage.value), 0)
    finally:
        os.close(file)


def _evict(room: Room, num_bytes: int) -> int:
    """Remove old chunks until `num_bytes` bytes are free, and some more; returns the bytes that
    remain."""
    chunks = sorted(_files(room.folder))
    total = sum(size for _, size, _ in chunks)
    for read, size, path in chunks:
        if total <= _FILLED * room.limit - num_bytes:
            break
        if path.suffix != ".tmp" or read < time.time() - _STALE:
            path.unlink(missing_ok=True)
            total -= size
    return total


def _files(folder: str) -> Iterator[tuple[float, int, Path]]:
    """For each chunk in the cache: the time of its last read, its size in bytes, and its path."""
    for path in Path(folder).glob("*/chunks-*/*"):
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            yield about.st_mtime, about.st_size, path
