"""Training in float16: the loss scale reaches every gradient, overflows change nothing else."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import MLP_ONLY, controls, mesh_of, tiny, tiny_batch, tiny_state
from short_runs import curve, digests

from maxmeg.checkpoint.names import to_arrays
from maxmeg.checkpoint.resume import with_scaler_of
from maxmeg.config.model import DType
from maxmeg.config.schema import Config, LogConfig, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.configs import gpt
from maxmeg.runtime.faults.guard import NonFiniteLoss
from maxmeg.step import make_gradients, make_train_step
from maxmeg.train import main

EVERY_LOSS = {
    "layers": "*(attention,moe)",
    "dropout_hidden": 0.1,
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.aux_loss": 0.1,
    "moe.z_loss": 0.1,
    "mtp.num_layers": 1,
}


@pytest.mark.slow
def test_the_scale_multiplies_every_gradient_and_no_metric():
    config = tiny(EVERY_LOSS, {"z_loss": 1e-3, "micro_batch_size": 2}, data=2, pipe=2)
    mesh = mesh_of(config)
    _, abstract, state = tiny_state(config, mesh)
    function = jax.jit(make_gradients(config, mesh, abstract.model))
    batch = tiny_batch(config, mesh)
    plain, scaled = (
        function(state.model, batch, state.key, jnp.float32(scale)) for scale in (1, 2**10)
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2**10 * a, b), plain[0], scaled[0])
    jax.tree.map(np.testing.assert_array_equal, plain[1], scaled[1])


def test_an_overflow_changes_the_step_number_and_the_scale_alone():
    config = tiny(MLP_ONLY | {"dtype": DType.float16}, data=2)
    config.optim.loss_scale.initial, config.optim.loss_scale.window = 2.0**40, 2
    mesh = mesh_of(config)
    optimizer, abstract, state = tiny_state(config, mesh)
    step = make_train_step(config, mesh, optimizer, abstract)
    batch, before = tiny_batch(config, mesh), jax.device_get(to_arrays(state))

    def scaler(state) -> list[float]:
        return [float(value) for value in dataclasses.astuple(state.scaler)]

    for scale, hysteresis in ((2.0**40, 1), (2.0**39, 0), (2.0**38, -1)):
        state, metrics = step(state, batch, controls(mesh))
        assert (float(metrics["skipped"]), np.isfinite(metrics["loss"])) == (1, True)
        batches = int(state.step) * config.train.global_batch_size
        assert scaler(state) == [scale, 0, hysteresis, batches]
    after = jax.device_get(to_arrays(state))
    for name in before.keys() - {"step", *(f"scaler.{n}" for n in vars(state.scaler))}:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    lower = jax.device_put(jnp.float32(2**8), abstract.scaler.scale.sharding)
    state = dataclasses.replace(state, scaler=dataclasses.replace(state.scaler, scale=lower))
    for expected in ([2.0**8, 1, -1, batches], [2.0**9, 0, 2, batches]):
        state, metrics = step(state, batch, controls(mesh))
        assert float(metrics["skipped"]) == 0
        assert scaler(state) == expected
    assert step._cache_size() == 1
    grown = to_arrays(state)["model.embedding.table"]
    assert not np.array_equal(grown, before["model.embedding.table"])


def test_a_fixed_scale_replaces_that_of_a_checkpoint():
    config = tiny(MLP_ONLY | {"dtype": DType.float16})
    _, abstract, state = tiny_state(config, mesh_of(config))
    assert state.scaler is not None and abstract.scaler is not None
    skipped = dataclasses.replace(state.scaler, skipped_samples=state.scaler.skipped_samples + 8)
    config.optim.loss_scale.fixed = 512.0
    resumed = with_scaler_of(dataclasses.replace(state, scaler=skipped), config, abstract).scaler
    assert resumed is not None and (resumed.scale, resumed.skipped_samples) == (512.0, 8)


def small(run_dir: Path, dtype: DType, steps: int, **train) -> Config:
    config = gpt.get_config()
    fields = MLP_ONLY | {"num_layers": 1, "hidden_size": 64, "dtype": dtype}
    config.model, config.run_dir = with_fields(config.model, fields), str(run_dir)
    config.data.sequence_length, config.log = 32, LogConfig(tensorboard=False)
    config.train = TrainConfig(num_steps=steps, global_batch_size=8, eval_every=0, **train)
    return config


def test_a_fixed_scale_that_overflows_ends_the_run(tmp_path):
    config = small(tmp_path, DType.float16, 4, max_skipped_steps=2)
    config.optim.loss_scale.fixed = 1e30  # as float32 it is larger
    with pytest.raises(NonFiniteLoss, match="steps 1 to 2 were skipped"):
        main(config)


@pytest.mark.slow
def test_schedules_wait_for_skipped_steps_and_a_resumed_run_for_their_number(tmp_path, capsys):
    def run(name: str, steps: int, dtype: DType = DType.float16) -> list[dict]:
        config = small(tmp_path / name, dtype, steps)
        config.optim.decay_steps, config.optim.warmup_steps = 12, 4
        if dtype is DType.float16:
            config.optim.loss_scale.initial = 2.0**19
        main(config)
        return curve(tmp_path / name)

    run("broken", 5)
    rows, resumed = run("whole", 9), run("broken", 9)
    assert any(row["skipped"] for row in rows[:5])
    assert not rows[-1]["skipped"]
    updates = 0
    for row, other in zip(rows, resumed, strict=True):
        assert row["learning_rate"] == pytest.approx(3e-3 * min(updates / 4, 1), rel=0.5)
        updates += not row["skipped"]
        for name in ("loss", "learning_rate", "loss_scale", "grad_norm"):
            assert row[name] == other[name], name
    assert digests(tmp_path / "whole", 9) == digests(tmp_path / "broken", 9)
    # To another dtype and back: the scale begins anew.
    assert "loss_scale" not in run("broken", 11, DType.bfloat16)[-1]
    assert run("broken", 12)[-1]["loss_scale"] == 2.0**19
    assert "scale 2^19" in capsys.readouterr().out
