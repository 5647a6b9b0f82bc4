"""From rows of a batch on each host to arrays sharded over the mesh."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import AXES, BATCH_AXES, batch_shards


def batch_spec(num_dims: int) -> P:
    """Spec of a batch [microbatch, sample, ...]: samples lie over the batch axes."""
    return P(None, BATCH_AXES, *(None,) * (num_dims - 2))


def num_microbatches(mesh: Mesh, batch_size: int, micro_batch_size: int) -> int:
    """Microbatches of a step: batch_size / (micro_batch_size x batch shards); 1 if it is 0."""
    return batch_size // (micro_batch_size * batch_shards(mesh)) if micro_batch_size else 1


def local_rows(mesh: Mesh, batch_size: int, microbatches: int) -> np.ndarray:
    """Rows of the global batch that this process must supply, ascending.

    Row m * (batch_size / microbatches) + j is sample j of microbatch m, as in Megatron-LM:
    microbatch-major, rank-minor.
    """
    width = batch_size // microbatches
    sharding = NamedSharding(mesh, batch_spec(2))
    indices = sharding.addressable_devices_indices_map((microbatches, width)).values()
    columns = np.unique(np.concatenate([np.arange(width)[index[1]] for index in indices]))
    return (np.arange(microbatches)[:, None] * width + columns[None]).reshape(-1)


def place_batch(
    batch: dict[str, np.ndarray], rows: np.ndarray, mesh: Mesh, batch_size: int, microbatches: int
) -> dict[str, jax.Array]:
    """Arrays [microbatch, sample, ...] over the mesh from this process's `rows`."""
    width = batch_size // microbatches

    def place(local: np.ndarray) -> jax.Array:
        shape = (microbatches, width, *local.shape[1:])

        def piece(index):
            columns = np.arange(width)[index[1]]
            wanted = np.arange(microbatches)[:, None] * width + columns[None]
            found = np.searchsorted(rows, wanted)
            return local[found]

        sharding = NamedSharding(mesh, batch_spec(len(shape)))
        return jax.make_array_from_callback(shape, sharding, piece)

    return {name: place(array) for name, array in batch.items()}


def place_flag(flag: bool, mesh: Mesh) -> jax.Array:
    """int32 [devices]: each process's own `flag` on its devices."""
    sharding = NamedSharding(mesh, P(AXES))
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.full(1, flag, np.int32)
    )
