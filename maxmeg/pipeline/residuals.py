"""Residuals of a layer, from forward to backward, as a flat list of arrays for a ring buffer."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxmeg.config.recompute import NAMES
from maxmeg.parallel.collectives import activation_names
from maxmeg.parallel.maxima import combine
from maxmeg.parallel.ordering import depending

Arrays = list[jax.Array]


class UnitVjp:
    """`jax.vjp` of function(params, x, constants) -> (y, aux), split into forward and backward.

    x and y: trees of the same structure. constants: inputs without a gradient. Residuals that are
    params or constants themselves (the same tracer) are not stored: backward gets them again.
    Tracing gives the structure of the vjp.
    """

    def __init__(self, function: Callable, params, x, constants):
        self.function = function
        self.structure = None
        self.sources: list[int | None] = []  # index in (params, constants); None: stored
        self.inputs: list[int] = []  # indices of x among what is stored
        self.residuals, self.aux = typed_shapes(self.forward, params, x, constants)[1:]

    def forward(self, params, x, constants) -> tuple[typing.Any, Arrays, typing.Any]:
        """(y, residuals without params and constants, auxiliary values)."""
        # Arrays of their own, also where x has one array twice: residuals are told by identity.
        x = jax.tree.map(lambda array: checkpoint_name(array, "unit_input"), x)
        y, pull, aux = jax.vjp(
            lambda params, x: self.function(params, x, constants), params, x, has_aux=True
        )
        leaves, structure = jax.tree.flatten(pull)
        inputs = jax.tree.leaves((params, constants))
        sources = [next((i for i, k in enumerate(inputs) if k is leaf), None) for leaf in leaves]
        if self.structure is None:
            self.structure, self.sources = structure, sources
        assert sources == self.sources  # every trace stores the same residuals
        saved = [leaf for leaf, i in zip(leaves, sources, strict=True) if i is None]
        arrays = jax.tree.leaves(x)
        self.inputs = [i for i, leaf in enumerate(saved) if any(leaf is a for a in arrays)]
        return y, saved, aux

    def following(self, residuals: Arrays, before) -> Arrays:
        """The residuals, of which the unit's input depends on the arrays of `before`."""
        return [
            depending(array, before) if i in self.inputs else array
            for i, array in enumerate(residuals)
        ]

    def backward(self, residuals: Arrays, params, constants, dy):
        """(gradients of params, gradient of x)."""
        inputs, values = jax.tree.leaves((params, constants)), iter(residuals)
        leaves = [next(values) if i is None else inputs[i] for i in self.sources]
        assert self.structure is not None
        return jax.tree.unflatten(self.structure, leaves)(dy)


def check_offloaded(names: frozenset[str], vjps: list[tuple], x) -> None:
    """ValueError for names that `model.recompute` offloads but no layer stores. vjps: each with its
    params and constants; x: the hidden states; all abstract."""
    if not vjps or not names:
        return
    stored = set[str]()
    for vjp, params, constants in vjps:
        stored |= activation_names(jax.make_jaxpr(vjp.forward)(params, x, constants).jaxpr)
    if names - stored:
        raise ValueError(
            f"model.recompute offloads {', '.join(sorted(names - stored))}, which no layer of "
            f"this model stores: choose from {', '.join(sorted(stored & set(NAMES)))}"
        )


def typed_shapes(function: Callable, *arguments):
    """Like jax.eval_shape, but the abstract arrays also tell whether they are in device or host
    memory."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return jax.tree.unflatten(jax.tree.structure(shapes), traced.out_avals)


def zeros_of(abstract, *sizes: int) -> jax.Array:
    """Zeros [*sizes, ...] in the memory of an abstract array."""
    zeros = jnp.zeros((*sizes, *abstract.shape), abstract.dtype)
    is_on_host = abstract.memory_space is jax.memory.Space.Host
    return jax.device_put(zeros, jax.memory.Space.Host) if is_on_host else zeros


def empty_ring(shapes, *sizes: int, is_read_first: bool = True) -> Arrays:
    """Arrays [*sizes, ...] for each of `shapes`, in their memories; zeros where an entry may be
    read before it is written, else in device memory without values."""

    def one(abstract) -> jax.Array:
        if is_read_first or abstract.memory_space is jax.memory.Space.Host:
            return zeros_of(abstract, *sizes)
        return lax.empty((*sizes, *abstract.shape), abstract.dtype)

    return [one(abstract) for abstract in shapes]


def stacked(shapes, size: int):
    """Shapes with a leading dimension of `size`."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape), a.dtype), shapes)


def write(ring, values, *place: jax.Array | int):
    """The arrays of the tree `ring` with `values` at the indices `place` of their first
    dimensions."""

    def one(buffer, value):
        start = (*place, *(0,) * value.ndim)
        return lax.dynamic_update_slice(buffer, value[(None,) * len(place)], start)

    return jax.tree.map(one, ring, values)


def read(ring, *place: jax.Array | int):
    """The arrays of the tree `ring` at the indices `place` of their first dimensions."""

    def one(buffer):
        start = (*place, *(0,) * (buffer.ndim - len(place)))
        sizes = (*(1,) * len(place), *buffer.shape[len(place) :])
        return lax.dynamic_slice(buffer, start, sizes).reshape(buffer.shape[len(place) :])

    return jax.tree.map(one, ring)


def write_ring(ring: list, values: Arrays, number: jax.Array, slot: jax.Array | int) -> list:
    """`ring` with `values` at entry `number`, of place `slot`: an index of dimension 1 or, where
    the loop over places is unrolled, of the list."""
    if not isinstance(slot, int):
        return write(ring, values, number, slot)
    return [write(r, values, number) if i == slot else r for i, r in enumerate(ring)]


def read_ring(ring: list, number: jax.Array, slot: jax.Array | int) -> Arrays:
    """What `write_ring` has written; at an idle stage, entry 0."""
    number = jnp.maximum(number, 0)
    return read(ring[slot], number) if isinstance(slot, int) else read(ring, number, slot)


def combine_at(total, values, place: jax.Array | int):
    """`total` with `values` combined into it at index `place` of dimension 0."""
    rows = jax.tree.map(lambda buffer: lax.dynamic_slice_in_dim(buffer, place, 1), total)
    rows = combine(rows, jax.tree.map(lambda value: value[None], values))
    return jax.tree.map(
        lambda buffer, row: lax.dynamic_update_slice_in_dim(buffer, row, place, axis=0), total, rows
    )
