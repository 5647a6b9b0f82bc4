"""Corpora in object storage: .idx copied whole, .bin read in chunks that a folder keeps.

What is kept serves all processes of a node. A chunk appears by a rename and goes when the folder is
full, the one that was read longest ago first. Everything is kept under a name that the version of
its object is part of: of an object that was replaced nothing is read by mistake.
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

from maxmeg.config.schema import DataConfig
from maxmeg.data import checksum, storage
from maxmeg.data.indexed import IndexedDataset
from maxmeg.data.stored import appearing, digest, locked

logger = logging.getLogger("maxmeg")
_THREADS = 16  # requests under way in a process: a store answers many at once, each late
_BLOCK = 1 << 24  # of an .idx, read at once
_SHARE = 0.1  # of the room, that the chunks of a later batch may take
_FILLED = 0.9  # of the room, taken after what was read longest ago has gone
_STALE = 600  # seconds after which a chunk that did not appear was given up
_CHECKED = 10  # seconds between two looks at an object that is read
_DIGITS = 20
_NOW, _LATER = 0, 1


@dataclasses.dataclass(frozen=True)
class Room:
    """Where chunks are kept, in how many bytes, and the bytes of a chunk."""

    folder: str
    limit: int
    chunk: int


def room_of(config: DataConfig, folder: str) -> Room:
    """That of a run, which keeps what it makes in `folder`."""
    folder = config.cache_dir or folder
    if not folder:
        raise ValueError("object storage needs a folder for what is read of it: data.cache_dir")
    limit, chunk = int(config.cache_gb * 1e9), config.chunk_kb << 10
    return Room(os.path.join(folder, "objects"), limit, chunk)


@dataclasses.dataclass(frozen=True)
class RemoteCorpus:
    """A corpus of which .idx (and .sums) lie at the prefix `local`, and the state of its .bin."""

    prefix: str
    local: str
    size: int
    stamp: str
    room: Room

    def tokens(self, dtype: np.dtype, count: int) -> "RemoteTokens":
        """The tokens, read when they are asked for."""
        return RemoteTokens(self, dtype, count)


def open_remote(prefix: str, room: Room) -> RemoteCorpus:
    """Finds a corpus, and copies its `.idx` and `.sums`, once on a node."""
    states = [_state(prefix, suffix) for suffix in (".idx", ".bin")]
    if _has_sums(prefix):
        states.append(_state(prefix, checksum.SUFFIX))
    final = Path(room.folder, digest(prefix, states))
    try:
        with locked(final.parent):
            if not final.is_dir():
                with appearing(final) as folder:
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
    """A corpus of a run: from files, or from object storage, of which `folder` keeps what is read.

    ValueError as of IndexedDataset, and where the store refuses.
    """
    if not storage.is_remote(prefix):
        return IndexedDataset(prefix, vocab_size=vocab_size)
    corpus = open_remote(prefix, room_of(config, folder))
    try:
        return IndexedDataset(prefix, vocab_size=vocab_size, remote=corpus)
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from error


def _state(prefix: str, suffix: str) -> tuple[str, int, str]:
    return suffix, storage.size(prefix + suffix), storage.stamp(prefix + suffix)


def _has_sums(prefix: str) -> bool:
    try:
        return storage.exists(prefix + checksum.SUFFIX)
    except ValueError as error:  # who may read objects but not list them is refused what is missing
        logger.info(f"{prefix}.idx is read without checksums: {error}")
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
    """`tokens[begin:end]` and `tokens[i]` of a .bin in object storage, as of an array."""

    def __init__(self, corpus: RemoteCorpus, dtype: np.dtype, count: int) -> None:
        self.dtype, self._count, self._corpus = dtype, count, corpus
        self.nbytes = count * dtype.itemsize
        if corpus.size != self.nbytes:
            raise ValueError(
                f"{corpus.prefix}.bin has {corpus.size} bytes, but its .idx describes "
                f"{self.nbytes} ({count} tokens of {dtype}): it is truncated or belongs to another "
                ".idx; copy both files again"
            )
        self._chunks = _Chunks(corpus, self.nbytes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice | int) -> np.ndarray:
        if not isinstance(where, slice):
            place = range(self._count)[where]  # IndexError, as of an array
            return self[place : place + 1][0]
        begin, end, stride = where.indices(self._count)
        if stride != 1:
            raise ValueError(f"{self._corpus.prefix}.bin is read forwards, not with step {stride}")
        size = self.dtype.itemsize
        return np.frombuffer(self._chunks.read(begin * size, max(begin, end) * size), self.dtype)

    def expect(self, starts: np.ndarray, lengths: np.ndarray, now: bool = False) -> None:
        """Tokens [start, start + length) will be read soon; now: at once, all of them."""
        size = self.dtype.itemsize
        self._chunks.expect(starts * size, (starts + lengths) * size, _NOW if now else _LATER)


class _Chunks:
    """The bytes of an object, by way of the folder."""

    def __init__(self, corpus: RemoteCorpus, size: int) -> None:
        self._corpus, self._size, self._chunk = corpus, size, corpus.room.chunk
        self._path = f"{corpus.prefix}.bin"
        name = f"{os.path.dirname(corpus.local)}/chunks-{self._chunk}"
        self._folder = Path(name)
        self._folder.mkdir(exist_ok=True)
        self._coming: dict[int, concurrent.futures.Future[bytes]] = {}
        self._lock, self._checked = threading.Lock(), time.monotonic()
        self._warned = False

    def read(self, begin: int, end: int) -> bytes:
        parts = []
        for number in range(begin // self._chunk, -(-end // self._chunk)):
            at = number * self._chunk
            first, last = max(begin - at, 0), min(end - at, self._chunk)
            parts.append(self._part(number, first, last))
        return b"".join(parts)

    def _part(self, number: int, begin: int, end: int) -> bytes:
        try:
            with open(self._file(number), "rb", buffering=0) as file:
                os.utime(file.fileno())  # when it was read last
                return os.pread(file.fileno(), end - begin, begin)
        except FileNotFoundError:
            return self._come(number, _NOW).result()[begin:end]

    def expect(self, begins: np.ndarray, ends: np.ndarray, when: int) -> None:
        wanted: set[int] = set()
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            wanted.update(range(begin // self._chunk, -(-end // self._chunk)))
        limit, size = self._corpus.room.limit, len(wanted) * self._chunk
        if when == _LATER and size > _SHARE * limit:
            return  # chunks would go again before they are read
        if when == _NOW and size > limit and not self._warned:
            self._warned = True
            logger.warning(
                f"{len(wanted)} chunks of {self._path} are read at once, {size / 1e9:.3g} GB, more "
                f"than data.cache_gb={limit / 1e9:g} keeps: they are fetched again and again; "
                "raise it, or lower data.chunk_kb"
            )
        for number in sorted(wanted):
            if not self._file(number).exists():
                self._come(number, when)

    def _file(self, number: int) -> Path:
        return self._folder / str(number)

    def _come(self, number: int, when: int) -> "concurrent.futures.Future[bytes]":
        """A chunk that is on its way; asked for again with more haste, it overtakes."""
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
                return  # it was asked for twice
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
        end = min(begin + self._chunk, self._size)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            return self._file(number).read_bytes()
        try:
            data = storage.read_range(self._path, begin, end)
        except ValueError as error:
            raise ValueError(f"bytes [{begin}, {end}): {error}") from error
        if time.monotonic() > self._checked + _CHECKED:  # after it was read, so that it counts
            self._checked = time.monotonic()
            if storage.stamp(self._path) != self._corpus.stamp:
                raise ValueError(
                    f"{self._path} was replaced while it was read: a run needs it as it was. Put "
                    "it back, or start a run with the new one"
                )
        _keep(self._corpus.room, self._file(number), data)
        return data


_order = itertools.count()  # of requests with equal haste


@functools.cache
def _requests() -> "queue.PriorityQueue[tuple[int, int, Callable[[], None]]]":
    """What this process's threads fetch, most urgent first; they end with the process."""
    requests: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()

    def serve() -> None:
        while True:
            requests.get()[2]()

    for _ in range(_THREADS):
        threading.Thread(target=serve, daemon=True).start()
    return requests


