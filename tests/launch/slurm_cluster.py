"""A real Slurm cluster on this host: slurmctld and one slurmd per node, without munge."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# Names that JAX's coordinator address can be resolved from.
NODES = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
FIRST_PORT = 17001
UP_SECONDS = 60
ENDED_SECONDS = 40

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobRequeue=1
KillWait=5
SlurmdTimeout=10
MpiDefault=none
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def can_start() -> bool:
    """Whether Slurm's programs are installed and this user may start them."""
    return os.getuid() == 0 and all(shutil.which(name) for name in DAEMONS)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster and yield environment variables for its commands; ends what it started."""
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={FIRST_PORT + i} "
        f"CPUs=2 RealMemory=1000 Gres=gpu:8"
        for i, name in enumerate(NODES)
    )
    (folder / "state").mkdir()
    values = {"folder": folder, "host": host, "nodes": nodes, "first_job": os.getpid()}
    (folder / "slurm.conf").write_text(CONFIG.format(**values))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-7]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    commands = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    processes = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}-{command[-1]}.out", "w") as log:
                started = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            processes.append(started)
        wait_until(lambda: states(environment) == ["idle"] * len(NODES), UP_SECONDS)
        yield environment
    finally:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            cancel = ["scancel", "--signal=KILL", "--full", "--user=root"]
            subprocess.run(cancel, env=environment, timeout=20)
            subprocess.run(["scancel", "--user=root"], env=environment, timeout=20)
            wait_until(lambda: not queue(environment), ENDED_SECONDS)
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def lose_node(node: str) -> None:
    """Kill the daemon of a node and all processes on it, as a loss of power would."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            variables = (path / "environ").read_bytes().split(b"\0")
            daemon = words[0].endswith(b"slurmd") and node.encode() in words
            if daemon or f"SLURMD_NODENAME={node}".encode() in variables:
                os.kill(int(path.name), signal.SIGKILL)


def states(environment: dict[str, str]) -> list[str]:
    """State of each node, such as idle."""
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    return done.stdout.split()


def queue(environment: dict[str, str]) -> str:
    """The jobs that have not ended, a line each."""
    command = ["squeue", "--noheader"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    return done.stdout


def wait_until(holds, seconds: float) -> None:
    """Wait until `holds()`; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.2)
