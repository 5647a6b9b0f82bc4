"""megatron-core's BERT and ours, trained from the same weights on Megatron-LM's samples."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import megatron_bert
import megatron_model
import numpy as np
from masked_corpus import corpus, vocabulary

import maxmeg
from maxmeg.config.model import DType
from maxmeg.config.schema import LrDecay, OptimConfig
from maxmeg.data.corpus.indexed import IndexedDataset
from maxmeg.data.masked.bert import BertDataset
from maxmeg.data.source import Datasets
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.megatron.convert import import_megatron

STEPS, ROWS = 50, 8
CLOSE = 1e-3  # relative


def train(folder: Path, data, rates: types.ModuleType, **settings) -> None:
    """Train the model in FOLDER/imported on these samples, in FOLDER/run; rates: LR, BETAS, EPS."""
    config = maxmeg.config(
        f"finetune:{folder / 'imported'}",
        **{
            "run_dir": str(folder / "run"),
            "data.sequence_length": megatron_model.LENGTH,
            "data.paths": (str(folder / "sentences"),),
            "train.eval_every": 0,
            "log.every": 1,
            "log.tensorboard": False,
            **settings,
        },
    )
    config.model.dtype = DType.float32
    beta1, beta2 = rates.BETAS
    config.optim = OptimConfig(
        lr=rates.LR,
        decay=LrDecay.constant,
        weight_decay=0.0,
        clip_norm=0.0,
        beta1=beta1,
        beta2=beta2,
        eps=rates.EPS,
    )
    maxmeg.train(config, Datasets(load_tokenizer(config.data.tokenizer), data))


def samples(folder: Path) -> BertDataset:
    data = IndexedDataset(str(folder / "sentences"))
    return BertDataset(data, "1,0,0", 0, megatron_model.LENGTH, vocabulary())


def run(*arguments: str | Path | int) -> None:
    """A Python program, on one device."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_fifty_steps_have_its_losses(tmp_path: Path):
    corpus(tmp_path)
    np.savez(tmp_path / "batches.npz", **samples(tmp_path).batch(np.arange(STEPS * ROWS)))
    run(megatron_bert.__file__, tmp_path, STEPS, ROWS)
    import_megatron(tmp_path / "bert", tmp_path / "imported")
    run(__file__, tmp_path)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    actual = np.array([[row["loss"], row["pair_loss"]] for row in map(json.loads, rows)])
    wanted = np.load(tmp_path / "losses.npy")
    assert wanted[-5:, 0].mean() < 0.8 * wanted[0, 0]
    np.testing.assert_allclose(actual, wanted, rtol=CLOSE, atol=CLOSE)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sizes = {"train.global_batch_size": ROWS, "train.num_steps": STEPS}
    train(folder, samples(folder), megatron_bert, **sizes)
