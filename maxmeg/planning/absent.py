"""JAX devices for GPUs that this machine does not have, to compile for."""

import contextlib
import ctypes
import importlib.metadata
import importlib.resources
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from jax.experimental import topologies

from maxmeg.planning.hardware import GPUS_A_NODE, parse_cluster

EXTRA = "pip install 'maxmeg[plan]'"
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")

# A plan needs no machine code. This assembler answers XLA and Mosaic as that of CUDA 13.0 does when
# they ask for its version and for that of PTX, and writes empty files.
_ASSEMBLER = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
--input-as-string) echo "Unsupported .version 99.99; current version is '9.0'" >&2; exit 255 ;;
*) while [ "$1" != -o ]; do shift; done; : > "$2" ;;
esac
"""
_DUMPS = ("xla_dump_to", "MOSAIC_GPU_DUMP_")  # whoever asks for them may read the assembler's


def target_text(name: str) -> str:
    """XLA's description of a GPU of a cluster, a GpuTargetConfigProto as text."""
    file = importlib.resources.files("maxmeg.planning").joinpath("targets", f"{name}.txtpb")
    return file.read_text(encoding="utf-8")


def absent_gpus(name: str, count: int) -> list:
    """`count` GPUs, eight per node, in rank order.

    The process must have been started with `absent_environment()`. ValueError for an unknown
    name, a count without whole nodes, and a missing plugin or one of another version.
    """
    parse_cluster(f"{name}x{count}")
    check_plugins()
    target, nodes = target_text(name), -(-count // GPUS_A_NODE)
    layout = f"{nodes}x1x{min(count, GPUS_A_NODE)}"
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


@contextlib.contextmanager
def without_assembler(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """`environ` with a `ptxas` that writes empty files, and without LLVM's optimization of kernels:
    half of compiling's CPU time goes into kernels that nothing runs.

    The real one stays if XLA or Mosaic is to dump files, and, after a warning, if no program can be
    executed in the folder for temporary files.
    """
    if any(word in text for word in _DUMPS for text in (*environ, environ.get("XLA_FLAGS", ""))):
        yield dict(environ)
        return
    with tempfile.TemporaryDirectory(prefix="maxmeg-") as folder:
        program = Path(folder, "bin", "ptxas")
        program.parent.mkdir()
        program.write_text(_ASSEMBLER, encoding="utf-8")
        program.chmod(0o700)
        if not os.access(program, os.X_OK):  # also where the folder is mounted with noexec
            warnings.warn(
                f"programs in {folder} cannot be executed, so the plan is compiled with the real "
                "ptxas, which takes longer: set TMPDIR to another folder",
                stacklevel=2,
            )
            yield dict(environ)
            return
        libdevice = Path(environ.get("CUDA_ROOT", ""), "nvvm")  # a wheel's is found without it
        if environ.get("CUDA_ROOT") and libdevice.is_dir():
            Path(folder, "nvvm").symlink_to(libdevice.resolve())
        path = os.pathsep.join([str(program.parent), environ.get("PATH", os.defpath)])
        flags = f"--xla_backend_optimization_level=0 {environ.get('XLA_FLAGS', '')}".strip()
        yield {**environ, "CUDA_ROOT": folder, "PATH": path, "XLA_FLAGS": flags}
