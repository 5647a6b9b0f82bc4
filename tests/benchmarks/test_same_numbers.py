"""The runs that a change is compared by: all are valid, and together they cover the settings."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import same_numbers

from maxmeg.config.layers import MIXERS
from maxmeg.config.setting import get
from maxmeg.config.validate import validate
from maxmeg.parallel.mesh import AXES

CONFIGS = {name: same_numbers.config_of(text) for name, text in same_numbers.RUNS.items()}
EVERY_VALUE = (
    *("model.dtype", "model.norm", "model.norm_place", "model.position", "model.moe.score"),
    *("parallel.schedule", "parallel.expert_exchange", "parallel.gradient_dtype"),
    *("train.quantization.recipe", "train.loss_reduction", "optim.optimizer", "optim.moments"),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_run_is_valid(name):
    validate(CONFIGS[name], 8)


def test_runs_cover_mixers_axes_and_the_values_of_settings():
    groups = [unit for config in CONFIGS.values() for unit, _ in config.model.groups]
    used = {name for unit in groups for layer in unit for sublayer in layer for name in sublayer}
    assert not MIXERS.keys() - used
    values = {
        path: {get(config, path) for config in CONFIGS.values()}
        for path in (*EVERY_VALUE, *(f"parallel.{axis}" for axis in AXES))
    }
    assert all(max(values[f"parallel.{axis}"]) > 1 for axis in AXES)
    for path in EVERY_VALUE:
        kind = type(next(iter(values[path])))
        assert {*kind} - values[path] == set(), path
