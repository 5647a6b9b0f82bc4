"""A run that is killed six times at random ends in the bits of a run that was not."""

import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import pytest
import s3fs
from s3_server import s3  # noqa: F401
from short_runs import config, curve, digests, write_corpus

from maxmeg.config.schema import Config

KILLS, STEPS = 6, 24
SOON = 0.2  # seconds from a chosen step to the kill, at most


def train(run: Config) -> None:
    from maxmeg.train import main  # in the child: a server of forks must not start JAX's threads

    main(run)


def start(run: Config) -> multiprocessing.Process:
    """A process that has imported maxmeg.train already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["maxmeg.train"])
    process = context.Process(target=train, args=(run,))
    process.start()
    return process


def rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("bucket", ["", "killed"])
def test_kills_change_no_bit(tmp_path, bucket):
    """bucket: of the checkpoints of the run that is killed; "": on the disk."""
    corpus, rng = write_corpus(tmp_path), random.Random(0)
    runs = [
        config(corpus, tmp_path / name, STEPS, {"num_layers": 1}, {"data": 4, "fsdp": 2})
        for name in ("whole", "killed")
    ]
    for run in runs:
        run.train.eval_every, run.checkpoint.save_every, run.optim.decay_steps = 7, 3, STEPS
    if bucket:
        s3fs.S3FileSystem().mkdir(bucket)
        runs[1].checkpoint.dir = f"s3://{bucket}/run"
    whole = start(runs[0])
    whole.join()
    assert whole.exitcode == 0
    killed, phases = tmp_path / "killed", []
    for _ in range(KILLS):
        process, before = start(runs[1]), rows(killed)
        new = rng.choice([0, 1, 2, 3])  # rows that this start adds before it is killed
        while new and process.is_alive() and rows(killed) - before < new:
            time.sleep(0.005)
            before = min(before, rows(killed))  # a resume drops rows after its checkpoint
        time.sleep(rng.uniform(0, SOON))
        process.kill()
        process.join()
        phases.append((new, process.exitcode))
    last = start(runs[1])
    last.join()
    assert last.exitcode == 0
    assert sum(code == -9 for _, code in phases) > KILLS // 2, phases
    assert digests(killed, STEPS) == digests(tmp_path / "whole", STEPS)
    losses = [[row["loss"] for row in curve(folder)] for folder in (tmp_path / "whole", killed)]
    assert len(losses[0]) == STEPS
    np.testing.assert_array_equal(*losses)
