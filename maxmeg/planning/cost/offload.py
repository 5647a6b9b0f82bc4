"""Bytes that are offloaded to pinned host memory, and the time of their transfers."""

from maxmeg.planning.cost.memory import activations, parameter_memory, unit_activations
from maxmeg.planning.cost.optimizer import host_master_bytes, is_halved
from maxmeg.planning.cost.workload import Workload
from maxmeg.planning.hardware import Cluster


def host_memory(work: Workload) -> dict[str, int]:
    """Bytes in host memory per GPU, by purpose; empty if nothing is offloaded."""
    device, both = parameter_memory(work), parameter_memory(work.on_device)
    parts = {
        "optimizer state": sum(both.values()) - sum(device.values()),
        "activations": activations(work.on_device) - activations(work),
    }
    return {name: size for name, size in parts.items() if size}


def sent_in_forward(work: Workload) -> int:
    """Bytes of activations per GPU that forward sends to the host in a step, and backward reads."""
    chunks = work.config.parallel.chunks
    units = zip(work.units, work.places, strict=True)
    each = sum(
        places * chunks * (unit_activations(work.on_device, unit) - unit_activations(work, unit))
        for unit, places in units
    )
    return work.microbatches * each


def offload_seconds(work: Workload, cluster: Cluster, forward: float, backward: float) -> float:
    """Seconds that transfers add to a step. Transfers of activations overlap with the `forward` and
    `backward` seconds of compute. A step begins with the copy of float32 masters in 16 bits; the
    optimizer's loop reads and then writes each layer."""
    if not (parts := host_memory(work)):
        return 0.0
    activation = sent_in_forward(work) / cluster.host_rate
    exposed = max(0.0, activation - forward) + max(0.0, activation - backward)
    copied = [s for s in work.shards if s.trained and not is_halved(work, s)]
    masters = sum(host_master_bytes(work, s) for s in copied) if work.config.optim.offload else 0
    return exposed + (masters + 2 * parts.get("optimizer state", 0)) / cluster.host_rate
