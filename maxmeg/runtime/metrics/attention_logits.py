"""The metric of optim.qk_clip: the largest attention logit of a step."""

import numpy as np

from maxmeg.layers.qk_clip import LARGEST
from maxmeg.runtime.metrics.hooks import Hook


def logit_hook() -> Hook:
    """Replaces the auxiliary value of attention layers, each head's largest logit, by the largest
    of all. Put it before the hooks that read metrics."""

    def call(step: int, metrics: dict) -> None:
        layers = metrics.pop("layers")
        metrics[LARGEST] = float(np.max(layers.pop(LARGEST)))
        if layers:
            metrics["layers"] = layers

    return Hook(call)
