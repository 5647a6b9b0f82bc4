"""Arrays that are made once on a node and memory-mapped by all its processes."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def digest(*parts: object) -> str:
    """A name for what the parts decide; arrays count with their content."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        is_array = isinstance(part, np.ndarray)
        kind = f"{part.dtype.str} {part.shape}" if isinstance(part, np.ndarray) else repr(part)
        found.update(f"{len(kind)}:{kind}".encode())
        if is_array:
            found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def stored(folder: str, name: str, keys: Iterable[str], make: Callable[[], Arrays]) -> Arrays:
    """What `make` returns, kept in FOLDER/NAME, with these keys; without a folder, in memory.

    One process makes them under a lock while the others wait. They appear whole, by a rename, so
    that where locks do not reach (a file system shared by nodes) the worst is work done twice.
    """
    if not folder:
        return make()
    final = Path(folder, name)
    try:
        if not final.is_dir():
            with locked(Path(folder)):
                if not final.is_dir():
                    _write(final, make())
    except OSError as error:
        raise ValueError(
            f"cannot keep the order of samples in {folder}: {error.strerror or error}; name a "
            "folder that can be written with data.cache_dir"
        ) from error
    try:
        return {key: np.load(final / f"{key}.npy", mmap_mode="r") for key in keys}
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{final} is damaged ({error}): delete this folder") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder, made where there is none, in which one process at a time makes something."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(final: Path, arrays: Arrays) -> None:
    with appearing(final) as temporary:
        temporary.mkdir()
        for key, values in arrays.items():
            np.save(temporary / f"{key}.npy", values)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """A name for a folder to fill (it does not exist yet), which becomes `final` at the end.

    `final` appears whole or not at all; where another process was first, with the same content,
    that one stays.
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
