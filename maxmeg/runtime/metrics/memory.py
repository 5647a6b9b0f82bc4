"""Device memory: peak usage, and the memory that the compiled train step needs."""

from collections.abc import Callable, Sequence

import jax

from maxmeg.ops.backend import chosen_backends
from maxmeg.parallel.batch import Batch
from maxmeg.processes import multihost
from maxmeg.runtime.kernel_checks import check_chosen
from maxmeg.runtime.metrics.hooks import Hook, Metrics
from maxmeg.runtime.metrics.progress import memory_size
from maxmeg.runtime.screen import say

GIB = 2**30


class CompiledStep:
    """A jitted step that compiles before its first call with a batch of new shapes, once its
    kernels have been found right on a small case.

    Calls `report` with each compiled step. It compiles once per shape: the call finds the
    executable in JAX's cache. In a run of several processes, all wait until all have compiled.
    """

    def __init__(self, step: Callable, report: Callable[[jax.stages.Compiled], None]):
        self.jitted, self._report = step, report
        self._compiled: set[tuple] = set()

    def __call__(self, state, batch: Batch, controls: dict):
        self.compile(state, batch, controls)
        return self.jitted(state, batch, controls)

    def compile(self, state, batch: Batch, controls: dict) -> None:
        """Compile for the shapes of these arguments, unless done before; execute nothing."""
        arrays, structure = jax.tree.flatten(batch)
        shapes = (structure, *(array.shape for array in arrays))
        if shapes not in self._compiled:
            self._compiled.add(shapes)
            with chosen_backends() as chosen:
                lowered = self.jitted.lower(state, batch, controls)
            check_chosen(chosen)
            self._report(lowered.compile())
            # Processes that begin to communicate too far apart fail: gloo waits for 30 s.
            multihost.meet(f"compiled/{len(self._compiled)}")


def print_memory(compiled: jax.stages.Compiled) -> None:
    """Print on process 0 how much memory per device a compiled train step needs."""
    stats = compiled.memory_analysis()
    if not multihost.is_primary():
        return
    assert stats is not None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts = {
        "state": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes + outputs,
    }
    details = ", ".join(f"{name} {memory_size(size)}" for name, size in parts.items())
    say(f"{memory_size(sum(parts.values()))} per device: {details}", "compiled")


def memory_limit(devices: Sequence | None = None) -> int | None:
    """Bytes of the smallest memory pool of this process's devices; None on a CPU."""
    limits = [stats.get("bytes_limit", 0) for stats in _statistics(devices)]
    return min(filter(None, limits), default=None)


def peak_memory_hook(devices: Sequence | None = None) -> Hook:
    """Hook that adds peak_memory_gib to a step's metrics; put it before the hooks that write.

    It is the maximum over this process's devices since the process started. CPUs have no memory
    statistics and get no metric.
    """

    def call(step: int, metrics: Metrics) -> None:
        peaks = [stats["peak_bytes_in_use"] for stats in _statistics(devices)]
        if peaks:
            metrics["peak_memory_gib"] = max(peaks) / GIB

    return Hook(call)


def _statistics(devices: Sequence | None) -> list[dict[str, int]]:
    devices = jax.local_devices() if devices is None else devices
    return [stats for device in devices if (stats := device.memory_stats())]
