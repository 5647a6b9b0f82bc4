"""Whole runs: stop and resume, several processes, other meshes, bad input, failing disks."""

import contextlib
import dataclasses
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import MLP_ONLY
from short_runs import curve, digests, write_corpus

from maxmeg import evaluate, generate
from maxmeg.checkpoint.initialize import create_state
from maxmeg.checkpoint.manager import Checkpointer, SaveError
from maxmeg.checkpoint.names import to_arrays
from maxmeg.checkpoint.resume import resume
from maxmeg.config.data import DataConfig
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.parallel import FsdpGather, ParallelConfig
from maxmeg.config.quantization import QuantizationRecipe
from maxmeg.config.schema import CheckpointConfig, Config, LogConfig, OptimConfig, TrainConfig
from maxmeg.config.setting import with_fields
from maxmeg.data.source import Datasets
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.objectives.objective import Objective
from maxmeg.optim.schedules import learning_rate_at
from maxmeg.runtime.faults.lock import lock_folder
from maxmeg.runtime.faults.rerun import with_rerun
from maxmeg.runtime.faults.signals import Interrupt
from maxmeg.step import make_train_step
from maxmeg.train import Options, Run, command, finish, main, train

REPOSITORY = Path(__file__).parent.parent
SAME_LOSS = 1e-6  # relative, of one process and several
PRINTED = 1e-4  # half a unit of the last digit of what is printed, and its own rounding
STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def small(corpus: str, run_dir, **parallel: int) -> Config:
    """A run of a few steps of a tiny model on all eight devices."""
    return Config(
        run_dir=str(run_dir),
        model=with_fields(
            ModelConfig(),
            {
                "num_layers": 1,
                "hidden_size": 32,
                "attention.num_heads": 8,
                "dtype": DType.float32,
            },
        ),
        data=DataConfig(paths=(corpus,), split="8,1,1", sequence_length=32),
        parallel=ParallelConfig(**parallel),
        optim=OptimConfig(warmup_steps=2, lr=1e-2),
        train=TrainConfig(num_steps=STEPS, global_batch_size=16, eval_every=3, eval_steps=2),
        checkpoint=CheckpointConfig(save_every=3),
        log=LogConfig(every=1, tensorboard=False),
    )


def flags(corpus: str, run_dir: Path, steps: int, **other: int) -> list[str]:
    """The same as a command line, on fewer devices, longer; `other` sizes of the mesh."""
    settings = {
        "run_dir": run_dir,
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.attention.num_heads": 4,
        "model.dropout_hidden": 0.1,
        "data.paths": corpus,
        "data.split": "8,1,1",
        "data.sequence_length": 32,
        "train.num_steps": steps,
        "optim.warmup_steps": 2,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 1,
        "train.eval_every": 0,
        "checkpoint.save_every": 0,
        "parallel.data": 2,
        "parallel.fsdp": 1,
        "parallel.tensor": 2,
        "log.tensorboard": "false",
        "log.sample_prompt": "",
        **{f"parallel.{axis}": size for axis, size in other.items()},
    }
    command = [sys.executable, "-m", "maxmeg.train", "--config=gpt"]
    return command + [f"--config.{name}={value}" for name, value in settings.items()]


def environment(devices: int) -> dict[str, str]:
    """That of a process with `devices` virtual devices."""
    given = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    count = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": " ".join([*given, count]), "PYTHONPATH": str(REPOSITORY)}


def losses(run_dir: Path) -> dict[int, float]:
    rows = curve(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: row["loss"] for row in rows}


HYBRID = {"layers": "mamba,mlp gated_delta,attention,mlp", "mamba.num_heads": 4}
HYBRID |= {"mamba.head_dim": 8, "mamba.num_groups": 2, "mamba.state_size": 6}
HYBRID |= {"delta.num_heads": 4, "delta.key_size": 6, "delta.chunk": 16}


