"""Process 0 logs for all; others log errors alone."""

import logging

import jax
import pytest

from maxmeg.runtime.logs import start_logging


@pytest.mark.parametrize(
    ("index", "count", "expected"),
    [
        (0, 1, "INFO: a\nERROR: b\nWARNING: d\n"),
        (1, 2, "process 1: ERROR: b\n"),
    ],
)
def test_each_process_logs_its_own_messages(monkeypatch, capsys, index, count, expected):
    root, ours = logging.getLogger(), logging.getLogger("maxmeg")
    monkeypatch.setattr(root, "handlers", [])
    levels = [(logger, logger.level) for logger in (root, ours)]
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    try:
        start_logging()
        ours.info("a")
        ours.error("b")
        logging.getLogger("another").info("c")
        logging.getLogger("another").warning("d")
    finally:
        for logger, level in levels:
            logger.setLevel(level)
    assert capsys.readouterr().err == expected
