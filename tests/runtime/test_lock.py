"""One run at a time writes to a run folder."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from maxmeg.runtime.faults import lock
from maxmeg.runtime.faults.lock import lock_folder

HOLD = """
import fcntl, json, os, socket, sys, time
with open(sys.argv[1] + "/lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    json.dump({"host": socket.gethostname(), "process": os.getpid(), "since": 0.0}, file)
    file.flush()
    print("held", flush=True)
    time.sleep(600)
"""


def write_lock(folder, host: str, process: int, age: float = 0.0) -> None:
    path = folder / "lock"
    path.write_text(json.dumps({"host": host, "process": process, "since": 0.0}))
    os.utime(path, (time.time() - age, time.time() - age))


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path, caplog):
    host, command = socket.gethostname(), [sys.executable, "-S", "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout and child.stdout.readline() == b"held\n"
            with (
                pytest.raises(OSError, match=rf"process {child.pid} on host {host} .*run_dir"),
                lock_folder(tmp_path),
            ):
                pass
        finally:
            child.kill()
    with lock_folder(tmp_path):  # the kernel has released it
        assert f"process {child.pid} on host {host}" in caplog.text and "has ended" in caplog.text
        with pytest.raises(OSError, match=f"process {os.getpid()} on"), lock_folder(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dead", [False, True])
def test_a_file_system_without_flock(tmp_path, monkeypatch, dead):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_lock(tmp_path, socket.gethostname(), 2**22 + 1 if dead else os.getpid())
    if not dead:
        with pytest.raises(OSError, match="is in use"), lock_folder(tmp_path):
            pass
        return
    with lock_folder(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()


@pytest.mark.parametrize("beats", [False, True])
def test_a_holder_on_another_host_is_known_by_its_heartbeat(tmp_path, monkeypatch, caplog, beats):
    write_lock(tmp_path, "elsewhere", 7)

    def sleep(seconds: float) -> None:  # time passes at once
        clock.append(clock[-1] + seconds)
        if beats and len(clock) == 5:
            write_lock(tmp_path, "elsewhere", 7, age=-10)

    clock = [0.0]
    monkeypatch.setattr(lock.time, "sleep", sleep)
    monkeypatch.setattr(lock.time, "monotonic", lambda: clock[-1])
    if beats:
        with pytest.raises(OSError, match="process 7 on host elsewhere"), lock_folder(tmp_path):
            pass
        assert clock[-1] == 4
        return
    with lock_folder(tmp_path):
        assert clock[-1] == lock.STALE_SECONDS and "waiting 60 s" in caplog.text


def test_an_old_lock_or_a_damaged_one_is_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", None)  # nobody waits
    write_lock(tmp_path, "elsewhere", 7, age=3600)
    with lock_folder(tmp_path):
        pass
    for text in ("", "{", "[]", '{"host": "a"}'):
        (tmp_path / "lock").write_text(text)
        with lock_folder(tmp_path):
            pass


def test_a_running_holder_writes_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    with lock_folder(tmp_path):
        first = (tmp_path / "lock").stat().st_mtime_ns
        while (tmp_path / "lock").stat().st_mtime_ns == first:
            pass
