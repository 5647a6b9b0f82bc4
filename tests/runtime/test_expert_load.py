"""Metrics and the plot of expert load, against their definitions."""

import json

import numpy as np
import pytest

from maxmeg.config.model import ModelConfig
from maxmeg.config.setting import with_fields
from maxmeg.runtime.metrics.expert_load import ExpertLoad
from maxmeg.runtime.metrics.plots import plot_expert_load

EXPERTS = 4
MODEL = with_fields(
    ModelConfig(),
    {"num_layers": 4, "layers": "*(attention,moe attention,mlp)", "moe.num_experts": EXPERTS},
)  # layers 0 and 2
COUNTS = np.array([[4, 4, 4, 4], [16, 0, 0, 0]])
LOSSES = {"load_balancing_loss": 1.5, "z_loss": 3.0}
EACH = {name: 16 * np.full(2, loss) for name, loss in LOSSES.items()}  # summed over 16 copies
EACH["expert_dropped"] = np.array([4.0, 4.0])


def metrics(counts=COUNTS) -> dict:
    return {"loss": 1.0, "layers": {"expert_tokens": counts} | EACH}


def test_numbers_of_every_step_and_of_layers_at_the_logging_interval(tmp_path):
    path = tmp_path / "experts.json"
    call, found = ExpertLoad(MODEL, num_steps=8, every=5, path=str(path)).hook().call, []
    for step in range(1, 9):
        found.append(metrics())
        call(step, found[-1])
    common = {"loss": 1, "expert_load_max": 4, "expert_load_entropy": 0.5, "expert_dropped": 0.25}
    common |= LOSSES
    of_layers = {f"expert_load_max/layer_{i}": value for i, value in ((0, 1), (2, 4))}
    of_layers |= {f"expert_load_entropy/layer_{i}": value for i, value in ((0, 1), (2, 0))}
    of_layers |= {f"expert_dropped/layer_{i}": 0.25 for i in (0, 2)}
    for step, values in enumerate(found, 1):
        wanted = {**common, **of_layers} if step in (5, 8) else common
        assert values == pytest.approx(wanted), step
    saved = json.loads(path.read_text())
    assert (saved["first_step"], saved["last_step"], saved["layers"]) == (6, 8, ["0", "2"])
    assert saved["loads"] == [[1, 1, 1, 1], [4, 0, 0, 0]]


def test_loads_are_means_over_the_steps_since_the_last_ones(tmp_path):
    path = tmp_path / "experts.json"
    call = ExpertLoad(MODEL, num_steps=100, every=2, path=str(path)).hook().call
    for step, counts in ((1, COUNTS), (2, COUNTS[:, ::-1])):
        call(step, metrics(counts))
    assert json.loads(path.read_text())["loads"] == [[1, 1, 1, 1], [2, 0, 0, 2]]
    picture = tmp_path / "experts.png"
    plot_expert_load(path, picture, "runs/test")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["experts.json", "experts.png"]


def test_a_run_whose_router_chooses_nothing_says_so(caplog):
    for even in (False, True):
        fields = {"layers": "*(attention,moe)", "moe.num_experts": EXPERTS}
        model = with_fields(ModelConfig(), fields | {"moe.force_balance": even})
        ExpertLoad(model, num_steps=1, every=1, path="experts.json")
        assert ("its weights are useless" in caplog.text) == even


def test_an_mtp_layer_reports_loads():
    fields = {"num_layers": 1, "layers": "*(attention,moe)", "mtp.num_layers": 1}
    model = with_fields(ModelConfig(), fields | {"moe.num_experts": EXPERTS})
    values = metrics()
    ExpertLoad(model, num_steps=1, every=1).hook().call(1, values)
    assert values["expert_load_max/layer_mtp_0"] == 4 and "expert_load_max/layer_0" in values
