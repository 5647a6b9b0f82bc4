"""Whole runs on pipelines: checkpoints go from one to another, the loss curve goes on."""

import json
from pathlib import Path

import pytest
from short_runs import EACH, SAME, curve, digests, write_corpus
from short_runs import config as short_run

from maxmeg import evaluate, generate
from maxmeg.config.schema import Config, Schedule
from maxmeg.train import main

LAYERS = 6
PARTS = [
    {"pipe": 1, "fsdp": 8},
    {"pipe": 2, "fsdp": 2, "tensor": 2, "chunks": 3},
    {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def config(corpus: str, run_dir: Path, steps: int, parallel: dict, prompt: str = "") -> Config:
    model, total = {"num_layers": LAYERS, "mtp_depths": 1}, EACH * len(PARTS)
    return short_run(corpus, run_dir, steps, total, model, parallel, sample_prompt=prompt)


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
        for name in ("loss", "validation_loss", "mtp_loss/1"):
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    tensors = digests(changing, EACH * len(PARTS))
    assert tensors.keys() == digests(whole, EACH * len(PARTS)).keys()
    shapes = {json.dumps(t["shape"]) for name, t in tensors.items() if "stack" in name}
    assert shapes and all(json.loads(shape)[0] == LAYERS for shape in shapes)

    evaluate.main(evaluate.Options(run_dir=str(changing), num_batches=2))
    last = curve(changing)[-1]["validation_loss"]
    printed = float(capsys.readouterr().out.split(" loss ")[1].split()[0])
    assert printed == pytest.approx(last, abs=1e-4)
    generate.main(generate.Options(prompt=("abc",), run_dir=str(changing), num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")


@pytest.mark.slow
def test_a_resumed_pipeline_is_bitwise_the_uninterrupted(corpus, tmp_path):
    whole, broken, parallel = tmp_path / "whole", tmp_path / "broken", PARTS[1]
    main(config(corpus, whole, 2 * EACH, parallel))
    main(config(corpus, broken, EACH, parallel))
    main(config(corpus, broken, 2 * EACH, parallel))
    for name in ("loss", "mtp_loss/1"):
        assert [row[name] for row in curve(broken)] == [row[name] for row in curve(whole)]
    assert digests(broken, 2 * EACH) == digests(whole, 2 * EACH)
