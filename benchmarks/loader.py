"""What reading samples costs: `python benchmarks/loader.py [--tokens=200e6] [--steps=60]`.

The same .bin/.idx files (documents of about 1,000 tokens), sequence length 2,048 and batches of 32,
in Megatron-LM's order, through its GPTDataset in torch's DataLoader with batches of consecutive
samples, as its sampler gives them to one rank, and through maxmeg's loader: samples/s on the clock
and millions of tokens per CPU-second (all processes and threads). Both read from the page cache,
after a pass that is not counted; a line for one process, for two workers, and for a blend of two
corpora. Rows are compared. Needs megatron-core (`pip install 'maxmeg[oracle]'`).
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LENGTH, BATCH, VOCAB, SEED = 2048, 32, 50304, 1234
WARM = 4  # steps before the clock starts


def write_corpora(folder: Path, tokens: int) -> list[str]:
    """Two corpora of `tokens` tokens together."""
    from maxmeg.data.corpus.indexed import IndexedWriter

    random, prefixes = np.random.default_rng(0), []
    for name in "ab":
        prefixes.append(str(folder / name))
        with IndexedWriter(prefixes[-1], VOCAB, checksums=False) as writer:
            while writer.num_tokens < tokens // 2:
                size = int(random.lognormal(6.4, 1.0)) + 2
                writer.add_document(random.integers(0, VOCAB, size, np.uint16))
        Path(prefixes[-1] + ".bin").read_bytes()  # into the page cache
    return prefixes


def megatron_batches(
    blend: list[str], steps: int, asked: int, num_workers: int, folder: Path
) -> Iterator:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its imports say of optional packages
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import get_blend_from_list
    if not torch.distributed.is_initialized():
        where = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=get_blend_from_list(blend),
        split="1",
        path_to_cache=str(folder / "megatron"),
        tokenizer=types.SimpleNamespace(
            vocab_size=VOCAB, eod=0, unique_identifiers={"class": "none"}
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [asked, 0, 0]
    data = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    batches = [range(step * BATCH, (step + 1) * BATCH) for step in range(steps)]
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, num_workers=num_workers)
    for batch in loader:
        yield {name: values.numpy() for name, values in batch.items()}


def maxmeg_batches(
    blend: list[str], steps: int, asked: int, num_workers: int, folder: Path
) -> Iterator:
    from maxmeg.config.data import DataConfig
    from maxmeg.data.build import build_dataset, open_corpus
    from maxmeg.data.loader import Loader, all_rows

    config = DataConfig(
        paths=tuple(blend), split="1", sequence_length=LENGTH, tokenizer=f"null:{VOCAB}"
    )
    tokenizer, prefixes = open_corpus(config, "unused")
    cache = str(folder / "maxmeg")
    data = build_dataset(config, prefixes, tokenizer, 0, SEED, VOCAB, asked, cache)
    assert data is not None
    with Loader(data, extent, all_rows, range(steps), num_workers) as loader:
        for _, batch in loader:
            yield batch


def extent(step: int) -> tuple[int, int]:
    return step * BATCH, BATCH


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(batches: Iterator, steps: int, num_workers: int) -> tuple[dict, np.ndarray]:
    """Rates after the first steps, and the tokens of the first batch. Of workers, whose CPU time is
    known when they have ended, only the clock is read."""
    first = next(batches)["tokens"].copy()
    for _ in range(WARM - 1):
        next(batches)
    wall, cpu, sampled = time.perf_counter(), cpu_seconds(), 0
    for batch in batches:
        sampled += len(batch["tokens"])
        assert batch["tokens"].shape == (BATCH, LENGTH)
    assert sampled == (steps - WARM) * BATCH
    found = {"samples_per_s": round(sampled / (time.perf_counter() - wall))}
    if not num_workers:
        rate = sampled * LENGTH / (cpu_seconds() - cpu)
        found["mtokens_per_cpu_s"] = round(rate / 1e6, 2)
    return found, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, default=200e6, help="in both corpora")
    parser.add_argument("--steps", type=int, default=60, help="of 32 samples")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        a, b = write_corpora(folder, int(flags.tokens))
        for title, blend, num_workers in (
            ("one process", [a], 0),
            ("two workers", [a], 2),
            ("a blend of two, one process", ["0.7", a, "0.3", b], 0),
        ):
            found, rows = {}, []
            for contender, make in (("megatron", megatron_batches), ("maxmeg", maxmeg_batches)):
                steps = flags.steps if contender == "megatron" else 10 * flags.steps
                asked = 10 * flags.steps * BATCH  # of both, as the order depends on it
                batches = make(blend, steps, asked, num_workers, folder)
                found[contender], first = measure(batches, steps, num_workers)
                rows.append(first)
            for rate in found["maxmeg"]:
                found[f"x_{rate}"] = round(found["maxmeg"][rate] / found["megatron"][rate], 1)
            found["same_rows"] = bool(np.array_equal(*rows))
            print(json.dumps({"case": title, "cores": os.cpu_count(), **found}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
