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
from maxmeg.parallel.collectives import (
    axis_size,
    counted_once,
    of_shared_head,
    unshard_parameter,
)
from maxmeg.parallel.mesh import TENSOR_AXES
from maxmeg.parallel.parameter import info, parameter
from maxmeg.weights.fused import split_columns


class Linear(nnx.Module):
    """y = x W (+ b) (+ lora(x)). Row-parallel if the output axis is "embed": returns partial sums.

    axes: logical axes of (input, output). std: standard deviation of the initial weights. parts:
    widths of the parts of each head's output, which are matrices by themselves (optim/muon.py).
    """

    quantizable = ("weight",)

    def __init__(
        self,
        key: jax.Array,
        sizes: tuple[int, int],
        axes: tuple[str, str],
        std: float,
        bias: bool = False,
        parts: tuple[int, ...] = (),
    ):
        self.weight = parameter(std * normal(key, sizes), *axes, sizes=sizes, head_parts=parts)
        self.row_parallel = axes[1] == "embed"
        bias_axis = "norm" if self.row_parallel else axes[1]
        self.bias = parameter(jnp.zeros(sizes[1]), bias_axis) if bias else None
        self.lora: typing.Any = nnx.data(None)  # a layers.lora.Lora
        self.codes: dict[str, typing.Any] = nnx.data({})  # layers.quantized.Codes of `weight`

    def __call__(
        self, x: Float[Array, "B L I"], ctx: Context | None = None
    ) -> Float[Array, "B L O"]:
        y_TO = self._completed(self.product(x), x, ctx, bool(self.codes))
        return y_TO.reshape(*x.shape[:-1], -1)

    def product(self, x: Float[Array, "B L I"]) -> Float[Array, "T O"]:
        """x times the weight, all tokens as one matrix: for [1, L, O] with a bias XLA would also
        keep a transposed copy."""
        x_TI = x.reshape(-1, x.shape[-1])
        if self.codes:
            return self.codes["weight"].product(x_TI, self.weight)
        return x_TI @ unshard_parameter(self.weight)

    def _completed(
        self, y_TO: jax.Array, x: jax.Array, ctx: Context | None, is_quantized: bool
    ) -> jax.Array:
        """The output [tokens, O], from the product with the weight or its codes."""
        num_heads = info(self.weight).num_kv_heads
        if is_quantized and 0 < num_heads < axis_size(TENSOR_AXES):
            y_TO = of_shared_head(y_TO, num_heads)
        if self.bias is not None:
            bias = self.bias[...]
            bias = counted_once(bias) if self.row_parallel else bias
            y_TO = y_TO + broadcast(bias, y_TO.shape)
        if self.lora is not None:
            y_TO = y_TO + self.lora(x, ctx)
        return y_TO


def project(
    linears: Sequence[Linear], x: Float[Array, "B L I"], ctx: Context | None = None
) -> list[Float[Array, "B L O"]]:
    """The outputs of projections of the same input, by one product if their weights are fused
    (parallel.fused)."""
    widths = info(linears[0].weight).fused_widths
    if not widths:
        return [linear(x, ctx) for linear in linears]
    parts = split_columns(linears[0].product(x), widths)
    outputs = [
        linear._completed(y, x, ctx, bool(linears[0].codes))
        for linear, y in zip(linears, parts, strict=True)
    ]
    return [y_TO.reshape(*x.shape[:-1], -1) for y_TO in outputs]
