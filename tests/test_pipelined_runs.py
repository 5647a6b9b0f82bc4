"""Whole runs go from one pipeline or expert parallelism to another: the loss curve goes on."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import short_runs
from short_runs import EACH, ENDS, SAME, copy_run, curve, digests, run_layouts, write_corpus

from maxmeg import evaluate, generate
from maxmeg.config.mixers import ExpertExchange, RouterScore
from maxmeg.config.parallel import Schedule
from maxmeg.config.schema import Config
from maxmeg.train import main

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
            {"data": 2, "fsdp": 2, "expert": 2, "tensor": 2, "expert_tensor": 1}
            | {"expert_exchange": ExpertExchange.ragged},
        ],
        ("loss", "validation_loss", "expert_load_max"),
    ),
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=CASES)
def runs(request, tmp_path_factory) -> SimpleNamespace:
    """One that stayed on the first layout, one that went over all of them."""
    folder = tmp_path_factory.mktemp("runs")
    corpus, (model, layouts, names) = write_corpus(folder), CASES[request.param]

    def config_of(run_dir: Path, steps: int, parallel: dict, prompt: str = "") -> Config:
        return short_runs.config(corpus, run_dir, steps, model, parallel, sample_prompt=prompt)

    whole, changing = run_layouts(config_of, layouts, folder)
    last: Callable = lambda run_dir: config_of(run_dir, ENDS[-1], layouts[-1], "abc")  # noqa: E731
    return SimpleNamespace(whole=whole, changing=changing, names=names, model=model, last=last)


def test_a_run_continues_on_other_layouts(runs, capsys):
    """Losses are those of a run that stayed, and biases of experts are those to the last digit."""
    whole, changing = curve(runs.whole), curve(runs.changing)
    assert len(whole) == ENDS[-1]
    for one, other in zip(changing, whole, strict=True):
        for name in runs.names:
            assert (name in one) == (name in other)
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=SAME), one["step"]
    tensors, wanted = (digests(run, ENDS[-1]) for run in (runs.changing, runs.whole))
    assert tensors.keys() == wanted.keys()
    if runs.model is EXPERTS:
        biases = [n for n in tensors if n.startswith("model") and n.endswith("moe/bias")]
        assert biases and all(tensors[name] == wanted[name] for name in biases)
        assert all((run / "experts.png").exists() for run in (runs.whole, runs.changing))
    else:
        layers = {tensor["shape"][0] for name, tensor in tensors.items() if "stack" in name}
        assert layers == {PIPELINED["num_layers"]}

    evaluate.main(evaluate.Options(run_dir=str(runs.changing), num_batches=2))
    printed = float(capsys.readouterr().out.split(" loss ")[1].split()[0])
    assert printed == pytest.approx(changing[-1]["validation_loss"], abs=1e-4)
    generate.main(generate.Options(prompt=("abc",), run_dir=str(runs.changing), num_tokens=8))
    assert capsys.readouterr().out.startswith("abc")


def test_a_resumed_run_is_bitwise_the_uninterrupted(runs, tmp_path, capsys):
    broken = tmp_path / "broken"
    copy_run(runs.changing, broken, ENDS[-1] - EACH)
    main(runs.last(broken))
    assert "--- sample\nabc" in capsys.readouterr().out
    for name in runs.names:
        again, before = ([row.get(name) for row in curve(run)] for run in (broken, runs.changing))
        assert again == before
    assert digests(broken, ENDS[-1]) == digests(runs.changing, ENDS[-1])
