"""One run at a time writes to a run folder."""

import contextlib
import fcntl
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from maxmeg.runtime.faults import lock
from maxmeg.runtime.faults.lock import lock_folder

HOSTS = 8
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
        waited = lock.STALE_SECONDS + lock.SETTLE_SECONDS
        assert clock[-1] == waited and "waiting 60 s" in caplog.text


def test_an_old_lock_or_a_damaged_one_is_taken_over_at_once(tmp_path, monkeypatch):
    waits = []  # none for a heartbeat
    monkeypatch.setattr(lock.time, "sleep", waits.append)
    write_lock(tmp_path, "elsewhere", 7, age=3600)
    with lock_folder(tmp_path):
        pass
    for text in ("", "{", "[]", '{"host": "a"}'):
        (tmp_path / "lock").write_text(text)
        with lock_folder(tmp_path):
            pass
    assert waits == 5 * [lock.SETTLE_SECONDS]


def test_a_running_holder_writes_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    with lock_folder(tmp_path):
        first = (tmp_path / "lock").stat().st_mtime_ns
        while (tmp_path / "lock").stat().st_mtime_ns == first:
            pass


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("stale", [False, True])
def test_one_of_many_hosts_takes_a_lock(tmp_path, monkeypatch, links, stale):
    """Threads stand for hosts of a network file system that keeps flock within each host."""
    here = threading.local()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: here.host)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    if stale:
        write_lock(tmp_path, "elsewhere", 7, age=3600)
    started, ended, held = threading.Barrier(HOSTS), threading.Barrier(HOSTS), []

    def run(number: int) -> None:
        here.host = f"host{number}"
        started.wait()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(tmp_path))
                held.append(number)
            except OSError as error:
                assert "is in use by another run" in str(error)
            ended.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(HOSTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and not list(tmp_path.iterdir())


def no_links(*_) -> None:
    raise OSError(95, "Operation not supported")


def test_a_lock_that_was_taken_over_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    lost = queue.Queue()
    with lock_folder(tmp_path, lost.put) as held:
        held.check()
        write_lock(tmp_path, "elsewhere", 7)
        line = lost.get(timeout=60)
        assert "no longer this run's: process 7 on host elsewhere" in line
        with pytest.raises(OSError, match=re.escape(line)):
            held.check()
    assert json.loads((tmp_path / "lock").read_text())["process"] == 7
    with lock_folder(tmp_path / "other", lost.put):
        (tmp_path / "other" / "lock").unlink()
        assert "somebody took it over" in lost.get(timeout=60)
