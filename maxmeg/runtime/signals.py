"""SIGINT and SIGTERM: finish the step and save; the second time, leave at once."""

import os
import signal
import sys

_NOTE = "\n{name}: finishing the step, then saving; once more to leave at once\n"


class Interrupt:
    """Context manager whose `requested` turns true at the first SIGINT or SIGTERM.

    The second signal ends the process with 128 + its number (130, 143), saving nothing. Enter it
    on the main thread; the handlers from before come back on leaving.
    """

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        if self.requested:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h")  # a progress bar may have hidden the cursor
            os._exit(128 + number)
        self.requested = True
        # Python's buffered streams are not reentrant; write(2) is.
        os.write(2, _NOTE.format(name=signal.Signals(number).name).encode())
