"""Send rows of tokens to their experts' devices as 8-bit codes with their scales, and sums back.

As in DeepSeek-V3 (section 3.3.3), what is sent to experts has 8 bits: the tokens in forward, and in
backward the gradients of the sums. What returns from experts has 16: outputs, and in backward the
gradients of tokens, whose sums over a token's experts would add up the roundings of each.

A row is its codes, float8_e4m3fn, then the exponents of its scales, all as bytes. Scales are powers
of two, for the row or for its blocks, as the experts' first product needs them: grouped products
multiply the codes that arrive. Where the values are quantized again, in other blocks, they stay the
same, unless they are so small that the format has fewer bits for them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from maxmeg.ops.experts.dispatch import Order, collect, spread
from maxmeg.ops.experts.grouped_matmul import exact, in_rows
from maxmeg.ops.quantized import E4M3, Quantized, Recipe, dequantize_blocks

Send = Callable[[Array], Array]  # a pytree: jax.tree_util.Partial


class Rows(NamedTuple):
    """Rows that arrived: their values, whose gradients go back, and, if they came packed, bytes."""

    values_RD: Float[Array, "R D"]
    packed_RW: UInt8[Array, "R W"] | None = None

    def spread(self, order: Order) -> "Rows":
        """The row of each copy, as `dispatch.spread`."""
        bytes_RW = None if self.packed_RW is None else spread(self.packed_RW, order)
        return Rows(spread(self.values_RD, order), bytes_RW)

    @property
    def codes(self) -> Quantized | None:
        """Codes, and exponents of their scales."""
        return None if self.packed_RW is None else unpack(self.packed_RW, self.values_RD.shape[1])


def pack(x_TD: Float[Array, "T D"], recipe: Recipe) -> UInt8[Array, "T W"]:
    """The codes of each row, and the exponents of its scales."""
    codes, exponents = in_rows(x_TD, recipe, E4M3)
    return jnp.concatenate((lax.bitcast_convert_type(codes, jnp.uint8), exponents), axis=1)


def unpack(rows_RW: UInt8[Array, "R W"], size: int) -> Quantized:
    """(codes [R, size], exponents of their scales)."""
    codes = lax.bitcast_convert_type(rows_RW[:, :size], jnp.dtype(E4M3))
    return codes, rows_RW[:, size:]


def sent_packed(x_TD: Array, order: Order, send: Send, keep: Callable, recipe: Recipe) -> Rows:
    rows_RW = keep(send(spread(pack(x_TD, recipe), order)))
    codes, exponents = unpack(rows_RW, x_TD.shape[1])
    values_RD = dequantize_blocks(codes, exponents, exact(x_TD.dtype))
    return Rows(values_RD.astype(x_TD.dtype), rows_RW)


def unchanged(rows: Array) -> Array:
    return rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def dispatch(
    x_TD: Float[Array, "T D"],
    order: Order,
    send: Send,
    send_back: Send,
    recipe: Recipe,
    keep: Callable,
) -> Rows:
    """The rows that arrive from all devices: each sends its tokens in `order`, packed.

    send, send_back: rows to the devices of their experts, and the reverse. keep: what arrives, by a
    name under which backward finds it.
    """
    return sent_packed(x_TD, order, send, keep, recipe)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def combine(
    y_RD: Float[Array, "R D"], order: Order, send: Send, send_back: Send, recipe: Recipe
) -> Float[Array, "T D"]:
    """The sums of the rows of each token's copies, sent back; their gradients are sent packed."""
    return collect(send_back(y_RD), order)


def dispatch_forward(x_TD, order, send, send_back, recipe, keep):
    return sent_packed(x_TD, order, send, keep, recipe), (order, send_back)


def dispatch_backward(recipe, keep, residuals, slope: Rows):
    order, send_back = residuals
    return collect(send_back(slope.values_RD), order), None, None, None


def combine_forward(y_RD, order, send, send_back, recipe):
    return collect(send_back(y_RD), order), (order, send)


def combine_backward(recipe, residuals, slope_TD):
    order, send = residuals
    slope = sent_packed(slope_TD, order, send, unchanged, recipe)
    return slope.values_RD, None, None, None


dispatch.defvjp(dispatch_forward, dispatch_backward)
combine.defvjp(combine_forward, combine_backward)
