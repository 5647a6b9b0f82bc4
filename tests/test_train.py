"""Whole runs: stop and resume, several processes, other meshes, bad input, failing disks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from maxmeg import evaluate, generate
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from maxmeg.data.indexed import IndexedWriter
from maxmeg.inference.load import load_run
from maxmeg.parallel.mesh import local_mesh
from maxmeg.runtime.guard import NonFiniteLoss
from maxmeg.state import create_state, resume, to_arrays
from maxmeg.train import Run, finish, main, train

REPOSITORY = Path(__file__).parent.parent
SAME_LOSS = 1e-6  # relative, of one process and several
STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Prefix of 40 documents of bytes."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "text")
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for _ in range(40):
            words = rng.integers(97, 103, rng.integers(200, 600))
            writer.add_document(np.append(words, 256), [len(words) + 1])
    return prefix


def small(corpus: str, run_dir, **parallel: int) -> Config:
    """A run of a few steps of a tiny model on all eight devices."""
    return Config(
        run_dir=str(run_dir),
        model=ModelConfig(
            num_layers=1, hidden_size=32, num_heads=8, dtype=DType.float32, dropout_hidden=0.1
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
        "model.num_heads": 4,
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
    command = [sys.executable, "-m", "maxmeg.train", f"--config={REPOSITORY / 'configs/gpt.py'}"]
    return command + [f"--config.{name}={value}" for name, value in settings.items()]


def environment(devices: int) -> dict[str, str]:
    """That of a process with `devices` virtual devices."""
    given = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    count = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": " ".join([*given, count]), "PYTHONPATH": str(REPOSITORY)}


def losses(run_dir: Path) -> dict[int, float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return {row["step"]: row["loss"] for row in rows}


def digests(run_dir: Path, step: int) -> dict:
    """The checkpoint's digest of every array."""
    path = run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json"
    tensors = json.loads(path.read_text())["body"]["tensors"]
    assert len(tensors) > 20
    return tensors


@pytest.mark.slow
def test_interrupted_run_resumes_bit_for_bit(corpus, tmp_path):
    steps, whole, broken = 60, tmp_path / "whole", tmp_path / "broken"
    env = environment(4)
    subprocess.run(flags(corpus, whole, steps), env=env, check=True, capture_output=True)
    process = subprocess.Popen(flags(corpus, broken, steps), env=env, stdout=subprocess.PIPE)
    metrics = broken / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 0 and b"the same command goes on" in out
    stopped = Checkpointer(broken / "checkpoints").latest_step()
    assert 3 <= stopped < steps and len(losses(broken)) == stopped
    subprocess.run(flags(corpus, broken, steps), env=env, check=True, capture_output=True)
    assert losses(broken) == losses(whole)
    assert digests(broken, steps) == digests(whole, steps)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"pipe": 2, "data": 1}], ids=["data", "pipe"])
def test_processes_give_the_losses_of_one_process(corpus, tmp_path, mesh):
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


