"""Stops a run whose loss is no longer a number."""

import math
from collections.abc import Callable, Sequence

from maxmeg.runtime.hooks import Hook, Metrics

_WATCHED = ("loss", "grad_norm")
_SHOWN = 16


class NonFiniteLoss(FloatingPointError):
    """The loss or the gradient of `step` is infinite or NaN; `samples` made up its batch."""

    def __init__(self, step: int, metrics: Metrics, samples: Sequence[int]):
        self.step = step
        self.samples = tuple(int(sample) for sample in samples)
        found = ", ".join(f"{name}={metrics[name]}" for name in _WATCHED if name in metrics)
        shown = ", ".join(map(str, self.samples[:_SHOWN]))
        more = len(self.samples) - _SHOWN
        super().__init__(
            f"step {step}: {found} is not finite; nothing was saved since. Its batch holds samples"
            f" {shown}{f' and {more} more' if more > 0 else ''}: look at them, or resume from the"
            " last checkpoint with a lower optim.lr or a longer warm-up"
        )


def guard_hook(samples_of: Callable[[int], Sequence[int]]) -> Hook:
    """Hook that raises NonFiniteLoss; `samples_of(step)` gives the batch's sample indices.

    Put it before every hook that saves or writes.
    """

    def call(step, metrics):
        if not all(math.isfinite(metrics[name]) for name in _WATCHED if name in metrics):
            raise NonFiniteLoss(step, metrics, samples_of(step))

    return Hook(call)
