"""Token and position embeddings, vocabulary-parallel."""

import functools
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmeg.layers.context import Context
from maxmeg.ops.random import normal
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import VOCAB_AXES
from maxmeg.parallel.ordering import zeros_after
from maxmeg.parallel.parameter import info, parameter


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(
    table_VD: Float[Array, "V D"], rows_BL: Int[Array, "B L"], num_rows: int
) -> Float[Array, "B L D"]:
    """table_VD[rows_BL], zero for rows outside of the table. num_rows: table_VD.shape[0].

    The gradient is accumulated in float32 and then cast to the table's dtype.
    """
    is_inside_BL = (rows_BL >= 0) & (rows_BL < num_rows)
    vectors_BLD = jnp.take(table_VD, jnp.clip(rows_BL, 0, num_rows - 1), axis=0)
    return jnp.where(is_inside_BL[..., None], vectors_BLD, 0)


def lookup_forward(table_VD, rows_BL, num_rows):
    return lookup(table_VD, rows_BL, num_rows), rows_BL


def lookup_backward(num_rows, rows_BL, d_BLD):
    rows_BL = jnp.where(rows_BL >= 0, rows_BL, num_rows)  # out of range: dropped
    zeros_VD = zeros_after(d_BLD, (num_rows, d_BLD.shape[-1]))
    d_VD = zeros_VD.at[rows_BL].add(d_BLD.astype(jnp.float32), mode="drop")
    return d_VD.astype(d_BLD.dtype), None


lookup.defvjp(lookup_forward, lookup_backward)


class Embedding(nnx.Module):
    """Token embeddings [V, D], padded with zero rows to `padded_size`.

    is_output: they are the output projection alone. Then fsdp shards them as any matrix, otherwise
    along D.
    """

    def __init__(
        self,
        key: jax.Array,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        std: float,
        is_output: bool = False,
    ):
        rows = std * normal(key, (vocab_size, hidden_size))
        table = jnp.pad(rows, ((0, padded_size - vocab_size), (0, 0)))
        sizes = table.shape if is_output else ()
        self.table = parameter(table, "vocab", "embed", sizes=sizes)

    def __call__(self, ids_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Partial sums over VOCAB_AXES.

        fsdp shards the table along D. Either every device gathers its rows, or, where a microbatch
        has fewer tokens than that, looks up its columns for the tokens of all and exchanges them.
        """
        rows = self.table.shape[0]
        ids_BL -= collectives.first_index(VOCAB_AXES, rows)
        if ids_BL.size >= rows:
            return lookup(collectives.unshard_parameter(self.table), ids_BL, rows)
        axes = info(self.table).fsdp_axes
        columns_BLD: typing.Any = lookup(self.table[...], collectives.gather(ids_BL, axes, 0), rows)
        return collectives.exchange(columns_BLD, axes, cut=0, joined=2)


class Positions(nnx.Module):
    """Learned absolute position embeddings [max_position, D]; the first `offset` are not used."""

    def __init__(
        self, key: jax.Array, max_position: int, hidden_size: int, std: float, offset: int = 0
    ):
        self.offset = offset
        table = std * normal(key, (max_position, hidden_size))
        self.table = parameter(table, "position", "embed")

    def __call__(self, positions_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        table_VD = collectives.unshard_parameter(self.table)
        return lookup(table_VD, positions_BL, table_VD.shape[0])

    def embed(self, x_BLD: Float[Array, "B L D"], ctx: Context) -> Float[Array, "B L D"]:
        """The embedding of tokens with that of their positions; both partial sums over pipe."""
        positions_BLD = self(ctx.shard(ctx.positions_BL + self.offset))
        return x_BLD + collectives.counted_once(positions_BLD, (collectives.PIPE_AXIS,))
