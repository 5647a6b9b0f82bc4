"""Real signals to a real process."""

import pathlib
import signal
import subprocess
import sys

import pytest

from maxmeg.runtime.faults.signals import Interrupt

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import sys, time
from maxmeg.runtime.faults.signals import Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    while not interrupt.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep(float(sys.argv[1]))
    print("saved", flush=True)
"""
PATIENCE = 30


def start(seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(seconds)],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_run_finish(number):
    process = start(0)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "saving\nsaved\n")
    assert f"{number.name}: stopping before the first step; send it again" in err


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGINT, 130), (signal.SIGINT, signal.SIGTERM, 143)],
)
def test_the_second_signal_leaves_at_once(first, second, code):
    process = start(PATIENCE)
    process.send_signal(first)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(second)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, "")


def test_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert signal.getsignal(signal.SIGTERM) is not before
        assert not interrupt.requested
    assert signal.getsignal(signal.SIGTERM) is before
