"""The data loader. The batch of step n depends on (config, seed, n) alone."""

import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from maxmeg.data import workers
from maxmeg.data.samples.dataset import Dataset
from maxmeg.data.samples.sampling import Batch

if TYPE_CHECKING:
    from maxmeg.config.schema import Config


Steps = Callable[[int], tuple[int, int]]  # step -> (number of its first sample, batch size)
Rows = Callable[[int], np.ndarray]  # batch size -> rows of the global batch that this process reads


def all_rows(batch_size: int) -> np.ndarray:
    """All rows of the global batch, for a process that reads the whole batch."""
    return np.arange(batch_size)


_AHEAD = 4  # later batches whose objects are fetched while a batch is made


class _StepSource:
    """Element i is this process's rows of the batch of step span[i]; elements can be read in any
    order."""

    def __init__(
        self, dataset: Dataset, steps: Steps, rows: Rows, span: range, stride: int = 1
    ) -> None:
        """stride: the caller reads elements i, i + stride, i + 2 * stride, ... in turn."""
        self._dataset, self._steps, self._rows, self._span = dataset, steps, rows, span
        self._stride, self._expected = stride, -1
        self._reads_ahead = getattr(dataset, "reads_ahead", False)

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, index: int) -> Batch:
        if self._reads_ahead:
            self._read_ahead(index)
        return self._dataset.batch(self._samples(index))

    def _samples(self, index: int) -> np.ndarray:
        first, size = self._steps(self._span[index])
        return first + self._rows(size)

    def _read_ahead(self, index: int) -> None:
        last = min(index + _AHEAD * self._stride, len(self._span) - 1)
        begin = max(self._expected, index) + self._stride
        for later in range(begin, last + 1, self._stride):
            self._expected = later
            self._dataset.read_ahead(self._samples(later))  # pyright: ignore

    def __repr__(self) -> str:
        return f"steps {self._span.start} to {self._span.stop}"


class _Threads:
    """Iterates over a source in order; Grain's threads read ahead."""

    def __init__(self, source: _StepSource, depth: int) -> None:
        import grain

        ready: set[int] = set()
        self._ready, self._next = ready, 0

        def make(index: int) -> Batch:
            batch = source[index]
            ready.add(index)
            return batch

        options = grain.ReadOptions(min(depth, 4), depth)
        numbers = grain.MapDataset.range(len(source))
        self._batches = iter(numbers.map(make).to_iter_dataset(options))
        self.close = weakref.finalize(self, self._batches.close)  # at the latest when Python exits

    @property
    def ready(self) -> bool:
        """Whether the next batch is available without waiting."""
        return self._next in self._ready

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._ready.discard(self._next)
        self._next += 1
        return batch


class Loader:
    """Yields (step, batch) for each step of `span` in order; threads or processes make batches
    ahead.

    A batch holds the rows of the global batch that `rows` selects for this process. The global
    batch does not depend on the number of processes. Starting at any step costs the same. Close the
    loader when it is no longer needed.

    waited: seconds spent waiting for the last batch; 0 if it was ready.
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
        self._span = iter(span)
        self.waited = 0.0
        self._batches: _Threads | workers.Workers | None = None
        if not len(span):
            return
        source = _StepSource(dataset, steps, rows, span, max(min(num_workers, len(span)), 1))
        if num_workers:
            self._batches = workers.Workers(source, num_workers, prefetch)
        else:
            self._batches = _Threads(source, prefetch)

    @property
    def ready(self) -> bool:
        """Whether the next batch is available without waiting."""
        return self._batches is not None and self._batches.ready

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[int, Batch]:
        step = next(self._span)
        if self._batches is None:
            raise ValueError("this loader is closed")
        is_ready, begin = self.ready, time.perf_counter()
        batch = next(self._batches)
        self.waited = 0.0 if is_ready else time.perf_counter() - begin
        return step, batch

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Stop threads and processes; may be called twice."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def train_loader(
    dataset: Dataset, config: "Config", start_step: int, steps: Steps, rows: Rows = all_rows
) -> Loader:
    """The batches of steps start_step to train.num_steps - 1.

    steps: step -> (samples consumed before it, batch size). rows: batch size -> the rows that this
    process reads. Both are pure functions, which are copied to worker processes.
    """
    span = range(start_step, config.train.num_steps)
    return Loader(dataset, steps, rows, span, config.data.num_workers, config.data.prefetch)


def eval_batches(
    dataset: Dataset, num_batches: int, batch_size: int, rows: Rows = all_rows, first: int = 0
) -> Iterator[Batch]:
    """`num_batches` batches, beginning with sample `first`; the dataset repeats after its last
    sample. num_batches=0: all samples, each once; rows that fill the last batch have no loss."""
    count = dataset.samples_per_epoch
    for i in range(num_batches or -(-count // batch_size)):
        samples = i * batch_size + rows(batch_size)
        batch = dataset.batch(first + samples)
        if not num_batches:
            batch["loss_mask"] = batch["loss_mask"] * (samples < count)[:, None]
        yield batch
