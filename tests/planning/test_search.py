"""Layouts found are valid, fit, and are ranked; what cannot fit is said with numbers."""

import functools
import re

import pytest

from maxmeg.config.architectures import use_architecture
from maxmeg.config.mixers import ExpertBackend
from maxmeg.config.recompute import POLICIES
from maxmeg.config.schema import Config
from maxmeg.config.setting import get, with_fields
from maxmeg.config.validate import validate
from maxmeg.planning.analytic import analyze
from maxmeg.planning.hardware import parse_cluster
from maxmeg.planning.report import MARGIN
from maxmeg.planning.search import (
    context_sizes,
    layouts,
    needed_bytes,
    orders,
    search,
    usable,
)

MOST = 4000


def of(name: str, batch: int) -> Config:
    config = use_architecture(Config(), name)
    config.train.global_batch_size = batch
    return config


CASES = [
    ("345m", 32, "h100x1"),
    ("1.3b", 64, "a100x6"),
    ("llama3-8b", 16, "h100x4"),
    pytest.param("22b", 512, "a100x64", marks=pytest.mark.slow),
]
of_search = functools.cache(lambda *case: search(of(*case[:2]), parse_cluster(case[2])))


@pytest.mark.parametrize(("name", "batch", "hardware"), CASES)
def test_found_layouts_are_valid_fit_and_are_ranked(name, batch, hardware):
    config, cluster = of(name, batch), parse_cluster(hardware)
    found = of_search(name, batch, hardware)
    steps = [candidate.analytic.step_seconds for candidate in found]
    assert steps == sorted(steps) and 0 < len(found) < MOST
    assert len({tuple(candidate.settings.items()) for candidate in found}) == len(found)
    for candidate in found[:: max(1, len(found) // 20)]:
        validate(candidate.config, cluster.count)
        assert candidate.analytic == analyze(candidate.config, cluster)
        assert candidate.analytic.total <= (1 - MARGIN) * cluster.capacity
        assert candidate.config.parallel.tensor <= 8
        assert candidate.config.model.num_layers == config.model.num_layers
        for name, value in candidate.settings.items():
            chosen = get(candidate.config, name)
            assert value == getattr(chosen, "value", chosen)


def test_an_eight_billion_model_shards_its_parameters():
    best = of_search("llama3-8b", 16, "h100x4")[0].config.parallel
    assert best.pipe == best.tensor == 1 and best.fsdp > 1


def test_no_more_is_recomputed_than_must_be():
    cluster = parse_cluster("h100x4")
    modes = list(POLICIES)
    seen = set()
    for candidate in of_search("llama3-8b", 16, "h100x4"):
        mode = candidate.config.model.recompute
        seen.add(mode)
        for less in modes[: modes.index(mode)]:
            lighter = with_fields(candidate.config, {"model.recompute": less})
            assert needed_bytes(lighter, cluster.count) > usable(cluster)
    assert len(seen) > 1


def test_settings_of_the_search_replace_those_of_the_config():
    config = of("345m", 32)
    config.parallel.chunk_layers, config.parallel.pipe = (10, 14), 2
    config.parallel.last_stage_layers = 3
    found = search(config, parse_cluster("h100x2"))
    assert config.parallel.chunk_layers == (10, 14)  # not changed
    assert {candidate.config.parallel.pipe for candidate in found} == {1, 2}
    assert all(candidate.config.parallel.chunk_layers == () for candidate in found)


def test_layers_that_do_not_divide_are_padded():
    config = of("345m", 32)
    config.model.num_layers = 23
    piped = [layout for layout in layouts(config, 4) if layout.parallel.pipe > 1]
    assert piped and all(layout.parallel.pad_layers for layout in piped)
    assert all(layout.parallel.chunks == 1 for layout in piped)


def test_tensor_may_exceed_the_key_value_heads():
    found = {layout.parallel.tensor for layout in layouts(of("qwen3-30b-a3b", 32), 8)}
    assert found == {1, 2, 4, 8}  # it has 4 of them


def test_chunks_need_microbatches_in_rounds():
    config = of("175b", 1536)
    assert {order["chunks"] for order in orders(config, 16, 32)} == {1, 2, 3, 6}
    assert {order["chunks"] for order in orders(config, 16, 33)} == {1}


@pytest.mark.slow
def test_a_model_that_cannot_fit_reports_the_excess_and_the_gpus_needed():
    cluster = parse_cluster("h100x8")
    with pytest.raises(ValueError, match="does not fit 8 h100 under any layout") as error:
        search(of("175b", 512), cluster)
    text = str(error.value)
    least, over, planned, capacity = (float(size) for size in re.findall(r"([\d.]+) GiB", text))
    assert least - over == pytest.approx(planned, abs=0.11)
    assert planned == pytest.approx((1 - MARGIN) * capacity, abs=0.11)
    assert capacity == pytest.approx(cluster.capacity / 2**30, abs=0.06)
    enough = int(re.findall(r"(\d+) GPUs would be enough", text)[0])
    assert search(of("175b", 512), parse_cluster(f"h100x{enough}"))
    with pytest.raises(ValueError, match="does not fit"):
        search(of("175b", 512), parse_cluster(f"h100x{enough // 2}"))


def test_a_model_that_fits_no_number_of_gpus_is_reported():
    config = of("22b", 1)
    config.data.sequence_length = config.model.max_position = 2**21 - 1  # context needs an even one
    with pytest.raises(ValueError, match=r"nor does it on up to \d+ with this batch"):
        search(config, parse_cluster("h100x1"))


def test_a_batch_that_no_layout_divides_says_so():
    config = of("345m", 7)
    config.model.num_layers = config.model.attention.num_heads = 1
    config.data.sequence_length = 1023  # which context does not divide
    with pytest.raises(ValueError, match=r"no layout of 64 h100 is valid .*global_batch_size=7"):
        search(config, parse_cluster("h100x64"))


def test_sequences_are_divided_where_they_are_long_or_more_than_the_batch():
    config = of("llama3-8b", 8)
    for length, sizes in ((16384, [1]), (32768, [1, 2, 4, 8]), (65536, [1, 2, 4, 8])):
        config.data.sequence_length = length
        assert context_sizes(config, 8) == sizes
    config.data.sequence_length, config.train.global_batch_size = 2048, 4
    assert context_sizes(config, 8) == [1, 2, 4, 8]
    config.train.global_batch_size, config.parallel.context_strategy = 8, "exchange"
    assert context_sizes(config, 8) == [1, 2, 4, 8]
    found = {layout.parallel.context for layout in layouts(config, 8, (1,))}
    assert found == {2, 4, 8}  # a strategy needs context


def test_experts_lie_along_context_too():
    config = of("qwen3-30b-a3b", 4)
    config.data.sequence_length = config.model.max_position = 32768
    found = [layout.parallel for layout in layouts(config, 8, (1,)) if layout.parallel.context > 1]
    assert found and all(one.expert % (one.context * one.fold) == 0 for one in found)
    assert {one.expert_axis for one in found} == {1, 2, 4}


def test_experts_are_spread_over_any_part_of_the_devices():
    config = of("345m", 32)
    config.model.num_layers, config.model.layers = 4, "*(attention,moe)"
    config.model.moe.backend = ExpertBackend.mosaic
    found = [layout.parallel for layout in layouts(config, 8)]
    assert {layout.expert for layout in found} == {1, 2, 4, 8}
    assert {layout.expert_tensor for layout in found if layout.tensor > 1} == {0, 1}
    config.parallel.expert_buffer = 2.0  # which nothing would read with expert=1
    found = [candidate.config.parallel for candidate in search(config, parse_cluster("h100x2"))]
    assert found and all(layout.expert > 1 for layout in found)
