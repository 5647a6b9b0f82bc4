"""Masked language modelling: the same losses and gradients on every layout; runs learn by it."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from layouts import BATCH, LENGTH, in_model_order, mesh_of, tiny, tiny_state
from masked_corpus import SIZE, corpus, vocabulary

from maxmeg import evaluate, generate, preprocess
from maxmeg.config.data import Objective
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Config
from maxmeg.data.build import build_dataset
from maxmeg.data.masked.bert import BertDataset
from maxmeg.data.resuming import record_order, warn_of_order
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.models.mixers import pattern
from maxmeg.parallel.placement import local_rows, place_batch
from maxmeg.planning.cost.flops import training_flops
from maxmeg.step import make_gradients

REPOSITORY = Path(__file__).parent.parent
TOLERANCE = 5e-6  # relative, float32: the order of sums differs
FLOOR = 1e-9  # for gradients that are zero in exact arithmetic
SLOW = pytest.mark.slow
LAYOUTS = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    pytest.param({"pipe": 2, "fsdp": 2, "schedule": Schedule.zero_bubble}, 2, marks=SLOW),
    pytest.param({"pipe": 2, "fsdp": 1, "tensor": 2, "chunks": 2}, 4, marks=SLOW),
]


def gradients(folder: Path, parallel: dict, micro_batch_size: int):
    """(loss, gradients by name in model order) of one batch of masked samples."""
    model = {"vocab_size": SIZE, "num_layers": 4, "attention.causal": False, "dropout_hidden": 0.1}
    config = tiny(model, {"micro_batch_size": micro_batch_size}, **parallel)
    config.data.objective = Objective.masked
    config.data.paths = ("sentences",)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    data = BertDataset(corpus(folder), "1,0,0", 0, LENGTH, vocabulary(), has_pairs=False)
    rows = local_rows(mesh, micro_batch_size)
    batch = place_batch(data.batch(np.arange(BATCH)[rows(BATCH)]), rows, mesh, BATCH)
    assert sorted(batch.extra) == ["is_swapped", "token_types"]
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    found, sums = function(state.model, batch, state.key)
    arrays = jax.tree_util.tree_leaves_with_path(in_model_order({"model": found}))
    named = {jax.tree_util.keystr(path): np.asarray(array) for path, array in arrays}
    return float(sums["loss_sum"] / sums["tokens"]), named


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return gradients(tmp_path_factory.mktemp("one"), {"fsdp": 1}, 0)


@pytest.mark.parametrize(("parallel", "micro"), LAYOUTS)
def test_layout_equals_one_device(one_device, tmp_path, parallel, micro):
    loss, found = gradients(tmp_path, parallel, micro)
    wanted_loss, wanted = one_device
    assert loss == pytest.approx(wanted_loss, rel=TOLERANCE)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        part = found[name][: len(array)]  # the padding of the vocabulary depends on tensor
        assert np.abs(part - array[: len(part)]).max() <= TOLERANCE * np.abs(array).max() + FLOOR


@pytest.mark.parametrize("mixer", ["attention", "local", "mla", "local_mla"])
def test_every_attention_is_bidirectional(mixer):
    """Layers read the setting, and the planner counts all scores."""
    fields = {"layers": f"*({mixer},mlp)", "attention.window": 5 * mixer.startswith("local")}
    causal, model = (tiny(fields | {"attention.causal": causal}).model for causal in (True, False))
    specs = [pattern(config)[0][0][0].mixers[0] for config in (causal, model)]
    assert [vars(spec)["causal"] for spec in specs] == [True, False]
    assert training_flops(model, LENGTH) == training_flops(causal, LENGTH, causal=False)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, str]:
    """The data settings of a corpus that counts, a sentence for each ten."""
    folder = tmp_path_factory.mktemp("counting")
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *digits]
    (folder / "vocab.txt").write_text("\n".join(words))
    text = json.dumps({"text": " ".join(f"{' '.join(digits)}." for _ in range(6))})
    (folder / "a.jsonl").write_text("\n".join([text] * 40))
    spec = f"wordpiece:{folder}/vocab.txt"
    flags = [f"--input={folder}/a.jsonl", f"--output={folder}/out", f"--tokenizer={spec}"]
    assert preprocess.main([*flags, "--split_sentences", "--workers=0"]) == 0
    return {"data.paths": f"{folder}/out_text_sentence", "data.tokenizer": spec}


@SLOW
def test_a_run_learns_and_does_not_generate(settings, tmp_path, capsys):
    settings = settings | {
        "run_dir": tmp_path,
        "data.objective": "masked",
        "data.sequence_length": 32,
        "data.split": "8,1,1",
        "model.attention.causal": "false",
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "parallel.pipe": 2,
        "parallel.tensor": 2,
        "train.num_steps": 80,
        "train.global_batch_size": 16,
        "train.micro_batch_size": 2,
        "train.eval_every": 80,
        "optim.lr": 1e-2,
        "log.every": 1,
        "log.sample_prompt": "",
    }
    command = [sys.executable, "-m", "maxmeg.train", "--config=gpt"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    frequencies = np.log(10)  # the loss of a model that does not read the sentence
    assert rows[0]["loss"] > frequencies
    assert max(np.mean([row["loss"] for row in rows[-10:]]), rows[-1]["validation_loss"]) < (
        0.8 * frequencies
    )
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=str(tmp_path)))
    assert "validation loss" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"bidirectional model .* does not continue text"):
        generate.main(generate.Options(prompt=("one",), run_dir=str(tmp_path)))


def test_one_corpus_is_read(settings, caplog):
    config = Config().data
    config.objective, config.sequence_length, config.split = Objective.masked, 32, "1,0,0"
    config.tokenizer = settings["data.tokenizer"]
    tokenizer, one = load_tokenizer(config.tokenizer), settings["data.paths"]
    data = build_dataset(config, [one], tokenizer, 0, seed=1)
    assert isinstance(data, BertDataset) and not data.batch(np.arange(9))["is_swapped"].any()
    assert build_dataset(config, [one], tokenizer, 1, seed=1) is None
    longer = build_dataset(config, [one], tokenizer, 0, 1, samples=data.num_samples + 1)
    saved = record_order(data, 5)
    warn_of_order(saved, data, 5)
    assert not caplog.text
    warn_of_order(saved, longer, 5)  # several epochs are shuffled together
    assert "changed: train.num_steps, beyond whole epochs of sentences" in caplog.text
    with pytest.raises(ValueError, match="reads one corpus, not 2"):
        build_dataset(config, [one, one], tokenizer, 0, seed=1)
