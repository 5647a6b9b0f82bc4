"""Layers to places over a grid: every layer once, in its chunk; places invert orders."""

import itertools

import numpy as np
import pytest
from tables import thinned

from maxmeg.config.model import ModelConfig
from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.stages import units_of_chunks
from maxmeg.models.registry import ARCHITECTURES, architecture
from maxmeg.pipeline.layout import Layout, arrange
from maxmeg.planning.cost.flops import training_flops

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
def test_every_layer_lies_once_where_its_chunk_runs(repeats, stages: int, chunks: int):
    layout, counts = layout_of(repeats, stages, chunks)
    ends = np.cumsum(counts)
    for chunk, (count, end) in enumerate(zip(counts, ends, strict=True)):
        assert of_chunk(layout, chunk) == list(range(end - count, end))


@pytest.mark.parametrize(("repeats", "stages", "chunks"), GRID)
def test_places_are_the_inverse_of_the_order(repeats, stages: int, chunks: int):
    layout, _ = layout_of(repeats, stages, chunks)
    for group, number in enumerate(repeats):
        order, places = np.array(layout.orders[group]), layout.places(group)
        assert len(order) == stages * chunks * layout.slots(group)
        np.testing.assert_array_equal(order[places], np.arange(number))
        empty = np.setdiff1d(np.arange(len(order)), places)
        assert (order[empty] == -1).all()


@pytest.mark.parametrize(("repeats", "stages", "chunks"), GRID)
def test_trivial_and_padded_layouts_are_recognized(repeats, stages: int, chunks: int):
    layout, counts = layout_of(repeats, stages, chunks)
    places = sum(len(order) for order in layout.orders)
    padded = [layout.padded(group) for group in range(len(repeats))]
    assert any(padded) == (places > sum(repeats))
    if len(repeats) == 1:
        even = len(set(counts)) == 1
        assert padded != [even]
        assert layout.trivial == (even and (chunks == 1 or stages == 1))


def test_chunks_alternate_between_stages():
    layout = arrange((8,), 2, (2, 2, 2, 2))
    assert layout.orders == ((0, 1, 4, 5, 2, 3, 6, 7),)
    assert layout.layers(0).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.places(0).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layout.slots(0) == 2
    assert not layout.trivial and not layout.padded(0)


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


@pytest.mark.parametrize("name", thinned(ARCHITECTURES, 4))
def test_stages_of_named_models_weigh_the_same(name):
    """FLOPs of a stage: its layers, and its part of the vocabulary's rows for the head."""
    model = architecture(name)
    for pipe in (p for p in range(2, model.num_layers + 1) if model.num_layers % p == 0):
        for chunks in (c for c in (1, 2, 3) if model.num_layers % (pipe * c) == 0):
            parallel = ParallelConfig(pipe=pipe, chunks=chunks)
            counts = units_of_chunks(ModelConfig(num_layers=model.num_layers), parallel)
            layers = np.array(counts).reshape(chunks, pipe).sum(axis=0)
            for tensor in (1, 2, 8):
                rows, left = divmod(model.padded_vocab_size(tensor, pipe), pipe * tensor)
                total = training_flops(model, model.max_position, tensor=tensor)
                head = 6 * model.max_position * model.hidden_size * rows * tensor
                each = (total - head * pipe) / model.num_layers
                flops = layers * each + head
                assert left == 0 and flops.max() <= 1.02 * flops.min()
