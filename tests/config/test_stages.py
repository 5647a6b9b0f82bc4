"""Layers of every chunk: sums over a grid, Megatron-LM's uneven stages, errors with choices."""

import itertools
from collections.abc import Sequence

import pytest

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.stages import units_of_chunks


def layers_of_chunks(parallel: ParallelConfig, num_layers: int, layers: str = "*(attention,mlp)"):
    return units_of_chunks(ModelConfig(num_layers=num_layers, layers=layers), parallel)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
def test_padding_spreads_any_number_of_layers(stages: int, chunks: int):
    parallel = ParallelConfig(pipe=stages, chunks=chunks, pad_layers=True)
    for num_layers in range(stages * chunks, 4 * stages * chunks + 1):
        counts = layers_of_chunks(parallel, num_layers)
        assert len(counts) == stages * chunks
        assert sum(counts) == num_layers
        assert max(counts) - min(counts) <= 1
        assert list(counts) == sorted(counts, reverse=True)
        if num_layers % (stages * chunks) == 0:
            assert (
                layers_of_chunks(ParallelConfig(pipe=stages, chunks=chunks), num_layers) == counts
            )


@pytest.mark.parametrize(
    ("num_layers", "settings", "expected"),
    [
        (30, {"pipe": 4, "first_stage_layers": 7, "last_stage_layers": 7}, (7, 8, 8, 7)),
        (29, {"pipe": 4, "first_stage_layers": 5}, (5, 8, 8, 8)),
        (15, {"pipe": 2, "first_stage_layers": 7}, (7, 8)),
        (
            28,
            {"pipe": 4, "chunks": 2, "first_stage_layers": 6, "last_stage_layers": 6},
            (3, 4, 4, 3, 3, 4, 4, 3),
        ),
        (10, {"pipe": 2, "chunks": 2, "chunk_layers": (1, 2, 3, 4)}, (1, 2, 3, 4)),
        (126, {"pipe": 16, "pad_layers": True}, (8,) * 14 + (7,) * 2),
        (4, {}, (4,)),
    ],
)
def test_layers_of_chunks(num_layers: int, settings: dict, expected: tuple[int, ...]):
    assert sum(expected) == num_layers
    assert layers_of_chunks(ParallelConfig(**settings), num_layers) == expected


def test_units_of_several_layers_take_the_place_of_layers():
    six = "*(5(local,mlp) attention,mlp)"
    assert layers_of_chunks(ParallelConfig(pipe=2, chunk_layers=(2, 3)), 26, six) == (2, 3)
    with pytest.raises(ValueError, match=r"num_layers=5 is not.*repeats units of 6 layers"):
        layers_of_chunks(ParallelConfig(pipe=2), 30, six)
    apart = "2(attention,mlp) *(local,mlp attention,mlp)"
    with pytest.raises(ValueError, match=r"repeats units of 1, 2 layers, which parallel.pipe=2"):
        layers_of_chunks(ParallelConfig(pipe=2, pad_layers=True), 8, apart)
    assert layers_of_chunks(ParallelConfig(), 8, apart) == (5,)


def largest(costs: Sequence[int], counts: Sequence[int]) -> int:
    """Cost of the most expensive chunk."""
    ends = itertools.accumulate(counts)
    return max(sum(costs[end - n : end]) for n, end in zip(counts, ends, strict=True))


@pytest.mark.parametrize("pipe", [2, 3, 4])
@pytest.mark.parametrize("count", [4, 6, 7, 9])
def test_the_most_expensive_chunk_is_as_cheap_as_possible(count: int, pipe: int):
    """Of all ways to cut units that differ; equal numbers where no other cut is cheaper."""
    model = ModelConfig(num_layers=count + 1, layers="M*" + "-" * (count - 1))
    (before, first), (_, others) = model.groups
    assert (len(before), first, others) == (2, 1, count - 1)
    for costs in ((1, 1), (9, 1), (3, 2), (1, 5)):
        units = [costs[0], *[costs[1]] * others]
        cuts = itertools.product(range(1, count + 1), repeat=pipe)
        least = min(largest(units, cut) for cut in cuts if sum(cut) == count)
        found = units_of_chunks(model, ParallelConfig(pipe=pipe), costs)
        assert sum(found) == count and len(found) == pipe and largest(units, found) == least
        if count % pipe == 0 and largest(units, [count // pipe] * pipe) == least:
            assert {*found} == {count // pipe}


def test_hybrid_strings_name_stages():
    parallel = ParallelConfig(pipe=2)
    assert layers_of_chunks(parallel, 6, "**|****") == (2, 4)
    assert layers_of_chunks(parallel, 6, "*-|*-*-") == (1, 2)
    assert layers_of_chunks(ParallelConfig(), 6, "*-|*-*-") == (3,)
    with pytest.raises(ValueError, match=r"put '\|' after a multiple of 2 layers"):
        layers_of_chunks(parallel, 6, "*-*|-*-")
    with pytest.raises(ValueError, match=r"leave parallel.chunk_layers=\(2, 4\) out"):
        layers_of_chunks(ParallelConfig(pipe=2, chunk_layers=(2, 4)), 6, "**|****")


UNEVEN = {"pipe": 4, "first_stage_layers": 7, "last_stage_layers": 7}
BAD = [
    (30, {"pipe": 4}, ["=30", "pipe=4 x chunks=1 = 4", "1, 2, 3, 5, 6, 10, 15, 30", "pad_layers"]),
    (12, {"pipe": 4, "chunks": 2}, ["num_layers=12", "chunks=2 = 8", "1, 2, 3, 4, 6, 12"]),
    (6, {"pipe": 4, "chunks": 2}, ["num_layers=6", "cannot fill", "= 8 chunks", "at most 6"]),
    (6, {"pipe": 8, "pad_layers": True}, ["num_layers=6", "pipe=8", "at most 6"]),
    (31, UNEVEN, ["num_layers=31", "first_stage_layers=7", "17 for 2 stages", "chunk_layers"]),
    (14, UNEVEN, ["leaves 0 for 2 stages"]),
    (30, {**UNEVEN, "pipe": 1}, ["leaves 16 for 0 stages"]),
    (30, {**UNEVEN, "first_stage_layers": -7}, ["first_stage_layers=-7"]),
    (30, {**UNEVEN, "chunks": 2}, ["first_stage_layers=7", "of 2 chunks", "divide"]),
    (30, {**UNEVEN, "pad_layers": True}, ["(7, 7)", "pad_layers=True", "set one of the three"]),
    (30, {"pipe": 2, "chunk_layers": (15, 15), "pad_layers": True}, ["set one of the three"]),
    (30, {"pipe": 2, "chunk_layers": (15, 14)}, ["(15, 14)", "2 (pipe x chunks)", "the sum 29"]),
    (30, {"pipe": 2, "chunk_layers": (10, 10, 10)}, ["must be 2", "they are 3"]),
    (30, {"pipe": 2, "chunk_layers": (30, 0)}, ["positive numbers"]),
]


@pytest.mark.parametrize(("num_layers", "settings", "parts"), BAD)
def test_bad_layers_name_numbers_and_choices(num_layers: int, settings: dict, parts: list[str]):
    with pytest.raises(ValueError) as error:
        layers_of_chunks(ParallelConfig(**settings), num_layers)
    for part in parts:
        assert part in str(error.value), str(error.value)
