"""Console output of a run: a line every few steps, and on a terminal a live progress bar."""

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from maxmeg.runtime.metrics.hooks import Hook, Metrics
from maxmeg.runtime.screen import width

_RATES = ("tokens_per_second", "tflops_per_device", "mfu")
_MIN_WAIT = 0.005  # fraction of the time; a shorter wait for data is not shown
# Left out in this order, until a line is short enough; all are in metrics.jsonl.
_LESS_IMPORTANT = ("TFLOP/s", "lr", "gnorm", "scale", "val/byte", "mem", "mfu", "eta")


class Progress:
    """Prints a line for every `every`-th step, for validations, for the first and the last step.

    Rates are means over all steps since the previous line, the loss over those that were not
    skipped. The line counts the skipped ones. Missing metrics are left out.
    """

    def __init__(
        self,
        num_steps: int,
        start_step: int = 0,
        every: int = 10,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """start_step: number of steps made before, by the run that is resumed."""
        self._num_steps, self._start_step, self._every = num_steps, start_step, every
        self._file = file or sys.stdout
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._bar, self._task = None, None  # on a terminal, once the first step is dispatched
        self._begin_line()

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
        self._skipped += bool(metrics.get("skipped"))
        if "loss" in metrics and not metrics.get("skipped"):
            self._losses.append(metrics["loss"])
        due = step % self._every == 0 or step in (self._start_step + 1, self._num_steps)
        left = self._time_left(step, now, *self._first)
        if due or "validation_loss" in metrics:
            self._print(self._line(step, metrics, left))
            self._begin_line()
        if self._bar is not None and self._task is not None:
            text = f"loss {metrics['loss']:.3f}" if "loss" in metrics else "training"
            self._bar.update(self._task, completed=step, text=text, left=left)

    def close(self) -> None:
        """Remove the live bar; the lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin_line(self):
        self._seconds, self._waited, self._sums = 0.0, 0.0, dict.fromkeys(_RATES, 0.0)
        self._losses: list[float] = []
        self._skipped = 0  # steps

    def _before(self, step):
        if step > self._start_step + 1 or self._bar is not None or not self._file.isatty():
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
            redirect_stderr=sys.stderr.isatty(),  # log lines are printed above the bar
        )
        self._task = self._bar.add_task(
            "", total=self._num_steps, completed=step - 1, text="compiling the step", left=""
        )
        self._bar.start()

    def _print(self, line):
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._file, flush=True)

    def _time_left(self, step, now, first, begin):
        if step == first or step >= self._num_steps:
            return ""
        return f"eta {duration((now - begin) / (step - first) * (self._num_steps - step))}"

    def _line(self, step, metrics, left):
        parts = self._parts(metrics) | ({"eta": left} if left else {})
        number = f"{step:>{len(str(self._num_steps))}}/{self._num_steps}"
        for name in ("", *_LESS_IMPORTANT):
            parts.pop(name, None)
            line = "  ".join([number, *parts.values()])
            if len(line) <= width():
                break
        return line

    def _parts(self, metrics) -> dict[str, str]:
        """The texts of a line after the step's number, in order."""
        parts = {}
        if "loss" in metrics:
            losses = self._losses or [metrics["loss"]]
            parts["loss"] = f"loss {sum(losses) / len(losses):.3f}"
        if "validation_loss" in metrics:
            parts["val"] = f"val {metrics['validation_loss']:.3f}"
        if "validation_loss_per_byte" in metrics and not tokens_are_bytes(metrics):
            parts["val/byte"] = f"val/byte {metrics['validation_loss_per_byte']:.3f}"
        for name, word in (("accuracy", "acc"), ("validation_accuracy", "val acc")):
            if name in metrics:
                parts[word] = f"{word} {100 * metrics[name]:.1f}%"
        if "learning_rate" in metrics:
            parts["lr"] = f"lr {brief(metrics['learning_rate'])}"
        if "grad_norm" in metrics:
            parts["gnorm"] = f"gnorm {metrics['grad_norm']:.3g}"
        if "loss_scale" in metrics:
            parts["scale"] = f"scale {power_of_two(metrics['loss_scale'])}"
        if self._skipped:
            parts["skipped"] = f"skipped {self._skipped}"
        if self._seconds:
            tokens, tflops, mfu = (self._sums[name] / self._seconds for name in _RATES)
            parts["tok/s"] = f"{quantity(tokens)} tok/s"
            if mfu:
                parts["mfu"] = f"mfu {mfu:.1f}%"
            elif tflops >= 1:
                parts["TFLOP/s"] = f"{tflops:.3g} TFLOP/s"
            if self._waited > _MIN_WAIT * self._seconds:
                parts["data wait"] = f"data wait {100 * self._waited / self._seconds:.0f}%"
        if "peak_memory_gib" in metrics:
            parts["mem"] = f"{metrics['peak_memory_gib']:.1f}GiB"
        return parts


def tokens_are_bytes(metrics: Metrics) -> bool:
    """Whether tokens are bytes, except for ends of documents: then the two losses are equal."""
    return metrics["validation_loss_per_byte"] > 0.99 * metrics.get("validation_loss", math.inf)


def duration(seconds: float) -> str:
    """'42s', '3m05s', '2h10m' or '3d04h'."""
    seconds = round(seconds)
    for size, unit, small, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // small:02}{name}"
    return f"{seconds // 60}m{seconds % 60:02}s" if seconds >= 60 else f"{seconds}s"


def brief(number: float) -> str:
    """Two digits with an exponent: 2.7e-3; 0 for zero."""
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if number else "0"


def power_of_two(number: float) -> str:
    """A loss scale: 2^16; the number itself if it is no power of two."""
    mantissa, exponent = math.frexp(number)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{number:.3g}"


def memory_size(number: float) -> str:
    """Bytes as '29.7 GiB', or below 1 GiB as '41.2 MiB'."""
    big = abs(number) >= 2**30
    return f"{number / 2**30:,.1f} GiB" if big else f"{number / 2**20:.1f} MiB"


def quantity(number: float) -> str:
    """Three digits and a suffix: 950, 12.3k, 4.57M."""
    for suffix in ("", "k", "M", "B"):
        if abs(number) < 999.5:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}T"
