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


def of_chunk(layout: Layout, chunk: int) -> list[int]:
    """The layers that chunk `chunk` in model order runs, in the order of its places."""
    stage, local = chunk % layout.stages, chunk // layout.stages
    actual = []
    for group in range(len(layout.orders)):
        places = layout.layers(group)[stage].reshape(layout.chunks, -1)[local]
        actual += [int(layer) for layer in places if layer >= 0]
    return actual


@pytest.mark.parametrize("fewest_first", [False, True])
@pytest.mark.parametrize(("repeats", "stages", "chunks"), GRID)
def test_layers_and_places_of_a_layout_fit_each_other(repeats, stages, chunks, fewest_first):
    """Every layer lies once where its chunk runs; places are the inverse of the order; trivial and
    padded layouts are recognized."""
    parallel = ParallelConfig(pipe=stages, chunks=chunks, pad_layers=True)
    counts = units_of_chunks(ModelConfig(num_layers=sum(repeats)), parallel)
    counts = counts[::-1] if fewest_first else counts
    layout = arrange(repeats, stages, counts)
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
