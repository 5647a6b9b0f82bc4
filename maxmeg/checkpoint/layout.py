"""Between a pipeline's order of layers in memory and the model's order on disk.

A checkpoint says nothing of the pipeline it was trained with: its stacked arrays hold layers in
model order, without the places that a stage skips. Arrays are known by name.
"""

import functools
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.pipeline.layout import Layout

STACKED = re.compile(r"(?:^|\.)stack\.groups\.(\d+)\.")


def group_of(name: str, layout: Layout) -> int | None:
    """The group whose layers an array stacks, where their order is not the model's."""
    found = STACKED.search(name)
    return None if layout.trivial or found is None else int(found[1])


def on_disk(abstract: Mapping[str, jax.ShapeDtypeStruct], layout: Layout) -> dict:
    """Shapes and shardings of the arrays as they are saved."""

    def one(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        group = group_of(name, layout)
        if group is None:
            return leaf
        shape = (len(layout.places(group)), *leaf.shape[1:])
        sharding = leaf.sharding and evenly_sharded(shape, leaf.sharding)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return {name: one(name, leaf) for name, leaf in abstract.items()}


def evenly_sharded(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """The sharding, with the axes of dimension 0 moved to one they divide where they do not it."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for dim, names in enumerate(sharding.spec):
        spec[dim] = (names,) if isinstance(names, str) else tuple(names or ())
    axes, sizes = spec[0], sharding.mesh.shape

    def divides(dim: int, names: tuple[str, ...]) -> bool:
        return shape[dim] % int(np.prod([sizes[name] for name in names])) == 0

    if not divides(0, axes):
        spec[0] = ()
        for dim in range(1, len(shape)):
            if divides(dim, (*spec[dim], *axes)):
                spec[dim] = (*spec[dim], *axes)
                break
    return NamedSharding(sharding.mesh, P(*(names or None for names in spec)))


def to_disk(arrays: Mapping[str, jax.Array], layout: Layout) -> dict[str, jax.Array]:
    """The arrays in model order; what lies in it already is the same object."""
    wanted = on_disk(
        {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in arrays.items()},
        layout,
    )

    def one(name: str, array: jax.Array) -> jax.Array:
        group = group_of(name, layout)
        if group is None:
            return array
        return moved(array, tuple(layout.places(group).tolist()), wanted[name].sharding)

    return {name: one(name, array) for name, array in arrays.items()}


def from_disk(
    arrays: Mapping[str, jax.Array], abstract: Mapping[str, jax.ShapeDtypeStruct], layout: Layout
) -> dict[str, jax.Array]:
    """The arrays in the pipeline's order, laid out as `abstract`; those read are freed."""

    def one(name: str, array: jax.Array) -> jax.Array:
        group = group_of(name, layout)
        if group is None:
            return array
        placed = moved(array, layout.orders[group], abstract[name].sharding)
        array.delete()
        return placed

    return {name: one(name, array) for name, array in arrays.items()}


def moved(array: jax.Array, order: tuple[int, ...], sharding) -> jax.Array:
    """The rows of dimension 0 in another order, done: only one array is on its way at a time.

    Programs that speak across devices and run at once can wait for each other on CPU devices.
    """
    return jax.block_until_ready(taken(order, sharding)(array))


@functools.cache
def taken(order: tuple[int, ...], sharding):
    """The jitted function that takes rows of dimension 0, zeros for -1."""

    def take(array):
        rows = jnp.take(array, np.maximum(order, 0), axis=0)
        there = np.array(order).reshape(-1, *(1,) * (array.ndim - 1)) >= 0
        return rows if there.all() else jnp.where(there, rows, jnp.zeros((), array.dtype))

    return jax.jit(take, out_shardings=sharding)
