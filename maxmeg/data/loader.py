"""Batches ahead of time, through Grain: what step n reads depends on (config, seed, n) alone."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from maxmeg.data.gpt import Batch, Dataset
from maxmeg.data.workers import follow_parent

if TYPE_CHECKING:
    from maxmeg.config.schema import Config

Steps = Callable[[int], tuple[int, int]]  # step -> (number of its first sample, batch size)
Rows = Callable[[int], np.ndarray]  # batch size -> rows of the global batch that are read here


def all_rows(batch_size: int) -> np.ndarray:
    """The rows of a process that reads the whole batch."""
    return np.arange(batch_size)


class _StepSource:
    """Element i is this process's part of step span[i]; read by Grain in any order."""

    def __init__(self, dataset: Dataset, steps: Steps, rows: Rows, span: range) -> None:
        self._dataset, self._steps, self._rows, self._span = dataset, steps, rows, span

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, index: int) -> Batch:
        first, size = self._steps(self._span[index])
        return self._dataset.batch(first + self._rows(size))

    def __repr__(self) -> str:
        return f"steps {self._span.start} to {self._span.stop}"


class Loader:
    """Yields (step, batch) for each step of `span` in order, made ahead by threads or processes.

    A batch holds the rows that `rows` names; together the processes of a run read the same global
    batch however it is divided. Starting at any step costs the same. Close it when done.
    """

    def __init__(
        self,
        dataset: Dataset,
        steps: Steps,
        rows: Rows,
        span: range,
        num_workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        import grain

        if num_workers < 0 or prefetch < 1:
            raise ValueError(
                f"num_workers={num_workers} must be >= 0 and prefetch={prefetch} must be >= 1"
            )
        self._span = iter(span)
        self._batches = None
        self._has_workers = num_workers > 0
        if not len(span):
            return
        source = grain.MapDataset.source(_StepSource(dataset, steps, rows, span))
        ahead = 1 if num_workers else prefetch
        batches = source.to_iter_dataset(grain.ReadOptions(min(ahead, 4), ahead))
        if num_workers:
            _settle_flags()
            # Through pipes: shared memory would outlive killed runs and is scarce in containers.
            piped = grain.experimental.DatasetOptions(min_shm_size=1 << 62)
            batches = grain.experimental.WithOptionsIterDataset(batches, piped)
            options = grain.MultiprocessingOptions(min(num_workers, len(span)), prefetch)
            batches = batches.mp_prefetch(options, _start_worker)
        self._batches = iter(batches)
        self._end = weakref.finalize(self, self._batches.close)  # at the latest when Python ends

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[int, Batch]:
        step = next(self._span)
        if self._batches is None:
            raise ValueError("this loader is closed")
        return step, next(self._batches)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Ends threads and processes; may be called twice."""
        if self._batches is not None:
            self._end()
            self._batches = None
            if self._has_workers:  # Grain leaves one that was never read from to the collector
                gc.collect()


def _start_worker(index: int, count: int) -> None:
    """Called by Grain in worker `index` of `count`."""
    follow_parent()


def _settle_flags() -> None:
    """Grain's worker processes read absl flags, which outside a command nobody has parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def train_loader(
    dataset: Dataset, config: "Config", start_step: int, steps: Steps, rows: Rows = all_rows
) -> Loader:
    """Batches of steps start_step to train.num_steps - 1.

    steps: a pure function, step -> (samples consumed before it, its batch size); rows: a pure
    function, batch size -> the rows that this process reads. Worker processes get copies of both.
    """
    span = range(start_step, config.train.num_steps)
    return Loader(dataset, steps, rows, span, config.data.num_workers, config.data.prefetch)


def eval_batches(
    dataset: Dataset, num_batches: int, batch_size: int, rows: Rows = all_rows
) -> Iterator[Batch]:
    """The same `num_batches` batches each time, from the split's first sample on.

    A split with fewer samples starts again from its first.
    """
    for i in range(num_batches):
        yield dataset.batch(i * batch_size + rows(batch_size))
