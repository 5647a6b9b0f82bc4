"""A lock on the run folder, so that one run at a time writes to it; it names its holder."""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from maxmeg.checkpoint.processes import Processes
from maxmeg.config.errors import EXIT_CODES
from maxmeg.processes import multihost
from maxmeg.runtime.faults.peers import Failure, leave, publish

LOCK = "lock"  # in the run folder while a run writes to it
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 60  # after this time without a heartbeat, a holder on another host has ended
SETTLE_SECONDS = 2  # wait after a takeover; of several concurrent takeovers the last one wins
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock, and when it took it (Unix time, seconds). token: unique."""

    host: str
    process: int
    since: float
    token: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on host {self.host} (since {since})"


class Lock:
    """A lock that this process has taken. lost(line): called once if another run has taken it over,
    from the thread that writes heartbeats."""

    def __init__(self, path: Path, descriptor: int, holder: Holder, lost: Callable[[str], None]):
        self._path, self._descriptor, self._holder, self._lost = path, descriptor, holder, lost
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._heart.start()

    def check(self) -> None:
        """OSError if another run has taken the lock over: this one was stopped for too long."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            text = ""
        except OSError:  # the file system may be unavailable for a moment
            return
        holder = _parsed(text)
        if holder is None or holder.token != self._holder.token:
            raise OSError(
                f"{self._path} is no longer this run's: {holder or 'somebody'} took it over while "
                "this process was stopped; nothing more is written"
            )

    def release(self) -> None:
        self._ended.set()
        self._heart.join()
        with contextlib.suppress(OSError):
            self.check()
            self._path.unlink()
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                self.check()
            except OSError as error:
                return self._lost(str(error))
            with contextlib.suppress(OSError):
                os.utime(self._path)


@contextlib.contextmanager
def lock_run(folder: str | os.PathLike[str]) -> Iterator[Lock | None]:
    """`lock_folder` for all processes of one run: process 0 holds the lock, the others get None.

    The run ends if another one takes the lock over.
    """
    processes = Processes("lock")
    with contextlib.ExitStack() as stack:

        def take() -> Lock | None:
            return stack.enter_context(lock_folder(folder, end)) if processes.primary else None

        yield processes.together("take", take, OSError)


def end(line: str) -> None:
    """End all processes of this run at once, without a last save."""
    code = EXIT_CODES[OSError]
    if multihost.store() is not None:
        publish(Failure(multihost.rank(), line, code))
    leave(f"error: {line}", code)


@contextlib.contextmanager
def lock_folder(
    folder: str | os.PathLike[str], lost: Callable[[str], None] = _log.error
) -> Iterator[Lock]:
    """Hold the lock of a run folder; OSError that names the holder if another process has it.

    The file of the lock appears by a hard link, which is atomic on network file systems too. The
    kernel releases its lock (flock) when the process ends. Some network file systems keep flock
    within one host, or lack it. The holder therefore also updates the file's modification time
    every HEARTBEAT_SECONDS, and a lock of another host is taken over only once that has stopped.
    """
    path = Path(folder, LOCK)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Holder(socket.gethostname(), os.getpid(), time.time(), secrets.token_hex(8))
    lock = Lock(path, _take(path, holder), holder, lost)
    try:
        yield lock
    finally:
        lock.release()


def _take(path: Path, holder: Holder) -> int:
    """Take the lock. Returns the descriptor of its file, which must stay open."""
    claim = path.with_name(f".{LOCK}.{holder.token}")
    descriptor = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, json.dumps(dataclasses.asdict(holder)).encode())
        os.fsync(descriptor)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        while not _link(claim, path):
            with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
                stale = file.read()
                alone = _refuse_if_held(path, file, _parsed(stale))
                if _read(path) != stale:  # another run has taken it over meanwhile
                    continue
                claim.replace(path)
                if not alone:  # of several that replace it at once, the last one has it
                    time.sleep(SETTLE_SECONDS)
                if (now := _parsed(_read(path))) != holder:
                    raise OSError(_in_use(path, now))
                break
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        claim.unlink(missing_ok=True)
    return descriptor


def _link(claim: Path, path: Path) -> bool:
    """Give the file of a claim a second name; False if that exists."""
    try:
        os.link(claim, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # without hard links: make an empty file, which is taken over like a stale one
        with contextlib.suppress(FileExistsError):
            path.open("x").close()
        return False


def _refuse_if_held(path: Path, file: typing.TextIO, holder: Holder | None) -> bool:
    """OSError if the process that wrote the lock still holds it. Returns whether no other process
    can take it over while `file` is open."""
    has_flock = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(_in_use(path, holder)) from None
    except OSError:
        has_flock = False
    if holder is None:
        return False
    is_here = holder.host == socket.gethostname()
    if is_here:
        alive = not has_flock and Path(f"/proc/{holder.process}").exists()
    else:
        alive = _has_heartbeat(path, holder)
    if alive:
        raise OSError(_in_use(path, holder))
    _log.warning("taking over %s: its holder, %s, has ended without removing it", path, holder)
    return is_here and has_flock


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


def _read(path: Path) -> str:
    """The text of the lock's file; empty without one."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _parsed(text: str) -> Holder | None:
    """The holder that a file names; None without one."""
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _in_use(path: Path, holder: Holder | None) -> str:
    return (
        f"{path.parent} is in use by another run: {holder or 'another process'} holds {path}; "
        "wait for that run, stop it, or set another run_dir"
    )
