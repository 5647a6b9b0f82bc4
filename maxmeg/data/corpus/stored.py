"""Arrays and folders that are made once per node and shared by its processes."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxmeg.data.workers import Arrays


def digest(*parts: object) -> str:
    """A hash of the parts, for file names; arrays are hashed by content."""
    result = hashlib.blake2b(digest_size=16)
    for part in parts:
        is_array = isinstance(part, np.ndarray)
        kind = f"{part.dtype.str} {part.shape}" if isinstance(part, np.ndarray) else repr(part)
        result.update(f"{len(kind)}:{kind}".encode())
        if is_array:
            result.update(np.ascontiguousarray(part).data)
    return result.hexdigest()


def cached(folder: str, name: str, keys: Iterable[str], make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returns, kept as FOLDER/NAME/KEY.npy; without a folder, in memory.

    One process makes the arrays under a lock while the others wait. They appear by a rename, so
    where locks have no effect (a file system shared by nodes) the work is at worst done twice.
    """
    if not folder:
        return make()
    final = Path(folder, name)
    try:
        if not final.is_dir():
            with locked_folder(Path(folder)):
                if not final.is_dir():
                    arrays = make()
                    with atomic_folder(final) as temporary:
                        temporary.mkdir()
                        for key, values in arrays.items():
                            np.save(temporary / f"{key}.npy", values)
    except OSError as error:
        raise ValueError(
            f"cannot keep the order of samples in {folder}: {error.strerror or error}; name a "
            "folder that can be written with data.cache_dir"
        ) from error
    try:
        return {key: np.load(final / f"{key}.npy", mmap_mode="r") for key in keys}
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{final} is damaged ({error}): delete this folder") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that appears whole, or replaces the file that was there, by a rename."""
    with atomic_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears at `path` when the block ends without an error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder, and hold its lock: one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A path at which the block makes a folder, which is renamed to `final` at the end.

    `final` appears complete or not at all. If another process made it first, that folder is kept.
    """
    temporary = final.with_name(f"{final.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
