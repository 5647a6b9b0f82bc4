"""Ends a run that makes no progress, with the exit code on which launchers restart it."""

import collections
import contextlib
import dataclasses
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maxmeg.config.errors import RESTART_CODE
from maxmeg.config.schema import Config
from maxmeg.processes import multihost
from maxmeg.runtime.faults.clock import TICK, RunningClock
from maxmeg.runtime.faults.peers import GRACE, Failure, Peers, leave, publish
from maxmeg.runtime.metrics.hooks import Hook, Metrics

STARTING, COMPILING, TRAINING = "starting", "compiling", "training"
VALIDATING, SAVING, ENDING = "validating", "saving", "shutting down"
MEDIANS = 10  # a step may take this many times the median
_RECENT = 64  # number of steps in the median


class Watchdog:
    """A daemon thread that ends this process when no step has finished for too long.

    The limit depends on the phase. A step may take `watchdog.step` seconds or 10 times the median
    step, whichever is longer; the first step of every batch size compiles. In a run of several
    processes it also ends this process when another is dead or has failed. The thread runs inside
    the `with` block; outside of it, phases are recorded only.
    """

    def __init__(self, config: Config):
        limits = config.watchdog
        self._limits = {
            STARTING: limits.start,
            COMPILING: limits.compile,
            TRAINING: limits.step,
            VALIDATING: limits.validate,
            SAVING: limits.save,
            ENDING: limits.shutdown,
        }
        self._silence = limits.silence
        self._folder = Path(config.run_dir) / "hangs"
        self.clock = RunningClock()
        self.dispatched: int | None = None
        self.finished: int | None = None
        self.peers: Peers | None = None
        self.wait_for_save: Callable[[], object] = lambda: None  # for a save in the background
        self.busy: dict[str, float] = {}  # sent in heartbeats, for `Stragglers`
        self.phase_seconds = 0.0  # spent within `phase`
        # The phase, and when it began or its last step finished: one object, read by the thread.
        self._phase = (STARTING, 0.0)
        self._seconds: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._median = 0.0
        self._batch_sizes: set[int] = set()
        self._compiled: int | None = None  # the step that is compiled
        self._stop, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if multihost.store() is not None:
            self.peers = Peers(self._silence, self.clock, self.status, self.end)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.peers is not None:
            if exception[0] is not None:  # the other processes may yet say why
                return
            self.peers.close()
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The `with` block is a phase with its own limit: VALIDATING, SAVING."""
        before, _ = self._phase
        self._begin(name)
        try:
            yield
        finally:
            self.phase_seconds += self.clock.now - self._phase[1]
            self._begin(before)

    def hook(self, batch_size: Callable[[int], int]) -> Hook:
        """Put it before all other hooks. A step with a new batch_size(step) compiles."""

        def before(step: int) -> None:
            if (size := batch_size(step)) not in self._batch_sizes:
                self._batch_sizes.add(size)
                self._compiled = step
                self._begin(COMPILING)
            self.dispatched = step

        def finish(step: int, metrics: Metrics) -> None:
            self.finished = step
            phase, since = self._phase
            if phase == TRAINING:
                self._seconds.append(self.clock.now - since)
                self._median = statistics.median(self._seconds)
            if self._compiled is None or step >= self._compiled:
                self._compiled = None
                self._begin(TRAINING)

        return Hook(finish, before=before)

    def last_hook(self) -> Hook:
        """Put it after all other hooks: they close after it, which may take long."""
        return Hook(lambda step, metrics: None, close=lambda: self._begin(ENDING))

    def check(self) -> Failure | None:
        """A failure if the current phase, or a step while training, has lasted too long."""
        phase, since = self._phase
        limit, seconds = self._limits[phase], self.clock.now - since
        if phase == TRAINING:
            limit = limit and max(limit, MEDIANS * self._median)
        if not limit or seconds <= limit:
            return None
        what = "no step finished" if phase == TRAINING else phase
        line = f"process {multihost.rank()}: {what} for {seconds:.0f} s, limit {limit:.0f} s"
        line += f"; last step dispatched {self.dispatched}, finished {self.finished}"
        return Failure(multihost.rank(), line, RESTART_CODE, stacks=True)

    def end(self, failure: Failure) -> None:
        """End this process from any thread; the first call counts."""
        with self._ending:
            if failure.stacks:
                self._write_stacks(failure.line)
            line = f"error: {failure.line}"
            if failure.code == RESTART_CODE:
                line += "; the same command resumes from the last checkpoint"
            leave(line, failure.code)

    def status(self) -> dict[str, Any]:
        """Status of this process, for its heartbeats."""
        return {"phase": self._phase[0], "dispatched": self.dispatched, **self.busy}

    def _watch(self) -> None:
        while not self._stop.wait(TICK):
            self.clock.tick()
            if failure := self.check():
                self._end_hang(failure)
            if self.peers is not None:
                self.peers.check()

    def _end_hang(self, failure: Failure) -> None:
        """End all processes for a hang, once a save in the background is complete."""
        if self._phase[0] not in (SAVING, ENDING):  # these phases wait for it themselves
            saving = threading.Thread(target=self.wait_for_save, daemon=True)
            saving.start()
            saving.join(self._limits[SAVING] or None)
        if self.peers is not None:
            failure = self.peers.with_laggards(failure)
            # Once a process has ended, collectives of the others fail and their stacks are lost: so
            # write these stacks before publishing the failure, and wait while others write theirs.
            self._write_stacks(failure.line)
            publish(failure)
            time.sleep(GRACE)
            failure = dataclasses.replace(failure, stacks=False)
        self.end(failure)

    def _write_stacks(self, line: str) -> None:
        """Write the stacks of all threads to stderr and to a file in the run folder."""
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        path = self._folder / f"step_{self.dispatched or 0:08d}_process_{multihost.rank()}.txt"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w") as file:
                file.write(f"{line}\n")
                file.flush()
                faulthandler.dump_traceback(file)
            os.write(2, f"stacks of all threads: {path}\n".encode())

    def _begin(self, phase: str) -> None:
        self._phase = (phase, self.clock.now)
