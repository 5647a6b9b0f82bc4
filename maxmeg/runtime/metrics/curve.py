"""The loss curve as a picture."""

import itertools
import json
import os
import pathlib

_TRAIN, _VALIDATION, _INK = "#4c78a8", "#e4572e", "#333333"


def write_curve(
    metrics_path: str | os.PathLike, image_path: str | os.PathLike, title: str = ""
) -> None:
    """Plot loss and validation_loss of a metrics.jsonl into a PNG.

    Raises ValueError when the file holds no loss yet.
    """
    train, validation = _series(metrics_path, "loss"), _series(metrics_path, "validation_loss")
    if not train[0]:
        raise ValueError(f"{metrics_path} holds no loss: nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps, losses = train
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(losses), color=_TRAIN, linewidth=1.8, label="training")
    if validation[0]:
        axes.plot(
            *validation, color=_VALIDATION, marker="o", markersize=4, linewidth=1.2,
            label="validation",
        )  # fmt: skip
    _annotate_last(axes, *(validation if validation[0] else (steps, _smooth(losses))))
    low, high = min(losses + validation[1]), max(losses + validation[1])
    axes.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.05 * (high - low) + 1e-6)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss (nats per token)", color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(frameon=False)
    path = pathlib.Path(image_path)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)


def _series(path, name):
    steps, values = [], []
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row.get(name) is not None:
                steps.append(row["step"])
                values.append(row[name])
    return steps, values


def _smooth(values):
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
        ha="center",
        color=_INK,
        fontsize=9,
    )
