"""Context parallelism in the train step, compiled for H100s that are not here, and its plan."""

import dataclasses
import functools

import pytest

from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.schema import Config, TrainConfig
from maxmeg.models.registry import use_architecture
from maxmeg.planning.analytic import analyze
from maxmeg.planning.compile import compile_report
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.report import Analytic, Compiled

GPUS, LAYERS = 8, 2
NEAR = 0.06  # planned over compiled memory


def config_of(name: str, length: int, **parallel) -> Config:
    train = TrainConfig(global_batch_size=1, micro_batch_size=1)
    config = use_architecture(Config(parallel=ParallelConfig(**parallel), train=train), name)
    config.data.sequence_length = length
    config.model = dataclasses.replace(config.model, recompute="selective", max_position=length)
    return config


@functools.cache
def reports(name: str, length: int, window: int, strategy: str) -> tuple[Analytic, Compiled]:
    config = config_of(name, length, context=GPUS, context_strategy=strategy)
    config.model.num_layers = LAYERS
    if window:
        config.model.attention.window = window
    return analyze(config, parse_cluster(f"h100x{GPUS}")), compile_report(config, "h100", GPUS)


@pytest.mark.parametrize(
    ("length", "gpus", "strategy"), [(131_072, 8, "ring"), (1_048_576, 64, "hierarchy")]
)
def test_llama_8b_trains_on_long_rows_with_selective_recomputation(length, gpus, strategy):
    """One row on all GPUs, the weights sharded over context: no device holds a copy of them."""
    config = config_of(
        "llama3-8b", length, context=gpus, context_strategy=strategy, fsdp_context=True
    )
    planned = analyze(config, parse_cluster(f"h100x{gpus}"))
    compiled = compile_report(config, "h100", gpus)
    assert compiled.fits and planned.fits
    assert planned.total == pytest.approx(compiled.total, rel=NEAR)


@pytest.mark.parametrize(
    ("case", "kind", "share"),
    [
        (("mistral-7b-v0.1", 131072, 1024, "auto"), "collective-permute", 1.0),
        (("llama3-8b", 131072, 0, "exchange"), "all-to-all", (GPUS - 1) / GPUS),
    ],
)
def test_transfers_over_context_and_memory_are_as_planned(case, kind, share):
    """share: of a collective's bytes that leave the device."""
    planned, compiled = reports(*case)
    found = [row for row in compiled.collectives if row.kind == kind]
    assert {row.axes for row in found} == {("context",)}
    expected = [row for row in planned.traffic if row.kind == kind]
    assert sum(row.runs for row in found) == sum(row.runs for row in expected)
    volume = sum(row.volume for row in found) * share
    assert volume == sum(row.volume for row in expected)
    assert planned.total == pytest.approx(compiled.total, rel=NEAR)
