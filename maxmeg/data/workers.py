"""Processes that read or tokenize for another one."""

import contextlib
import fcntl
import multiprocessing
import multiprocessing.util
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np

_LAST_WORDS = 5  # seconds in which a process whose pipe is closed has ended
LOADER_REMEDY = (
    "lower data.num_workers or data.prefetch; the same command goes on from the last checkpoint"
)
_PIPE = 1 << 20  # bytes; the usual 64 KiB would wake both ends for each
_JOINED = 0.02  # seconds between looks at a thread that may wait for room


def follow_parent() -> None:
    """Leaves signals to the parent process, which ends its workers; ends when the parent is gone.

    A terminal and Slurm signal the whole group, and the parent may want to finish its step first;
    a parent that was killed would leave its workers waiting for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


Arrays = dict[str, np.ndarray]


class Source(Protocol):
    """What workers read, copied to each: any element at any time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Arrays: ...


class Workers:
    """The elements of `source` in order, made ahead by processes: worker i of n makes every n-th.

    Up to `ahead` elements of each wait here. An error in a worker is raised in its element's
    place, and so is the end of a worker that was killed; name and remedy are for that. A pipe of
    its own connects each, whose other end it alone holds: that end closes when the worker dies,
    even in the middle of an element, for the rest of which a queue shared by parent and worker
    would wait for ever.
    """

    def __init__(
        self,
        source: Source,
        num_workers: int,
        ahead: int,
        name: str = "loader process",
        remedy: str = LOADER_REMEDY,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        # Before multiprocessing's own end of daemons, which signals what they leave to us.
        end = multiprocessing.util.Finalize(self, _end, (self._workers,), exitpriority=10)
        self._end, self._next, self._count = end, 0, len(source)
        for number in range(min(num_workers, len(source))):
            reader, writer = context.Pipe(duplex=False)
            with contextlib.suppress(OSError):  # a user may have less
                fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
            arguments = (source, range(number, len(source), num_workers), writer)
            name_of = f"{name} {number + 1} of {num_workers}"
            process = context.Process(target=_work, args=arguments, daemon=True, name=name_of)
            process.start()
            writer.close()
            self._workers.append(_Worker(process, reader, ahead, remedy))

    @property
    def _worker(self) -> "_Worker":
        return self._workers[self._next % len(self._workers)]

    @property
    def ready(self) -> bool:
        """Whether the next element is there."""
        return self._next >= self._count or not self._worker.answers.empty()

    def __next__(self) -> Arrays:
        if self._next >= self._count:
            raise StopIteration
        worker = self._worker
        kind, answer = worker.answers.get()
        if kind == "error":
            worker.answers.put((kind, answer))  # for who asks again
            raise answer
        self._next += 1
        return answer

    def close(self) -> None:
        """Ends the processes; may be called twice."""
        self._end()


class _Worker:
    """A process, and a thread that takes what it makes."""

    def __init__(self, process: BaseProcess, reader: Connection, ahead: int, remedy: str) -> None:
        self.process, self.reader, self._remedy = process, reader, remedy
        self.answers: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
        self.thread = threading.Thread(target=self._take, daemon=True)
        self.thread.start()

    def _take(self) -> None:
        kind = "element"
        while kind == "element":
            try:
                kind, answer = self.reader.recv()
                if kind == "element":
                    answer = _receive(self.reader, answer)
            except (EOFError, OSError):
                kind, answer = "error", self._explain_end()
            except Exception as error:  # one that cannot be made here again
                kind, answer = "error", error
            self.answers.put((kind, answer))

    def _explain_end(self) -> ChildProcessError:
        self.process.join(_LAST_WORDS)
        code = self.process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by signal {-code} ({signal.Signals(-code).name})"
        return ChildProcessError(
            f"{self.process.name} (process {self.process.pid}) was ended {how}, not by this run. "
            f"Where memory ran out (see `dmesg`, or the job's limits), {self._remedy}"
        )


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()  # nothing of theirs is lost
    for worker in workers:
        while worker.thread.is_alive():  # it may wait for room
            while not worker.answers.empty():
                worker.answers.get()
            worker.thread.join(_JOINED)
        worker.process.join()
        worker.reader.close()


def _send(writer: Connection, arrays: Arrays) -> None:
    """What the arrays are, then their bytes as they lie in memory: nothing is copied."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    writer.send(("element", [(name, a.dtype.str, a.shape) for name, a in whole.items()]))
    for array in whole.values():
        view = array.reshape(-1).view(np.uint8).data
        while view:
            view = view[os.write(writer.fileno(), view) :]


def _receive(reader: Connection, names: list[tuple[str, str, tuple[int, ...]]]) -> Arrays:
    found = {}
    for name, dtype, shape in names:
        found[name] = np.empty(shape, dtype)
        view = found[name].reshape(-1).view(np.uint8).data
        while view:
            count = os.readv(reader.fileno(), [view])
            if not count:
                raise EOFError
            view = view[count:]
    return found


def _work(source: Source, numbers: range, writer: Connection) -> None:
    follow_parent()
    if "jax" in sys.modules:  # imported with the parent's main module: accelerators are its alone
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    try:
        for number in numbers:
            _send(writer, source[number])
        writer.send(("end", None))
    except BrokenPipeError:  # closed
        return
    except Exception as error:
        error.add_note(f"In {multiprocessing.current_process().name}:\n" + traceback.format_exc())
        try:
            writer.send(("error", error))
        except Exception:  # it cannot be sent
            writer.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))
