"""Averages of weights: their formula, and who reads them. (Checkpoints: test_stored_states.py.)"""

import json

import numpy as np
import pytest
from layouts import BATCH, LENGTH, controls, mesh_of, tiny, tiny_abstract, tiny_batch
from short_runs import config as run_config
from short_runs import write_corpus
from test_stored_states import TOKENIZER, Steps, assert_same_bits

from maxmeg.checkpoint.names import to_arrays
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LoraConfig, Masters, OptimConfig
from maxmeg.config.setting import with_fields
from maxmeg.hf import convert
from maxmeg.hf.trained import open_run
from maxmeg.inference.load import load_run
from maxmeg.state import evaluated_model
from maxmeg.train import main

DECAY = 0.75
SAME = 1e-6  # relative: sums in another order


def config_of(decay: float = DECAY, optim: dict | None = None) -> Config:
    fields = {"num_layers": 3, "dtype": DType.bfloat16 if optim else DType.float32}
    config = tiny(fields, {"micro_batch_size": 2}, fsdp=1)
    config.data.tokenizer = TOKENIZER
    config.optim = with_fields(OptimConfig(**optim or {}), {"ema.decay": decay})
    return config


def part_of(arrays: dict, name: str) -> dict[str, np.ndarray]:
    found = {n.removeprefix(name): array for n, array in arrays.items() if n.startswith(name)}
    return {n: np.asarray(array) for n, array in found.items()}


def test_averages_follow_the_weights_and_not_skipped_steps():
    steps = Steps(config_of())
    expected = part_of(to_arrays(steps.state), "model.")
    assert_same_bits(part_of(to_arrays(steps.state), "ema."), expected)  # they begin equal
    for seed in range(3):
        arrays = steps.run(range(seed, seed + 1))
        weights = part_of(arrays, "model.")
        decay = min(DECAY, (1 + seed) / (10 + seed))  # the first weights are soon forgotten
        expected = {n: decay * a + (1 - decay) * weights[n] for n, a in expected.items()}
        for name, array in part_of(arrays, "ema.").items():
            np.testing.assert_allclose(array, expected[name], rtol=SAME, atol=1e-7)
    model = to_arrays(evaluated_model(steps.state, True))
    assert_same_bits({n: np.asarray(a) for n, a in model.items()}, part_of(arrays, "ema."))
    mask = np.full((BATCH, LENGTH), np.nan, np.float32)
    batch = tiny_batch(steps.config, steps.mesh, loss_mask=mask)
    state, metrics = steps.step(steps.state, batch, controls(steps.mesh))
    assert metrics["skipped"]
    assert_same_bits(part_of(to_arrays(state), "ema."), part_of(arrays, "ema."))


@pytest.mark.slow
def test_averages_begin_and_end_at_a_resume(tmp_path):
    """With masters of either kind; what begins are copies of the weights."""
    first = Steps(config_of(0.0))
    weights = part_of(first.run(range(1)), "model.")
    saver = first.save(tmp_path / "without")
    halves = {"masters": Masters.remainders}
    for optim in (None, halves):
        begun = Steps(config_of(optim=optim)).resumed(saver)
        assert_same_bits(part_of(to_arrays(begun.state), "ema."), weights)
        begun.run(range(1, 2))
        ended = Steps(config_of(0.0, optim=optim)).resumed(begun.save(tmp_path / f"{optim}"))
        assert ended.state.ema is None
        ended.run(range(2, 3))


def test_only_adapters_have_averages():
    config = config_of()
    config.lora = LoraConfig(rank=2)
    arrays = to_arrays(tiny_abstract(config, mesh_of(config))[1])
    names = [name for name in arrays if name.startswith("ema.")]
    assert names and all(name.endswith(("lora.a", "lora.b")) for name in names)


@pytest.mark.slow
def test_validation_loading_and_export_read_the_averages(tmp_path):
    corpus, losses = write_corpus(tmp_path), {}
    for name, decay, validate in (("plain", 0.0, True), ("own", 0.9, False), ("ema", 0.9, True)):
        config = run_config(corpus, tmp_path / name, 4, {"dropout_hidden": 0.0}, {})
        fields = {"ema.decay": decay, "ema.validate": validate}
        config.optim, config.log.sample_prompt = with_fields(config.optim, fields), "a"
        main(config)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["validation_loss"] for row in map(json.loads, lines[1::2])]
    assert losses["own"] == losses["plain"] and losses["ema"][-1] > losses["own"][-1] + 0.01
    run = tmp_path / "ema"
    reader = open_run(run)
    saved = {n.replace("/", "."): reader.read(n) for n in reader.tensors if n.startswith("ema/")}
    averages = part_of(saved, "ema.")
    loaded = to_arrays(load_run(str(run), master_weights=True, average=True).model)
    assert_same_bits({n: np.asarray(a) for n, a in loaded.items()}, averages)
    convert.export_model(run, tmp_path / "hf", DType.float32, average=True)
    convert.import_model(convert.open_folder(tmp_path / "hf"), tmp_path / "again")
    again = to_arrays(load_run(str(tmp_path / "again"), master_weights=True).model)
    assert_same_bits({n: np.asarray(a) for n, a in again.items()}, averages)
    for read in (
        lambda: load_run(str(tmp_path / "plain"), average=True),
        lambda: convert.export_model(tmp_path / "plain", tmp_path / "no", average=True),
    ):
        with pytest.raises(ValueError, match="has no EMA weights"):
            read()
