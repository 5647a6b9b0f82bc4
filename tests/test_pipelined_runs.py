"""Whole runs on pipelines: checkpoints go from one to another, the loss curve goes on."""

import json
from pathlib import Path

import pytest
from short_runs import EACH, ENDS, SAME, config, copy_run, curve, digests, run_layouts, write_corpus

from maxmeg import evaluate, generate
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Config
from maxmeg.train import main

MODEL = {"num_layers": 6, "mtp.num_layers": 1, "mtp.layers": "mlp,attention"}
LAYOUTS = [
    {"pipe": 1, "fsdp": 8},
    {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
    {"pipe": 2, "fsdp": 2, "tensor": 2, "chunks": 3},
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> list[Path]:
    """One that stayed on the first layout, one that went over all of them."""
    return run_layouts(
        lambda *part: config_of(corpus, *part), LAYOUTS, tmp_path_factory.mktemp("runs")
    )


def config_of(corpus: str, run_dir: Path, steps: int, parallel: dict, prompt: str = "") -> Config:
    return config(corpus, run_dir, steps, MODEL, parallel, sample_prompt=prompt)


def test_a_run_continues_with_another_pipeline(runs, capsys):
    whole, changing = runs
    for one, other in zip(curve(changing), curve(whole), strict=True):
        for name in ("loss", "validation_loss", "mtp_loss/1"):
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    assert len(curve(whole)) == ENDS[-1]
    tensors = digests(changing, ENDS[-1])
    assert tensors.keys() == digests(whole, ENDS[-1]).keys()
    shapes = {json.dumps(t["shape"]) for name, t in tensors.items() if "stack" in name}
    assert shapes and all(json.loads(shape)[0] == MODEL["num_layers"] for shape in shapes)

    evaluate.main(evaluate.Options(run_dir=str(changing), num_batches=2))
    last = curve(changing)[-1]["validation_loss"]
    printed = float(capsys.readouterr().out.split(" loss ")[1].split()[0])
    assert printed == pytest.approx(last, abs=1e-4)
    generate.main(generate.Options(prompt=("abc",), run_dir=str(changing), num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")


def test_a_resumed_pipeline_is_bitwise_the_uninterrupted(corpus, runs, tmp_path, capsys):
    whole, broken = runs[1], tmp_path / "broken"
    copy_run(whole, broken, ENDS[-1] - EACH)
    main(config_of(corpus, broken, ENDS[-1], LAYOUTS[-1], "abc"))
    assert "--- sample\nabc" in capsys.readouterr().out
    for name in ("loss", "mtp_loss/1"):
        assert [row[name] for row in curve(broken)] == [row[name] for row in curve(whole)]
    assert digests(broken, ENDS[-1]) == digests(whole, ENDS[-1])
