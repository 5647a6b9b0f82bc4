"""megatron-core's T5 and ours, trained from the same weights on Megatron-LM's samples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import megatron_model
import megatron_t5
import numpy as np
from masked_corpus import corpus, vocabulary

import maxmeg
from maxmeg.config.model import DType, Position
from maxmeg.config.schema import LrDecay, OptimConfig
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.masked.t5 import T5Dataset
from maxmeg.data.source import Datasets
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.hf.families.binding import Place
from maxmeg.hf.trained import TrainedModel
from maxmeg.megatron.convert import import_megatron

STEPS, ROWS = 100, 8
CLOSE = 1e-3  # relative
LENGTHS = megatron_t5.SOURCE, megatron_model.LENGTH


def samples(folder: Path) -> T5Dataset:
    data = IndexedDataset(str(folder / "sentences"))
    return T5Dataset(data, "1,0,0", 0, LENGTHS, vocabulary())


def train(folder: Path) -> None:
    """Train the model in FOLDER/imported on these samples, in FOLDER/run."""
    config = maxmeg.config(
        f"finetune:{folder / 'imported'}",
        **{
            "run_dir": str(folder / "run"),
            "data.source_length": megatron_t5.SOURCE,
            "data.sequence_length": megatron_model.LENGTH,
            "data.paths": (str(folder / "sentences"),),
            "train.global_batch_size": ROWS,
            "train.num_steps": STEPS,
            "train.eval_every": 0,
            "log.every": 1,
            "log.tensorboard": False,
        },
    )
    config.model.dtype = DType.float32
    beta1, beta2 = megatron_t5.BETAS
    config.optim = OptimConfig(
        lr=megatron_t5.LR,
        decay=LrDecay.constant,
        weight_decay=0.0,
        clip_norm=0.0,
        beta1=beta1,
        beta2=beta2,
        eps=megatron_t5.EPS,
    )
    maxmeg.train(config, Datasets(load_tokenizer(config.data.tokenizer), samples(folder)))


def run(*arguments: str | Path | int) -> None:
    """A Python program, on one device."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_hundred_steps_have_its_losses(tmp_path: Path):
    corpus(tmp_path)
    np.savez(tmp_path / "batches.npz", **samples(tmp_path).batch(np.arange(STEPS * ROWS)))
    run(megatron_t5.__file__, tmp_path, STEPS, ROWS)
    import_megatron(tmp_path / "t5", tmp_path / "imported")
    run(__file__, tmp_path)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    actual, wanted = [json.loads(row)["loss"] for row in rows], np.load(tmp_path / "losses.npy")
    assert wanted[-5:].mean() < 0.5 * wanted[0]
    np.testing.assert_allclose(actual, wanted, rtol=CLOSE)

    import_megatron(tmp_path / "relative", tmp_path / "imported relative")
    trained = TrainedModel(tmp_path / "imported relative", None)
    assert trained.model.position is Position.relative
    for side, table in np.load(tmp_path / "tables.npz").items():
        np.testing.assert_array_equal(trained.read(Place(f"relative.{side}.table")), table)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
