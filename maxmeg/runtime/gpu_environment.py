"""Environment variables that a process sets before JAX starts its GPUs."""

import os
from collections.abc import Mapping

from maxmeg.runtime.platform import choose_platform

# Share of a GPU's memory that XLA preallocates as its pool; XLA's default is 0.75. Arrays, the
# step's temporaries and cuDNN's workspaces come from the pool. The CUDA context, loaded kernels
# and NCCL's buffers lie outside: 0.08 leaves them 6 GiB on an 80 GB GPU. The planner counts on the
# same share, so that a plan that fits fits the pool.
MEMORY_FRACTION = 0.92
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


# XLA then takes no atomic additions (scatters are sorted and summed in a fixed order), cuDNN's
# deterministic backward and untuned products: tuning could choose others when a run restarts.
DETERMINISTIC = "--xla_gpu_deterministic_ops"
NCCL_ALGORITHMS = "^NVLS,NVLSTree"  # sums inside of NVLink switches have no fixed order


def gpu_environment(environ: Mapping[str, str], deterministic: bool = False) -> dict[str, str]:
    """Variables to add to `environ` for a process on GPUs; what the user has set is left alone.

    ValueError where XLA_FLAGS say no to `deterministic`.
    """
    added = {}
    if not any(environ.get(name) for name in _FRACTION_NAMES):  # JAX refuses both names together
        added[_FRACTION_NAMES[0]] = str(MEMORY_FRACTION)
    if deterministic:
        added["XLA_FLAGS"] = deterministic_flags(environ.get("XLA_FLAGS", ""))
        added["NCCL_ALGO"] = environ.get("NCCL_ALGO") or NCCL_ALGORITHMS
    return added


def deterministic_flags(flags: str) -> str:
    """XLA_FLAGS with the flag for deterministic programs; ValueError where they set it false."""
    named = [flag for flag in flags.split() if flag.split("=")[0] == DETERMINISTIC]
    if any(flag.endswith(("=false", "=0")) for flag in named):
        raise ValueError(
            f"train.deterministic=true contradicts {named[-1]} in XLA_FLAGS: remove one of the two"
        )
    return flags if named else f"{flags} {DETERMINISTIC}=true".strip()


def set_gpu_environment(deterministic: bool = False) -> None:
    """Add `gpu_environment` to this process's environment; call before the first use of a device.

    deterministic: as train.deterministic. Without a GPU JAX takes the CPU; ValueError where
    JAX_PLATFORMS asks for CUDA all the same.
    """
    choose_platform()
    os.environ.update(gpu_environment(os.environ, deterministic))
