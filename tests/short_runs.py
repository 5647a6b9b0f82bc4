"""Short runs of a tiny model that tests of whole runs share: parts of one schedule."""

import json
from pathlib import Path

import numpy as np

from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DataOrder,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from maxmeg.data.indexed import IndexedWriter

SAME = 1e-5  # relative, of losses whose sums are made in another order
EACH = 3  # steps of a part of the run


def write_corpus(folder: Path) -> str:
    """Its prefix: words of six letters of bytes."""
    prefix = str(folder / "text")
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for _ in range(40):
            words = rng.integers(97, 103, rng.integers(200, 600))
            writer.add_document(np.append(words, 256), [len(words) + 1])
    return prefix


def config(
    corpus: str, run_dir: Path, steps: int, total: int, model: dict, parallel: dict, **log
) -> Config:
    """`steps` steps of a schedule of rates over `total`, the same whatever `steps` is."""
    fields = {"hidden_size": 32, "num_heads": 4, "dropout_hidden": 0.1, "max_position": 64}
    return Config(
        run_dir=str(run_dir),
        model=ModelConfig(**fields | {"dtype": DType.float32} | model),
        data=DataConfig(
            paths=(corpus,),
            split="8,1,1",
            sequence_length=32,
            order=DataOrder.native,  # Megatron's depends on the number of steps
        ),
        parallel=ParallelConfig(**parallel),
        optim=OptimConfig(warmup_steps=2, lr=1e-2, decay_steps=total),
        train=TrainConfig(
            num_steps=steps,
            global_batch_size=16,
            micro_batch_size=1,
            eval_every=EACH,
            eval_steps=2,
        ),
        checkpoint=CheckpointConfig(save_every=0, keep_last=9),
        log=LogConfig(every=1, tensorboard=False, **log),
    )


def curve(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def digests(run_dir: Path, step: int) -> dict:
    path = run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json"
    return json.loads(path.read_text())["body"]["tensors"]
