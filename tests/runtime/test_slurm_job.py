"""A save that would outlast its Slurm job is announced."""

import time

import pytest

from maxmeg.runtime.slurm import resuming_words, warn_of_late_save


@pytest.mark.parametrize(
    ("end_in", "save_seconds", "told"),
    [(100, 700.0, True), (900, 700.0, False), (100, None, False), (None, 700.0, False)],
)
def test_a_late_save_is_announced(end_in, save_seconds, told, monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if end_in is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + end_in))
    warn_of_late_save(save_seconds)
    assert bool(caplog.records) == told
    assert not told or "--signal=B:USR1@1460" in caplog.text


def test_a_requeued_job_is_not_told_to_be_started_again(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "the same command" in resuming_words()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert "command" not in resuming_words() and "once it runs again" in resuming_words()
