"""Clusters by name, and what their links carry."""

import re

import pytest

from maxmeg.planning.absent import target_text
from maxmeg.planning.hardware import GPUS_A_NODE, LINK_REACHED, gpu, parse_cluster
from maxmeg.runtime.gpu_environment import MEMORY_FRACTION


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("h100x64", "NVIDIA H100 80GB HBM3"),
        ("h200x8", "NVIDIA H200"),
        ("b200x1", "NVIDIA B200"),
        ("A100x2048", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_names_are_datasheets_of_whole_nodes(text, kind):
    cluster = parse_cluster(text)
    assert cluster.gpu == gpu(kind)
    assert f"{cluster.name}x{cluster.count}" == text.lower()
    assert 0.9e9 * cluster.gpu.memory_gb < cluster.capacity < 1e9 * cluster.gpu.memory_gb
    assert cluster.capacity == int(MEMORY_FRACTION * cluster.gpu.cuda_gib * 2**30)  # XLA's pool
    reported = int(re.findall(r"device_memory_size: (\d+)", target_text(cluster.name))[0])
    assert cluster.gpu.cuda_gib == pytest.approx(reported / 2**30, rel=0.01)
    assert cluster.gpu.nvlink_gb_per_s > GPUS_A_NODE * cluster.gpu.network_gb_per_s / 2


WRONG = {
    "a100, h100, h200, b200": ["v100x8", "x8", "h100x8x8"],
    "NAMExCOUNT, as h100x64": ["h100", "h100x", "h100x1.5", "h100 x 8"],
    f"GPUs .* a multiple of {GPUS_A_NODE}": ["h100x0", "h100x-8", "h100x9", "h100x12"],
}


@pytest.mark.parametrize("message", WRONG)
def test_other_texts_are_refused(message):
    for text in WRONG[message]:
        with pytest.raises(ValueError, match=message):
            parse_cluster(text)


def test_a_ring_over_nodes_is_as_fast_as_its_adapters_and_never_faster_than_within():
    cluster = parse_cluster("h100x64")
    within = cluster.link_rate(1, 8)
    over = [cluster.link_rate(2, adapters) for adapters in range(1, 9)]
    assert within == 450e9 * LINK_REACHED
    assert over == [adapters * 50e9 * LINK_REACHED for adapters in range(1, 9)]
    assert cluster.link_rate(2, 100) == within
