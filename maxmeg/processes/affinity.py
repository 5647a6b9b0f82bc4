"""The CPUs near the GPUs of a process: those of the NUMA nodes that the GPUs are attached to."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")  # a folder per GPU, named by its PCI address
PCI = Path("/sys/bus/pci/devices")


def bind_near_gpus(
    local_device_ids: Sequence[int] | None,
    environ: Mapping[str, str],
    gpus: Path = GPUS,
    pci: Path = PCI,
) -> set[int]:
    """Bind this process, and the threads that it starts later, to the CPUs near its GPUs.

    It stays within the CPUs that it may use already. local_device_ids: numbers of its GPUs among
    the visible ones; None: they have not been divided here, and nothing is bound. Returns the CPUs;
    none where Linux or NVIDIA's driver do not say them, and then nothing changes either.
    """
    cpus = cpus_near(local_device_ids or (), environ, gpus, pci)
    if cpus := cpus & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
    return cpus


def cpus_near(
    local_device_ids: Sequence[int], environ: Mapping[str, str], gpus: Path, pci: Path
) -> set[int]:
    """Return the CPUs near these GPUs, as in `bind_near_gpus`.

    CUDA numbers GPUs that are alike by their PCI addresses. A job that sees only a part of the
    node's GPUs may number them from 0, so that their addresses are unknown: no CPUs.
    """
    addresses = sorted(path.name for path in gpus.glob("*"))
    order = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(addresses)))))
    numbers = [int(word) for word in order.split(",") if word.isdecimal()]
    if sorted(numbers) != list(range(len(addresses))):
        return set()
    cpus: set[int] = set()
    for device in local_device_ids:
        path = pci / addresses[numbers[device]] / "local_cpulist" if device < len(numbers) else None
        if path is None or not path.is_file():
            return set()
        cpus |= cpus_of(path.read_text())
    return cpus


def cpus_of(text: str) -> set[int]:
    """'0-3,8' is {0, 1, 2, 3, 8}."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for low, _, high in spans for cpu in range(int(low), int(high or low) + 1)}
