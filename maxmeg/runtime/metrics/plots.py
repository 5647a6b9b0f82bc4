"""Plots of a run: the loss curve and the load of experts, as PNG files."""

import io
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxmeg.data.corpus.stored import write_atomically
from maxmeg.runtime.metrics.hooks import Metrics

_TRAIN, _VALIDATION, _INK, _BALANCED = "#4c78a8", "#e4572e", "#333333", "#f7f4ee"
METRICS_FILE = "metrics.jsonl"
LOSSES = ("loss", "validation_loss")
Series = tuple[list[int], list[float]]
_MAX_LOAD = 2.0  # loads over the mean load from here on have the same colour


class LossPlot:
    """Writer that draws RUN_DIR/loss.png after every validation; put it after metrics.jsonl's.

    It reads metrics.jsonl at the first validation, and later remembers the losses itself.
    """

    def __init__(self, run_dir: str):
        self._run_dir, self._losses = run_dir, None

    def __call__(self, step: int, metrics: Metrics) -> None:
        if self._losses is not None:
            _add(self._losses, {**metrics, "step": step})
        if "validation_loss" not in metrics:
            return
        if self._losses is None:
            self._losses = series(os.path.join(self._run_dir, METRICS_FILE), LOSSES)
        if self._losses["loss"][0]:  # else every step so far was skipped
            _draw_losses(self._losses, _curve(self._run_dir), _title(self._run_dir))

    def close(self) -> None:
        pass


def write_plots(run_dir: str) -> dict[str, str]:
    """Plot what the run folder holds. Returns the paths of the PNG files by title, or why one could
    not be written."""
    plots = {"loss curve": _curve(run_dir)}
    loads = os.path.join(run_dir, "experts.json")
    try:
        plot_loss(os.path.join(run_dir, METRICS_FILE), _curve(run_dir), _title(run_dir))
        if os.path.exists(loads):
            plots["expert load"] = os.path.join(run_dir, "experts.png")
            plot_expert_load(loads, plots["expert load"], _title(run_dir))
    except OSError as error:
        plots[[*plots][-1]] = f"not drawn: {error}"
    return plots


def validation_words(run_dir: str) -> str:
    """The last validation's loss, also per byte where the tokenizer gives bytes; or ""."""
    names = ("validation_loss", "validation_loss_per_byte")
    curves = series(os.path.join(run_dir, METRICS_FILE), names)
    (steps, per_token), (_, per_byte) = (curves[name] for name in names)
    if not steps:
        return ""
    words = f"validation loss: {per_token[-1]:.4f} at step {steps[-1]}"
    if per_byte:
        words += f" ({per_byte[-1]:.4f} nats per byte, {per_byte[-1] / math.log(2):.3f} bits)"
    return words


def _title(run_dir: str) -> str:
    return os.path.basename(os.path.normpath(run_dir))


def _curve(run_dir: str) -> str:
    return os.path.join(run_dir, "loss.png")


def plot_loss(
    metrics_path: str | os.PathLike, image_path: str | os.PathLike, title: str = ""
) -> None:
    """Plot loss and validation_loss of a metrics.jsonl.

    Raises ValueError when the file holds no loss yet.
    """
    losses = series(metrics_path, LOSSES)
    if not losses["loss"][0]:
        raise ValueError(f"{metrics_path} holds no loss: nothing to plot")
    _draw_losses(losses, image_path, title)


def _draw_losses(curves: dict[str, Series], image_path: str | os.PathLike, title: str) -> None:
    train, validation = (curves[name] for name in LOSSES)
    figure, axes = _figure(4.5)
    steps, losses = train
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses), color=_TRAIN, linewidth=1.8, label="training")
    if validation[0]:
        axes.plot(
            *validation, color=_VALIDATION, marker="o", markersize=4, linewidth=1.2,
            label="validation",
        )  # fmt: skip
    _annotate_last(axes, *(validation if validation[0] else (steps, smooth(losses))))
    low, high = min(losses + validation[1]), max(losses + validation[1])
    axes.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.05 * (high - low) + 1e-6)
    _label(axes, "step", "loss (nats per token)", title)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(frameon=False)
    _save(figure, image_path)


def plot_expert_load(
    loads_path: str | os.PathLike, image_path: str | os.PathLike, title: str
) -> None:
    """Plot the file of `ExpertLoad`: one row per layer, one column per expert."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    measured = json.loads(pathlib.Path(loads_path).read_text(encoding="utf-8"))
    loads = np.array(measured["loads"])
    figure, axes = _figure(min(max(1.6 + 0.16 * len(loads), 2.6), 12))
    colours = LinearSegmentedColormap.from_list("load", ["#2b5c8a", _BALANCED, "#c8442b"])
    norm = TwoSlopeNorm(1.0, 0.0, _MAX_LOAD)
    image = axes.imshow(loads, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, extend="max", pad=0.02)
    bar.set_label("load / mean load", color=_INK)
    bar.set_ticks([0, 0.5, 1, 1.5, _MAX_LOAD])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    labels = dict(enumerate(measured["layers"]))
    axes.yaxis.set_major_formatter(lambda row, _: labels.get(round(row), ""))
    steps = f"steps {measured['first_step']}-{measured['last_step']}"
    _label(axes, "expert", "layer", f"{title}: load / mean load, {steps}, max {loads.max():.2f}")
    _save(figure, image_path)


def _figure(height: float):
    """(figure of 8 x `height` inches, its axes)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _label(axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=11)


def _save(figure, path: str | os.PathLike) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(pathlib.Path(path), image.getvalue())


def series(path: str | os.PathLike, names: Sequence[str]) -> dict[str, Series]:
    """(steps, values) of each of these metrics in a metrics.jsonl; nulls are left out."""
    curves: dict[str, Series] = {name: ([], []) for name in names}
    with open(path, encoding="utf-8") as file:
        for line in file:
            _add(curves, json.loads(line))
    return curves


def _add(curves: dict[str, Series], row: Mapping[str, Any]) -> None:
    for name, (steps, values) in curves.items():
        value = row.get(name)
        if value is not None and math.isfinite(value):
            steps.append(row["step"])
            values.append(value)


def smooth(values):
    """Centred mean over about a thirtieth of the run, narrower near its start."""
    sums = [0.0, *itertools.accumulate(values)]
    half, smooth = len(values) // 60, []
    for i in range(len(values)):
        reach = min(half, i)
        begin, end = i - reach, min(i + reach + 1, len(values))
        smooth.append((sums[end] - sums[begin]) / (end - begin))
    return smooth


def _annotate_last(axes, steps, values):
    axes.annotate(
        f"{values[-1]:.3f}",
        (steps[-1], values[-1]),
        xytext=(0, 10),
        textcoords="offset points",
        ha="right",
        color=_INK,
        fontsize=9,
    )
