"""Processes that read or tokenize for a parent process."""

import collections
import contextlib
import fcntl
import functools
import itertools
import multiprocessing
import multiprocessing.util
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, Self

import numpy as np

_LAST_WORDS = 5  # seconds to wait for the exit of a process whose pipe is closed
_PIPE = 1 << 20  # bytes in a pipe; the default of 64 KiB would wake both processes too often
_JOINED = 0.02  # seconds between checks of a thread that may wait for the queue


def follow_parent() -> None:
    """Ignore SIGINT and SIGTERM, which the parent handles; exit when the parent has exited.

    A terminal or Slurm signals the whole process group, but the parent may want to finish its step
    first. If the parent is killed, its workers would otherwise wait forever.
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
    """The sequence that workers read; each worker has a copy, and reads elements in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Arrays: ...


class RebuiltInWorkers:
    """An object that is sent to a worker as its constructor's arguments and constructed there.

    Its arrays, open files and memory maps are not copied.
    """

    _arguments: tuple[tuple, dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._arguments = args, kwargs
        return self

    def __reduce__(self) -> tuple:
        args, kwargs = self._arguments
        return functools.partial(type(self), *args, **kwargs), ()


_function: Callable[[Any], Any] | None = None  # of a process of `in_processes`


def in_processes(
    items: Iterable[Any], num_workers: int, make: Callable, arguments: tuple, died: str
) -> Generator[tuple[Any, Any], None, None]:
    """Yield (item, function(item)) in order; every process makes the function, make(*arguments).

    ChildProcessError with the message `died` where a process is killed.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start, (make, arguments))
    remaining, pending = iter(items), collections.deque()

    def submit(count: int) -> None:
        for item in itertools.islice(remaining, count):
            try:
                pending.append((item, pool.submit(_call, item)))
            except OSError as error:  # the pool is closing after the death of a process
                raise BrokenProcessPool from error

    try:
        submit(2 * num_workers + 2)
        while pending:
            item, future = pending.popleft()
            result = future.result()
            submit(1)
            yield item, result
    except BrokenProcessPool as error:
        raise ChildProcessError(died) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(make: Callable, arguments: tuple) -> None:
    global _function
    follow_parent()
    _function = make(*arguments)


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)


class Workers:
    """Iterates over `source` in order; of n processes, process i makes the elements i, i + n, ...

    Up to `depth` elements of each process wait in this process. An exception in a worker is raised
    in place of its element; if a worker is killed, a ChildProcessError is raised. Each worker alone
    holds the writing end of its pipe, so the pipe closes when the worker dies, even in the middle
    of an element; with a shared queue the parent would wait forever.
    """

    def __init__(self, source: Source, num_workers: int, depth: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        # Runs before multiprocessing terminates its daemons by SIGTERM, which workers ignore.
        end = multiprocessing.util.Finalize(self, _end, (self._workers,), exitpriority=10)
        self._end, self._next, self._count = end, 0, len(source)
        for number in range(min(num_workers, len(source))):
            reader, writer = context.Pipe(duplex=False)
            with contextlib.suppress(OSError):  # users may be limited to smaller pipes
                fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, _PIPE)
            arguments = (source, range(number, len(source), num_workers), writer)
            name_of = f"loader process {number + 1} of {num_workers}"
            process = context.Process(target=_work, args=arguments, daemon=True, name=name_of)
            process.start()
            writer.close()
            self._workers.append(_Worker(process, reader, depth))

    @property
    def _worker(self) -> "_Worker":
        return self._workers[self._next % len(self._workers)]

    @property
    def ready(self) -> bool:
        """Whether the next element is available without waiting."""
        return self._next >= self._count or not self._worker.answers.empty()

    def __next__(self) -> Arrays:
        if self._next >= self._count:
            raise StopIteration
        worker = self._worker
        kind, answer = worker.answers.get()
        if kind == "error":
            worker.answers.put((kind, answer))  # for the next call
            raise answer
        self._next += 1
        return answer

    def close(self) -> None:
        """Stop the processes; may be called twice."""
        self._end()


class _Worker:
    """A process, and the thread that receives its elements."""

    def __init__(self, process: BaseProcess, reader: Connection, depth: int) -> None:
        self.process, self.reader = process, reader
        self.answers: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
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
            except Exception as error:  # one that cannot be unpickled
                kind, answer = "error", error
            self.answers.put((kind, answer))

    def _explain_end(self) -> ChildProcessError:
        self.process.join(_LAST_WORDS)
        code = self.process.exitcode
        cause = f"with exit code {code}"
        if code is not None and code < 0:
            cause = f"by signal {-code} ({signal.Signals(-code).name})"
        return ChildProcessError(
            f"{self.process.name} (process {self.process.pid}) was ended {cause}, not by this run. "
            f"Where memory ran out (see `dmesg`, or the job's limits), lower data.num_workers or "
            "data.prefetch; the same command resumes from the last checkpoint"
        )


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()  # they hold no state
    for worker in workers:
        while worker.thread.is_alive():  # it may wait for the queue
            while not worker.answers.empty():
                worker.answers.get()
            worker.thread.join(_JOINED)
        worker.process.join()
        worker.reader.close()


def _send(writer: Connection, arrays: Arrays) -> None:
    """Send names, dtypes and shapes, then the bytes of each array without a copy."""
    buffers = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    writer.send(("element", [(name, a.dtype.str, a.shape) for name, a in buffers.items()]))
    for array in buffers.values():
        view = array.reshape(-1).view(np.uint8).data
        while view:
            view = view[os.write(writer.fileno(), view) :]


def _receive(reader: Connection, names: list[tuple[str, str, tuple[int, ...]]]) -> Arrays:
    arrays = {}
    for name, dtype, shape in names:
        arrays[name] = np.empty(shape, dtype)
        view = arrays[name].reshape(-1).view(np.uint8).data
        while view:
            count = os.readv(reader.fileno(), [view])
            if not count:
                raise EOFError
            view = view[count:]
    return arrays


def _work(source: Source, numbers: range, writer: Connection) -> None:
    follow_parent()
    # jax is imported with the parent's main module; only the parent uses accelerators.
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    try:
        for number in numbers:
            _send(writer, source[number])
        writer.send(("end", None))
    except BrokenPipeError:  # the parent has closed the pipe
        return
    except Exception as error:
        error.add_note(f"In {multiprocessing.current_process().name}:\n" + traceback.format_exc())
        try:
            writer.send(("error", error))
        except Exception:  # it cannot be pickled
            writer.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))
