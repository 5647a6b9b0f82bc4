"""The only place inside the model that names mesh axes.

Layers see their own shard (one `shard_map`, manual over every axis). Each function here is the
identity where its axis is absent or of size 1, so the same layer runs under plain `jax.jit` on
one device. Autodiff's duality all_gather <-> psum_scatter is Megatron-LM's f/g operators. No sum
here is ever differentiated: losses carry their own vjp.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxmeg.parallel.mesh import TENSOR_AXES

PIPE_AXIS = "pipe"
VOCAB_AXES = ("pipe", *TENSOR_AXES)


def present(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that are mapped here and have more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in axes if a in mesh.manual_axes and mesh.shape[a] > 1)


def axis_index(axes: tuple[str, ...]) -> jax.Array | int:
    """Rank within the product of `axes`, the first slowest."""
    index = 0
    for axis in present(axes):
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def axis_size(axes: tuple[str, ...]) -> int:
    """Devices along the product of `axes`."""
    return math.prod(lax.axis_size(axis) for axis in present(axes))


def gather(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    axes = present(axes)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    axes = present(axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def sum_over(x, axes: tuple[str, ...]):
    """Sum of a tree over mesh axes in one collective; not to be differentiated."""
    axes = present(axes)
    return lax.psum(x, axes) if axes else x


def max_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    axes = present(axes)
    return lax.pmax(x, axes) if axes else x


def permute(x: jax.Array, axis: str, pairs: list[tuple[int, int]]) -> jax.Array:
    """x sent along (from, to) ranks of one axis; zeros where nothing arrives."""
    return lax.ppermute(x, axis, pairs) if present((axis,)) else x


def exchange(x: jax.Array, axes: tuple[str, ...], cut: int = 0, joined: int = 0) -> jax.Array:
    """All-to-all: block r of dimension `cut` goes to rank r, and block s of dimension `joined` of
    the result came from s."""
    axes = present(axes)
    return lax.all_to_all(x, axes, cut, joined, tiled=True) if axes else x


def ragged_exchange(x_ND, out_ND, starts_R, sizes_R, places_R, received_R, axes: tuple[str, ...]):
    """`out_ND` with the slices that all ranks send here (lax.ragged_all_to_all), on CUDA alone."""
    names = present(axes)
    slices = (starts_R, sizes_R, places_R, received_R)
    return lax.ragged_all_to_all(x_ND, out_ND, *slices, axis_name=names)


def gather_sequence(x_BLD: jax.Array, sharded: bool = True) -> jax.Array:
    """The whole sequence from its shards over tensor (sequence parallelism)."""
    return gather(x_BLD, TENSOR_AXES, 1) if sharded else x_BLD


def scatter_sequence(x_BLD: jax.Array, sharded: bool = True) -> jax.Array:
    """Partial sums over tensor -> summed; this device keeps its part of the sequence.

    With sharded=False (decoding, where a sequence is one token) every device keeps all of it.
    """
    return scatter(x_BLD, TENSOR_AXES, 1) if sharded else sum_over(x_BLD, TENSOR_AXES)


def local_sequence(x_BL: jax.Array, length: int, axes: tuple[str, ...] = TENSOR_AXES) -> jax.Array:
    """This device's part, `length` long, of an array whose dimension 1 is the whole sequence."""
    if x_BL.shape[1] == length:
        return x_BL
    return lax.dynamic_slice_in_dim(x_BL, axis_index(axes) * length, length, axis=1)


def unshard_parameter(parameter) -> jax.Array:
    """The parameter gathered over fsdp along its "embed" dimension (ZeRO-3)."""
    value, axes = parameter[...], parameter.get_metadata()["axes"]
    if "embed" in axes:
        value = gather(value, ("fsdp",), axes.index("embed") + value.ndim - len(axes))
    return value


def counted_once(x: jax.Array, axes: tuple[str, ...] = TENSOR_AXES) -> jax.Array:
    """`x` on rank 0 of axes, zero elsewhere: to be added to partial sums."""
    rank = axis_index(axes)
    return x if isinstance(rank, int) else jnp.where(rank == 0, x, 0)


def stored(x: jax.Array) -> jax.Array:
    """An activation that backward reads instead of making it again; see `stores`.

    Named are the outputs of matrix products that backward needs and cannot make cheaply. What is
    not (norms, activations, rotations, gathered sequences and parameters) is made again.
    """
    return checkpoint_name(x, "stored")


def stores(prim, *_, **params) -> bool:
    """jax.checkpoint policy: keep what is `stored`.

    A policy also rules inside a nested jax.checkpoint: one that keeps all but some would undo it.
    """
    return prim.name == "name" and params["name"] == "stored"


def stored_attention(weights: jax.Array) -> jax.Array:
    """Attention's weights for a short sequence, or its output, which `stores_attention` keeps."""
    return checkpoint_name(weights, "attention")


def stored_exchange(rows: jax.Array) -> jax.Array:
    """Rows from other devices, which `stores_attention` keeps, so that they are sent once."""
    return checkpoint_name(rows, "exchange")


def stores_attention(prim, *_, **params) -> bool:
    """`stores`, and what attention needs to run forward once: cuDNN's outputs, or the weights; and
    rows that were exchanged."""
    named = prim.name == "name" and params["name"] in ("attention", "exchange")
    return named or stores(prim, **params) or prim.name == "dot_product_attention_fwd_wrapper"
