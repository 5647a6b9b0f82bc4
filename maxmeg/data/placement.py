"""Rows of a batch in each process -> arrays sharded over the mesh.

Letters not in the legend: C chunks of a row, R rows.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.batch import Batch, batch_spec
from maxmeg.parallel.mesh import BATCH_AXES, MESH_AXES, batch_shards
from maxmeg.parallel.sequence import chunk_places, context_order


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """Maps a batch size to the ascending rows of the global batch that this process reads.

    Row m * (batch_size / microbatches) + j is sample j of microbatch m, as in Megatron-LM:
    microbatch-major, rank-minor. A microbatch has `shards` shards; this process has the `owned`.
    context_chunks: as parallel.context_chunks. max_targets: of a row; 0: any number.
    """

    shards: int
    owned: tuple[int, ...]
    micro_batch_size: int
    context_chunks: int = 0
    max_targets: int = 0

    def microbatches(self, batch_size: int) -> int:
        """Microbatches per step; 1 without a micro_batch_size."""
        unit = self.micro_batch_size * self.shards
        return batch_size // unit if unit else 1

    def __call__(self, batch_size: int) -> np.ndarray:
        microbatches = self.microbatches(batch_size)
        each = batch_size // microbatches // self.shards
        parts = np.arange(batch_size).reshape(microbatches, self.shards, each)
        return parts[:, list(self.owned)].reshape(-1)


def local_rows(
    mesh: Mesh, micro_batch_size: int = 0, context_chunks: int = 0, max_targets: int = 0
) -> LocalRows:
    """The LocalRows of this process on a mesh."""
    shards = batch_shards(mesh)
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    owned = set()
    for index in sharding.addressable_devices_indices_map((shards,)).values():
        owned.update(np.arange(shards)[index].tolist())
    return LocalRows(shards, tuple(sorted(owned)), micro_batch_size, context_chunks, max_targets)


def place_batch(
    arrays: dict[str, np.ndarray], rows: LocalRows, mesh: Mesh, batch_size: int
) -> Batch:
    """The global batch on the mesh, from the arrays of this process's rows by name.

    Tokens of a row are reordered for the devices along context. ValueError for a row with more than
    `rows.max_targets` targets.
    """
    targets, most = np.count_nonzero(arrays["loss_mask"], axis=1).max(initial=0), rows.max_targets
    if 0 < most < targets:
        raise ValueError(
            f"a row of the batch has {targets} masked tokens, and data.objective=masked computes "
            f"the loss of at most {most} of data.sequence_length: mask fewer"
        )
    arrays = in_context_order(arrays, mesh.shape["context"], rows.context_chunks)
    return Batch.of({name: place(array, rows, mesh, batch_size) for name, array in arrays.items()})


def in_context_order(
    arrays: dict[str, np.ndarray], context: int, chunks: int
) -> dict[str, np.ndarray]:
    """Arrays [row, token, ...] by name with the tokens in the order of the ranks along context.

    chunks: of a row on each rank, whose owners are chosen by attention area; then the result has
    `chunks` [row, chunk] too. 0: Megatron-LM's order.
    """
    rows = {name: x for name, x in arrays.items() if x.ndim > 1}
    if context == 1:
        return arrays
    if not chunks:
        return arrays | {n: x[:, context_order(x.shape[1], context)] for n, x in rows.items()}
    tokens = arrays["tokens"]
    segments = arrays.get("segment_ids", np.zeros_like(tokens))
    chunks_RC = balanced_chunks(chunk_areas(segments, context * chunks), context)
    places_RL = chunk_places(chunks_RC, tokens.shape[1] // (context * chunks))
    number_R1 = np.arange(len(tokens))[:, None]
    return arrays | {n: x[number_R1, places_RL] for n, x in rows.items()} | {"chunks": chunks_RC}


def chunk_areas(segments_RL: np.ndarray, count: int) -> np.ndarray:
    """Number of pairs of a query and a key in each of `count` equal chunks [R, C] of rows, under
    causal attention inside documents, which `segments_RL` numbers."""
    rows, length = segments_RL.shape
    index_L = np.arange(length)
    is_first_RL = np.ones((rows, length), bool)
    is_first_RL[:, 1:] = segments_RL[:, 1:] != segments_RL[:, :-1]
    first_RL = np.maximum.accumulate(np.where(is_first_RL, index_L, 0), axis=1)
    return (index_L - first_RL + 1).reshape(rows, count, -1).sum(-1)


def balanced_chunks(areas_RC: np.ndarray, context_size: int) -> np.ndarray:
    """The chunks [R, C] of each row in the order of the ranks along context, equally many each.

    Each rank's chunks ascend. Chunks in order of falling area go to the rank with the least area
    that still has room (Graham's rule).
    """
    rows, count = areas_RC.shape
    every_R, room = np.arange(rows), count // context_size
    owner_RC = np.empty((rows, count), int)
    area_RN, counts_RN = np.zeros((2, rows, context_size))
    for chunk_R in np.argsort(-areas_RC, axis=1, kind="stable").T:
        rank_R = np.argmin(np.where(counts_RN < room, area_RN, np.inf), axis=1)
        owner_RC[every_R, chunk_R] = rank_R
        area_RN[every_R, rank_R] += areas_RC[every_R, chunk_R]
        counts_RN[every_R, rank_R] += 1
    return np.argsort(owner_RC, axis=1, kind="stable").astype(np.int32)


def imbalance(areas_RC: np.ndarray, chunks_RC: np.ndarray, context_size: int) -> np.ndarray:
    """Area of the busiest rank over the mean [R], if ranks own chunks in this order."""
    ordered_RC = np.take_along_axis(areas_RC, chunks_RC, axis=1)
    area_RN = ordered_RC.reshape(len(areas_RC), context_size, -1).sum(-1)
    return area_RN.max(axis=1) / area_RN.mean(axis=1)


def place(local: np.ndarray, rows: LocalRows, mesh: Mesh, batch_size: int) -> jax.Array:
    """A global array [microbatch, sample, token, ...] on the mesh, from this process's rows."""
    microbatches, numbers = rows.microbatches(batch_size), rows(batch_size)
    width = batch_size // microbatches
    shape = (microbatches, width, *local.shape[1:])

    def piece(index):
        columns = np.arange(width)[index[1]]
        samples = np.arange(microbatches)[:, None] * width + columns[None]
        block = local[np.searchsorted(numbers, samples)]
        return block[:, :, index[2]] if block.ndim > 2 else block

    sharding = NamedSharding(mesh, batch_spec(len(shape)))
    return jax.make_array_from_callback(shape, sharding, piece)


def place_flag(flag: bool, mesh: Mesh) -> jax.Array:
    """int32 [devices]: the `flag` of each process on its devices."""
    sharding = NamedSharding(mesh, P(MESH_AXES))
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.full(1, flag, np.int32)
    )
