"""Processes that are killed, stopped, hang or fail: the others end soon and say which and why.

Real processes, signals and networks. The program has the watchdog and the collectives of a training
run, but no model: it starts in a few seconds.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxmeg.runtime.faults.peers import RESTART_CODE

REPOSITORY = Path(__file__).parents[2]
SECONDS = 240
PROGRAM = """
import itertools, os, signal, subprocess, sys, time
import jax
from maxmeg.config.schema import Config
from maxmeg.config.schema import WatchdogConfig
from maxmeg.parallel import multihost
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


def enter(process: subprocess.Popen, *kinds: str) -> list[str]:
    """How a command begins that runs in the namespaces of a process."""
    return ["nsenter", f"--target={process.pid}", "--user", "--preserve-credentials", *kinds]


class Hosts:
    """Two network namespaces, 10.0.0.1 and 10.0.0.2, that are joined by a cable.

    A user namespace owns them, so that this needs no rights. All ends with their processes.
    Methods raise OSError where the kernel does not permit it.
    """

    def __init__(self):
        self._processes: list[subprocess.Popen] = []

    def create(self) -> None:
        owner = self._hold([], "--user", "--map-root-user")
        kinds = ("--net", "--uts")
        hosts = [self._hold(enter(owner), *kinds) for _ in range(2)]
        self._enter = [enter(host, *kinds) for host in hosts]
        self.call(0, f"ip link add net type veth peer name net netns {hosts[1].pid}")
        for host in range(2):
            self.call(host, f"hostname 10.0.0.{host + 1}")  # gloo listens there
            self.call(host, f"ip address add 10.0.0.{host + 1}/24 dev net")
            self.call(host, "ip link set net up")
            self.call(host, "ip link set lo up")

    def _hold(self, prefix: list[str], *kinds: str) -> subprocess.Popen:
        """Start a process that only holds new namespaces."""
        process = subprocess.Popen(
            [*prefix, "unshare", *kinds, "sh", "-c", "echo; read _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            raise OSError(process.stderr.read().strip())
        return process

    def call(self, host: int, command: str) -> None:
        done = subprocess.run(
            [*self._enter[host], *command.split()], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")

    def start(self, host: int, command: list[str], **environment: str) -> subprocess.Popen:
        """Start a command with process numbers of its own, as on another machine."""
        process = subprocess.Popen(
            [*self._enter[host], "unshare", "--pid", "--fork", "--kill-child", *command],
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def cut(self) -> None:
        """From now on frames go to an address that nobody has: nothing is refused or reset."""
        for host in range(2):
            nobody = f"ip neighbour replace 10.0.0.{2 - host} lladdr 02:00:00:00:00:99 dev net"
            self.call(host, f"{nobody} nud permanent")

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.communicate()


@pytest.fixture
def hosts():
    commands = ("ip", "hostname", "unshare", "nsenter")
    if missing := [name for name in commands if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install iproute2 hostname util-linux")
    hosts = Hosts()
    try:
        try:
            hosts.create()
        except OSError as error:
            pytest.skip(f"needs network namespaces: run as root, outside of containers: {error}")
        yield hosts
    finally:
        hosts.close()


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        (KILL, 0),
        pytest.param(KILL, 1, marks=pytest.mark.slow),
        pytest.param(STOP, 0, marks=pytest.mark.slow),
        pytest.param(STOP, 1, marks=pytest.mark.slow),
    ],
    ids=["killed-0", "killed-1", "stopped-0", "stopped-1"],
)
def test_a_process_that_is_gone_is_named_by_the_other(tmp_path, fault, faulty):
    """Process 0 is like any other, though JAX's coordinator belongs to it."""
    stopped = fault == STOP
    code, err = run(tmp_path, faulty, fault, grace=1 if stopped else 30, silence=2)
    assert code == (RESTART_CODE if stopped else 128 + signal.SIGKILL), err
    line = next((s for s in err.splitlines() if s.startswith(f"[{1 - faulty}] error: ")), "")
    assert f"process {faulty} (" in line and "; last heartbeat: training, step " in line, err
    if stopped:
        assert "it is stopped (SIGSTOP or a debugger)" in line
        assert f"launch/local.py: rank {1 - faulty} ended with exit code {RESTART_CODE}" in err
    else:
        assert "was killed or has crashed" in line
        assert f"launch/local.py: rank {faulty} was killed by SIGKILL" in err
    assert "*** Check failure stack trace" not in err


@pytest.mark.parametrize("faulty", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_exception_in_one_process_ends_all(tmp_path, faulty):
    code, err = run(tmp_path, faulty, "if step == 10: raise KeyError('lost')")
    assert code == 1, err
    lines = err.splitlines()
    assert "KeyError: 'lost'" in [line.removeprefix(f"[{faulty}] ") for line in lines]
    assert lines[-1] == f"[{1 - faulty}] error: process {faulty} failed: KeyError: 'lost'", err


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


@pytest.mark.slow
def test_processes_that_a_network_no_longer_joins_end_and_name_each_other(tmp_path, hosts):
    text = program(1, "if step == 10: print('cut', flush=True)", silence=2)
    processes = [
        hosts.start(
            rank,
            [sys.executable, "-c", text, str(tmp_path)],
            MAXMEG_COORDINATOR="10.0.0.1:61440",
            MAXMEG_NUM_PROCESSES="2",
            MAXMEG_PROCESS_ID=str(rank),
            JAX_PLATFORMS="cpu",
            XLA_FLAGS="--xla_force_host_platform_device_count=1",
        )
        for rank in range(2)
    ]
    reached = "cut\n" in iter(processes[1].stdout.readline, "")
    hosts.cut()
    errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    assert reached, errors
    assert [process.returncode for process in processes] == [RESTART_CODE] * 2, errors
    lines = [text.splitlines()[-1] for text in errors]
    where = r"last heartbeat: training, step \d+\)"
    cause = r"or its host or network is down; the same command resumes from the last checkpoint"
    silent = rf"error: process 1 \(10.0.0.2, pid \d+; {where} has not answered for \d+ s: .*{cause}"
    assert re.fullmatch(silent, lines[0]), errors[0]
    silent = rf"error: process 0 \(10.0.0.1, pid \d+; {where} and the coordinator there .*{cause}"
    assert re.fullmatch(silent, lines[1]), errors[1]
    stacks = sorted(tmp_path.glob("hangs/step_*_process_*.txt"))
    assert len(stacks) == 2 and all("in main" in path.read_text() for path in stacks)
