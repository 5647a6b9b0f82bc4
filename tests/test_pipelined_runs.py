"""Whole runs on pipelines: checkpoints go from one to another, the loss curve goes on."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxmeg import evaluate, generate
from maxmeg.config.model import DType, ModelConfig
from maxmeg.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DataOrder,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    Schedule,
    TrainConfig,
)
from maxmeg.data.indexed import IndexedWriter
from maxmeg.train import main

SAME = 1e-5  # relative, of losses whose sums are made in another order
LAYERS, EACH = 6, 3  # steps of a part of the run
PARTS = [
    {"pipe": 1, "fsdp": 8},
    {"pipe": 4, "fsdp": 2, "pad_layers": True},
    {"pipe": 2, "fsdp": 2, "tensor": 2, "chunks": 3},
    {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("corpus") / "text")
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=257) as writer:
        for _ in range(40):
            words = rng.integers(97, 103, rng.integers(200, 600))
            writer.add_document(np.append(words, 256), [len(words) + 1])
    return prefix


def config(corpus: str, run_dir: Path, steps: int, parallel: dict, prompt: str = "") -> Config:
    """`steps` steps of a schedule of rates that is the same whatever their number."""
    total = EACH * len(PARTS)
    return Config(
        run_dir=str(run_dir),
        model=ModelConfig(
            num_layers=LAYERS,
            hidden_size=32,
            num_heads=4,
            dtype=DType.float32,
            dropout_hidden=0.1,
            max_position=64,
        ),
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
        log=LogConfig(every=1, tensorboard=False, sample_prompt=prompt),
    )


def curve(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def digests(run_dir: Path, step: int) -> dict:
    path = run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json"
    return json.loads(path.read_text())["body"]["tensors"]


@pytest.mark.slow
def test_a_run_goes_from_pipeline_to_pipeline(corpus, tmp_path, capsys):
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    main(config(corpus, whole, EACH * len(PARTS), PARTS[0]))
    for i, parallel in enumerate(PARTS):
        prompt = "abc" if i == len(PARTS) - 1 else ""
        main(config(corpus, changing, EACH * (i + 1), parallel, prompt))
    assert "--- sample\nabc" in capsys.readouterr().out
    expected = curve(whole)
    assert len(expected) == EACH * len(PARTS)
    for one, other in zip(curve(changing), expected, strict=True):
        for name in ("loss", "validation_loss"):
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    tensors = digests(changing, EACH * 4)
    assert tensors.keys() == digests(whole, EACH * 4).keys()
    shapes = {json.dumps(t["shape"]) for name, t in tensors.items() if "stack" in name}
    assert shapes and all(json.loads(shape)[0] == LAYERS for shape in shapes)

    evaluate.main(evaluate.Options(run_dir=str(changing), num_batches=2))
    last = curve(changing)[-1]["validation_loss"]
    printed = float(capsys.readouterr().out.split(" loss ")[1].split()[0])
    assert printed == pytest.approx(last, abs=1e-4)
    generate.main(generate.Options(prompt=("abc",), run_dir=str(changing), num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [PARTS[1], PARTS[2]], ids=["padded", "interleaved"])
def test_a_resumed_pipeline_is_bitwise_the_uninterrupted(corpus, tmp_path, parallel):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    main(config(corpus, whole, 2 * EACH, parallel))
    main(config(corpus, broken, EACH, parallel))
    main(config(corpus, broken, 2 * EACH, parallel))
    assert [row["loss"] for row in curve(broken)] == [row["loss"] for row in curve(whole)]
    assert digests(broken, 2 * EACH) == digests(whole, 2 * EACH)
