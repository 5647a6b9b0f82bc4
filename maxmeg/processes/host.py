"""Pinned host memory: CPU memory that GPUs read and write directly."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HOST = "pinned_host"


class AbsentHostSharding(NamedSharding):
    """A sharding in pinned host memory for compilation without GPUs: topology devices list no
    memories, and jaxlib then drops the memory kind of a NamedSharding."""

    @property
    def memory_kind(self) -> str:
        return HOST

    def __hash__(self) -> int:
        return hash((HOST, self.mesh, self.spec))

    def __eq__(self, other) -> bool:
        same = isinstance(other, AbsentHostSharding)
        return same and (self.mesh, self.spec) == (other.mesh, other.spec)

    def __ne__(self, other) -> bool:
        return not self == other


def host_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The sharding of an array in pinned host memory. ValueError if the devices have none."""
    check_host_memory(mesh)
    sharding = NamedSharding(mesh, spec, memory_kind=HOST)
    return sharding if sharding.memory_kind else AbsentHostSharding(mesh, spec)


def check_host_memory(mesh: Mesh) -> None:
    """ValueError if the devices list their memories and pinned host memory is not among them."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kinds and HOST not in kinds:
        raise ValueError(
            f"offloading needs {HOST} memory, and {device.platform} devices have only "
            f"{', '.join(kinds)}: set optim.offload=false, and model.recompute without offload: "
            "(CUDA GPUs and CPUs have it)"
        )


def result_sharding(sharding: NamedSharding) -> NamedSharding:
    """A sharding that jax.jit accepts in out_shardings: without a memory kind for devices that are
    only compiled for."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=sharding.memory_kind)


def is_on_host(array) -> bool:
    return jax.typeof(array).memory_space is jax.memory.Space.Host


def to_device(tree):
    """Copy the arrays of `tree` that are in host memory to the device."""
    space = jax.memory.Space.Device
    return jax.tree.map(lambda a: jax.device_put(a, space) if is_on_host(a) else a, tree)


def to_memory_of(tree, like):
    """Copy each array of `tree` to the host if the array in its place in `like` is there."""

    def one(array, other):
        return jax.device_put(array, jax.memory.Space.Host) if is_on_host(other) else array

    return jax.tree.map(one, tree, like)
