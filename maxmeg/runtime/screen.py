"""Lines of a run that fit a terminal of 80 columns, also with the prefix of a launcher."""

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import TypeVar

import jax

Item = TypeVar("Item")
WIDTH = 78
_PREFIX = 4  # columns of "12: " (srun --label) or "[1] " (launch/local.py)
_LABEL = 9


def width() -> int:
    """Number of columns of a line; fewer where a launcher puts the process's number before it."""
    labelled = "SLURM_PROCID" in os.environ or jax.process_count() > 1
    return WIDTH - _PREFIX * labelled


def wrapped(text: str, label: str = "") -> str:
    """The text in lines that fit, those after the first one indented; after a label, if any."""
    return textwrap.fill(
        text,
        width(),
        initial_indent=f"{label:{_LABEL}}" if label else "",
        subsequent_indent=" " * (_LABEL if label else 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str, label: str = "") -> None:
    """Print `wrapped(text, label)` at once."""
    print(wrapped(text, label), flush=True)


def tracked(items: Iterable[Item], label: str, count: int | None = None) -> Iterable[Item]:
    """Return the items, shown by a progress bar if standard error is a terminal.

    count: number of items; default their length.
    """
    from rich import console, progress

    target = console.Console(file=sys.stderr)
    settings = {"console": target, "disable": not target.is_terminal, "transient": True}
    return progress.track(items, label, total=count, **settings)
