"""Rows of a batch on each host -> arrays sharded over the mesh."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.batch import Batch
from maxmeg.parallel.mesh import BATCH_AXES, CONTEXT_AXES, MESH_AXES, batch_shards
from maxmeg.parallel.sequence import context_order


def batch_spec(num_dims: int) -> P:
    """PartitionSpec of a batch array [microbatch, sample, token, ...] of `num_dims` dimensions:
    samples are sharded over the batch axes, tokens over context."""
    return P(*(None, BATCH_AXES, CONTEXT_AXES)[:num_dims])


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """Maps a batch size to the ascending rows of the global batch that this process reads.

    Row m * (batch_size / microbatches) + j is sample j of microbatch m, as in Megatron-LM:
    microbatch-major, rank-minor. A microbatch has `shards` shards; this process has the `owned`.
    """

    shards: int
    owned: tuple[int, ...]
    micro_batch_size: int

    def microbatches(self, batch_size: int) -> int:
        """Microbatches per step; 1 without a micro_batch_size."""
        unit = self.micro_batch_size * self.shards
        return batch_size // unit if unit else 1

    def __call__(self, batch_size: int) -> np.ndarray:
        microbatches = self.microbatches(batch_size)
        each = batch_size // microbatches // self.shards
        parts = np.arange(batch_size).reshape(microbatches, self.shards, each)
        return parts[:, list(self.owned)].reshape(-1)


def local_rows(mesh: Mesh, micro_batch_size: int = 0) -> LocalRows:
    """The LocalRows of this process on a mesh."""
    shards = batch_shards(mesh)
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    owned = set()
    for index in sharding.addressable_devices_indices_map((shards,)).values():
        owned.update(np.arange(shards)[index].tolist())
    return LocalRows(shards, tuple(sorted(owned)), micro_batch_size)


def place_batch(
    arrays: dict[str, np.ndarray], rows: LocalRows, mesh: Mesh, batch_size: int
) -> Batch:
    """The global batch on the mesh, from the arrays of this process's rows by name."""
    return Batch.of({name: place(array, rows, mesh, batch_size) for name, array in arrays.items()})


def place(local: np.ndarray, rows: LocalRows, mesh: Mesh, batch_size: int) -> jax.Array:
    """A global array [microbatch, sample, token, ...] on the mesh, from this process's rows.

    Tokens of a row are reordered by `context_order`.
    """
    context = mesh.shape["context"]
    microbatches, numbers = rows.microbatches(batch_size), rows(batch_size)
    width = batch_size // microbatches
    shape = (microbatches, width, *local.shape[1:])

    def piece(index):
        columns = np.arange(width)[index[1]]
        wanted = np.arange(microbatches)[:, None] * width + columns[None]
        held = local[np.searchsorted(numbers, wanted)]
        if context == 1 or held.ndim < 3:
            return held
        return held[:, :, context_order(shape[2], context)[index[2]]]

    sharding = NamedSharding(mesh, batch_spec(len(shape)))
    return jax.make_array_from_callback(shape, sharding, piece)


def place_flag(flag: bool, mesh: Mesh) -> jax.Array:
    """int32 [devices]: the `flag` of each process on its devices."""
    sharding = NamedSharding(mesh, P(MESH_AXES))
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.full(1, flag, np.int32)
    )
