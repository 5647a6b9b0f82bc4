"""Check a machine or a job before training on it: maxmeg doctor, or under srun on all nodes.

    srun --ntasks-per-node=1 maxmeg doctor

Shows versions, environment variables, GPUs with their clocks and memory pools, the speed of a
matrix product and of a copy on every device, and the bandwidth of an all-reduce over all devices.
The exit code is 1 if a device is much slower than the others or than its datasheet.

    maxmeg doctor --kernels

Compares the results and gradients of every kernel with a reference, on one device. A run with a
backend that is wrong here stops, and backend=auto takes none. The exit code is 1 if one is wrong.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("doctor")

import dataclasses
import statistics
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxmeg.config.options import Doctor as Options
from maxmeg.ops import choices
from maxmeg.pages.table import aligned
from maxmeg.processes import multihost
from maxmeg.runtime.gpu_environment import set_gpu_environment
from maxmeg.runtime.kernel_checks import Check, cases, checks, line, write
from maxmeg.runtime.preflight import Speeds, all_reduce_gb, environment, kinds, slow_devices, speeds


def main(options: Options) -> None:
    set_gpu_environment()
    if options.kernels:
        check_kernels()
        return
    multihost.initialize()
    devices = jax.devices()
    matrix = options.matrix or (1024 if devices[0].platform == "cpu" else 8192)
    local = [speeds(device, matrix, options.size_mb) for device in jax.local_devices()]
    table = np.asarray([[each.tflops, each.copy_gb] for each in local])
    table = np.asarray(multihost_utils.process_allgather(table)).reshape(-1, 2)
    bandwidth = all_reduce_gb(options.size_mb) if len(devices) > 1 else None
    all_speeds = [Speeds(*row) for row in table.tolist()]
    problems = list(slow_devices(all_speeds, devices[0].device_kind))
    if multihost.is_primary():
        print("\n\n".join([*environment(), measured(all_speeds, bandwidth, devices[0])]))
        print("\n" + ("\n".join(f"problem: {each}" for each in problems) or "no problems found"))
    multihost.shutdown()
    if problems:
        raise SystemExit(1)


def check_kernels() -> None:
    """Print a line for each case and backend; on a GPU, write what was found after each, and before
    it that the backend has ended the process."""
    is_gpu, outcomes = jax.default_backend() == "gpu", []

    def announce(check: Check) -> None:
        if is_gpu:
            write([*outcomes, dataclasses.replace(check, problem="it ended the process")])

    choices.LOCAL.unlink(missing_ok=True)  # what it calls wrong is tried again
    for case in cases(32 if is_gpu else 1):
        for check in checks(case, announce):
            outcomes.append(check)
            print(line(check), flush=True)
    if is_gpu:
        print(f"written to {write(outcomes)}, for backend=auto")
    if problems := [check for check in outcomes if check.problem]:
        print(f"{len(problems)} of {len(outcomes)} checks are wrong")
        raise SystemExit(1)


def measured(speeds: list[Speeds], bandwidth: float | None, device: Any) -> str:
    """A table of the slowest and the median device, and the all-reduce."""
    rows = [["measured", "slowest", "median", "datasheet"]]
    for name, unit, values, peak in kinds(speeds, device.device_kind):
        numbers = [min(values), statistics.median(values)]
        rows.append([f"  {name}, {unit}", *(f"{x:,.4g}" for x in numbers), f"{peak or '-'}"])
    if bandwidth is not None:
        over = f"  all-reduce over {jax.device_count()}, GB/s"
        rows.append([over, "", f"{bandwidth:,.4g}", ""])
    return "\n".join(aligned(rows, right=3))
