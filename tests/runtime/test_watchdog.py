"""Limits, clocks and comparisons of the watchdog, without its thread and without processes."""

import logging
import os
import subprocess
import sys
import types

import pytest

from maxmeg.config.errors import RESTART_CODE
from maxmeg.config.schema import Config, WatchdogConfig
from maxmeg.config.validate import watchdog_problems
from maxmeg.runtime.faults import peers, watchdog
from maxmeg.runtime.faults.clock import TICK, RunningClock
from maxmeg.runtime.faults.stragglers import Stragglers
from maxmeg.runtime.faults.watchdog import SAVING, Watchdog


class Steps:
    """A watchdog with its hook, on a clock that is set by hand."""

    def __init__(self, tmp_path, **limits: float):
        self.watchdog = Watchdog(Config(run_dir=str(tmp_path), watchdog=WatchdogConfig(**limits)))
        self.hook = self.watchdog.hook(lambda step: 8 if step < 100 else 16)

    def dispatch(self, step: int) -> None:
        assert self.hook.before is not None
        self.hook.before(step)

    def wait(self, seconds: float) -> str:
        """What the watchdog says after the seconds. Empty: nothing."""
        self.watchdog.clock.now += seconds
        failure = self.watchdog.check()
        return failure.line if failure else ""

    def train(self, start: int, stop: int, seconds: float) -> None:
        """Steps as the loop makes them: each finishes after the next one has been dispatched."""
        for step in range(start, stop):
            self.dispatch(step)
            if step > start:
                assert not self.wait(seconds)
                self.hook.call(step - 1, {})
        self.hook.call(stop - 1, {})


def test_a_step_has_a_limit_once_the_first_has_compiled(tmp_path):
    steps = Steps(tmp_path, step=60, compile=600, start=1000)
    assert not steps.wait(999)
    assert "starting for 1001 s, limit 1000 s" in steps.wait(2)
    steps.dispatch(0)
    assert not steps.wait(599)
    steps.hook.call(0, {})
    steps.dispatch(1)
    assert not steps.wait(60)
    line = "process 0: no step finished for 61 s, limit 60 s; last step dispatched 1, finished 0"
    assert steps.wait(1) == line


def test_slow_steps_raise_the_limit_and_new_batch_sizes_compile(tmp_path):
    steps = Steps(tmp_path, step=60, compile=600)
    steps.train(0, 20, 12.0)
    steps.dispatch(20)
    assert not steps.wait(119)  # 10 x the median
    assert "limit 120 s" in steps.wait(2)
    steps.dispatch(100)  # while step 20 still runs
    assert not steps.wait(500)
    steps.hook.call(20, {})
    assert not steps.wait(99)
    assert "compiling for 601 s" in steps.wait(2)


def test_saving_has_a_limit_of_its_own_and_zero_is_none(tmp_path):
    steps = Steps(tmp_path, step=60, save=300)
    steps.train(0, 3, 1.0)
    with steps.watchdog.phase(SAVING):
        assert not steps.wait(299)
        assert "saving for 301 s" in steps.wait(2)
    assert not steps.wait(59)  # the step's time begins again
    steps = Steps(tmp_path, step=0)
    steps.train(0, 3, 1.0)
    assert not steps.wait(1e9)


def test_a_hang_waits_for_the_save_in_the_background(tmp_path, monkeypatch):
    steps, events = Steps(tmp_path, step=60), []
    steps.watchdog.wait_for_save = lambda: events.append("saved")
    monkeypatch.setattr(watchdog, "leave", lambda line, code: events.append((line, code)))
    steps.train(0, 3, 1.0)
    steps.dispatch(3)
    steps.watchdog.clock.now += 100
    failure = steps.watchdog.check()
    assert failure is not None
    steps.watchdog._end_hang(failure)
    line = f"error: {failure.line}; the same command resumes from the last checkpoint"
    assert events == ["saved", (line, RESTART_CODE)]
    stacks = tmp_path / "hangs" / "step_00000003_process_0.txt"
    assert stacks.read_text().startswith(f"{failure.line}\n") and "thread" in stacks.read_text()


def test_the_clock_stands_still_while_the_process_is_stopped():
    times = iter([0.0, TICK, 100.0, 100.0 + TICK])
    clock = RunningClock(lambda: next(times))
    clock.tick()
    clock.tick()  # after SIGCONT
    clock.tick()
    assert clock.now == pytest.approx(2 * TICK + 1.0)
    assert clock.stalled == pytest.approx(100 - 2 * TICK)


def test_short_stops_are_seen():
    """SIGSTOP for the first 60 % of every 100 ms; a tick that is due then comes at SIGCONT."""
    now = 0.0
    clock = RunningClock(lambda: now)
    while now < 10:
        now += TICK
        now += max(0.06 - now % 0.1, 0)
        clock.tick()
    assert 0.4 * now < clock.stalled < 0.6 * now


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ((0.01, 0.5, 0.02), 1),
        ((0.01, 0.011, 0.013), None),  # 30 % more of next to nothing
        ((0.5, 0.52, 0.51), None),
        ((0.5, 0.1), 0),
    ],
)
def test_the_process_that_the_others_wait_for_is_named(own, named, caplog):
    statuses = {
        i: {"busy_seconds": seconds, "data_wait_seconds": seconds / 2, "host": f"h{i}"}
        for i, seconds in enumerate(own)
    }
    others = types.SimpleNamespace(index=0, statuses=statuses, interval=1.0)
    clock = types.SimpleNamespace(stalled=0.0)
    dog = types.SimpleNamespace(peers=others, clock=clock, phase_seconds=0.0, own={})
    times = iter(range(100))
    hook = Stragglers(dog, 1.2, 2, lambda: next(times)).hook()  # pyright: ignore
    assert hook.before is not None
    caplog.set_level(logging.WARNING, logger="maxmeg")
    metrics = {"data_wait_seconds": 0.25}
    for step in range(3):
        hook.before(step)
        hook.call(step, metrics)
    assert dog.busy == {"busy_seconds": 1.0, "data_wait_seconds": 0.25}  # of 2 s per step
    assert metrics["slowest_process"] == max(range(len(own)), key=own.__getitem__)
    slow = [record.getMessage() for record in caplog.records]
    assert len(slow) == (named is not None)
    for text in slow:
        assert f"process {named} (h{named}) is slow" in text
        assert f"{max(own) / 2:.3g} s of them waiting for data" in text


def test_processes_on_this_host_are_looked_up(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    status = {**peers._identity(), "pid": child.pid}
    _, status["began"] = peers._state_and_start(child.pid)
    assert peers._state(status) == "running"
    assert peers._state({**status, "began": "1"}) == "gone"  # its number has been used again
    assert peers._state({**status, "space": "other"}) == ""  # another host or container
    child.communicate()
    assert peers._state(status) == "gone"
    assert peers._state({**peers._identity(), "pid": os.getpid()}) == "running"


def test_invalid_limits_are_refused():
    assert not list(watchdog_problems(WatchdogConfig(step=0, silence=0, straggler=0)))
    wrong = WatchdogConfig(step=-1, silence=1, straggler=-1.0)
    names = [problem.split("=")[0] for problem in watchdog_problems(wrong)]
    assert names == ["watchdog.step", "watchdog.silence", "watchdog.straggler"]
