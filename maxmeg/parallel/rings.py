"""Tensor-parallel products in parts, beside the transfers of the other parts.

The residual stream is sharded over tensor along the sequence (l = L / devices). Instead of one
all-gather before a product, or one reduce-scatter after it, every shard goes straight to the device
that needs it: one permute for each distance between ranks. As Megatron-LM's --tp-comm-overlap.

XLA would merge the products of several shards with one weight: a barrier makes the weight another
value for each.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.parallel.collectives import (
    axis_index,
    axis_size,
    gather_sequence,
    permute_in_stage,
)
from maxmeg.parallel.mesh import TENSOR_AXES


@jax.custom_vjp
def gather_matmul(x_BlD: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """gather_sequence(x) @ w [B, L, O] for each w [D, O] of `weights`; x is sent once."""
    return multiply_arriving(x_BlD, weights)[0]


def _gather_matmul_forward(x_BlD, weights):
    return gather_matmul(x_BlD, weights), (x_BlD, weights)


def _gather_matmul_backward(kept, slopes):
    x_BlD, weights = kept
    x_BLD = gather_sequence(x_BlD)

    def part(rank) -> jax.Array:
        into = [
            multiply_shard(shard_of(slope, rank), w.T)
            for slope, w in zip(slopes, weights, strict=True)
        ]
        return sum(into[1:], into[0])

    return sum_of_parts(part), tuple(weight_gradient(x_BLD, slope) for slope in slopes)


gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


@jax.custom_vjp
def matmul_scatter(x_BLI: jax.Array, w_ID: jax.Array) -> jax.Array:
    """scatter_sequence(x @ w) [B, l, D]; the sum over devices is float32."""
    return sum_of_parts(lambda rank: multiply_shard(shard_of(x_BLI, rank), w_ID))


def _matmul_scatter_forward(x_BLI, w_ID):
    return matmul_scatter(x_BLI, w_ID), (x_BLI, w_ID)


def _matmul_scatter_backward(kept, slope_BlD):
    x_BLI, w_ID = kept
    (into_BLI,), slope_BLD = multiply_arriving(slope_BlD, (w_ID.T,))
    return into_BLI, weight_gradient(x_BLI, slope_BLD)


matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def multiply_arriving(x_BlD: jax.Array, weights: tuple[jax.Array, ...]):
    """((x of the whole sequence @ w for each of `weights`), x of the whole sequence)."""
    devices, rank = axis_size(TENSOR_AXES), axis_index(TENSOR_AXES)
    ranks = [(rank + distance) % devices for distance in range(devices)]
    shards = [moved(x_BlD, -distance) for distance in range(devices)]
    products = (assemble(ranks, [multiply_shard(shard, w) for shard in shards]) for w in weights)
    return tuple(products), assemble(ranks, shards)


def sum_of_parts(part: Callable[[jax.Array | int], jax.Array]) -> jax.Array:
    """The sum of all devices' part(rank of this device), in float32. The own part is last: the
    others are on their way meanwhile."""
    devices, rank = axis_size(TENSOR_AXES), axis_index(TENSOR_AXES)
    arrived = [moved(part((rank + n) % devices), n) for n in range(1, devices)]
    parts = [part(rank), *arrived]
    total = sum((one.astype(jnp.float32) for one in parts[1:]), parts[0].astype(jnp.float32))
    return total.astype(parts[0].dtype)


def moved(x: jax.Array, distance: int) -> jax.Array:
    """x of the device `distance` ranks before this one along tensor, cyclically."""
    devices = axis_size(TENSOR_AXES)
    if distance % devices == 0:
        return x
    pairs = [(i, (i + distance) % devices) for i in range(devices)]
    return permute_in_stage(x, TENSOR_AXES, pairs)


def shard_of(x_BLI: jax.Array, rank: jax.Array | int) -> jax.Array:
    length = x_BLI.shape[1] // axis_size(TENSOR_AXES)
    return lax.dynamic_slice_in_dim(x_BLI, rank * length, length, axis=1)


def assemble(ranks: Sequence[jax.Array | int], shards: Sequence[jax.Array]) -> jax.Array:
    """The whole sequence from the shards of these ranks."""
    B, length, *rest = shards[0].shape
    whole = lax.empty((B, length * len(shards), *rest), shards[0].dtype)
    for rank, shard in zip(ranks, shards, strict=True):
        whole = lax.dynamic_update_slice_in_dim(whole, shard, rank * length, axis=1)
    return whole


def multiply(x_BLI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """x @ w, with all tokens as one matrix."""
    return (x_BLI.reshape(-1, x_BLI.shape[-1]) @ w_IO).reshape(*x_BLI.shape[:-1], -1)


def multiply_shard(x_BlI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """x @ w as a product of its own."""
    return multiply(*lax.optimization_barrier((x_BlI, w_IO)))


def weight_gradient(x_BLI: jax.Array, slope_BLO: jax.Array) -> jax.Array:
    return x_BLI.reshape(-1, x_BLI.shape[-1]).T @ slope_BLO.reshape(-1, slope_BLO.shape[-1])
