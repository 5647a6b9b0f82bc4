"""Quantization-aware training: forward multiplies rounded weights (and inputs), backward treats the
rounding as the identity (the straight-through estimator of Bengio et al., 2013).

Backward multiplies the rounded operands, which are stored instead of the originals, with gradients
in the compute dtype. Products have wider copies of the codes on every device: what is saved is
memory and communication, not time.

Int8 is symmetric: codes from -127 to 127, one float32 scale for each output column of a weight and
for each token of an input. With parallel.tensor a device scales its own part of a token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmeg.ops.backend import Device
from maxmeg.ops.quantized import Quantized, Recipe, Shares, all_finite, contract

INT8_LARGEST = 127


@dataclasses.dataclass(frozen=True)
class StraightThrough(Recipe):
    """Weights, and inputs if `rounds_inputs`, are rounded as by `rounding` for sums over I."""

    rounding: Recipe = Recipe()
    rounds_inputs: bool = True
    multiplies_codes: bool = False
    grouped: bool = False
    capability: tuple[int, int] = (0, 0)

    @property
    def shares(self) -> Shares:
        return self.rounding.shares

    def passes(self, device: Device) -> float:
        return 4.0 if self.rounds_inputs else 0.0

    def weight_bytes(self, count: int) -> int:
        return self.rounding.weight_bytes(count)

    def weights(self, w: Float[Array, "*E I O"], largest: jax.Array | None) -> list[Quantized]:
        return self.rounding.weights(w, largest)[:1]

    def inputs(self, x: Float[Array, "*E T I"]) -> tuple[Quantized, Quantized]:
        stored = self.rounding.inputs(x)[0] if self.rounds_inputs else (x,)
        return stored, stored

    def slopes(
        self, slope: Float[Array, "*E T O"], key: jax.Array | None
    ) -> tuple[Quantized, Quantized]:
        return (slope,), (slope,)

    def multiply(
        self, a: Quantized, b: Quantized, dims: tuple[int, int], dtype, precision=None
    ) -> jax.Array:
        left, right = (self.wide(each, dtype) for each in (a, b))
        return contract(left, right, dims, dtype)

    def wide(self, quantized: Quantized, dtype) -> jax.Array:
        """An array alone has not been rounded."""
        return quantized[0] if len(quantized) == 1 else self.rounding.wide(quantized, dtype)


def straight_through(rounding: Recipe, rounds_inputs: bool = True) -> StraightThrough:
    return StraightThrough(
        rounding.forward, block=rounding.block, rounding=rounding, rounds_inputs=rounds_inputs
    )


@dataclasses.dataclass(frozen=True)
class Int8(Recipe):
    """Symmetric 8-bit integers with a scale for each column of weights and each row of inputs."""

    forward: str = "int8"

    @property
    def shares(self) -> Shares:
        return Shares.column

    def weights(self, w: Float[Array, "*E I O"], largest: jax.Array | None) -> list[Quantized]:
        assert largest is not None
        return [to_int8(w, largest, -2)]

    def inputs(self, x: Float[Array, "*E T I"]) -> tuple[Quantized, Quantized]:
        stored = to_int8(x, jnp.max(jnp.abs(x), axis=-1, keepdims=True), -1)
        return stored, stored

    def wide(self, quantized: Quantized, dtype) -> jax.Array:
        codes, scale = quantized  # fsdp gathers a copy of the scales of columns from each device
        scale = scale if scale.shape[-1] == 1 else scale[..., :1, :]
        return (codes.astype(jnp.float32) * scale).astype(dtype)


def to_int8(x: jax.Array, largest: jax.Array, axis: int) -> Quantized:
    """(x / scale rounded to int8, scale), so that numbers up to `largest`, of those along the axis,
    fit. The scale is NaN if one of them is not finite."""
    scale = jnp.where(all_finite(x, axis), largest.astype(jnp.float32) / INT8_LARGEST, jnp.nan)
    inverse = jnp.where(scale > 0, 1 / scale, 0)
    return jnp.round(x.astype(jnp.float32) * inverse).astype(jnp.int8), scale
