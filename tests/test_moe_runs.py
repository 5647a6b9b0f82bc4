"""Whole runs of models with experts: they go from one expert parallelism to another, and go on."""

from pathlib import Path

import pytest
from short_runs import EACH, SAME, config, curve, digests, write_corpus

from maxmeg import generate
from maxmeg.config.model import RouterScore
from maxmeg.config.schema import Config, ExpertExchange
from maxmeg.train import main

MODEL = {
    "num_layers": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_size": 32,
    "shared_ffn_size": 32,
    "first_dense_layers": 1,
    "router_score": RouterScore.sigmoid,
    "router_bias": True,
    "router_bias_rate": 0.01,
    "router_sequence_aux_loss": 0.01,
    "router_global_aux_loss": 0.01,
    "router_jitter": 0.05,
}
PARTS = [
    {"fsdp": 8},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "expert": 2, "tensor": 2, "expert_tensor": 1},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def part(corpus: str, run_dir: Path, steps: int, parallel: dict, prompt: str = "") -> Config:
    total = EACH * len(PARTS)
    made = config(corpus, run_dir, steps, total, MODEL, parallel, sample_prompt=prompt)
    made.train.eval_every = 0
    return made


@pytest.mark.slow
def test_a_run_goes_from_one_expert_parallelism_to_another(corpus, tmp_path, capsys):
    """Losses are those of one that stayed, and the biases are those to the last digit."""
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    main(part(corpus, whole, EACH * len(PARTS), PARTS[0]))
    for i, parallel in enumerate(PARTS):
        prompt = "abc" if i == len(PARTS) - 1 else ""
        main(part(corpus, changing, EACH * (i + 1), parallel, prompt))
    sample = capsys.readouterr().out.split("--- sample\n")[1]
    rows = list(zip(curve(changing), curve(whole), strict=True))
    assert len(rows) == EACH * len(PARTS)
    for one, other in rows:
        for name in ("loss", "expert_load_max"):
            assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    tensors, wanted = (digests(run, EACH * len(PARTS)) for run in (changing, whole))
    assert tensors.keys() == wanted.keys()
    biases = [name for name in tensors if name.startswith("model") and name.endswith("moe/bias")]
    assert biases and all(tensors[name] == wanted[name] for name in biases)
    assert all((run / "experts.png").exists() for run in (whole, changing))
    generate.main(generate.Options(prompt=("abc",), run_dir=str(changing), num_tokens=8))
    assert sample.startswith("abc") and capsys.readouterr().out.startswith("abc")


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted(corpus, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    parallel = PARTS[2] | {"expert_exchange": ExpertExchange.ragged}
    main(part(corpus, whole, 2 * EACH, parallel))
    main(part(corpus, broken, EACH, parallel))
    main(part(corpus, broken, 2 * EACH, parallel))
    assert [row["loss"] for row in curve(broken)] == [row["loss"] for row in curve(whole)]
    assert digests(broken, 2 * EACH) == digests(whole, 2 * EACH)
