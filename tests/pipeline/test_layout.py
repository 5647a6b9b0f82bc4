"""Layers to places over a grid: every layer once, in its chunk; places invert orders."""

import itertools

import numpy as np
import pytest

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.stages import units_of_chunks
from maxmeg.pipeline.layout import Layout, arrange

GROUPS = [(24,), (23,), (1, 23), (3, 17, 4), (1, 1, 22)]
GRID = [
    (repeats, stages, chunks)
    for repeats, stages, chunks in itertools.product(GROUPS, range(1, 9), range(1, 4))
    if stages * chunks <= sum(repeats)
]


def layout_of(repeats: tuple[int, ...], stages: int, chunks: int) -> tuple[Layout, tuple[int, ...]]:
    parallel = ParallelConfig(pipe=stages, chunks=chunks, pad_layers=True)
    counts = units_of_chunks(ModelConfig(num_layers=sum(repeats)), parallel)
    return arrange(repeats, stages, counts), counts


def of_chunk(layout: Layout, chunk: int) -> list[int]:
    """The layers that chunk `chunk` in model order runs, in the order of its places."""
    stage, local = chunk % layout.stages, chunk // layout.stages
    actual = []
    for group in range(len(layout.orders)):
        places = layout.layers(group)[stage].reshape(layout.chunks, -1)[local]
        actual += [int(layer) for layer in places if layer >= 0]
    return actual


@pytest.mark.parametrize(("repeats", "stages", "chunks"), GRID)
def test_layers_and_places_of_a_layout_fit_each_other(repeats, stages: int, chunks: int):
    """Every layer lies once where its chunk runs; places are the inverse of the order; trivial and
    padded layouts are recognized."""
    layout, counts = layout_of(repeats, stages, chunks)
    ends = np.cumsum(counts)
    for chunk, (count, end) in enumerate(zip(counts, ends, strict=True)):
        assert of_chunk(layout, chunk) == list(range(end - count, end))
    for group, number in enumerate(repeats):
        order, places = np.array(layout.orders[group]), layout.places(group)
        assert len(order) == stages * chunks * layout.slots(group)
        np.testing.assert_array_equal(order[places], np.arange(number))
        empty = np.setdiff1d(np.arange(len(order)), places)
        assert (order[empty] == -1).all()
    padded = [layout.padded(group) for group in range(len(repeats))]
    assert any(padded) == (sum(map(len, layout.orders)) > sum(repeats))
    if len(repeats) == 1:
        even = len(set(counts)) == 1
        assert padded != [even]
        assert layout.trivial == (even and (chunks == 1 or stages == 1))


@pytest.mark.parametrize(("pipe", "tensor"), [(2, 1), (3, 2), (5, 8)])
def test_rows_of_the_vocabulary_are_divided_among_stages(pipe: int, tensor: int):
    """Each stage runs its part of the head."""
    rows = ModelConfig(vocab_size=50257).padded_vocab_size(tensor, pipe)
    assert rows >= 50257 and rows % (pipe * tensor) == 0


def test_padding_leaves_the_end_of_a_chunk_empty():
    layout = arrange((7,), 4, (2, 2, 2, 1))
    assert layout.orders == ((0, 1, 2, 3, 4, 5, 6, -1),)
    assert layout.padded(0) and not layout.trivial
    assert layout.places(0).tolist() == list(range(7))


def test_groups_have_places_of_their_own():
    """A dense first layer before seven others: only the first stage has one, all have its place."""
    layout = arrange((1, 7), 4, (2, 2, 2, 2))
    assert layout.orders == ((0, -1, -1, -1), (0, -1, 1, 2, 3, 4, 5, 6))
    assert layout.padded(0) and layout.padded(1)
    assert layout.layers(0).tolist() == [[0], [-1], [-1], [-1]]
    assert layout.layers(1).tolist() == [[1, -1], [2, 3], [4, 5], [6, 7]]


def test_uneven_first_and_last_stage():
    """30 layers as 7, 8, 8, 7: Megatron-LM's way to spare the stages beside embedding and head."""
    parallel = ParallelConfig(pipe=4, first_stage_layers=7, last_stage_layers=7)
    layout = arrange((30,), 4, units_of_chunks(ModelConfig(num_layers=30), parallel))
    assert [len(of_chunk(layout, chunk)) for chunk in range(4)] == [7, 8, 8, 7]
    assert layout.slots(0) == 8
    assert of_chunk(layout, 3) == list(range(23, 30))