def test_run_compiles_once_and_restores_on_other_meshes(corpus, tmp_path, capsys):
    config = small(corpus, tmp_path / "run", data=2, fsdp=2, tensor=2)
    run = Run(config)
    state = create_state(config, run.optimizer, run.abstract)
    state = train(run, state, 0)
    finish(run, state)
    assert run.train_step._cache_size() == run.eval_step._cache_size() == 1
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = {name: np.asarray(array) for name, array in to_arrays(state).items()}

    other = Run(small(corpus, tmp_path / "run", data=1, fsdp=1, tensor=8))
    step, restored = resume(other.config, other.checkpointer, other.abstract, "bytes")
    assert step == STEPS
    for name, array in to_arrays(restored).items():
        array, expected = np.asarray(array), saved[name]
        if array.shape != expected.shape:  # the vocabulary's padding: all zeros
            rows = min(len(array), len(expected))
            assert not array[rows:].any() and not expected[rows:].any()
            array, expected = array[:rows], expected[:rows]
        np.testing.assert_array_equal(array, expected, err_msg=name)

    trained = load_run(config.run_dir, mesh=local_mesh())
    assert trained.step == STEPS
    capsys.readouterr()
    evaluate.main(evaluate.Options(run_dir=config.run_dir, num_batches=2))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    printed = float(capsys.readouterr().out.split(" loss ")[1].split()[0])
    assert printed == pytest.approx(last["validation_loss"], abs=1e-4)
    generate.main(generate.Options(prompt=("abc",), run_dir=config.run_dir, num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")
    with pytest.raises(ValueError, match="exceed the context of 32"):
        generate.main(generate.Options(prompt=("abc" * 20,), run_dir=config.run_dir))

    wider = small(corpus, tmp_path / "run")
    wider.model.hidden_size = 64
    with pytest.raises(ValueError, match=r"embedding.table has shape \(512, 32\)"):
        main(wider)
    other = small(corpus, tmp_path / "run")
    other.data.tokenizer, other.checkpoint.load = "null:200", "auto"
    with pytest.raises(ValueError, match="vocabulary"):
        main(other)
    fresh = small(corpus, tmp_path / "run")
    fresh.checkpoint.load = "none"
    with pytest.raises(ValueError, match="already holds checkpoints"):
        main(fresh)


@pytest.mark.slow
def test_loss_that_is_not_finite_stops_before_a_save(corpus, tmp_path):
    config = small(corpus, tmp_path)
    config.optim.lr = config.optim.warmup_init_lr = 1e30
    config.checkpoint.save_every = 1
    with pytest.raises(NonFiniteLoss, match=r"step 1: .* Its batch holds samples 16, 17"):
        main(config)
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    assert checkpointer.steps() == [1]
    assert np.isfinite(losses(tmp_path)[0])


def test_training_outlives_a_failing_save(corpus, tmp_path, caplog, capsys):
    (tmp_path / "checkpoints").write_text("in the way")
    config = small(corpus, tmp_path)
    config.checkpoint.load = "none"
    main(config)
    assert len(losses(tmp_path)) == STEPS
    assert any(record.levelname in ("ERROR", "CRITICAL") for record in caplog.records)
    assert "checkpoint:" not in capsys.readouterr().out


def test_run_folder_that_cannot_be_made(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        main(small(corpus, tmp_path / "file" / "run"))


def test_corpus_of_another_tokenizer(corpus, tmp_path):
    config = small(corpus, tmp_path)
    config.model.vocab_size = 100
    with pytest.raises(ValueError, match=r"vocab_size=100 is smaller than the tokenizer's 257"):
        main(config)
    config.model.vocab_size, config.data.tokenizer = 0, "null:99"
    with pytest.raises(ValueError, match="is not in the vocabulary"):
        main(config)


@pytest.mark.slow
def test_growing_batches_compile_once_a_size(corpus, tmp_path):
    config = small(corpus, tmp_path, data=2, fsdp=4)
    config.train.global_batch_size, config.train.batch_rampup = 24, (8, 8, 32)
    config.data.num_workers = 1
    run = Run(config)
    state = create_state(config, run.optimizer, run.abstract)
    train(run, state, 0)
    sizes = [run.schedules.batch_size(step) for step in range(STEPS)]
    assert sizes[0] == 8 and sizes[-1] == 24 and run.train_step._cache_size() == len(set(sizes))
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["consumed_samples"] == sum(sizes)


@pytest.mark.slow
def test_loads_another_run(corpus, tmp_path, capsys):
    config = small(corpus, tmp_path / "first")
    main(config)
    config = small(corpus, tmp_path / "second")
    config.checkpoint.load, config.train.num_steps = str(tmp_path / "first"), STEPS + 1
    config.parallel.fsdp = 0
    main(config)
    assert f"resumed at step {STEPS}" in capsys.readouterr().out
    assert Checkpointer(tmp_path / "second" / "checkpoints").latest_step() == STEPS + 1
    assert jax.process_count() == 1
