"""Token and position embeddings, vocabulary-parallel."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import VOCAB_AXES


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(
    table_VD: Float[Array, "V D"], ids_BL: Int[Array, "B L"], num_rows: int
) -> Float[Array, "B L D"]:
    """Rows of this device's part of the table, zero for ids that lie elsewhere.

    num_rows is table_VD.shape[0]. The table's gradient is summed in float32.
    """
    local_BL = ids_BL - collectives.axis_index(VOCAB_AXES) * num_rows
    here_BL = (local_BL >= 0) & (local_BL < num_rows)
    rows_BLD = jnp.take(table_VD, jnp.clip(local_BL, 0, num_rows - 1), axis=0)
    return jnp.where(here_BL[..., None], rows_BLD, 0)


def lookup_forward(table_VD, ids_BL, num_rows):
    return lookup(table_VD, ids_BL, num_rows), ids_BL


def lookup_backward(num_rows, ids_BL, d_BLD):
    local_BL = ids_BL - collectives.axis_index(VOCAB_AXES) * num_rows
    place_BL = jnp.where(local_BL >= 0, local_BL, num_rows)  # out of range: dropped
    zeros_VD = jnp.zeros((num_rows, d_BLD.shape[-1]), jnp.float32)
    d_VD = zeros_VD.at[place_BL].add(d_BLD.astype(jnp.float32), mode="drop")
    return d_VD.astype(d_BLD.dtype), None


lookup.defvjp(lookup_forward, lookup_backward)


class Embedding(nnx.Module):
    """Table [V, D], the vocabulary padded with zero rows up to `padded_size`."""

    def __init__(
        self, key: jax.Array, vocab_size: int, padded_size: int, hidden_size: int, std: float
    ):
        rows = std * jax.random.normal(key, (vocab_size, hidden_size))
        table = jnp.pad(rows, ((0, padded_size - vocab_size), (0, 0)))
        self.table = nnx.Param(table, axes=("vocab", "embed"))

    def __call__(self, ids_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Partial sums over the vocabulary's axes."""
        table_VD = collectives.unshard_parameter(self.table)
        return lookup(table_VD, ids_BL, table_VD.shape[0])


class Positions(nnx.Module):
    """Learned absolute positions, a table [max_position, D]."""

    def __init__(self, key: jax.Array, max_position: int, hidden_size: int, std: float):
        table = std * jax.random.normal(key, (max_position, hidden_size))
        self.table = nnx.Param(table, axes=("position", "embed"))

    def __call__(self, positions_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        return jnp.take(collectives.unshard_parameter(self.table), positions_BL, axis=0)
