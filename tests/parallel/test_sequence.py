"""Which tokens each device holds: shards of a sequence, and batches that are cut the same way."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxmeg.data.prepare.standard_library import source_files
from maxmeg.layers.context import Context
from maxmeg.parallel.mesh import AXES, CONTEXT_AXES, TENSOR_AXES, make_mesh
from maxmeg.parallel.placement import batch_spec, in_context_order, local_rows, place_batch
from maxmeg.parallel.sequence import (
    SequenceShard,
    balanced_chunks,
    chunk_areas,
    chunk_places,
    context_order,
    imbalance,
)
from maxmeg.parallel.spmd import spmd


@pytest.mark.parametrize(("context", "tensor"), itertools.product((1, 2, 3, 4), (1, 2, 4)))
def test_shards_cover_the_sequence_once_in_order(context, tensor):
    whole_length = context * tensor * 6
    chunk = whole_length // (2 * context)
    actual = []
    for rank in range(context):
        shards = [SequenceShard(whole_length, context, rank, tensor, t) for t in range(tensor)]
        places = [shard.places(np.arange(shard.length)) for shard in shards]
        assert {len(part) for part in places} == {6}
        of_rank = np.arange(whole_length).reshape(-1, chunk)[[rank, 2 * context - 1 - rank]]
        np.testing.assert_array_equal(np.concatenate(places), of_rank.reshape(-1))
        piece = shards[-1].gathered()  # a gather over tensor restores the order of the piece
        np.testing.assert_array_equal(np.concatenate(places), piece.places(np.arange(piece.length)))
        actual += places
    np.testing.assert_array_equal(np.concatenate(actual), context_order(whole_length, context))
    assert sorted(np.concatenate(actual)) == list(range(whole_length))


@pytest.mark.parametrize("chunks", [0, 4])
def test_layers_know_the_tokens_that_placement_gave_them(chunks):
    """Positions placed as a batch are the places that Context computes on each device, of the
    residual stream's tokens, of the sequence gathered over tensor, and without a cut over tensor.
    """
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": 2, "context": 2, "tensor": 2})
    rows = local_rows(mesh, 1, chunks)
    whole = np.broadcast_to(np.arange(16, dtype=np.int32), (4, 16))
    segments = (whole >= np.array([[3], [9], [16], [5]])).astype(np.int32)
    arrays = dict.fromkeys(("tokens", "targets", "positions", "loss_mask"), whole)
    batch = place_batch(arrays | {"segment_ids": segments}, rows, mesh, 4)
    for shard in batch.positions.addressable_shards:
        assert shard.data.shape == (2, 1, 8)

    def local(positions_MBL, chunks_MBC):
        chunks_BC = None if chunks_MBC is None else chunks_MBC[0]
        ctx = Context(positions_MBL[0], chunks_BC=chunks_BC)
        decoding = Context(positions_MBL[0], chunks_BC=chunks_BC, sequence_sharded=False)
        assert (ctx.sequence.whole_length, ctx.sequence.length) == (16, 4)
        whole_1L = ctx.places(8), decoding.places(8), decoding.shard(decoding.positions_BL)
        return (ctx.shard(ctx.positions_BL), ctx.places(4)), (ctx.positions_BL, *whole_1L)

    cut, gathered = P("data", CONTEXT_AXES + TENSOR_AXES), P("data", CONTEXT_AXES)
    out = spmd(local, mesh, (batch_spec(3),) * 2, ((cut,) * 2, (gathered,) * 4))
    expected = np.asarray(batch.positions)[0]
    if not chunks:
        np.testing.assert_array_equal(expected, whole[:2, context_order(16, 2)])
    for actual in jax.tree.leaves(jax.jit(out)(batch.positions, batch.chunks)):
        np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected)


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
