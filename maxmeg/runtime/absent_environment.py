"""Environment of a process that compiles for GPUs that are not there."""

import os

from maxmeg.runtime.gpu_environment import deterministic_flags

_SET = {
    "CUDA_VISIBLE_DEVICES": "-1",  # a GPU that is here must not be touched
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the plugin's wheel alone, without CUDA's
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # seconds to compile are part of the report
}
_XLA_FLAGS = "--xla_gpu_autotune_level=0"  # nothing to measure on


def absent_environment(deterministic: bool = False) -> dict[str, str]:
    """This process's environment, with what must be set before JAX starts in a child.

    deterministic: as train.deterministic.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}".strip()
    flags = deterministic_flags(flags) if deterministic else flags
    return {**os.environ, **_SET, "XLA_FLAGS": flags}
