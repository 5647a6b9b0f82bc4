"""Rows of a batch on each host -> arrays sharded over the mesh."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES, MESH_AXES, batch_shards
from maxmeg.parallel.sequence import balanced_chunks, chunk_areas, chunk_places, context_order


def batch_spec(num_dims: int) -> P:
    """PartitionSpec of a batch array [microbatch, sample, token, ...] of `num_dims` dimensions:
    samples are sharded over the batch axes, tokens over context."""
    return P(*(None, BATCH_AXES, CONTEXT_AXES)[:num_dims])


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
