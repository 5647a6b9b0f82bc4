"""Logging in a run of several processes: process 0 logs for all, except errors."""

import logging

import jax


def start_logging() -> None:
    """Process 0 logs INFO and above of this package; the others log errors, with their number.

    Call it after `multihost.initialize`.
    """
    index, count = jax.process_index(), jax.process_count()
    process = f"process {index}: " if count > 1 else ""
    level = logging.ERROR if index else logging.WARNING
    logging.basicConfig(format=f"{process}%(levelname)s: %(message)s", level=level)
    logging.getLogger("maxmeg").setLevel(logging.ERROR if index else logging.INFO)
