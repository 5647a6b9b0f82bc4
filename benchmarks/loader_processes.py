"""Loader processes, maxmeg's own beside Grain's: `python benchmarks/loader_processes.py`.

Two processes make batches of 32 samples of 2,048 tokens, or of one array of 2 MB, for a parent that
does nothing else: samples/s, or MB/s. `mp_prefetch` and `DataLoader` are Grain's two ways.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags
from loader import BATCH, LENGTH, SEED, VOCAB, extent, write_corpora

from maxmeg.config.data import DataConfig
from maxmeg.data.build import build_dataset, open_corpus
from maxmeg.data.loader import _StepSource, all_rows
from maxmeg.data.workers import Workers, follow_parent

PROCESSES, AHEAD, WARM, TURNS = 2, 2, 12, 3


class Large:
    """A dataset whose batches are one array of 2 MB."""

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": np.full((1, 1 << 18), indices[0])}


def start(number: int, count: int) -> None:
    follow_parent()


def own(source: _StepSource) -> Any:
    return Workers(source, PROCESSES, AHEAD)


def mp_prefetch(source: _StepSource) -> Iterator:
    options = grain.multiprocessing.MultiprocessingOptions(PROCESSES, AHEAD)
    batches = grain.MapDataset.range(len(source)).map(source.__getitem__)
    batches = batches.to_iter_dataset(grain.ReadOptions(1, 1))
    return iter(batches.mp_prefetch(options, worker_init_fn=start))


def data_loader(source: _StepSource) -> Iterator:
    shard = grain.sharding.NoSharding()
    sampler = grain.samplers.IndexSampler(
        len(source), shard, shuffle=False, num_epochs=1, seed=SEED
    )
    return iter(
        grain.DataLoader(
            data_source=source,
            sampler=sampler,
            worker_count=PROCESSES,
            worker_buffer_size=AHEAD,
            read_options=grain.ReadOptions(1, 1),
        )
    )


def rate(make: Any, dataset: Any, steps: int) -> float:
    """Batches per second after the first."""
    batches = make(_StepSource(dataset, extent, all_rows, range(steps), PROCESSES))
    for _ in range(WARM):
        next(batches)
    begin = time.perf_counter()
    for _ in range(WARM, steps):
        next(batches)
    found = (steps - WARM) / (time.perf_counter() - begin)
    getattr(batches, "close", lambda: None)()
    return found


def main() -> None:
    flags.FLAGS.mark_as_parsed()  # Grain's processes read them
    with tempfile.TemporaryDirectory() as name:
        prefixes = tuple(write_corpora(Path(name), 100_000_000))[:1]
        config = DataConfig(
            paths=prefixes, split="1", sequence_length=LENGTH, tokenizer=f"null:{VOCAB}"
        )
        tokenizer, found = open_corpus(config, "unused")
        samples = 1500 * BATCH
        data = build_dataset(config, found, tokenizer, 0, SEED, VOCAB, samples, f"{name}/cache")
        for _ in range(TURNS):
            for unit, dataset, steps, scale in (
                ("samples/s", data, 1500, BATCH),
                ("MB/s", Large(), 300, 2),
            ):
                rates = {
                    f.__name__: rate(f, dataset, steps) for f in (own, mp_prefetch, data_loader)
                }
                print(
                    json.dumps({unit: {k: round(v * scale) for k, v in rates.items()}}), flush=True
                )


if __name__ == "__main__":
    sys.exit(main())
