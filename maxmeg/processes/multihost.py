"""Connects the processes of a job, from the variables of its launcher.

Recognized, in this order: `launch/local.py` (MAXMEG_COORDINATOR, MAXMEG_NUM_PROCESSES,
MAXMEG_PROCESS_ID), Open MPI, a Slurm step, and the same three variables with the prefix JAX_.
JAX detects Slurm and Open MPI too, but gives each process the one GPU of its local rank. Here the
GPUs of a node are divided among its processes, so that a single process per node has all of them.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed  # no public access to the key-value store

from maxmeg.config.validate import VIRTUAL_DEVICES
from maxmeg.processes.affinity import bind_near_gpus
from maxmeg.processes.coordinator import Coordinator

FIRST_PORT = 61440  # of the last 4096 ports, which JAX uses for its coordinator as well
NUM_PORTS = 4096
MOST_STEPS = 16  # of a Slurm job before it is requeued
CPU_THREADS = 4  # of XLA for each CPU device, of at least 8 devices
CPU_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler"
LINGER_SECONDS = 30  # the coordinator outlives the time in which the others notice a failure
HEARTBEAT_SECONDS = 100  # JAX's default; then JAX ends a run with a C++ stack trace
ALL, SRUN = "set all of them, or none", "start it with srun, or unset SLURM_STEP_NODELIST"
_on_shutdown = contextlib.ExitStack()  # closes the coordinator in process 0


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Address of the coordinator, number of this process, its GPUs (None: all visible ones)."""

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process id {self.process_id} is not in [0, {self.num_processes}): "
                "number the processes from 0 to one less than their count"
            )
        if not re.fullmatch(r".+:\d+", self.coordinator):
            raise ValueError(
                f"coordinator address {self.coordinator!r} is not HOST:PORT: "
                "name a host that every process reaches and a free port on it"
            )


def initialize(silence: float = 60.0) -> None:
    """Connect to the other processes of the job, once, before any other use of JAX.

    Binds a process that has a part of its node's GPUs to the CPUs near them.
    Does nothing without a known launcher, or if it started a single process. silence: seconds
    without an answer after which `runtime/faults/peers.py` considers a process dead.

    Raises:
      ValueError: a launcher's variables are incomplete or contradict each other, or the
        coordinator's port is in use.
    """
    if jax.distributed.is_initialized():
        return
    rendezvous = detect(os.environ)
    order_cpu_collectives(rendezvous is not None)
    if rendezvous is None:
        return
    bind_near_gpus(rendezvous.local_device_ids, os.environ)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    heartbeat = max(HEARTBEAT_SECONDS, int(2 * silence))
    options: dict[str, Any] = {}
    if rendezvous.process_id == 0:
        address = f"[::]:{rendezvous.coordinator.rpartition(':')[2]}"
        address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
        linger = silence + LINGER_SECONDS
        coordinator = Coordinator(address, rendezvous.num_processes, heartbeat, linger)
        _on_shutdown.callback(coordinator.close)
        # JAX always starts a service in process 0: leave it idle, on a port of its choice.
        options["coordinator_bind_address"] = "127.0.0.1:0"
    jax.distributed.initialize(
        rendezvous.coordinator,
        rendezvous.num_processes,
        rendezvous.process_id,
        local_device_ids=rendezvous.local_device_ids,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=heartbeat,
        **options,
    )


def order_cpu_collectives(several_processes: bool = False) -> None:
    """Keep collectives of CPU devices from deadlocks. Call it before JAX starts.

    XLA's default starts independent collectives at once, in an order that may differ between
    devices: then they deadlock, or sum the wrong arrays. Another scheduler orders them, except for
    one behind a loop, which may start during the loop. A waiting collective blocks a thread, and
    XLA has a thread per core or device: then all may wait for one that has no thread to start in.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not several_processes and VIRTUAL_DEVICES not in flags:
        return
    if CPU_SCHEDULER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {CPU_SCHEDULER}=false".strip()
    devices = re.findall(rf"{VIRTUAL_DEVICES}=(\d+)", flags)[-1:] or ["1"]
    threads = max(os.cpu_count() or 1, CPU_THREADS * max(8, int(devices[0])))
    os.environ.setdefault("NPROC", str(threads))


def use_one_process() -> None:
    """As `order_cpu_collectives`; ValueError if a launcher has started several processes."""
    if rendezvous := detect(os.environ):
        raise ValueError(
            f"this command runs in one process, and the launcher has started "
            f"{rendezvous.num_processes}: start one. In several run maxmeg train, serve and replay"
        )
    order_cpu_collectives()


def is_primary() -> bool:
    """Whether this is process 0, which writes files; call it after `initialize`."""
    return jax.process_index() == 0


def shutdown() -> None:
    """Wait for the other processes and disconnect; without others do nothing."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
        _on_shutdown.close()


def store() -> Any:
    """The client of the coordinator's key-value store. None in a run of one process."""
    return distributed.global_state.client


def rank() -> int:
    """This process's number; unlike jax.process_index, it does not start the devices."""
    return distributed.global_state.process_id


def size() -> int:
    """Number of processes of the run."""
    return distributed.global_state.num_processes


def leader_host() -> str:
    """Name or address of process 0's host, which runs the coordinator."""
    return str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")


def meet(name: str, seconds: float = 0.0) -> None:
    """Wait until every process has called this with the same name, at most once per name.

    seconds: limit; 0: a day. Raises JaxRuntimeError when it has passed.
    """
    if (client := store()) is not None:
        client.wait_at_barrier(f"maxmeg/{name}", int(1000 * (seconds or 86400)))


