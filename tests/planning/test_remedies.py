"""Changes that make a config fit really do, and the smallest are named."""

import pytest

from maxmeg.config.architectures import use_architecture
from maxmeg.config.schema import Config
from maxmeg.config.setting import with_fields
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.remedies import largest_savings, planned_memory, remedies
from maxmeg.planning.search import needed_bytes

GIB = 2**30


def of(name: str, batch: int, micro: int = 0, **parallel: int) -> Config:
    config = use_architecture(Config(), name)
    config.train.global_batch_size, config.train.micro_batch_size = batch, micro
    config.parallel = with_fields(config.parallel, parallel)
    return config


def test_as_few_changes_as_possible_together():
    cluster = parse_cluster("h100x8")
    found = remedies(of("llama3-8b", 128, data=8), cluster)
    assert found[0].flags == "--train.micro_batch_size=2 --parallel.data=1"
    assert all(remedy.total <= cluster.capacity for remedy in found)
    assert not any("recompute" in remedy.flags and "micro" in remedy.flags for remedy in found)
    assert [r.slowdown for r in found] == sorted(r.slowdown for r in found)
    assert remedies(of("175b", 512, tensor=8), cluster) == ()


FULL, SMALLEST = "--model.recompute=full", "--train.micro_batch_size=1"


@pytest.mark.parametrize(
    ("config", "count", "flags"),
    [
        (of("llama3-8b", 128, data=8), 8, [FULL, SMALLEST, "--parallel.data=1"]),
        (of("1.3b", 64), 1, [SMALLEST, FULL, "--parallel.fsdp=2 on 2 devices"]),
    ],
)
def test_the_largest_saving_of_each_kind(config, count, flags):
    """Several microbatches under ZeRO-1 need whole float32 gradients, one the shards alone."""
    found = dict(largest_savings(config, count))
    assert list(found) == flags
    lighter = with_fields(config, {"model.recompute": "full"})
    assert found[FULL] == needed_bytes(config, count) - needed_bytes(lighter, count) > 70 * GIB


def test_a_model_that_is_not_planned_has_neither():
    config = of("345m", 8)
    config.model.mtp.num_layers = 1
    assert planned_memory(config, 1) is None and largest_savings(config, 1) == []
