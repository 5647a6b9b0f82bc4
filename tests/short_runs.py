"""Short runs of a tiny model that tests of whole runs share: parts of one schedule."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxmeg.checkpoint.places import place_of
from maxmeg.config.data import DataConfig, DataOrder
from maxmeg.config.files import checkpoints_of
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import CheckpointConfig, Config, LogConfig, OptimConfig, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.data.corpus.indexed import IndexedWriter
from maxmeg.train import main

SAME = 1e-5  # relative, of losses whose sums are made in another order
EACH = 2  # steps from one checkpoint to the next
ENDS = (EACH, 2 * EACH, 4 * EACH)  # steps after which the layout changes, and the run is over


def write_corpus(folder: Path) -> str:
    """Its prefix: words of six letters of bytes."""
    prefix = str(folder / "text")
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for _ in range(40):
            words = rng.integers(97, 103, rng.integers(200, 600))
            writer.add_document(np.append(words, 256), [len(words) + 1])
    return prefix


def config(corpus: str, run_dir: Path, steps: int, model: dict, parallel: dict, **log) -> Config:
    """`steps` steps of a schedule of rates that is the same whatever `steps` is."""
    fields = {
        "hidden_size": 32,
        "attention.num_heads": 4,
        "dropout_hidden": 0.1,
        "max_position": 64,
    }
    return Config(
        run_dir=str(run_dir),
        model=with_fields(ModelConfig(), fields | {"dtype": DType.float32} | model),
        data=DataConfig(
            paths=(corpus,),
            split="8,1,1",
            sequence_length=32,
            order=DataOrder.native,  # Megatron's depends on the number of steps
        ),
        parallel=ParallelConfig(**parallel),
        optim=OptimConfig(warmup_steps=2, lr=1e-2, decay_steps=ENDS[-1]),
        train=TrainConfig(
            num_steps=steps,
            global_batch_size=16,
            micro_batch_size=1,
            eval_every=EACH,
            eval_steps=2,
        ),
        checkpoint=CheckpointConfig(save_every=EACH, keep_last=9),
        log=LogConfig(every=1, tensorboard=False, **log),
    )


def run_layouts(part: Callable[..., Config], layouts: list[dict], folder: Path) -> list[Path]:
    """A run that stays on the first layout, and one that went on the others from its first end.

    part(run directory, steps, layout) is a run's config.
    """
    whole, changing = folder / "whole", folder / "changing"
    main(part(whole, ENDS[-1], layouts[0]))
    copy_run(whole, changing, ENDS[0])
    for steps, parallel in zip(ENDS[1:], layouts[1:], strict=True):
        main(part(changing, steps, parallel))
    return [whole, changing]


def copy_run(run_dir: Path, to: Path, step: int) -> None:
    """The run as it was after so many steps."""
    shutil.copytree(run_dir, to)
    for later in (to / "checkpoints").iterdir():
        if later.name > f"step_{step:08d}":
            shutil.rmtree(later)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(rows[:step]))


def curve(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def digests(run_dir: Path, step: int) -> dict:
    path = place_of(checkpoints_of(run_dir)) / f"step_{step:08d}" / "manifest.json"
    return json.loads(path.read_text())["body"]["tensors"]


def resumed_bitwise(run: Callable, folder: Path) -> Path:
    """A run of 4 steps, equal bit for bit to one that was resumed after 2. run(run directory,
    steps) makes it."""
    whole, resumed = folder / "whole", folder / "again"
    run(whole, 4)
    copy_run(whole, resumed, 2)
    run(resumed, 4)
    assert digests(resumed, 4) == digests(whole, 4)
    losses = [[row["loss"] for row in curve(each)] for each in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    return whole
