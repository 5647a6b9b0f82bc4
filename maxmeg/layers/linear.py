"""Linear projection; its logical axes decide whether it is column- or row-parallel."""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.ops.broadcast import broadcast
from maxmeg.ops.random import normal
from maxmeg.parallel.collectives import counted_once, unshard_parameter
from maxmeg.parallel.fused import fused_widths, split_columns


class Linear(nnx.Module):
    """y = x W (+ b) (+ lora(x)). Row-parallel if the output axis is "embed": returns partial sums.

    axes: logical axes of (input, output). std: standard deviation of the initial weights.
    """

    def __init__(
        self,
        key: jax.Array,
        sizes: tuple[int, int],
        axes: tuple[str, str],
        std: float,
        bias: bool = False,
    ):
        self.weight = nnx.Param(std * normal(key, sizes), axes=axes, sizes=sizes)
        self.row_parallel = axes[1] == "embed"
        bias_axis = "norm" if self.row_parallel else axes[1]
        self.bias = nnx.Param(jnp.zeros(sizes[1]), axes=(bias_axis,)) if bias else None
        self.lora: typing.Any = nnx.data(None)  # a layers.lora.Lora

    def __call__(
        self, x: Float[Array, "B L I"], ctx: Context | None = None
    ) -> Float[Array, "B L O"]:
        # All tokens as one matrix: for [1, L, O] with a bias XLA would also keep a transposed copy.
        y_TO = x.reshape(-1, x.shape[-1]) @ unshard_parameter(self.weight)
        return self.completed(y_TO, x, ctx)

    def completed(self, y_TO: jax.Array, x: jax.Array, ctx: Context | None) -> jax.Array:
        """The output, from the product with the weight."""
        if self.bias is not None:
            bias = self.bias[...]
            bias = counted_once(bias) if self.row_parallel else bias
            y_TO = y_TO + broadcast(bias, y_TO.shape)
        if self.lora is not None:
            y_TO = y_TO + self.lora(x, ctx)
        return y_TO.reshape(*x.shape[:-1], -1)


def project(
    linears: Sequence[Linear], x: Float[Array, "B L I"], ctx: Context | None = None
) -> list[Float[Array, "B L O"]]:
    """The outputs of projections of the same input, by one product if their weights are fused
    (parallel.fused)."""
    weight = linears[0].weight
    if (widths := fused_widths(weight)) is None:
        return [linear(x, ctx) for linear in linears]
    y_TO = x.reshape(-1, x.shape[-1]) @ unshard_parameter(weight)
    parts = split_columns(y_TO, widths)
    return [linear.completed(y, x, ctx) for linear, y in zip(linears, parts, strict=True)]
