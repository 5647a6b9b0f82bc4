"""Tokens per second, TFLOP/s and MFU of each step."""

import contextlib
import time
from collections.abc import Callable, Iterator

from maxmeg.runtime.metrics.hooks import Hook, Metrics


class Throughput:
    """Adds step_seconds, tokens_per_second, tflops_per_device and mfu to a step's metrics.

    A step takes the time between the arrivals of its metrics and the previous step's. The first
    step of a process compiles and gets no metrics. mfu: percent of `peak_tflops`; left out if None.
    """

    def __init__(
        self,
        tokens_of: Callable[[int], int],
        flops_of: Callable[[int], float],
        num_devices: int,
        peak_tflops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens_of, self._flops_of = tokens_of, flops_of
        self._num_devices, self._peak_tflops = num_devices, peak_tflops
        self._clock = clock
        self._arrival: float | None = None
        self._paused = 0.0

    def __call__(self, step: int, metrics: Metrics) -> None:
        now = self._clock()
        if self._arrival is not None:
            seconds = max(now - self._arrival - self._paused, 1e-9)
            tflops = self._flops_of(step) / seconds / 1e12 / self._num_devices
            metrics["step_seconds"] = seconds
            metrics["tokens_per_second"] = self._tokens_of(step) / seconds
            metrics["tflops_per_device"] = tflops
            if self._peak_tflops:
                metrics["mfu"] = 100 * tflops / self._peak_tflops
        self._arrival, self._paused = now, 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the `with` block, such as a validation."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def hook(self) -> Hook:
        """Put it before the hooks that write or print metrics."""
        return Hook(self)
