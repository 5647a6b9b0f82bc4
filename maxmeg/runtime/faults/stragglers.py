"""Finds the process that the others wait for."""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

from maxmeg.runtime.faults.watchdog import Watchdog
from maxmeg.runtime.metrics.hooks import Hook, Metrics

_NOTABLE = 0.1  # fraction of the step's time that a straggler must cost to be reported
_log = logging.getLogger(__name__)


class Stragglers:
    """Compares the seconds per step that each process spends outside of the compiled step.

    All processes finish a step at the same time, because its collectives wait for the slowest
    process. What differs is the time from the end of a step to the next dispatch (waiting for the
    next batch, hooks) and the time in which a process did not run at all (stopped, swapping, too
    few cores). Each process sends its own seconds in its heartbeats. Every `every` steps, process 0
    adds the slowest process to the metrics; it also names that process in the log, and how long it
    waited for data, if it takes more than `factor` times the median of the others. A device that
    computes slowly does not show here: compare profiles for that.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        factor: float,
        every: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._watchdog, self._factor, self._every, self._clock = watchdog, factor, every, clock
        self._finished: tuple[float, float] | None = None
        self._busy = self._data_wait = 0.0
        self._steps = 0
        self._begin: tuple[float, float] | None = None

    def hook(self) -> Hook:
        """Put it before the hooks that write metrics."""
        return Hook(self._finish, before=self._before)

    def _before(self, step: int) -> None:
        if self._finished is not None:
            finished, phases = self._finished
            self._busy += self._clock() - finished - (self._watchdog.phase_seconds - phases)
            self._finished = None

    def _finish(self, step: int, metrics: Metrics) -> None:
        now, stalled = self._clock(), self._watchdog.clock.stalled
        self._finished = now, self._watchdog.phase_seconds
        self._steps += 1
        self._data_wait += metrics.get("data_wait_seconds", 0.0)
        peers = self._watchdog.peers
        assert peers is not None
        if self._begin is not None:
            begin, stalled_before = self._begin
            # A heartbeat must have sent the last interval's seconds before they are replaced.
            if step % self._every or now - begin < 2 * peers.interval:
                return
            seconds = (now - begin) / self._steps
            busy = min((self._busy + stalled - stalled_before) / self._steps, seconds)
            data_wait = min(self._data_wait / self._steps, busy)
            self._watchdog.busy = {"busy_seconds": busy, "data_wait_seconds": data_wait}
            if peers.index == 0:
                self._compare(peers.statuses, seconds, metrics)
        self._begin, self._busy, self._data_wait, self._steps = (now, stalled), 0.0, 0.0, 0

    def _compare(
        self, statuses: dict[int, dict[str, Any]], step_seconds: float, metrics: Metrics
    ) -> None:
        busy = {i: s["busy_seconds"] for i, s in statuses.items() if "busy_seconds" in s}
        if len(busy) < 2:
            return
        slowest = max(busy, key=busy.__getitem__)
        seconds, status = busy.pop(slowest), statuses[slowest]
        median = statistics.median(busy.values())
        metrics["slowest_process"] = slowest
        metrics["slowest_process_seconds"] = seconds
        metrics["slowest_process_data_wait_seconds"] = status["data_wait_seconds"]
        metrics["median_process_seconds"] = median
        if seconds > self._factor * median and seconds - median > _NOTABLE * step_seconds:
            _log.warning(
                "process %d (%s) is slow: outside of the compiled step it takes %.3g s per step, "
                "%.3g s of them waiting for data; the median of the others is %.3g s, "
                "a step takes %.3g s",
                slowest, status["host"], seconds, status["data_wait_seconds"], median, step_seconds,
            )  # fmt: skip