@pytest.mark.slow
def test_interrupted_run_resumes_bit_for_bit(corpus, tmp_path):
    """Of a hybrid, which has every kind of parameter."""
    steps, whole, broken = 60, tmp_path / "whole", tmp_path / "broken"
    env, settings = environment(4), [f"--config.model.{n}={v}" for n, v in HYBRID.items()]
    again = [*flags(corpus, broken, steps), *settings]
    first = [*flags(corpus, whole, steps), *settings]
    subprocess.run(first, env=env, check=True, capture_output=True)
    process = subprocess.Popen(again, env=env, stdout=subprocess.PIPE)
    metrics = broken / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 0 and b"the same command resumes" in out
    stopped = Checkpointer(broken / "checkpoints").steps()[-1]
    assert 3 <= stopped < steps and len(losses(broken)) == stopped
    subprocess.run(again, env=env, check=True, capture_output=True)
    assert losses(broken) == losses(whole)
    assert digests(broken, steps) == digests(whole, steps)


@pytest.mark.slow
def test_processes_give_the_losses_of_one_process(corpus, tmp_path):
    mesh = {"pipe": 2, "data": 1}
    one, two = tmp_path / "one", tmp_path / "two"
    command = flags(corpus, one, 8, **mesh)
    subprocess.run(command, env=environment(4), check=True, capture_output=True)
    launch = [sys.executable, str(REPOSITORY / "launch/local.py"), "-n", "2"]
    launch += ["--devices-per-process", "2", "--", *flags(corpus, two, 8, **mesh)]
    subprocess.run(launch, env=environment(2), check=True, capture_output=True)
    expected = losses(one)
    for step, loss in losses(two).items():
        assert loss == pytest.approx(expected[step], rel=SAME_LOSS)
    assert len(expected) == 8


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> SimpleNamespace:
    """A run of STEPS steps, its arrays, and what it printed, compiled and copied."""
    folder = tmp_path_factory.mktemp("finished")
    config = small(corpus, "run", data=2, fsdp=2, tensor=2)
    config.checkpoint.timeout_seconds = 77
    compiled, copied, printed = [], [], io.StringIO()

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if details.get("fun_name") == "jit(train_step)":
            compiled.append(event.rpartition("/")[-1])

    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        run = Run(config)
        run.open_data(0, {})
        state = create_state(config, run.program.optimizer, run.program.abstract)
        compute_copy = run.program.compute_copy
        run.program.compute_copy = lambda model: copied.append(compute_copy(model)) or copied[-1]
        jax.monitoring.register_event_duration_secs_listener(listen)
        state = train(run, state, 0, Interrupt())
        jax.monitoring.unregister_event_duration_listener(listen)
        finish(run, state)
    arrays = {name: np.asarray(array) for name, array in to_arrays(state).items()}
    facts = {"compiled": compiled, "copies": len(copied), "printed": printed.getvalue()}
    return SimpleNamespace(run=run, folder=folder / "run", arrays=arrays, **facts)


