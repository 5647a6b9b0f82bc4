"""What a layer keeps between forward and backward, as a flat list of arrays for a ring buffer."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.layers.auxiliary import combine

Arrays = list[jax.Array]


class UnitVjp:
    """`jax.vjp` of function(params, x, given) -> (y, aux) in two halves, at two times.

    What backward needs and is given again there (parameters, the microbatch) is not kept: it is
    known by being the very same tracer. The structure of the vjp is learned by tracing.
    """

    def __init__(self, function: Callable, params, x, given):
        self.function = function
        self.structure = None
        self.sources: list[int | None] = []  # place among the given leaves, None: kept
        shapes = jax.eval_shape(self.forward, params, x, given)
        self.residuals, self.aux = shapes[1:]  # shapes and dtypes

    def forward(self, params, x: jax.Array, given) -> tuple[jax.Array, Arrays, typing.Any]:
        """(y, what backward needs beside params and given, auxiliary values)."""
        y, pull, aux = jax.vjp(
            lambda params, x: self.function(params, x, given), params, x, has_aux=True
        )
        leaves, structure = jax.tree.flatten(pull)
        known = jax.tree.leaves((params, given))
        sources = [next((i for i, k in enumerate(known) if k is leaf), None) for leaf in leaves]
        if self.structure is None:
            self.structure, self.sources = structure, sources
        assert sources == self.sources  # every trace keeps the same
        return y, [leaf for leaf, i in zip(leaves, sources, strict=True) if i is None], aux

    def backward(self, residuals: Arrays, params, given, dy: jax.Array):
        """(gradients of params, gradient of x)."""
        known, kept = jax.tree.leaves((params, given)), iter(residuals)
        leaves = [next(kept) if i is None else known[i] for i in self.sources]
        assert self.structure is not None
        return jax.tree.unflatten(self.structure, leaves)(dy)


def empty_ring(shapes, *sizes: int) -> Arrays:
    """Zeros [*sizes, ...] for each of `shapes`."""
    return [jnp.zeros((*sizes, *s.shape), s.dtype) for s in shapes]


def write(ring: Arrays, values: Arrays, *place: jax.Array | int) -> Arrays:
    """`ring` with `values` at the indices `place` of its first dimensions."""

    def one(buffer, value):
        start = (*place, *(0,) * value.ndim)
        return lax.dynamic_update_slice(buffer, value[(None,) * len(place)], start)

    return [one(buffer, value) for buffer, value in zip(ring, values, strict=True)]


def read(ring, *place: jax.Array | int):
    """The arrays at the indices `place` of the first dimensions of a tree."""

    def one(buffer):
        start = (*place, *(0,) * (buffer.ndim - len(place)))
        sizes = (*(1,) * len(place), *buffer.shape[len(place) :])
        return lax.dynamic_slice(buffer, start, sizes).reshape(buffer.shape[len(place) :])

    return jax.tree.map(one, ring)


def combine_at(total, place: jax.Array, values):
    """`total` with `values` combined into it at index `place` of dimension 0."""
    return jax.tree.map(
        lambda buffer, row: lax.dynamic_update_slice_in_dim(buffer, row[None], place, axis=0),
        total,
        combine(read(total, place), values),
    )
