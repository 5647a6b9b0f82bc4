"""A clock that does not count the time in which its process was stopped."""

import time
from collections.abc import Callable

TICK = 0.05  # seconds between two ticks
_LONGEST = 1.0  # seconds between two ticks that count; a longer gap means a stopped process
_LATE = 0.03  # seconds by which a tick may be late on a machine that is not overloaded


class RunningClock:
    """Seconds in which this process ran, without those in which it was stopped or suspended.

    Call `tick` every TICK seconds. stalled: total delay of the ticks, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._last = clock, clock()
        self.now = self.stalled = 0.0

    def tick(self) -> None:
        time_now = self._clock()
        passed, self._last = time_now - self._last, time_now
        self.now += min(passed, _LONGEST)
        if passed > TICK + _LATE:
            self.stalled += passed - TICK
