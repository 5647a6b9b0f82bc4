"""Log lines of a program of several processes: process 0 speaks for all, except in errors."""

import logging

import jax


def start_logging() -> None:
    """Process 0 logs everything from INFO of this package; others log errors, with their number.

    Call it after `multihost.initialize`.
    """
    index, count = jax.process_index(), jax.process_count()
    process = f"process {index}: " if count > 1 else ""
    level = logging.ERROR if index else logging.WARNING
    logging.basicConfig(format=f"{process}%(levelname)s: %(message)s", level=level)
    logging.getLogger("maxmeg").setLevel(logging.ERROR if index else logging.INFO)
