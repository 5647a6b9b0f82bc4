"""Reading launchers' environments, in pure Python."""

import os

import pytest

from maxmeg.processes.multihost import (
    CPU_SCHEDULER,
    VIRTUAL_DEVICES,
    Rendezvous,
    detect,
    order_cpu_collectives,
    use_one_process,
)

LOCAL = {
    "MAXMEG_COORDINATOR": "127.0.0.1:1234",
    "MAXMEG_NUM_PROCESSES": "2",
    "MAXMEG_PROCESS_ID": "1",
}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-009,020],other",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SLURM_PORT = 61440 + (4100 + 37) % 4096


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),  # a batch shell
        (LOCAL, Rendezvous("127.0.0.1:1234", 2, 1)),
        (LOCAL | {"MAXMEG_NUM_PROCESSES": "1", "MAXMEG_PROCESS_ID": "0"}, None),
        (SLURM | LOCAL, Rendezvous("127.0.0.1:1234", 2, 1)),
        (
            SLURM | {"SLURM_RESTART_COUNT": "2"},
            Rendezvous(f"gpu007:{SLURM_PORT + 37 * 32}", 5, 3, (4, 5, 6, 7)),
        ),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "host:99",
                "JAX_NUM_PROCESSES": "3",
                "JAX_PROCESS_ID": "0",
            },
            Rendezvous("host:99", 3, 0),
        ),
        (SLURM, Rendezvous(f"gpu007:{SLURM_PORT}", 5, 3, (4, 5, 6, 7))),
        (
            SLURM | {"SLURM_STEP_NODELIST": "solo", "JAX_COORDINATOR_PORT": "99"},
            Rendezvous("solo:99", 5, 3, (4, 5, 6, 7)),
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": "127.0.0.[11-14]"},
            Rendezvous(f"127.0.0.11:{SLURM_PORT}", 5, 3, (4, 5, 6, 7)),
        ),
        (  # alone on its node: all its GPUs
            SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"},
            Rendezvous(f"gpu007:{SLURM_PORT}", 5, 4),
        ),
        (  # --gpus-per-task has bound them already
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            Rendezvous(f"gpu007:{SLURM_PORT}", 5, 3),
        ),
        (  # a shell of salloc, which has the job's number of tasks
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},
            None,
        ),
        (OPEN_MPI, Rendezvous("10.96.0.1:62880", 4, 2, (2,))),
        (SLURM | OPEN_MPI, Rendezvous("10.96.0.1:62880", 4, 2, (4, 5))),  # mpirun inside Slurm
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,fe80::2]:4"},
            Rendezvous("[fe80::1]:61441", 4, 2, (2,)),
        ),
        (
            without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri") | {"JAX_COORDINATOR_ADDRESS": "n:5"},
            Rendezvous("n:5", 4, 2, (2,)),
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_the_cluster_is_detected(environ: dict[str, str], expected: Rendezvous | None):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(LOCAL, "MAXMEG_PROCESS_ID"), "1234.*without MAXMEG_PROCESS_ID: set all"),
        (LOCAL | {"MAXMEG_PROCESS_ID": "2"}, r"process id 2 is not in \[0, 2\)"),
        (LOCAL | {"MAXMEG_PROCESS_ID": "one"}, "MAXMEG_PROCESS_ID='one' is not a whole number"),
        (LOCAL | {"MAXMEG_COORDINATOR": "host"}, "'host' is not HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "without JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        (without(SLURM, "SLURM_PROCID"), "without SLURM_PROCID: start it with srun, or"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is not like"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 has no entry"),
        (SLURM | {"SLURM_GPUS_ON_NODE": "3"}, "3 GPUs do not divide among the 2 processes"),
        (without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"), "mpirun -x JAX_COORDINATOR_ADDRESS"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "without OMPI_COMM_WORLD_RANK"),
    ],
)
def test_incomplete_environments_are_errors(environ: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        detect(environ)


def test_a_command_of_one_process_is_refused_in_several(monkeypatch):
    monkeypatch.setattr(os, "environ", LOCAL)
    with pytest.raises(ValueError, match="one process, and the launcher has started 2: start one"):
        use_one_process()


@pytest.mark.parametrize(
    ("flags", "several", "ordered", "threads"),
    [
        ("", False, False, None),
        ("", True, True, "32"),
        ("--xla_force_host_platform_device_count=8", False, True, "32"),
        (f"{VIRTUAL_DEVICES}=100", False, True, "400"),
        (f"{CPU_SCHEDULER}=true {VIRTUAL_DEVICES}=2", True, False, "32"),  # what is given wins
    ],
)
def test_cpu_devices_that_speak_are_ordered(monkeypatch, flags, several, ordered, threads):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    order_cpu_collectives(several)
    assert os.environ["XLA_FLAGS"].split() == flags.split() + [f"{CPU_SCHEDULER}=false"] * ordered
    assert os.environ.get("NPROC") == threads
    monkeypatch.setenv("NPROC", "3")
    order_cpu_collectives(several)
    assert os.environ["NPROC"] == "3"