@pytest.mark.each_commit
def test_a_run_compiles_once(finished):
    run = finished.run
    assert run.checkpointer.processes.timeout_seconds == 77
    assert finished.compiled.count("backend_compile_duration") == 1
    assert finished.copies == STEPS // run.config.train.eval_every
    assert finished.printed.count("compiled ") == 1
    assert run.program.train_step.jitted._cache_size() == run.program.eval_step._cache_size() == 1
    assert (finished.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_restored_on_another_mesh(finished, corpus):
    other = Run(small(corpus, finished.folder, data=1, fsdp=1, tensor=8))
    begun = resume(other.config, other.checkpointer, other.program.abstract, "bytes")
    assert begun.step == STEPS
    assert begun.metadata["config"]["run_dir"] == str(finished.folder)  # not "run"
    for name, array in to_arrays(begun.state).items():
        found, expected = np.atleast_1d(array, finished.arrays[name])
        assert not found[len(expected) :].any()  # the vocabulary's padding
        np.testing.assert_array_equal(found[: len(expected)], expected, name)


def test_a_run_is_evaluated_and_continues_text(finished, capsys):
    run_dir = str(finished.folder)
    evaluate.main(evaluate.Options(run_dir=run_dir, num_batches=2))
    last = curve(finished.folder)[-1]
    said = capsys.readouterr().out.split(" loss ")[1].split()
    assert float(said[0]) == pytest.approx(last["validation_loss"], abs=PRINTED)
    assert float(said[4]) == pytest.approx(last["validation_loss_per_byte"], abs=PRINTED)
    # The ends of documents (1 of about 400 bytes) have a loss, but are no bytes.
    assert 1 < last["validation_loss_per_byte"] / last["validation_loss"] < 1.01
    generate.main(generate.Options(prompt=("abc",), run_dir=run_dir, num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")
    with pytest.raises(ValueError, match="exceed the context of 32"):
        generate.main(generate.Options(prompt=("abc" * 20,), run_dir=run_dir))


@pytest.mark.parametrize("options", [Options(), Options(dry_run=True)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model.hidden_size": 64}, r"embedding.table has shape \(512, 32\)"),
        ({"data.tokenizer": "null:257", "checkpoint.load": "auto"}, "vocabulary"),
        ({"checkpoint.load": "none"}, "already holds checkpoints"),
    ],
)
def test_what_does_not_continue_a_run_is_refused(
    finished, corpus, monkeypatch, settings, error, options
):
    monkeypatch.chdir(finished.folder.parent)
    with pytest.raises(ValueError, match=error):
        command(with_fields(small(corpus, "run"), settings), options)


def test_a_longer_run_resumes_and_a_damaged_checkpoint_is_passed_over(
    finished, corpus, tmp_path, capsys
):
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    config = small(corpus, tmp_path)
    config.train.num_steps += 1
    command(config, Options(dry_run=True))
    shown = capsys.readouterr().out
    assert f"would resume at step {STEPS}, sample" in shown and "num_steps 6 -> 7" in shown
    newest = tmp_path / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json"
    newest.write_bytes(newest.read_bytes()[:100])
    config.train.num_steps = 3
    main(config)
    assert "resumed at step 3" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("transient", [False, True], ids=["persistent", "transient"])
def test_a_bad_step_changes_nothing(corpus, tmp_path, transient, monkeypatch, caplog):
    """NaN weights in step 3's loss; with rerun_bad_steps they may be gone the second time."""
    bad, steps = 3, []
    config = small(corpus, tmp_path / "run", data=2, fsdp=2, tensor=2)
    config.train.rerun_bad_steps, config.train.eval_every = transient, 0
    run = Run(config)
    run.open_data(0, {})
    place, program = run.place, run.program
    compiled = make_train_step(config, program.mesh, program.optimizer, program.abstract)

    def damaged(state, batch, controls):
        steps.append(int(state.step))
        if steps[-1] == bad and not (transient and steps.count(bad) == 2):
            batch = dataclasses.replace(batch, loss_mask=batch.loss_mask * jnp.nan)
        return compiled(state, batch, controls)

    run.program.train_step = with_rerun(damaged) if transient else damaged
    state = create_state(config, run.program.optimizer, run.program.abstract)
    state = train(run, state, 0, Interrupt())
    assert compiled._cache_size() == 1
    told = "step 4 ran twice .* a transient fault" if transient else "step 4 was skipped: loss=nan"
    assert re.search(told, caplog.text)

    expected = create_state(config, run.program.optimizer, run.program.abstract)
    with run.batches(0) as batches:
        for step, batch in batches:
            if step == bad and not transient:  # as if it had been left out of the optimizer
                expected = dataclasses.replace(expected, step=expected.step + 1)
            else:
                controls = run.controls(step, False, expected)
                expected, _ = compiled(expected, place(step, batch), controls)
    for name, array in to_arrays(expected).items():
        np.testing.assert_array_equal(to_arrays(state)[name], array, err_msg=name)
    rows = curve(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [float(i == bad and not transient) for i in range(6)]


@pytest.mark.slow
def test_training_outlives_a_failing_save(corpus, tmp_path, caplog, capsys):
    (tmp_path / "checkpoints").write_text("in the way")
    config = small(corpus, tmp_path)
    config.checkpoint.load = "none"
    with pytest.raises(SaveError, match=r"the last checkpoint was not saved .* FileExistsError"):
        main(config)
    assert len(losses(tmp_path)) == STEPS
    failures = [r for r in caplog.records if "WAS NOT SAVED, training continues" in r.getMessage()]
    assert len(failures) == STEPS // config.checkpoint.save_every
    assert "checkpoint:" not in capsys.readouterr().out


def test_a_dry_run_checks_and_prints_and_writes_nothing(corpus, tmp_path, capsys):
    config = small(corpus, tmp_path / "run")
    command(config, Options(dry_run=True))
    shown = capsys.readouterr().out
    for words in ("parameters", "memory per device, estimated", "validation", "dry run: these"):
        assert words in shown
    assert list(tmp_path.iterdir()) == [] and config == small(corpus, tmp_path / "run")
    assert "resume" not in shown
    for change, message in (
        ({"train.global_batch_size": 3}, r"train.global_batch_size=3 is not divisible"),
        ({"data.max_epochs": 0.1}, r"training corpora \d+ times, more than data.max_epochs=0.1"),
        ({"train.num_steps": 2**53}, r"training corpora [\d,]+ times, more than data.max_epochs="),
        (
            {"train.quantization.recipe": QuantizationRecipe.mxfp4},
            r"has no effect|has blocks of 32 weights",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            command(with_fields(config, change), Options(dry_run=True))


def test_a_run_folder_in_use_is_refused(corpus, tmp_path):
    with lock_folder(tmp_path), pytest.raises(OSError, match="is in use by another run"):
        main(small(corpus, tmp_path))
    assert not list(tmp_path.iterdir())


class Interrupted(Datasets):
    """Data that the signal of a preemption arrives at."""

    def open(self, *arguments):
        signal.raise_signal(signal.SIGTERM)
        return super().open(*arguments)


def test_a_stop_during_the_start_ends_before_the_first_step(tmp_path, capfd):
    config = small("", tmp_path, data=2, fsdp=4)
    config.model = with_fields(config.model, MLP_ONLY)
    handler = signal.getsignal(signal.SIGTERM)
    main(config, Interrupted(load_tokenizer("bytes"), Counting(), {"": Counting()}))
    shown = capfd.readouterr()
    assert "SIGTERM: stopping before the first step; send it again" in shown.err
    assert "stopped before the first step; the same command" in shown.out
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "lock").exists()
    assert signal.getsignal(signal.SIGTERM) is handler


class Counting:
    """Rows that count up from a random number; targets of even tokens weigh nothing."""

    vocab_size, sequence_length, samples_per_epoch, num_tokens = 257, 32, 1000, 32_000

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        first_B1 = np.array([np.random.default_rng(n).integers(200) for n in indices])[:, None]
        places_BL = np.broadcast_to(np.arange(32, dtype=np.int32), (len(indices), 32))
        tokens_BL = np.int32(first_B1 + places_BL)
        mask_BL = np.ones_like(tokens_BL, np.float32)
        common = {"tokens": tokens_BL, "targets": tokens_BL + 1, "positions": places_BL}
        return {**common, "loss_mask": mask_BL, "weight": np.float32(tokens_BL % 2)}


def weighted_loss(model, h_BLD, batch, train, ctx):
    """The cross entropy of targets times the weights that the dataset gives them."""
    weights_BL = batch.extra["weight"]
    loss, losses_BL = model.token_losses(
        h_BLD, batch.targets, weights_BL / batch.divisors[0], train
    )
    sums = {"loss_sum": jnp.sum(losses_BL * weights_BL), "weights": jnp.sum(weights_BL)}
    return loss, sums | {"tokens": jnp.sum(batch.loss_mask)}


def test_data_and_a_loss_can_be_made_in_python(tmp_path):
    config = small("", tmp_path, data=2, fsdp=4)
    config.model = with_fields(config.model, MLP_ONLY)
    source = Datasets(load_tokenizer("bytes"), Counting(), {"": Counting()})

    def metrics(sums):
        return {"loss": sums["loss_sum"] / sums["tokens"], "weights": sums["weights"]}

    main(config, source, Objective(loss=weighted_loss, metrics=metrics))
    rows = curve(tmp_path)
    assert [row["weights"] for row in rows] == [16 * 32 / 2] * STEPS
    losses = [row["loss"] for row in rows]
    assert losses[0] == pytest.approx(np.log(257) / 2, rel=0.1)
    assert losses[-1] < 0.9 * losses[0]
    assert rows[-1]["validation_loss"] < losses[0]


@pytest.mark.slow
def test_growing_batches_compile_once_a_size(corpus, tmp_path):
    config = small(corpus, tmp_path, data=2, fsdp=4)
    config.train.global_batch_size, config.train.batch_rampup = 24, (8, 8, 32)
    config.data.num_workers = 1
    run = Run(config)
    run.open_data(0, {})
    state = create_state(config, run.program.optimizer, run.program.abstract)
    train(run, state, 0, Interrupt())
    sizes = [run.schedules.batch_size(step) for step in range(STEPS)]
    assert sizes[0] == 8 and sizes[-1] == 24
    assert run.program.train_step.jitted._cache_size() == len(set(sizes))
    assert curve(tmp_path)[-1]["consumed_samples"] == sum(sizes)


@pytest.mark.slow
def test_a_run_continues_with_twice_the_batch_where_its_samples_end(corpus, tmp_path, caplog):
    """Each sample is read once, at the learning rate of its place; a new seed is told."""
    config = small(corpus, tmp_path)
    config.train.num_steps, config.train.eval_every = 3, 1
    config.optim.decay_samples = 160
    main(config)
    config.train.global_batch_size, config.train.num_steps = 32, 6
    main(config)
    rows = curve(tmp_path)
    assert [row["consumed_samples"] for row in rows] == [16, 32, 48, 80, 112, 144]
    rates = [
        learning_rate_at(before, config.optim, warmup=32, decay=160)
        for before in (0, 16, 32, 48, 80, 112)
    ]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    saved = Checkpointer(tmp_path / "checkpoints").manifest(6).metadata
    assert saved["batches"] == [[0, 0, 16], [3, 48, 32]]
    assert saved["validation_samples"] == 3 * 32 + 3 * 64
    assert saved["data_order"][0]["samples"] == 144 and "After sample" not in caplog.text
    config.seed, config.train.num_steps = 5, 7
    main(config)
    assert caplog.text.count("(changed: seed). After sample 144, ") == 1


@pytest.mark.slow
def test_a_run_loads_another_run(corpus, tmp_path, capsys):
    config = small(corpus, tmp_path / "first")
    main(config)
    config = small(corpus, tmp_path / "second")
    config.checkpoint.load, config.train.num_steps = str(tmp_path / "first"), STEPS + 1
    config.parallel.fsdp, config.parallel.fsdp_gather = 0, FsdpGather.step
    main(config)
    out = " ".join(capsys.readouterr().out.split())
    assert "devices: data 8 batch" in out and "fsdp_gather microbatch -> step" in out
    assert f"resumed at step {STEPS}" in out and f"num_steps {STEPS} -> {STEPS + 1}" in out
    assert Checkpointer(tmp_path / "second" / "checkpoints").steps()[-1] == STEPS + 1
    saved = (tmp_path / "second" / "config.yaml").read_text()
    assert "lanes: apart\n" in saved and "lanes" not in out  # of `auto`, on CPUs
    config.optim.lr, config.parallel.fsdp_gather = 1.0, FsdpGather.microbatch
    main(config)  # it has no step to make
    out = " ".join(capsys.readouterr().out.split())
    gather = "parallel.fsdp_gather step -> microbatch"
    assert f"changed since step 7: {gather}, optim.lr 0.01 -> 1.0" in out
    assert "already finished at step 7: raise train.num_steps=7" in out
    assert (tmp_path / "second" / "config.yaml").read_text() == saved
    assert jax.process_count() == 1
