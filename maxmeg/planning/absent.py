"""JAX devices for GPUs that this machine does not have, to compile for."""

import ctypes
import importlib.metadata
import importlib.resources

from jax.experimental import topologies

from maxmeg.planning.hardware import GPUS_A_NODE, parse_cluster

EXTRA = "pip install 'maxmeg[plan]'"
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def hardware_names() -> list[str]:
    """Names of the GPUs to compile for: "a100", "b200", ..."""
    files = importlib.resources.files("maxmeg.planning").joinpath("targets").iterdir()
    return sorted(file.name.removesuffix(".txtpb") for file in files if "." in file.name)


def target_text(name: str) -> str:
    """XLA's description of a GPU, a GpuTargetConfigProto as text; ValueError for unknown names."""
    if name not in hardware_names():
        raise ValueError(f"unknown hardware {name!r}: choose from {', '.join(hardware_names())}")
    file = importlib.resources.files("maxmeg.planning").joinpath("targets", f"{name}.txtpb")
    return file.read_text(encoding="utf-8")


def absent_gpus(name: str, count: int) -> list:
    """`count` GPUs, eight per node, in rank order.

    The process must have been started with `absent_environment()`. ValueError for an unknown
    name, a count without whole nodes, and a missing plugin or one of another version.
    """
    target = target_text(name)
    parse_cluster(f"{name}x{count}")
    check_plugins()
    layout = f"{-(-count // GPUS_A_NODE)}x1x{min(count, GPUS_A_NODE)}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=layout)
    return list(topology.devices)


def check_plugins() -> None:
    """ValueError unless the wheels that compile for CUDA are installed, in jaxlib's version."""
    jaxlib = importlib.metadata.version("jaxlib")
    for wheel in _PLUGINS:
        try:
            version = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                f"{wheel} is not installed; compiling for GPUs needs it: {EXTRA}"
            ) from None
        if version != jaxlib:
            raise ValueError(
                f"{wheel} {version} does not fit jaxlib {jaxlib}: pip install '{wheel}=={jaxlib}'"
            )


def has_cudnn() -> bool:
    """Whether cuDNN can be loaded; the plugin has already loaded that of a wheel."""
    try:
        ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return False
    return True
