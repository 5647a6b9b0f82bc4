"""The runs that commits are compared by: valid settings, and every pair of features in one."""

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import reference_runs
from reference_configurations import CONFIGURATIONS, FEATURES, RARE

from maxmeg.config.validate import resolve, validate

REFUSED = {  # a feature, and what validate refuses beside it
    "mla": ("qk_norm", "qk_norm_heads"),
    "alternating": ("shared", "interleaved"),
    "parallel": ("dropless", "capacity", "shared", "sinkhorn", "all_to_all"),
    "capacity": ("lora",),
    "interleaved": ("sinkhorn",),
    "mtp": ("lora",),
    "no mlp": ("all_to_all",),
}


@pytest.mark.parametrize("features", CONFIGURATIONS)
def test_configuration_is_valid(features):
    settings = reference_runs.settings_of(" ".join(features)) | {"data.paths": ["chats.jsonl"]}
    config = reference_runs.make_config(settings)
    resolve(config, 257)
    validate(config, 8)


def test_every_pair_of_features_is_in_a_configuration():
    groups = [{*group, f"no {name}"} - {*RARE} for name, group in FEATURES.items()]
    chosen = [set(" ".join(features).split()) for features in CONFIGURATIONS]
    for row in chosen:
        row.update(f"no {name}" for name, group in FEATURES.items() if not row & {*group})
    met = {pair for row in chosen for pair in itertools.permutations(row, 2)}
    wanted = {
        (a, b)
        for one, other in itertools.combinations(groups, 2)
        for a, b in itertools.product(one, other)
    }
    refused = {(a, b) for a, others in REFUSED.items() for b in others}
    missing = {pair for pair in wanted - met if not {pair, pair[::-1]} & refused}
    assert not missing
    assert all(any(name in row for row in chosen) for name in RARE)


def test_compare_says_what_differs(tmp_path, capsys):
    header = {"jax": "0", "processor": "x"}
    runs = {"0": {"loss": [(1.5).hex(), (2.0).hex()], "compiles": 1}, "1": {"loss": [(1.0).hex()]}}
    programs = {"8b": {"state": 100, "collectives": {"all-gather": 2}, "lower_cpu_seconds": 1.0}}
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps({**header, "record": runs, "compile": programs}))
    programs["8b"]["lower_cpu_seconds"] = 2.0
    after.write_text(json.dumps({**header, "record": runs, "compile": programs}))
    assert reference_runs.compare(str(before), str(after))
    assert "8b: lower_cpu_seconds 1.0 -> 2.0 (+100.00%)" in capsys.readouterr().out
    runs["0"]["loss"][1] = (2.5).hex()
    programs["8b"]["collectives"] = {"all-gather": 3}
    after.write_text(json.dumps({**header, "record": runs, "compile": programs}))
    assert not reference_runs.compare(str(before), str(after))
    text = capsys.readouterr().out
    assert "0: loss differs in 1 of 2 steps, by 2.0e-01 at most" in text and "1: equal" in text
    assert "8b: collectives all-gather 2 -> 3 (+50.00%); lower_cpu_seconds" in text
