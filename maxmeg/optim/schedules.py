"""Learning rate, weight decay and batch size of every step, as Megatron-LM computes them.

Schedules are functions of the consumed samples, in pure Python on the host: the step receives the
values. A length of n steps means the samples that the first n steps of the run consume. After a
resume with another batch size, earlier steps count with their own batch size and later steps with
the new one: a finished warm-up does not change, while the end of a decay over `train.num_steps`
steps moves to the new end of the run. Lengths in samples never move.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from maxmeg.config.data import DataOrder
from maxmeg.config.schema import Config, LrDecay, OptimConfig, WeightDecayRamp, WsdDecay
from maxmeg.config.values import whole_number


@dataclasses.dataclass(frozen=True)
class Origin:
    """The step at which a resumed run continues, and what the earlier steps consumed.

    consumed_samples: training samples. validation_samples: samples of the periodic validations.
    batches: (first step, samples before it, batch size) of each range of steps with equal batches.
    """

    step: int = 0
    consumed_samples: int = 0
    validation_samples: int = 0
    batches: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of_checkpoint(cls, step: int, metadata: Mapping[str, Any]) -> "Origin":
        """The origin of a run that resumes the checkpoint of `step`, from `Schedules.progress`."""
        consumed = metadata["consumed_samples"]
        # Without a record of the batch sizes, every step had the mean one.
        batches = metadata.get("batches", [(0, 0, consumed // max(step, 1))])
        return cls(
            step,
            consumed,
            metadata.get("validation_samples", 0),
            tuple((first, before, size) for first, before, size in batches if first < step),
        )


class Schedules:
    """Values of step n (from 0) of a run, as functions of the samples before that step."""

    batch_sizes: tuple[int, ...]  # each once, in the order of the run
    skipped_samples = 0  # of steps before this one for which the rates do not advance

    def __init__(self, config: Config, batch_multiple: int = 1, origin: Origin = Origin()):
        """batch_multiple: samples of one microbatch over all replicas; it must divide every batch
        size. Raises ValueError for settings that contradict each other."""
        self._optim, self._origin, train = config.optim, origin, config.train
        self._eval_every = train.eval_every
        self._eval_samples = train.eval_steps * train.global_batch_size  # of one validation
        self._validates_in_turn = config.data.order is not DataOrder.native
        self.num_steps = train.num_steps
        coming = _segments(config, origin)
        self.batch_sizes = tuple(dict.fromkeys(size for _, _, size in coming))
        self._segments = _merged([*origin.batches, *coming])
        self._starts = [segment[0] for segment in self._segments]
        for size in self.batch_sizes:
            _check_divisible(size, batch_multiple)
        _check_optim(self._optim)
        optim = self._optim
        self.total_samples = self.consumed_samples(self.num_steps)
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

    def batch_size(self, step: int) -> int:
        """Samples of step `step`."""
        return self._segment(step)[2]

    def consumed_samples(self, step: int) -> int:
        """Samples of all steps before `step`."""
        first, consumed, size = self._segment(step)
        return consumed + (step - first) * size

    def extent(self, step: int) -> tuple[int, int]:
        """(index of the first sample of step `step`, its batch size)."""
        first, consumed, size = self._segment(step)
        return consumed + (step - first) * size, size

    def validation_samples(self, step: int) -> int:
        """Samples of all periodic validations before step `step`."""
        before, every = self._origin.validation_samples, self._eval_every
        if not every:
            return before
        return before + (step // every - self._origin.step // every) * self._eval_samples

    def evaluation_start(self, step: int) -> int:
        """Index of the first sample of the validation after step `step`.

        In Megatron-LM's order each validation continues after the previous one; in the native
        order every validation reads the same samples.
        """
        return self.validation_samples(step) if self._validates_in_turn else 0

    def progress(self, step: int) -> dict[str, Any]:
        """What the steps before `step` consumed, as JSON, for `Origin.of_checkpoint`."""
        return {
            "consumed_samples": self.consumed_samples(step),
            "validation_samples": self.validation_samples(step),
            "batches": [list(segment) for segment in self._segments if segment[0] < step],
        }

    def step_at(self, samples: int) -> int:
        """The first step before which at least `samples` samples are consumed."""
        last = bisect.bisect_left([consumed for _, consumed, _ in self._segments], samples) - 1
        first, consumed, size = self._segments[max(last, 0)]
        return first + max(0, -(-(samples - consumed) // size))

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

    def _segment(self, step):
        if step < 0:
            raise ValueError(f"step={step} is negative: steps count from 0")
        return self._segments[bisect.bisect_right(self._starts, step) - 1]

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


def _merged(segments):
    """Segments, without a segment that only continues the previous one."""
    result = []
    for first, consumed, size in segments:
        if result:
            last_first, last_consumed, last_size = result[-1]
            reached = last_consumed + (first - last_first) * last_size
            if (reached, last_size) == (consumed, size):
                continue
        result.append((first, consumed, size))
    return result


def _segments(config, origin):
    """(first step, samples before it, batch size) of each coming range of equal batches."""
    train = config.train
    if train.global_batch_size < 1:
        raise ValueError(f"train.global_batch_size={train.global_batch_size}: must be at least 1")
    if train.batch_rampup and train.batch_schedule:
        raise ValueError(
            f"train.batch_rampup={train.batch_rampup} and train.batch_schedule="
            f"{train.batch_schedule!r} both set the batch size: give one of the two"
        )
    if train.batch_rampup:
        return _rampup_segments(train.batch_rampup, train.global_batch_size, origin)
    if train.batch_schedule:
        return _schedule_segments(
            train.batch_schedule, config.data.sequence_length, train.global_batch_size, origin
        )
    return [(origin.step, origin.consumed_samples, train.global_batch_size)]


def _rampup_segments(rampup, final, origin):
    if len(rampup) != 3:
        raise ValueError(
            f"train.batch_rampup={rampup}: give three numbers, start,increment,samples"
        )
    start, increment, samples = rampup
    if min(start, increment, samples) < 1 or start > final:
        raise ValueError(
            f"train.batch_rampup={rampup}: all three must be positive and start at most"
            f" train.global_batch_size={final}"
        )
    if (final - start) % increment:
        raise ValueError(
            f"train.batch_rampup={rampup} does not reach train.global_batch_size={final} in whole"
            f" increments: {final} - {start} is not divisible by {increment}"
        )
    step, consumed = origin.step, origin.consumed_samples
    if start == final:
        return [(step, consumed, final)]
    each = samples / ((final - start) // increment)
    segments = []
    while consumed <= samples:
        size = start + int(consumed / each) * increment
        segments.append((step, consumed, size))
        step, consumed = step + 1, consumed + size
    return [*_merged(segments), (step, consumed, final)]


def _schedule_segments(schedule, sequence_length, final, origin):
    entries = []
    for entry in schedule.split():
        try:
            tokens, size = map(whole_number, entry.split(":"))
        except (ValueError, OverflowError):
            tokens = size = 0
        if size < 1:
            raise ValueError(
                f"train.batch_schedule={schedule!r}: {entry!r} is not TOKENS:BATCH_SIZE,"
                " as in '0:768 250B:1536' (suffixes K, M, B, T)"
            )
        entries.append((tokens, size))
    thresholds = [tokens // sequence_length for tokens, _ in entries]
    if not entries or entries[0][0] != 0 or thresholds != sorted(set(thresholds)):
        raise ValueError(
            f"train.batch_schedule={schedule!r}: must begin at 0 tokens and grow by at least one"
            f" sample ({sequence_length} tokens) from entry to entry"
        )
    if entries[-1][1] != final:
        raise ValueError(
            f"train.batch_schedule={schedule!r} ends with batches of {entries[-1][1]} but"
            f" train.global_batch_size={final}: set it to {entries[-1][1]}"
        )
    segments, step, consumed = [], origin.step, origin.consumed_samples
    for (_, size), following in zip(entries, [*thresholds[1:], None], strict=True):
        if following is not None and consumed >= following:
            continue  # the previous step has already passed this entry
        segments.append((step, consumed, size))
        count = 0 if following is None else -(-(following - consumed) // size)
        step, consumed = step + count, consumed + count * size
    return segments


def _check_divisible(size, multiple):
    if size % multiple:
        lower = size // multiple * multiple
        multiples = [str(value) for value in (lower, lower + multiple) if value > 0]
        raise ValueError(
            f"batch size {size} is not divisible by {multiple} (micro-batch times replicas):"
            f" choose {' or '.join(multiples)}, or change train.micro_batch_size"
        )


def _check_optim(optim):
    for name in ("warmup", "decay"):
        steps, samples = getattr(optim, f"{name}_steps"), getattr(optim, f"{name}_samples")
        if steps and samples:
            raise ValueError(
                f"optim.{name}_steps={steps} and optim.{name}_samples={samples} both set a length:"
                " give one of the two"
            )
        if steps < 0 or samples < 0:
            raise ValueError(f"optim.{name}_steps={steps}, optim.{name}_samples={samples}: >= 0")
    end = optim.weight_decay_end
    ramp = optim.weight_decay_ramp
    if (ramp is WeightDecayRamp.constant) != (end < 0 or end == optim.weight_decay):
        raise ValueError(
            f"optim.weight_decay_ramp={ramp.name} with optim.weight_decay={optim.weight_decay} and"
            f" optim.weight_decay_end={end}: choose a ramp (linear, cosine) together with an end"
        )
    if optim.wsd_decay_steps < 0 or (optim.decay is LrDecay.wsd) != (optim.wsd_decay_steps > 0):
        raise ValueError(
            f"optim.decay={optim.decay.name} with optim.wsd_decay_steps={optim.wsd_decay_steps}:"
            " wsd needs a length above 0, no other shape has one"
        )
