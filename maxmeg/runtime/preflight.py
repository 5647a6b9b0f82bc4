"""What to know of a machine before a run: versions, settings, speeds of devices and links."""

import dataclasses
import functools
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxmeg.pages.table import aligned
from maxmeg.planning.hardware import gpu
from maxmeg.runtime.metrics.memory import memory_limit
from maxmeg.runtime.metrics.progress import memory_size

PACKAGES = ("maxmeg", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax")
PREFIXES = ("JAX_", "XLA_", "NCCL_", "MAXMEG_", "CUDA_VISIBLE_DEVICES")
QUERY = "index,name,driver_version,clocks.sm,clocks.max.sm,temperature.gpu,power.draw,power.limit"
REPEATS = 5
SLOW = 0.8  # a device below this fraction of the median device is reported
FAR_BELOW = 0.5  # and one below this fraction of its datasheet


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Of one device: TFLOP/s of a bfloat16 matrix product, GB/s read and written by a copy."""

    tflops: float
    copy_gb: float


def speeds(device: Any, matrix: int, size_mb: float) -> Speeds:
    """Measure one device. matrix: rows and columns; size_mb: MB (10^6 bytes) copied."""
    count = int(size_mb * 1e6 / 4)
    square = jax.device_put(jnp.ones((matrix, matrix), jnp.bfloat16), device)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16))
    array = jax.device_put(jnp.ones(count, jnp.float32), device)
    copy = jax.jit(lambda x: x + 1)
    return Speeds(
        2 * matrix**3 / seconds(lambda: product(square, square)) / 1e12,
        2 * 4 * count / seconds(lambda: copy(array)) / 1e9,
    )


def all_reduce_gb(size_mb: float) -> float:
    """Bus bandwidth of an all-reduce over all devices, GB/s, as nccl-tests define it.

    size_mb: MB (10^6 bytes) per device.
    """
    devices = jax.devices()
    n, count = len(devices), int(size_mb * 1e6 / 4)
    mesh, spec = Mesh(np.asarray(devices), ("all",)), PartitionSpec("all")
    sharding = NamedSharding(mesh, spec)
    ones = jax.jit(lambda: jnp.ones((n, count), jnp.float32), out_shardings=sharding)()
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    return 2 * (n - 1) / n * 4 * count / seconds(lambda: total(ones)) / 1e9


def seconds(run: Callable[[], jax.Array]) -> float:
    """Median seconds of a call that was compiled before."""
    run().block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def kinds(
    speeds: list[Speeds], device_kind: str
) -> list[tuple[str, str, list[float], float | None]]:
    """(measurement, unit, value of each device, value of the datasheet) of both measurements."""
    sheet = gpu(device_kind)
    peaks = (sheet.bf16_tflops, 1e3 * sheet.memory_tb_per_s) if sheet else (None, None)
    return [
        ("matrix product", "TFLOP/s", [each.tflops for each in speeds], peaks[0]),
        ("copy", "GB/s", [each.copy_gb for each in speeds], peaks[1]),
    ]


def slow_devices(speeds: list[Speeds], kind: str) -> list[str]:
    """A line for each device that is much slower than the others or than its datasheet."""
    lines = []
    for name, unit, values, peak in kinds(speeds, kind):
        median = statistics.median(values)
        for index, value in enumerate(values):
            if peak is None:  # CPU devices share cores: their speeds say little
                continue
            if value < SLOW * median:
                lines.append(f"device {index}: {name} {value:.4g} {unit}, median {median:.4g}")
            elif value < FAR_BELOW * peak:
                lines.append(f"device {index}: {name} {value:.4g} {unit}, datasheet {peak:.4g}")
    return lines


def environment() -> list[str]:
    """Blocks of text: versions, environment variables, what nvidia-smi says of the GPUs."""
    versions = [["versions", ""], ["  python", platform.python_version()]]
    versions += [[f"  {name}", version] for name in PACKAGES if (version := version_of(name))]
    names = sorted(name for name in os.environ if name.startswith(PREFIXES))
    variables = [["environment", ""], *([f"  {name}", os.environ[name]] for name in names)]
    devices = [
        ["devices", ""],
        ["  kind", f"{jax.device_count()} x {jax.devices()[0].device_kind}"],
        ["  processes", str(jax.process_count())],
        ["  host", f"{platform.node()}, {os.cpu_count()} CPU cores"],
    ]
    if limit := memory_limit():
        devices.append(["  memory pool", f"{memory_size(limit)} per device"])
    return ["\n".join(aligned(rows)) for rows in (versions, variables, devices)] + nvidia_smi()


def version_of(package: str) -> str:
    """The installed version; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvidia_smi() -> list[str]:
    """A block with driver, clocks, temperature and power of this host's GPUs; none without one."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [f"nvidia-smi failed: {(done.stderr or done.stdout).strip()}"]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    header = ["GPU", "name", "driver", "clock", "highest", "temperature", "power", "limit"]
    return ["\n".join(aligned([header, *rows]))]
