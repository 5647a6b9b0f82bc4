"""SIGINT and SIGTERM: the first one ends the run in order, the second exits at once."""

import math
import os
import signal
import sys
import time

from maxmeg.checkpoint.processes import Processes
from maxmeg.runtime.screen import say
from maxmeg.runtime.slurm import resuming_words

_STARTING, _TRAINING = "stopping before the first step", "finishing the step, then saving"
_NOTE = "{name}: {what}; send it again to exit at once\n"


class Interrupt:
    """Context manager whose `requested` becomes true at the first SIGINT or SIGTERM.

    minutes: time from now after which it becomes true without a signal; 0: never. The second signal
    ends the process with exit code 128 + its number (130, 143) and saves nothing. Enter it on the
    main thread; on exit it restores the previous handlers.
    """

    def __init__(self, minutes: float = 0.0):
        self._signalled, self._trains = False, False
        self._end = time.monotonic() + 60 * minutes if minutes else math.inf
        self._previous = {}

    def lets_train(self) -> bool:
        """Whether no process has been asked to stop so far; all processes call it. Later requests
        are met by the training loop."""
        self._trains = True
        processes = Processes("stop")
        requested = processes.gather("requested", lambda: self.requested, RuntimeError)
        stops = processes.broadcast("any", lambda: any(requested), RuntimeError)
        if stops and processes.primary:
            say(f"stopped before the first step; {resuming_words()}")
        return not stops

    @property
    def requested(self) -> bool:
        return self._signalled or time.monotonic() >= self._end

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        if self._signalled:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h")  # a progress bar may have hidden the cursor
            os._exit(128 + number)
        self._signalled = True
        # Python's buffered streams are not reentrant; write(2) is. It replaces a progress bar.
        begin = "\r\x1b[2K" if sys.stderr.isatty() else ""
        what = _TRAINING if self._trains else _STARTING
        note = _NOTE.format(name=signal.Signals(number).name, what=what)
        os.write(2, (begin + note).encode())
