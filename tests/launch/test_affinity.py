"""The CPUs that a process is bound to, on a machine with two sockets of four GPUs."""

from pathlib import Path

import pytest

from maxmeg.processes import affinity
from maxmeg.processes.affinity import bind_near_gpus, cpus_near, cpus_of

# As Linux lists the CPUs of a socket: its cores, then their second threads.
SOCKETS = ("0-27,56-83\n", "28-55,84-111\n")
FIRST, SECOND = ({*range(low, low + 28), *range(low + 56, low + 84)} for low in (0, 28))
ADDRESSES = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")  # those of an HGX H100
ALL = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture
def machine(tmp_path) -> tuple[Path, Path]:
    gpus, pci = tmp_path / "gpus", tmp_path / "pci"
    for number, bus in enumerate(ADDRESSES):
        address = f"0000:{bus}:00.0"
        (gpus / address).mkdir(parents=True)
        (pci / address).mkdir(parents=True)
        (pci / address / "local_cpulist").write_text(SOCKETS[number // 4])
    return gpus, pci


@pytest.mark.parametrize(
    ("devices", "environ", "expected"),
    [
        ((0,), ALL, FIRST),
        ((4,), ALL, SECOND),
        ((7,), {}, SECOND),
        ((2, 3), ALL, FIRST),
        ((3, 4), ALL, FIRST | SECOND),
        ((0,), {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}, SECOND),
        ((0,), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, set()),  # of which four?
        ((0,), {"CUDA_VISIBLE_DEVICES": "MIG-4be9"}, set()),
        ((8,), ALL, set()),
        ((), ALL, set()),
    ],
)
def test_cpus_are_those_of_the_gpus_sockets(machine, devices, environ, expected):
    assert cpus_near(devices, environ, *machine) == expected


def test_nothing_is_known_without_gpus_or_their_cpus(machine, tmp_path):
    gpus, pci = machine
    assert cpus_near((0,), {}, tmp_path / "none", pci) == set()
    assert cpus_near((0,), {}, gpus, tmp_path / "none") == set()


def test_lists_of_cpus():
    assert [cpus_of(text) for text in ("0-2,8\n", "5", "\n")] == [{0, 1, 2, 8}, {5}, set()]


@pytest.mark.parametrize(
    ("allowed", "devices", "bound"),
    [
        (FIRST | SECOND, (5,), SECOND),
        (set(range(40)), (5,), set(range(28, 40))),  # what the launcher allows
        (FIRST, (5,), None),  # nothing near: as it was
        (FIRST | SECOND, None, None),  # the launcher has chosen the GPU
    ],
)
def test_a_process_is_bound_within_its_cpus(machine, monkeypatch, allowed, devices, bound):
    calls = []
    monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda process: allowed)
    monkeypatch.setattr(affinity.os, "sched_setaffinity", lambda *call: calls.append(call))
    assert bind_near_gpus(devices, ALL, *machine) == (bound or set())
    assert calls == ([] if bound is None else [(0, bound)])
