"""Linear projection; its logical axes decide whether it is column- or row-parallel."""

import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxmeg.layers.context import Context
from maxmeg.ops.broadcast import broadcast
from maxmeg.ops.random import normal
from maxmeg.parallel.collectives import counted_once, unshard_parameter


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
        if self.bias is not None:
            bias = self.bias[...]
            bias = counted_once(bias) if self.row_parallel else bias
            y_TO = y_TO + broadcast(bias, y_TO.shape)
        if self.lora is not None:
            y_TO = y_TO + self.lora(x, ctx)
        return y_TO.reshape(*x.shape[:-1], -1)
