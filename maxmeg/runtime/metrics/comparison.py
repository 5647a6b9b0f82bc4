"""One page that compares runs: losses, learning rate and throughput from their metrics.jsonl."""

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Iterator, Sequence

from maxmeg.config.options import PlotAxis
from maxmeg.pages.chart import Chart, Curve
from maxmeg.pages.table import Table
from maxmeg.pages.templates import colour, render
from maxmeg.runtime.metrics.plots import METRICS_FILE, smooth
from maxmeg.runtime.metrics.progress import duration, quantity, tokens_are_bytes

_AXES = {  # label, and the metric that is read
    PlotAxis.step: ("step", "step"),
    PlotAxis.tokens: ("tokens", "consumed_tokens"),
    PlotAxis.seconds: ("seconds of training, without validation and saving", "step_seconds"),
}
_SETTLED = 0.02  # the loss of this first part of a run may lie above the chart


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The rows of a metrics.jsonl, and the place of each row on the x axis."""

    name: str
    rows: list[dict]
    xs: list[float]

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """(x, value) of the rows that have this metric."""
        points = [
            (x, row[metric])
            for x, row in zip(self.xs, self.rows, strict=True)
            if row.get(metric) is not None
        ]
        return [x for x, _ in points], [y for _, y in points]

    def last(self, metric: str) -> float | None:
        return next((y for y in reversed(self.curve(metric)[1])), None)


def read_run(folder: str, axis: PlotAxis) -> RunMetrics:
    """The metrics of a run folder; ValueError where there are none, or none of this axis."""
    path = os.path.join(folder, METRICS_FILE)
    if not os.path.isfile(path):
        raise ValueError(f"{folder} is not the folder of a run: it has no {METRICS_FILE}")
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.endswith("\n")]
    _, name = _AXES[axis]
    if not any(name in row for row in rows):
        raise ValueError(f"{path} has no {name}: choose another --x than {axis.value}")
    xs = [float(row.get(name) or 0.0) for row in rows]
    if axis is PlotAxis.seconds:
        xs = list(itertools.accumulate(xs))
    return RunMetrics(os.path.normpath(folder), rows, xs)


def comparison_html(runs: Sequence[RunMetrics], axis: PlotAxis, command: str) -> str:
    """The page. command: what wrote it."""
    title = ", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    charts = _charts(runs, _AXES[axis][0])
    return render("runs.html", title=title, command=command, runs=_table(runs), charts=charts)


def _charts(runs: Sequence[RunMetrics], label: str) -> Iterator[Chart]:
    """A chart of every metric that a run has."""
    curves, tops = [], []
    for index, run in enumerate(runs):
        xs, losses = run.curve("loss")
        means = smooth(losses)
        if len(runs) == 1:
            curves.append(Curve(run.name, colour(index), xs, losses, faint=True))
        curves.append(Curve(run.name, colour(index), xs, means))
        tops += means[int(_SETTLED * len(means)) :]
    yield Chart("Training loss", label, curves, max(tops, default=1.0))
    for title, metric in (
        ("Validation loss", "validation_loss"),
        ("Validation loss per byte", "validation_loss_per_byte"),
        ("Learning rate", "learning_rate"),
        ("Gradient norm", "grad_norm"),
        ("Tokens per second", "tokens_per_second"),
        ("MFU, percent", "mfu"),
        ("Peak memory, GiB", "peak_memory_gib"),
    ):
        curves, dots = [], metric.startswith("validation")
        for index, run in enumerate(runs):
            xs, values = run.curve(metric)
            if metric in ("grad_norm", "tokens_per_second", "mfu"):
                values = smooth(values)
            curves.append(Curve(run.name, colour(index), xs, values, dots=dots))
        same = metric == "validation_loss_per_byte" and all(map(_reads_bytes, runs))
        if any(curve.xs for curve in curves) and not same:
            yield Chart(title, label, curves)


def _reads_bytes(run: RunMetrics) -> bool:
    """Whether the tokens of a run are bytes: the two validation losses are then the same."""
    return all(tokens_are_bytes(row) for row in run.rows if "validation_loss_per_byte" in row)


def _table(runs: Sequence[RunMetrics]) -> Table:
    rows = []
    for run in runs:
        losses = smooth(run.curve("loss")[1])
        seconds, speeds = run.curve("step_seconds")[1], run.curve("tokens_per_second")[1]
        tokens = run.last("consumed_tokens")
        rows.append(
            [
                run.name,
                f"{run.rows[-1]['step']:,}",
                quantity(tokens) if tokens else "",
                _loss(losses[-1] if losses else None),
                _loss(run.last("validation_loss")),
                _loss(run.last("validation_loss_per_byte")),
                quantity(statistics.median(speeds)) if speeds else "",
                duration(sum(seconds)),
            ]
        )
    header = ["run", "steps", "tokens", "train loss", "val loss", "val per byte", "tok/s", "time"]
    return Table(header, rows, "wnnnnnnn", swatches=True)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
