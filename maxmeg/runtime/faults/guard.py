"""Monitors the loss: reports skipped steps and spikes, ends a run that skips too many steps."""

import collections
import logging
import math
import statistics
from collections.abc import Callable, Sequence

from maxmeg.runtime.metrics.hooks import Hook, Metrics

log = logging.getLogger("maxmeg")
SHOWN_SAMPLES = 16
WINDOW, FEWEST = 100, 20  # most and fewest previous losses that define a spike


class NonFiniteLoss(FloatingPointError):
    """Too many consecutive steps had an infinite or NaN loss or gradient norm.

    steps: their numbers. samples: the sample indices of their batches.
    """

    def __init__(self, steps: Sequence[int], samples: Sequence[int], values: str):
        self.steps, self.samples = tuple(steps), tuple(samples)
        first, last = self.steps[0], self.steps[-1]
        super().__init__(
            f"{f'steps {first} to {last} were' if first < last else f'step {last} was'} skipped: "
            f"{values} is not finite (train.max_skipped_steps={len(steps)} in a row). Parameters "
            f"are those before step {first}; the batches hold samples {excerpt(samples)}: inspect "
            "these, or resume from the last checkpoint with a lower optim.lr or a longer warm-up"
        )


class Guard:
    """Hook on the metrics loss, grad_norm and skipped; put it before hooks that write.

    Raises NonFiniteLoss after `max_skipped` consecutive skipped steps. Warns when a loss is more
    than `spike_zscore` standard deviations above the mean of the last WINDOW finite losses (0:
    never). samples_of(step): the sample indices of a step's batch. minimum_scale: of the loss with
    float16; above it, a step whose gradients overflow is as it should be.
    """

    def __init__(
        self,
        samples_of: Callable[[int], Sequence[int]],
        max_skipped: int,
        spike_zscore: float = 0,
        minimum_scale: float = 1.0,
    ):
        self._samples_of, self._max_skipped = samples_of, max_skipped
        self._spike_zscore, self._minimum_scale = spike_zscore, minimum_scale
        self._streak: list[int] = []
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def __call__(self, step: int, metrics: Metrics) -> None:
        if not metrics.get("skipped"):
            self._streak = []
            self._report_spike(step, metrics["loss"])
            self._losses.append(metrics["loss"])
            return
        if math.isfinite(metrics["loss"]) and metrics.get("loss_scale", 0) > self._minimum_scale:
            return
        self._streak.append(step)
        values = f"loss={metrics['loss']}, grad_norm={metrics['grad_norm']}"
        if len(self._streak) >= self._max_skipped:
            samples = [sample for s in self._streak for sample in self._samples_of(s)]
            raise NonFiniteLoss(self._streak, samples, values)
        log.warning(
            "step %d was skipped: %s is not finite; parameters and optimizer are unchanged. Its "
            "batch holds samples %s",
            *(step, values, excerpt(self._samples_of(step))),
        )

    def hook(self) -> Hook:
        return Hook(self)

    def _report_spike(self, step: int, loss: float) -> None:
        if not self._spike_zscore or len(self._losses) < FEWEST:
            return
        mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
        if loss > mean + self._spike_zscore * deviation and deviation:
            log.warning(
                "step %d: the loss %.4g is %.1f standard deviations above the mean %.4g of the "
                "last %d steps. Its batch holds samples %s",
                *(step, loss, (loss - mean) / deviation, mean, len(self._losses)),
                excerpt(self._samples_of(step)),
            )


def excerpt(samples: Sequence[int]) -> str:
    """ "16, 17, 18", cut after the first SHOWN_SAMPLES."""
    hidden = len(samples) - SHOWN_SAMPLES
    return ", ".join(map(str, samples[:SHOWN_SAMPLES])) + (
        f" and {hidden} more" if hidden > 0 else ""
    )