def detect(environ: Mapping[str, str]) -> Rendezvous | None:
    """Read a launcher's environment; None if this is the only process."""
    # mpirun before Slurm: it passes on the Slurm variables of its own daemon.
    local = functools.partial(_from_variables, "MAXMEG_", "COORDINATOR")
    jax_names = functools.partial(_from_variables, "JAX_", "COORDINATOR_ADDRESS")
    readers = (local, _from_open_mpi, _from_slurm, jax_names)
    rendezvous = next((r for read in readers if (r := read(environ))), None)
    return rendezvous if rendezvous and rendezvous.num_processes > 1 else None


def _from_variables(prefix: str, coordinator: str, environ: Mapping[str, str]) -> Rendezvous | None:
    names = [prefix + name for name in (coordinator, "NUM_PROCESSES", "PROCESS_ID")]
    if not any(name in environ for name in names):
        return None
    _require(environ, names)
    count, number = (_integer(environ, name) for name in names[1:])
    return Rendezvous(environ[names[0]], count, number)


def _from_slurm(environ: Mapping[str, str]) -> Rendezvous | None:
    if "SLURM_STEP_NODELIST" not in environ:  # a login or batch shell: not started by srun
        return None
    layout = "SLURM_STEP_TASKS_PER_NODE"
    numbers = ("JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID")
    _require(environ, (*(f"SLURM_{name}" for name in numbers), layout), SRUN)
    tasks = _slurm_tasks_per_node(environ[layout])
    node = _integer(environ, "SLURM_NODEID")
    if node >= len(tasks):
        raise ValueError(
            f"SLURM_NODEID={node} has no entry in {layout}={environ[layout]!r}: start with srun"
        )
    step = _integer(environ, "SLURM_STEP_ID")
    if "SLURM_RESTART_COUNT" in environ:  # a requeued job: what it left behind may hold its port
        step += MOST_STEPS * _integer(environ, "SLURM_RESTART_COUNT")
    port = _port(environ, _integer(environ, "SLURM_JOB_ID"), step)
    host = _slurm_first_host(environ["SLURM_STEP_NODELIST"])
    return Rendezvous(
        environ.get("JAX_COORDINATOR_ADDRESS", f"{host}:{port}"),
        sum(tasks),  # SLURM_NTASKS is the job's in an interactive step
        _integer(environ, "SLURM_PROCID"),
        _local_device_ids(environ, _integer(environ, "SLURM_LOCALID"), tasks[node]),
    )


def _slurm_first_host(nodelist: str) -> str:
    """The first name in 'node[001-015,020],other', here node001."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host: start the program with srun"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _slurm_tasks_per_node(layout: str) -> list[int]:
    """'2(x3),1' is [2, 2, 2, 1]."""
    tasks = []
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE={layout!r} is not like '2(x3),1': start with srun"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _from_open_mpi(environ: Mapping[str, str]) -> Rendezvous | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    _require(environ, names)
    if (size := _integer(environ, "OMPI_COMM_WORLD_SIZE")) == 1:
        return None
    rank, local_rank, local_size = (_integer(environ, name) for name in names)
    return Rendezvous(
        environ.get("JAX_COORDINATOR_ADDRESS") or _open_mpi_coordinator(environ),
        size,
        rank,
        _local_device_ids(environ, local_rank, local_size),
    )


def _open_mpi_coordinator(environ: Mapping[str, str]) -> str:
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # '1531576320.0;tcp://10.96.0.1,10.1.0.1:34911'
    match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://(\[[^,\]]+))", uri)
    if match is None:
        raise ValueError(
            f"Open MPI tells no address of mpirun (OMPI_MCA_orte_hnp_uri={uri!r}; Open MPI 5 never "
            "does): run mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT, HOST being that of rank 0"
        )
    host = match[2] or match[3] + "]"
    return f"{host}:{_port(environ, int(match[1]) // 4096)}"


def _port(environ: Mapping[str, str], job: int, step: int = 0) -> int:
    if "JAX_COORDINATOR_PORT" in environ:
        return _integer(environ, "JAX_COORDINATOR_PORT")
    return FIRST_PORT + (job + 37 * step) % NUM_PORTS


def _local_device_ids(
    environ: Mapping[str, str], local_rank: int, local_size: int
) -> tuple[int, ...] | None:
    """This process's part of the node's GPUs; None if it may use all visible ones."""
    if local_size == 1 or "JAX_LOCAL_DEVICE_IDS" in environ:  # the latter is read by JAX
        return None
    on_node = environ.get("SLURM_GPUS_ON_NODE")
    ids = environ.get("CUDA_VISIBLE_DEVICES")
    visible = len([name for name in ids.split(",") if name]) if ids is not None else None
    if visible is not None and (visible < local_size or (on_node and visible < int(on_node))):
        return None  # the launcher has already divided the GPUs
    count = visible if visible is not None else int(on_node or local_size)
    if count % local_size:
        raise ValueError(
            f"{count} GPUs do not divide among the {local_size} processes of this node: "
            "start one process a node, or one a GPU"
        )
    share = count // local_size
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def _require(environ: Mapping[str, str], names: Sequence[str], remedy: str = ALL) -> None:
    if missing := [name for name in names if name not in environ]:
        present = {name: environ[name] for name in names if name in environ}
        raise ValueError(
            f"the launcher's environment is incomplete: {present} without {', '.join(missing)}: "
            f"{remedy} for a single process"
        )


def _integer(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ValueError(f"{name}={environ[name]!r} is not a whole number: set it to one")
    return int(environ[name])
