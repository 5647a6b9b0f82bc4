"""Whole runs of models with experts: they go from one expert parallelism to another, and go on."""

from pathlib import Path

import pytest
from short_runs import EACH, ENDS, SAME, config, copy_run, curve, digests, run_layouts, write_corpus

from maxmeg import generate
from maxmeg.config.mixers import ExpertExchange, RouterScore
from maxmeg.config.schema import Config
from maxmeg.train import main

MODEL = {
    "num_layers": 2,
    "layers": "attention,mlp *(attention,moe)",
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_size": 32,
    "moe.shared_ffn_size": 32,
    "moe.score": RouterScore.sigmoid,
    "moe.bias_balancing": True,
    "moe.bias_rate": 0.01,
    "moe.sequence_aux_loss": 0.01,
    "moe.global_aux_loss": 0.01,
    "moe.jitter": 0.05,
}
LAYOUTS = [
    {"fsdp": 8},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "expert": 2, "tensor": 2, "expert_tensor": 1}
    | {"expert_exchange": ExpertExchange.ragged},
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
    made = config(corpus, run_dir, steps, MODEL, parallel, sample_prompt=prompt)
    made.train.eval_every = 0
    return made


def test_a_run_continues_with_another_expert_parallelism(runs, capsys):
    """Losses are those of one that stayed, and the biases are those to the last digit."""
    whole, changing = runs
    for one, other in zip(curve(changing), curve(whole), strict=True):
        for name in ("loss", "expert_load_max"):
            assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    assert len(curve(whole)) == ENDS[-1]
    tensors, wanted = (digests(run, ENDS[-1]) for run in (changing, whole))
    assert tensors.keys() == wanted.keys()
    biases = [name for name in tensors if name.startswith("model") and name.endswith("moe/bias")]
    assert biases and all(tensors[name] == wanted[name] for name in biases)
    assert all((run / "experts.png").exists() for run in (whole, changing))
    generate.main(generate.Options(prompt=("abc",), run_dir=str(changing), num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")


def test_a_resumed_run_is_bitwise_the_uninterrupted(corpus, runs, tmp_path, capsys):
    whole, broken = runs[1], tmp_path / "broken"
    copy_run(whole, broken, ENDS[-1] - EACH)
    main(config_of(corpus, broken, ENDS[-1], LAYOUTS[-1], "abc"))
    assert "--- sample\nabc" in capsys.readouterr().out
    assert [row["loss"] for row in curve(broken)] == [row["loss"] for row in curve(whole)]
    assert digests(broken, ENDS[-1]) == digests(whole, ENDS[-1])