def _keep(room: Room, path: Path, data: bytes) -> None:
    """Writes a chunk; before that makes room for it."""
    with _locked(room.folder) as used:
        if used.value + len(data) > room.limit:
            used.value = _evict(room, len(data))
        used.value += len(data)
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
    """Bytes that chunks take, which one process of the node at a time may change."""
    file = os.open(os.path.join(folder, "used"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        found = os.pread(file, _DIGITS, 0)
        used = _Used(int(found) if found else sum(size for _, size, _ in _kept(folder)))
        yield used
        os.pwrite(file, b"%0*d" % (_DIGITS, used.value), 0)  # as long as before: never half of it
    finally:
        os.close(file)


def _evict(room: Room, wanted: int) -> int:
    """Removes chunks until `wanted` bytes have room, and some more; returns the bytes left."""
    kept = sorted(_kept(room.folder))
    total = sum(size for _, size, _ in kept)
    for read, size, path in kept:
        if total <= _FILLED * room.limit - wanted:
            break
        if path.suffix != ".tmp" or read < time.time() - _STALE:
            path.unlink(missing_ok=True)
            total -= size
    return total


def _kept(folder: str) -> Iterator[tuple[float, int, Path]]:
    """When each chunk was read last, its bytes, and its file."""
    for path in Path(folder).glob("*/chunks-*/*"):
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            yield about.st_mtime, about.st_size, path
