"""The processes of a run watch each other through the coordinator's key-value store.

Every process writes a heartbeat. Process 0 reads all heartbeats, the others read that of process 0,
so that traffic grows linearly with the number of processes. A process that finds another one dead,
or fails itself, publishes a Failure; every process prints it and ends with its exit code.
"""

import contextlib
import dataclasses
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from maxmeg.config.errors import RESTART_CODE, is_for_user, report
from maxmeg.config.schema import Config
from maxmeg.processes import multihost
from maxmeg.runtime.faults.clock import RunningClock

FAILURE, ALIVE = "maxmeg/failure", "maxmeg/alive/"
INTERVAL = 2.0  # seconds between heartbeats, at most
_CHECK_SECONDS = 0.5
_BEATS = 3  # missing heartbeats after which a hang is reported with this process as silent
_RPC_SECONDS = 5.0  # limit of a call that blocks if the coordinator does not answer
GRACE = 1.0  # seconds for a process to fail by itself before a published failure ends it
_COLLECTIVES = ("gloo", "nccl")  # words in XLA's errors that the end of another process causes
_CAUSES = {
    "stopped": "is stopped (SIGSTOP or a debugger)",
    "": "was killed or stopped, or its host or network is down",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run ends: one line and the exit code of all processes.

    process: number of the publisher. stacks: every process writes the stacks of its threads.
    """

    process: int
    line: str
    code: int
    stacks: bool = False


class Peers:
    """Exchanges heartbeats in a daemon thread and ends this process when the run has failed.

    silence: seconds without a heartbeat after which a process counts as dead; 0: never. The end of
    a process on this host is noticed at once. status(): content of a heartbeat. statuses: the last
    heartbeat of each process. interval: seconds between heartbeats. `end` is called with the
    failure in this thread.
    """

    def __init__(
        self,
        silence: float,
        clock: RunningClock,
        status: Callable[[], dict[str, Any]],
        end: Callable[[Failure], None],
    ):
        self.index, self.count = multihost.rank(), multihost.size()
        self.statuses: dict[int, dict[str, Any]] = {}
        self._silence, self._clock, self._status, self._end = silence, clock, status, end
        self.interval = min(INTERVAL, silence / 4) if silence else INTERVAL
        self._moved = dict.fromkeys(self._watched(), clock.now)  # when a heartbeat was new
        self._beats: dict[int, int] = {}  # the newest heartbeat of every process
        self._deaths: dict[int, float] = {}  # when a process on this host was first found dead
        self._checked = 0.0
        self._answered = clock.now  # time of the coordinator's last answer
        self._thread = threading.Thread(target=self._exchange, name="peers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Publish a failure and end this process if another, or the coordinator, is dead.

        Never waits for the coordinator. Call it every few tenths of a second.
        """
        now = self._clock.now
        if now < self._checked + _CHECK_SECONDS:
            return
        self._checked = now
        if self._silence and now - self._answered > self._silence:
            line = f"{self._describe(0)} and the coordinator there do not answer for "
            line += f"{now - self._answered:.0f} s: stopped, or its host or network is down"
            self._end(Failure(self.index, line, RESTART_CODE, stacks=True))
        dead = [line for index in self._moved if (line := self._dead(index, now))]
        if dead:
            silent = any(now - moved > self._silence > 0 for moved in self._moved.values())
            failure = Failure(self.index, "; ".join(dead[:4]), RESTART_CODE, stacks=silent)
            publish(failure)
            self._end(failure)

    def with_laggards(self, failure: Failure) -> Failure:
        """Add to a hang's message the processes that are silent or behind in dispatched steps."""
        before = self._newest_beats()

        def read_twice() -> None:  # without effect where the coordinator does not answer
            self._read(ALIVE)
            before.update(self._newest_beats())
            time.sleep(_BEATS * self.interval)
            self._read(ALIVE)

        reading = threading.Thread(target=read_twice, daemon=True)
        reading.start()
        reading.join(_RPC_SECONDS + _BEATS * self.interval)
        steps = {i: status["dispatched"] for i, status in self.statuses.copy().items()}
        newest = max((step for step in steps.values() if step is not None), default=0)
        after = self._newest_beats()
        silent = [i for i in after if i != self.index and after[i] == before.get(i)]
        behind = [i for i, step in steps.items() if step is None or step < newest]
        line = failure.line
        for what, processes in (("no heartbeat from", silent), ("behind", behind)):
            if processes:
                line += f"; {what}: {', '.join(map(self._describe, processes[:4]))}"
        return dataclasses.replace(failure, line=line)

    def close(self) -> None:
        """Wait until every process has called this, then stop the thread."""
        multihost.meet("end")
        publish(Failure(self.index, "", 0))  # wakes every thread that waits for a failure
        self._thread.join()

    def _watched(self) -> list[int]:
        return list(range(1, self.count)) if self.index == 0 else [0]

    def _exchange(self) -> None:
        client, beat, here = multihost.store(), 0, {"process": self.index, **_identity()}
        watched = f"{ALIVE}0/" if self.index else ALIVE
        while True:
            beat += 1
            message = json.dumps({**self._status(), **here, "beat": beat})
            try:
                client.key_value_set(f"{ALIVE}{self.index}/beat", message, allow_overwrite=True)
                self._read(watched)
                self._answered = self._clock.now
            except jax.errors.JaxRuntimeError:  # `check` counts how long it does not answer
                time.sleep(self.interval)
                continue
            try:
                text = client.blocking_key_value_get(FAILURE, int(1000 * self.interval))
            except jax.errors.JaxRuntimeError:  # none so far
                continue
            failure = Failure(*json.loads(text))
            if failure.code and failure.process != self.index:
                if not failure.stacks:
                    time.sleep(GRACE)
                self._end(failure)
            return

    def _read(self, prefix: str) -> None:
        for _, text in multihost.store().key_value_dir_get(prefix):
            status = json.loads(text)
            index = status["process"]
            self.statuses[index] = status
            if index in self._moved and status["beat"] != self._beats.get(index):
                self._beats[index], self._moved[index] = status["beat"], self._clock.now

    def _newest_beats(self) -> dict[int, int]:
        return {index: status["beat"] for index, status in self.statuses.copy().items()}

    def _dead(self, index: int, now: float) -> str:
        """Why a process counts as dead; empty: it does not."""
        seconds = now - self._moved[index]
        state = _state(self.statuses.get(index, {}))
        if state == "gone":
            if now - self._deaths.setdefault(index, now) < 1.5 * GRACE:
                return ""  # its own failure may not have arrived yet
            return f"{self._describe(index)} was killed or has crashed"
        # A process on this host that runs without heartbeats has the limits of its own watchdog.
        if not self._silence or seconds <= self._silence or state == "running":
            return ""
        if index == 0 and now - self._answered > self._silence / 2:
            return ""  # the coordinator in process 0 is silent too: `check` soon says so
        return f"{self._describe(index)} has not answered for {seconds:.0f} s: it {_CAUSES[state]}"

    def _describe(self, index: int) -> str:
        status = self.statuses.get(index)
        if status is None:
            return f"process {index}"
        where = f"{status['host']}, pid {status['pid']}"
        step = "" if status["dispatched"] is None else f", step {status['dispatched']}"
        return f"process {index} ({where}; last heartbeat: {status['phase']}{step})"


def publish(failure: Failure) -> None:
    """Publish a failure to all processes. The first one counts."""
    client, text = multihost.store(), json.dumps(dataclasses.astuple(failure))

    def write() -> None:
        # It fails if another failure was first, or if the coordinator is gone.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(FAILURE, text)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_RPC_SECONDS)


def leave(line: str, code: int) -> None:
    """Print a line and end this process, from any thread, even if the main thread hangs."""

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(GRACE)  # the main thread may hold the lock of a stream
    if line:
        os.write(2, f"{line}\n".encode())
    os._exit(code)


def ending_together(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command's `main(config, ...)`: an exception ends all processes of the run.

    Otherwise the process would wait for the others in JAX's exit handler, and they would wait for
    it in a collective.
    """

    @functools.wraps(main)
    def run(config: Config, *others: Any) -> None:
        try:
            main(config, *others)
        except BaseException as error:
            if multihost.store() is None:
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())
            # XLA raises these as RuntimeError or, for the status UNKNOWN, as ValueError.
            follows = any(name in text.lower() for name in _COLLECTIVES)
            follows = follows and not (is_for_user(error) or isinstance(error, MemoryError))
            if follows:  # wait until the process that failed first publishes the cause
                time.sleep(1.5 * config.watchdog.silence + 4 * INTERVAL)
            code = report(error, config)
            if follows:  # no process has failed: a connection was lost
                code = RESTART_CODE
            line = f"process {multihost.rank()} failed: {text}"
            publish(Failure(multihost.rank(), line, code))
            leave("", code)

    return run


def _identity() -> dict[str, Any]:
    """Identifies this process to the others on this host."""
    pid = os.getpid()
    _, began = _state_and_start(pid)
    return {"host": socket.gethostname(), "pid": pid, "began": began, "space": _process_space()}


@functools.cache
def _process_space() -> str:
    """Equal for processes in the same PID namespace. Empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """State letter and start time of a process, from /proc; empty if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _state(status: dict[str, Any]) -> str:
    """running, stopped or gone for a process on this host. Empty: unknown."""
    if not status or not status["space"] or status["space"] != _process_space():
        return ""
    letter, began = _state_and_start(status["pid"])
    if began != status["began"] or letter in "ZX":
        return "gone"
    return "stopped" if letter in "Tt" else "running"
