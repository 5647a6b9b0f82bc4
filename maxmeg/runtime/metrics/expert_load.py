"""Metrics of expert load: how evenly the router distributes tokens over experts."""

import json
import logging
import pathlib

import numpy as np

from maxmeg.config.model import ModelConfig
from maxmeg.data.corpus.stored import write_atomically
from maxmeg.layers.balance import DROPPED, LOSSES, TOKENS
from maxmeg.runtime.metrics.hooks import Hook

_log = logging.getLogger(__name__)


class ExpertLoad:
    """Hook that replaces the auxiliary values of mixture-of-experts layers in a step's metrics.

    Every step, scalars: the largest load of an expert over the mean load of its layer; the entropy
    of the loads over log(experts), averaged over layers (1: balanced, 0: one expert has all
    tokens); each auxiliary loss without its coefficient; the fraction of dropped copies. Every
    `every`-th step and the last step also load, entropy and dropped fraction per layer, and the
    mean loads since the last such step as JSON in the file `path`.
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
                "model.moe.force_balance: tokens go to the experts in turn, not by the router: use "
                "this run to measure speed only, its weights are useless"
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
        if step % self._every and step != self._num_steps:
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
            write_atomically(pathlib.Path(self._path), text.encode())
        self._first, self._sums = -1, np.zeros(())


def entropy(counts: np.ndarray) -> np.ndarray:
    """Entropy of each row of `counts`, over the logarithm of the row's length."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log(np.where(shares > 0, shares, 1))
    return -(shares * logs).sum(1) / np.log(max(counts.shape[1], 2))
