"""Batch size of every step, and the samples that the steps before it consumed, as Megatron-LM
computes them.

Batch sizes are functions of the consumed samples. After a resume with another batch size, earlier
steps count with their own batch size and later steps with the new one.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any

from maxmeg.config.data import DataOrder
from maxmeg.config.schema import Config
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
        """The origin of a run that resumes the checkpoint of `step`, from `BatchSizes.progress`."""
        consumed = metadata["consumed_samples"]
        # Without a record of the batch sizes, every step had the mean one.
        batches = metadata.get("batches", [(0, 0, consumed // max(step, 1))])
        return cls(
            step,
            consumed,
            metadata.get("validation_samples", 0),
            tuple((first, before, size) for first, before, size in batches if first < step),
        )


NEW = Origin()  # of a new run


class BatchSizes:
    """Values of step n (from 0) of a run. batch_sizes: each once, in the order of the run.
    total_samples: of all steps."""

    def __init__(self, config: Config, batch_multiple: int = 1, origin: Origin = NEW):
        """batch_multiple: samples of one microbatch over all replicas; it must divide every batch
        size. Raises ValueError for settings that contradict each other."""
        self._origin, train = origin, config.train
        self._eval_every = train.eval_every
        self._eval_samples = train.eval_steps * train.global_batch_size  # of one validation
        self._validates_in_turn = config.data.order is not DataOrder.native
        self.num_steps = train.num_steps
        coming = _segments(config, origin)
        self.batch_sizes: tuple[int, ...] = tuple(dict.fromkeys(size for _, _, size in coming))
        self._segments = _merged([*origin.batches, *coming])
        self._starts = [segment[0] for segment in self._segments]
        for size in self.batch_sizes:
            _check_divisible(size, batch_multiple)
        self.total_samples = self.consumed_samples(self.num_steps)

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

    def _segment(self, step):
        if step < 0:
            raise ValueError(f"step={step} is negative: steps count from 0")
        return self._segments[bisect.bisect_right(self._starts, step) - 1]


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
