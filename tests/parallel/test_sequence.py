"""Which tokens each device holds: shards of a sequence, and batches that are cut the same way."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxmeg.data.placement import local_rows, place_batch
from maxmeg.layers.context import Context
from maxmeg.parallel.batch import batch_spec
from maxmeg.parallel.mesh import AXES, CONTEXT_AXES, TENSOR_AXES, make_mesh
from maxmeg.parallel.sequence import SequenceShard, context_order
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
