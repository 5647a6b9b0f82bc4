"""Whole runs go from one pipeline or expert parallelism to another: the loss curve goes on."""

from pathlib import Path

import pytest
import short_runs
from short_runs import ENDS, SAME, curve, digests, run_layouts, write_corpus

from maxmeg import evaluate, generate
from maxmeg.config.mixers import RouterScore
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Config

PIPELINED = {"num_layers": 6, "mtp.num_layers": 1, "mtp.layers": "mlp,attention"}
EXPERTS = {
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
CASES = {
    "pipelined": (
        PIPELINED,
        [
            {"pipe": 1, "fsdp": 8},
            {"pipe": 2, "data": 2, "fsdp": 1, "tensor": 2, "schedule": Schedule.zero_bubble},
            {"pipe": 2, "fsdp": 2, "tensor": 2, "chunks": 3},
        ],
        ("loss", "validation_loss", "mtp_loss/1"),
    ),
    "experts": (
        EXPERTS,
        [
            {"fsdp": 8},
            {"fsdp": 2, "expert": 4},
            {"data": 2, "fsdp": 2, "expert": 2, "tensor": 2, "expert_tensor": 1},
        ],
        ("loss", "validation_loss", "expert_load_max"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layouts", "names"), CASES.values(), ids=CASES)
def test_a_run_continues_on_other_layouts(model, layouts, names, tmp_path, capsys):
    """Losses are those of a run that stayed, and biases of experts are those to the last digit."""
    corpus = write_corpus(tmp_path)

    def config_of(run_dir: Path, steps: int, parallel: dict) -> Config:
        prompt = "abc" if parallel == layouts[-1] else ""
        return short_runs.config(corpus, run_dir, steps, model, parallel, sample_prompt=prompt)

    runs = run_layouts(config_of, layouts, tmp_path)  # that stays, that changes
    assert "--- sample\nabc" in capsys.readouterr().out
    whole, changing = map(curve, runs)
    assert len(whole) == ENDS[-1]
    for one, other in zip(changing, whole, strict=True):
        for name in names:
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    wanted, tensors = (digests(run, ENDS[-1]) for run in runs)
    assert tensors.keys() == wanted.keys()
    if model is EXPERTS:
        biases = [n for n in tensors if n.startswith("model") and n.endswith("moe/bias")]
        assert biases and all(tensors[name] == wanted[name] for name in biases)
        assert all((run / "experts.png").exists() for run in runs)
    else:
        layers = {tensor["shape"][0] for name, tensor in tensors.items() if "stack" in name}
        assert layers == {PIPELINED["num_layers"]}

    evaluate.main(evaluate.Options(run_dir=str(runs[1]), num_batches=2))
    printed = float(capsys.readouterr().out.split(" loss ")[1].split()[0])
    assert printed == pytest.approx(changing[-1]["validation_loss"], abs=1e-4)
    generate.main(generate.Options(prompt=("abc",), run_dir=str(runs[1]), num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")
