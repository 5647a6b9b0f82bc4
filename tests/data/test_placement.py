"""Rows that each process reads, and where their tokens lie."""

import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxmeg.data.placement import (
    LocalRows,
    balanced_chunks,
    chunk_areas,
    imbalance,
    in_context_order,
    local_rows,
    place,
    place_flag,
)
from maxmeg.data.prepare.standard_library import source_files
from maxmeg.parallel.batch import batch_spec
from maxmeg.parallel.mesh import AXES, make_mesh
from maxmeg.parallel.sequence import chunk_places, context_order


@pytest.mark.parametrize("micro_batch_size", [0, 1, 3])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_processes_divide_a_batch(shards, micro_batch_size):
    size = 24
    microbatches = LocalRows(shards, (0,), micro_batch_size).microbatches(size)
    parts = [LocalRows(shards, (shard,), micro_batch_size)(size) for shard in range(shards)]
    assert sorted(np.concatenate(parts)) == list(range(size))
    each = size // shards // microbatches
    for shard, rows in enumerate(parts):  # microbatch-major, rank-minor
        expected = [m * each * shards + shard * each for m in range(microbatches)]
        assert rows.reshape(microbatches, each)[:, 0].tolist() == expected
        assert (np.diff(rows.reshape(microbatches, each), axis=1) == 1).all()


def test_batch_lies_as_its_spec_says():
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2})
    rows = local_rows(mesh, 2)
    assert rows.owned == (0, 1, 2, 3) and rows.microbatches(16) == 2
    values = np.arange(16 * 3).reshape(16, 3)
    placed = place(values[rows(16)], rows, mesh, 16)
    assert placed.sharding == NamedSharding(mesh, batch_spec(3))
    np.testing.assert_array_equal(placed, values.reshape(2, 8, 3))
    assert int(place_flag(True, mesh).sum()) == 8 and not place_flag(False, mesh).any()


def documents_of_files(length: int) -> np.ndarray:
    """Rows of documents without padding, as long as the files of Python's standard library: a token
    for each four bytes."""
    tokens = [path.stat().st_size // 4 + 1 for path in source_files()]
    number_N = np.repeat(np.arange(len(tokens)), tokens)
    return number_N[: number_N.size // length * length].reshape(-1, length)


def test_owners_of_chunks_have_equal_parts_of_the_attention():
    context, length = 8, 2**15
    segments = documents_of_files(length)
    pairs = np.broadcast_to(context_order(2 * context, context), (len(segments), 2 * context))
    before = imbalance(chunk_areas(segments, 2 * context), pairs, context)
    assert before.mean() > 1.3
    areas = chunk_areas(segments, 8 * context)
    owners = balanced_chunks(areas, context)
    after = imbalance(areas, owners, context)
    assert after.mean() <= 1.01 and after.max() <= 1.05
    assert (np.diff(owners.reshape(-1, context, 8), axis=2) > 0).all()
    assert (np.sort(owners, axis=1) == np.arange(8 * context)).all()


def test_areas_are_pairs_of_tokens_of_one_document():
    segments = np.array([[1, 1, 1, 2, 2, 1, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5]])
    assert chunk_areas(segments, 4).tolist() == [[3, 4, 3, 3], [3, 7, 11, 15]]
    assert chunk_places(np.array([[0, 3], [1, 2]]), 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_extra_arrays_come_along():
    """Arrays of tokens, of any number of dimensions, in their order; others as they are."""
    tokens, number = np.arange(12).reshape(1, 12), np.array([7])
    arrays = {"tokens": tokens, "vectors": np.stack((tokens, -tokens), axis=-1), "number": number}
    for chunks in (0, 2):
        ordered = in_context_order(arrays, 2, chunks)
        assert sorted(ordered["tokens"][0]) == list(range(12)) and ordered["number"] is number
        np.testing.assert_array_equal(ordered["vectors"][..., 1], -ordered["tokens"])
    assert in_context_order(arrays, 1, 0) is arrays
