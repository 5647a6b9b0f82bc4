"""A lock on the run folder, so that one run at a time writes to it; it names its holder."""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from maxmeg.checkpoint.processes import Processes

LOCK = "lock"  # in the run folder while a run writes to it
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 60  # after this time without a heartbeat, a holder on another host has ended
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock, and when it took it (Unix time, seconds)."""

    host: str
    process: int
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on host {self.host} (since {since})"


@contextlib.contextmanager
def lock_run(folder: str | os.PathLike[str]) -> Iterator[None]:
    """`lock_folder` for all processes of one run: process 0 holds the lock."""
    processes = Processes("lock")
    with contextlib.ExitStack() as stack:

        def take() -> None:
            if processes.primary:
                stack.enter_context(lock_folder(folder))

        processes.together("take", take, OSError)
        yield


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a run folder; OSError that names the holder if another process has it.

    The kernel releases its lock (flock) when the process ends. Some network file systems keep flock
    within one host, or lack it. The holder therefore also updates the file's modification time
    every HEARTBEAT_SECONDS, and a lock of another host is taken over only once that has stopped.
    """
    path = Path(folder, LOCK)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _take(path)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the file system may be unavailable for a moment
                os.utime(path)

    heart = threading.Thread(target=beat, name="lock", daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _take(path: Path) -> int:
    """Take the lock. Returns the descriptor of its file, which must stay open."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _refuse_if_held(path, descriptor)
            holder = Holder(socket.gethostname(), os.getpid(), time.time())
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(dataclasses.asdict(holder)).encode(), 0)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder has just removed this file: lock the new one


def _refuse_if_held(path: Path, descriptor: int) -> None:
    """OSError if the process that wrote the lock still holds it."""
    has_flock = True
    holder = _read_holder(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(_in_use(path, holder)) from None
    except OSError:
        has_flock = False
    if holder is None:
        return
    if holder.host == socket.gethostname():
        alive = not has_flock and Path(f"/proc/{holder.process}").exists()
    else:
        alive = _has_heartbeat(path, holder)
    if alive:
        raise OSError(_in_use(path, holder))
    _log.warning("taking over %s: its holder, %s, has ended without removing it", path, holder)


def _has_heartbeat(path: Path, holder: Holder) -> bool:
    """Whether the file's modification time changes within STALE_SECONDS."""
    first = _renewed(path)
    if abs(time.time() - first) > 10 * STALE_SECONDS:  # clocks differ by less
        return False
    _log.warning("%s is held by %s: waiting %d s for its heartbeat", path, holder, STALE_SECONDS)
    end = time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(1)
        if _renewed(path) != first:
            return True
    return False


def _renewed(path: Path) -> float:
    """Modification time of the lock. Opening the file makes NFS ask the server for it."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _read_holder(path: Path) -> Holder | None:
    """The holder that the file names; None without one."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _in_use(path: Path, holder: Holder | None) -> str:
    return (
        f"{path.parent} is in use by another run: {holder or 'another process'} holds {path}; "
        "wait for that run, stop it, or set another run_dir"
    )
