"""Learning rate and weight decay of every step, as Megatron-LM computes them.

Schedules are functions of the consumed samples, in pure Python on the host: the step receives the
values. A length of n steps means the samples that the first n steps of the run consume. After a
resume with another batch size, earlier steps count with their own batch size and later steps with
the new one: a finished warm-up does not change, while the end of a decay over `train.num_steps`
steps moves to the new end of the run. Lengths in samples never move.
"""

import math

from maxmeg.config.schema import Config, LrDecay, OptimConfig, WeightDecayRamp, WsdDecay
from maxmeg.data.batch_sizes import NEW, BatchSizes, Origin


class Schedules(BatchSizes):
    """Values of step n (from 0) of a run, as functions of the samples before that step."""

    skipped_samples = 0  # of steps before this one for which the rates do not advance

    def __init__(self, config: Config, batch_multiple: int = 1, origin: Origin = NEW):
        """As of `BatchSizes`."""
        super().__init__(config, batch_multiple, origin)
        self._optim = optim = config.optim
        decay_steps = optim.decay_steps or self.num_steps
        self.decay_samples = optim.decay_samples or self.consumed_samples(decay_steps)
        self.warmup_samples = (
            optim.warmup_samples
            or self.consumed_samples(optim.warmup_steps)
            or min(round(optim.warmup_fraction * self.decay_samples), self.decay_samples - 1)
        )
        end = self.step_at(self.decay_samples)
        start = max(end - optim.wsd_decay_steps, 0)
        self.wsd_samples = self.consumed_samples(end) - self.consumed_samples(start)
        self._check_lengths()

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update made by step `step`."""
        return learning_rate_at(
            self.consumed_samples(step) - self.skipped_samples,
            self._optim,
            warmup=self.warmup_samples,
            decay=self.decay_samples,
            wsd=self.wsd_samples,
        )

    def weight_decay(self, step: int) -> float:
        """Weight decay of the update made by step `step`."""
        samples = self.consumed_samples(step) - self.skipped_samples
        return weight_decay_at(samples, self._optim, self.total_samples)

    def _length(self, name):
        """(setting, its value, unit) that sets the length of "warmup" or "decay"."""
        for unit in ("samples", "steps"):
            if value := getattr(self._optim, f"{name}_{unit}"):
                return f"optim.{name}_{unit}", value, unit
        return "train.num_steps", self.num_steps, "steps"

    def _check_lengths(self):
        """ValueError unless the warm-up ends before the decay does, in the units that were set."""
        warmup, decay = self.warmup_samples, self.decay_samples
        if self._optim.decay is LrDecay.constant:
            return
        if warmup >= decay > 0:
            begin, begin_value, unit = self._length("warmup")
            end, end_value, end_unit = self._length("decay")
            samples = f" ({warmup} >= {decay} samples)" if unit != end_unit else ""
            raise ValueError(
                f"{begin}={begin_value} >= {end}={end_value}{samples}: warm-up must end before the"
                f" decay does; lower {begin} or raise {end}"
            )
        if self._optim.decay is LrDecay.wsd and self.wsd_samples > decay - warmup:
            raise ValueError(
                f"optim.wsd_decay_steps={self._optim.wsd_decay_steps} takes {self.wsd_samples}"
                f" samples but only {decay - warmup} lie between warm-up and the end of the decay:"
                " lower it"
            )


def learning_rate_at(
    samples: int, optim: OptimConfig, *, warmup: int, decay: int, wsd: int = 0
) -> float:
    """Learning rate after `samples` samples; warm-up, decay and wsd lengths are in samples too."""
    if warmup > 0 and samples <= warmup:
        return optim.warmup_init_lr + (optim.lr - optim.warmup_init_lr) * samples / warmup
    if optim.decay is LrDecay.constant:
        return optim.lr
    if samples > decay:
        return optim.min_lr
    if optim.decay is LrDecay.inverse_square_root:
        return max(optim.min_lr, optim.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
    if optim.decay is LrDecay.wsd:
        done = (samples - (decay - wsd)) / wsd if wsd else 0.0
        fraction = 1.0 if done <= 0 else _wsd_fraction(optim.wsd_decay, done)
    else:
        done = (samples - warmup) / max(decay - warmup, 1)
        fraction = 1 - done if optim.decay is LrDecay.linear else _cosine(done)
    return optim.min_lr + fraction * (optim.lr - optim.min_lr)


def weight_decay_at(samples: int, optim: OptimConfig, total: int) -> float:
    """Weight decay after `samples` of `total` samples."""
    if optim.weight_decay_ramp is WeightDecayRamp.constant:
        return optim.weight_decay
    if samples > total:
        return optim.weight_decay_end
    progress = samples / max(total, 1)
    if optim.weight_decay_ramp is WeightDecayRamp.cosine:
        progress = _cosine(1 - progress)
    return optim.weight_decay + progress * (optim.weight_decay_end - optim.weight_decay)


def _cosine(progress):
    return 0.5 * (math.cos(math.pi * progress) + 1)


def _wsd_fraction(shape, progress):
    return {
        WsdDecay.linear: 1 - progress,
        WsdDecay.cosine: _cosine(progress),
        WsdDecay.exponential: 2 * 0.5**progress - 1,
        WsdDecay.minus_sqrt: 1 - math.sqrt(progress),
    }[shape]
