"""Console output of a run: a line every few steps, and on a terminal a live progress bar."""

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from maxmeg.runtime.metrics.hooks import Hook, Metrics

_RATES = ("tokens_per_second", "tflops_per_device", "mfu")
_MIN_WAIT = 0.005  # fraction of the time; a shorter wait for data is not shown


class Progress:
    """Prints a line every `every` steps, after each validation and at the end.

    Rates are means over the steps since the previous line. Missing metrics are left out.
    """

    def __init__(
        self,
        num_steps: int,
        start_step: int = 0,
        every: int = 10,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._num_steps, self._start_step, self._every = num_steps, start_step, every
        self._file = file or sys.stdout
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._seconds, self._waited, self._sums = 0.0, 0.0, dict.fromkeys(_RATES, 0.0)
        self._bar, self._task = None, None  # on a terminal, once the first step is dispatched

    def hook(self) -> Hook:
        """Put it after the hooks that add metrics."""
        return Hook(self, before=self._before, close=self.close)

    def __call__(self, step: int, metrics: Metrics) -> None:
        now = self._clock()
        self._first = self._first or (step, now)
        seconds = metrics.get("step_seconds", 0.0)
        self._seconds += seconds
        self._waited += metrics.get("data_wait_seconds", 0.0) if seconds else 0.0
        for name in _RATES:
            self._sums[name] += metrics.get(name, 0.0) * seconds
        last = step == self._num_steps - 1
        due = self._every > 0 and step % self._every == 0
        left = self._time_left(step, now, *self._first)
        if due or last or step == self._start_step or "validation_loss" in metrics:
            self._print(self._line(step, metrics, left))
            self._seconds, self._waited, self._sums = 0.0, 0.0, dict.fromkeys(_RATES, 0.0)
        if self._bar is not None and self._task is not None:
            text = f"loss {metrics['loss']:.4f}" if "loss" in metrics else "training"
            self._bar.update(self._task, completed=step + 1, text=text, left=left)

    def close(self) -> None:
        """Remove the live bar; the lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _before(self, step):
        if step > self._start_step or self._bar is not None or not self._file.isatty():
            return
        from rich import console, progress

        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            progress.BarColumn(None),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[left]}", markup=False),
            console=console.Console(file=self._file),
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._bar.add_task(
            "", total=self._num_steps, completed=step, text="compiling the step", left=""
        )
        self._bar.start()

    def _print(self, line):
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._file, flush=True)

    def _time_left(self, step, now, first, begin):
        if step == first or step >= self._num_steps - 1:
            return ""
        seconds = (now - begin) / (step - first) * (self._num_steps - 1 - step)
        return f"{duration(seconds)} left"

    def _line(self, step, metrics, left):
        parts = [f"step {step:>{len(str(self._num_steps))}}"]
        for name, label, layout in (
            ("loss", "loss", ".4f"),
            ("validation_loss", "validation", ".4f"),
            ("validation_loss_per_byte", "per byte", ".4f"),
            ("learning_rate", "lr", ".2e"),
            ("grad_norm", "grad", ".3f"),
        ):
            if name in metrics and not (name.endswith("_per_byte") and _tokens_are_bytes(metrics)):
                parts.append(f"{label} {metrics[name]:{layout}}")
        if self._seconds:
            tokens, tflops, mfu = (self._sums[name] / self._seconds for name in _RATES)
            parts.append(f"{quantity(tokens)} tok/s")
            parts.append(f"{tflops:.3g} TFLOP/s")
            if mfu:
                parts.append(f"MFU {mfu:.1f}%")
            if self._waited > _MIN_WAIT * self._seconds:
                parts.append(f"data wait {100 * self._waited / self._seconds:.0f}%")
        if "peak_memory_gib" in metrics:
            parts.append(f"peak {metrics['peak_memory_gib']:.1f} GiB")
        return "  ".join([*parts, left]).rstrip()


def _tokens_are_bytes(metrics: Metrics) -> bool:
    """Whether tokens are bytes, except for ends of documents: then the two losses are equal."""
    return metrics["validation_loss_per_byte"] > 0.99 * metrics.get("validation_loss", math.inf)


def duration(seconds: float) -> str:
    """'42s', '3m 05s', '2h 10m' or '3d 04h'."""
    seconds = round(seconds)
    for size, unit, small, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // small:02}{name}"
    return f"{seconds // 60}m {seconds % 60:02}s" if seconds >= 60 else f"{seconds}s"


def memory_size(number: float) -> str:
    """Bytes as '29.7 GiB', or below 0.1 GiB as '41.2 MiB'."""
    big = abs(number) >= 2**30 / 10
    return f"{number / 2**30:,.1f} GiB" if big else f"{number / 2**20:.1f} MiB"


def quantity(number: float) -> str:
    """Three digits and a suffix: 950, 12.3k, 4.57M."""
    for suffix in ("", "k", "M", "B"):
        if abs(number) < 999.5:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}T"
