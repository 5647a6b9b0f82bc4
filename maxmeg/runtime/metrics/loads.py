"""How even the loads of experts are: numbers beside the other metrics, and a picture."""

import json
import logging
import os
import pathlib

import numpy as np

from maxmeg.config.model import ModelConfig
from maxmeg.layers.balance import DROPPED, LOSSES, TOKENS
from maxmeg.runtime.metrics.hooks import Hook

_log = logging.getLogger(__name__)
_INK, _EVEN = "#333333", "#f7f4ee"
_SHOWN = 2.0  # the load, over the mean, from which on colours do not change


class ExpertLoads:
    """Replaces the auxiliary values of layers with experts in a step's metrics by scalars.

    Every step: the largest load over the mean of its layer, the entropy over log(experts) as a mean
    over layers (1: even, 0: one expert has all), each loss without its coefficient, and the share
    of copies dropped. Every `every`-th step and at the last step: load, entropy and share of every
    layer; and into the file `path` the mean loads since the last such step.
    """

    def __init__(self, model: ModelConfig, num_steps: int, every: int, path: str = ""):
        self._num_steps, self._every, self._path = num_steps, every, path
        self._experts, self._sums = model.moe.num_experts, np.zeros(())
        self._names = [str(i) for i in range(model.num_layers) if "moe" in model.mixers(i)]
        if "moe" in model.mixers(model.num_layers - 1):
            self._names += [f"mtp_{depth}" for depth in range(model.mtp.num_layers)]
        self._first = -1
        if model.moe.force_balance and path:
            _log.warning(
                "model.moe.force_balance: tokens take the experts in turn, the router chooses "
                "nothing; what this run measures is speed, its weights are of no use"
            )

    def hook(self) -> Hook:
        """Put it before the hooks that read metrics."""
        return Hook(self)

    def __call__(self, step: int, metrics: dict) -> None:
        layers = {
            name: np.asarray(rows, np.float64) for name, rows in metrics.pop("layers").items()
        }
        counts = layers[TOKENS]
        copies = np.maximum(counts.sum(1), 1)
        largest, evenness = counts.max(1) / copies * self._experts, entropy(counts)
        metrics["expert_load_max"] = float(largest.max())
        metrics["expert_load_entropy"] = float(evenness.mean())
        for name in (name for name in (*LOSSES, DROPPED) if name in layers):
            metrics[name] = float(np.mean(layers[name] / copies))
        self._first = step if self._first < 0 else self._first
        self._sums = self._sums + counts
        if step % self._every and step != self._num_steps - 1:
            return
        each = {"expert_load_max": largest, "expert_load_entropy": evenness}
        for name, values in (each | {DROPPED: layers[DROPPED] / copies}).items():
            for layer, value in zip(self._names, values, strict=True):
                metrics[f"{name}/layer_{layer}"] = float(value)
        self._write(step)

    def _write(self, step: int) -> None:
        if self._path:
            shares = self._sums / np.maximum(self._sums.sum(1, keepdims=True), 1)
            loads = np.round(shares * self._experts, 4).tolist()
            steps = {"first_step": self._first, "last_step": step}
            text = json.dumps({**steps, "layers": self._names, "loads": loads})
            partial = f"{self._path}.partial"
            pathlib.Path(partial).write_text(text, encoding="utf-8")
            os.replace(partial, self._path)
        self._first, self._sums = -1, np.zeros(())


def entropy(counts: np.ndarray) -> np.ndarray:
    """Of each row, over the logarithm of its length."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log(np.where(shares > 0, shares, 1))
    return -(shares * logs).sum(1) / np.log(max(counts.shape[1], 2))


def write_loads(loads_path: str | os.PathLike, image_path: str | os.PathLike, title: str) -> None:
    """Draw what ExpertLoads has written as a PNG, layers down and experts across."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    found = json.loads(pathlib.Path(loads_path).read_text(encoding="utf-8"))
    loads = np.array(found["loads"])
    height = min(max(1.6 + 0.16 * len(loads), 2.6), 12)
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list("load", ["#2b5c8a", _EVEN, "#c8442b"])
    norm = TwoSlopeNorm(1.0, 0.0, _SHOWN)
    image = axes.imshow(loads, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, extend="max", pad=0.02)
    bar.set_label("load / mean load", color=_INK)
    bar.set_ticks([0, 0.5, 1, 1.5, _SHOWN])
    axes.set_xlabel("expert", color=_INK)
    axes.set_ylabel("layer", color=_INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    labels = dict(enumerate(found["layers"]))
    axes.yaxis.set_major_formatter(lambda row, _: labels.get(round(row), ""))
    steps = f"steps {found['first_step']} to {found['last_step']}, at most {loads.max():.2f}"
    axes.set_title(f"{title}   {steps}".strip(), loc="left", color=_INK, fontsize=11)
    partial = pathlib.Path(f"{image_path}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, image_path)
