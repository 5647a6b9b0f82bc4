"""Logging in a run of several processes: process 0 logs for all, except errors."""

import logging
import sys

import jax

from maxmeg.runtime.screen import wrapped


class Stderr(logging.StreamHandler):
    """Writes to the current sys.stderr; a live progress bar replaces it and prints above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The text, on a terminal in lines that fit."""
        text = super().format(record)
        return "\n".join(map(wrapped, text.splitlines())) if sys.stderr.isatty() else text


def start_logging() -> None:
    """Process 0 logs INFO and above of this package; the others log errors, with their number.

    Call it after `multihost.initialize`.
    """
    index = jax.process_index()
    process = f"process {index}: " if index else ""
    level = logging.ERROR if index else logging.WARNING
    pattern = f"{process}%(levelname)s: %(message)s"
    logging.basicConfig(format=pattern, level=level, handlers=[Stderr()])
    logging.getLogger("maxmeg").setLevel(logging.ERROR if index else logging.INFO)
