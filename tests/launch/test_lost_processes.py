"""Processes that are killed, stopped, hang or fail: the others end soon and say which and why.

Real processes and signals. A stopped process is as silent as one behind a cut network. The program
has the watchdog and the collectives of a training run, but no model: it starts in a few seconds.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxmeg.config.errors import RESTART_CODE

REPOSITORY = Path(__file__).parents[2]
SECONDS = 240
PROGRAM = """
import itertools, os, signal, subprocess, sys, time
import jax
from maxmeg.config.schema import Config
from maxmeg.config.schema import WatchdogConfig
from maxmeg.processes import multihost
from maxmeg.runtime.metrics.hooks import Hooks
from maxmeg.runtime.faults.peers import ending_together
from maxmeg.runtime.faults.stragglers import Stragglers
from maxmeg.runtime.faults.watchdog import Watchdog

def main(config):
    multihost.initialize(config.watchdog.silence)
    with Watchdog(config) as watchdog:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
        x = jax.make_array_from_callback((2,), rows, lambda index: jax.numpy.arange(2.0)[index])
        total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh,
                                      in_specs=jax.P("data"), out_specs=jax.P()))
        hooks = Hooks([watchdog.hook(lambda step: 1), Stragglers(watchdog, 1.2, 1).hook()])
        for step in itertools.count():
            hooks.before(step)
            if multihost.rank() == FAULTY:
                FAULT
            total(x).block_until_ready()
            hooks(step, {})
            time.sleep(SECONDS)
    multihost.shutdown()

config = Config(run_dir=sys.argv[1], watchdog=WatchdogConfig(**LIMITS))
ending_together(main)(config)
"""
STOP = "if step == 10: os.kill(os.getpid(), signal.SIGSTOP)"
KILL = "if step == 10: os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "if step == 10: raise KeyError('lost')"


# Stops a process for 60 % of every 100 ms until it has ended.
DUTY_CYCLE = "while kill -STOP $0; do sleep 0.06; kill -CONT $0; sleep 0.04; done"


def program(faulty: int, fault: str, pause: str = "0.1", **limits) -> str:
    """Source text in which process `faulty` executes the statement `fault` before each step.

    pause: seconds between two steps.
    """
    text = PROGRAM.replace("FAULTY", str(faulty)).replace("FAULT", fault)
    return text.replace("SECONDS", pause).replace("LIMITS", str(limits))


def run(folder: Path, faulty: int, fault: str, grace: float = 30, **options):
    """Exit code and stderr of two processes of `program`, started by launch/local.py."""
    command = [sys.executable, str(REPOSITORY / "launch" / "local.py"), "-n", "2"]
    command += ["--devices-per-process=1", f"--grace-seconds={grace}"]
    command += ["--", sys.executable, "-c", program(faulty, fault, **options), str(folder)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return done.returncode, done.stderr


GONE = "; last heartbeat: training, step "
# Fault -> seconds until the launcher kills the rest, exit code, what the other process says of the
# faulty one, and a line beside it.
FAULTS = {
    KILL: (30, 128 + signal.SIGKILL, f"{GONE}.*was killed or has crashed", "was killed by SIGKILL"),
    STOP: (1, RESTART_CODE, f"{GONE}.*it is stopped .SIGSTOP or a debugger", "exit code 75"),
    RAISE: (30, 1, "failed: KeyError: 'lost'$", "KeyError: 'lost'"),
}


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        (KILL, 0),
        (RAISE, 1),
        pytest.param(STOP, 0, marks=pytest.mark.slow),
        pytest.param(STOP, 1, marks=pytest.mark.slow),
    ],
    ids=["killed-0", "raises-1", "stopped-0", "stopped-1"],
)
def test_a_process_that_fails_ends_all_and_is_named_by_the_other(tmp_path, fault, faulty):
    """Process 0 is like any other, though JAX's coordinator belongs to it."""
    grace, code, named, beside = FAULTS[fault]
    actual, err = run(tmp_path, faulty, fault, grace, silence=2)
    assert actual == code, err
    line = next((s for s in err.splitlines() if s.startswith(f"[{1 - faulty}] error: ")), "")
    assert re.search(rf"process {faulty} .*{named}", line), err
    assert beside in err and "*** Check failure stack trace" not in err


@pytest.mark.slow
def test_a_slow_process_is_named_and_a_hang_ended_with_the_stacks_of_all_threads(tmp_path):
    fault = f"""if step == 10:
                    began = time.monotonic()
                    subprocess.Popen(["sh", "-c", "{DUTY_CYCLE}", str(os.getpid())])
                elif step > 10 and time.monotonic() > began + 6:
                    time.sleep(600)"""
    code, err = run(tmp_path, 1, fault, pause="0", step=5, silence=2)
    assert code == RESTART_CODE, err
    slow = [line for line in err.splitlines() if "is slow: outside of the compiled step" in line]
    assert slow and all(line.startswith("[0] process 1 (") for line in slow), err
    hang = r"no step finished for \d+ s, limit \d+ s; last step dispatched (\d+)"
    found = re.search(hang, err)
    assert found, err
    assert "behind: process" not in err and "no heartbeat" not in err  # both have dispatched it
    stacks = sorted(tmp_path.glob(f"hangs/step_{int(found[1]):08d}_process_*.txt"))
    assert len(stacks) == 2 and all("in main" in path.read_text() for path in stacks)
