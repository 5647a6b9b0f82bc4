"""A clock that stands still while its process does."""

import time
from collections.abc import Callable

TICK = 0.05  # seconds between two ticks
_LONGEST = 1.0  # seconds between two ticks that count; more only where the process did not run
_LATE = 0.03  # seconds that a tick may come late on a machine that is not overloaded


class RunningClock:
    """Seconds in which this process ran: those in which it was stopped or suspended do not count.

    Call `tick` every TICK seconds. `stalled` sums up how late the ticks came, in seconds.
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
