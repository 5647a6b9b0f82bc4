"""Environment variables that must be set before JAX starts its GPUs."""

import os
from collections.abc import Mapping

from maxmeg.runtime.platform import choose_platform

# Fraction of a GPU's memory that XLA preallocates as its pool; XLA's default is 0.75. Arrays, the
# step's temporaries and cuDNN's workspaces come from the pool. The CUDA context, loaded kernels
# and NCCL's buffers lie outside of it: 0.08 leaves them 6 GiB on an 80 GB GPU. The planner compares
# with the same fraction.
MEMORY_FRACTION = 0.92
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_ABSENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # a GPU of this machine must not be touched
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the plugin's wheel without CUDA's wheels
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # the report has the seconds to compile
}

# With it XLA uses no atomic additions (scatters are sorted and summed in a fixed order), cuDNN's
# deterministic backward, and untuned products: tuning may choose differently after a restart.
DETERMINISTIC = "--xla_gpu_deterministic_ops"
NCCL_ALGORITHMS = "^NVLS,NVLSTree"  # sums inside NVLink switches have no fixed order


def gpu_environment(environ: Mapping[str, str], deterministic: bool = False) -> dict[str, str]:
    """Variables to add to `environ` for a process on GPUs; never one that the user has set.

    ValueError if XLA_FLAGS contradict `deterministic`.
    """
    added = {}
    if not any(environ.get(name) for name in _FRACTION_NAMES):  # JAX refuses both names together
        added[_FRACTION_NAMES[0]] = str(MEMORY_FRACTION)
    if deterministic:
        added["XLA_FLAGS"] = deterministic_flags(environ.get("XLA_FLAGS", ""))
        added["NCCL_ALGO"] = environ.get("NCCL_ALGO") or NCCL_ALGORITHMS
    return added


def deterministic_flags(flags: str) -> str:
    """XLA_FLAGS with the flag for deterministic programs; ValueError if they set it to false."""
    named = [flag for flag in flags.split() if flag.split("=")[0] == DETERMINISTIC]
    if any(flag.endswith(("=false", "=0")) for flag in named):
        raise ValueError(
            f"train.deterministic=true contradicts {named[-1]} in XLA_FLAGS: remove one of the two"
        )
    return flags if named else f"{flags} {DETERMINISTIC}=true".strip()


def set_gpu_environment(deterministic: bool = False) -> None:
    """Add `gpu_environment` to this process's environment; call before the first use of a device.

    deterministic: as train.deterministic. Without a GPU, JAX uses the CPU; ValueError if
    JAX_PLATFORMS asks for CUDA nevertheless.
    """
    choose_platform()
    os.environ.update(gpu_environment(os.environ, deterministic))


def absent_environment(deterministic: bool = False) -> dict[str, str]:
    """Environment of a child process that compiles for GPUs that this machine does not have.

    deterministic: as train.deterministic.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    flags = deterministic_flags(flags) if deterministic else flags
    return {**os.environ, **_ABSENT, "XLA_FLAGS": flags}
