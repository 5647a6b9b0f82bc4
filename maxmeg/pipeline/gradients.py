"""Sums of the gradients of one group of layers over the ticks of a step, and their reduction.

A layer's gradients are added to its row of the sums. Under fsdp they are summed over devices and
scattered first. In the last tick, every row becomes complete: what ZeRO-1 cuts is then summed and
scattered over the axes of its cut. Both overlap with products: the gradients of a layer are reduced
while the next layer computes.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxmeg.layers.auxiliary import start_values
from maxmeg.parallel import collectives
from maxmeg.parallel.maxima import combine
from maxmeg.parallel.ordering import zeros_after
from maxmeg.parallel.parameter import Cut
from maxmeg.parallel.trainable import joined, without
from maxmeg.pipeline.residuals import combine_at, read, write
from maxmeg.pipeline.weights import GroupWeights
from maxmeg.weights.zero1 import map_cut, scatter_layer


class Sums(typing.NamedTuple):
    """rows: sums of gradients [places, ...]. waiting: the place whose layer ran last (-1: none) and
    those of its gradients that are not yet in `rows`; None: nothing ever waits."""

    rows: typing.Any
    waiting: tuple[jax.Array, typing.Any] | None = None


class GroupGradients:
    """The Sums of one group of layers, and what is added to them.

    gradients: shapes of a layer's gradients, gathered over fsdp. weights: of the group. once:
    nothing is added, as a single tick makes gradients: what ZeRO-1 cuts then has shards alone.
    Otherwise the last tick writes each shard into the beginning of its row. if_held(places, run,
    x): run(x) on stages that hold a layer at one of the places.
    """

    def __init__(self, gradients, weights: GroupWeights, once: bool, if_held: Callable):
        self.gradients, self.once, self.if_held = gradients, once, if_held
        self.divide, self.slots = weights.divide, weights.slots
        self.chunks, self.has_cuts = weights.chunks, weights.has_cuts
        self.ends = self.divide(gradients)[0]  # shapes of what waits

    def start(self, dy=None) -> Sums:
        """Zeros for a whole step, or for its last tick, which exist once dy does."""

        def zeros(row) -> jax.Array:
            dtype = row.dtype if self.once else jnp.float32
            shape = (self.chunks * self.slots, *row.shape)
            return jnp.zeros(shape, dtype) if dy is None else zeros_after(dy, shape, dtype)

        rows = jax.eval_shape(self.reduced if self.once else self.over_fsdp, self.gradients)
        is_sharded = collectives.has_sharded(self.gradients)
        waiting = (jnp.int32(-1), start_values(self.ends)) if is_sharded else None
        sums = Sums(jax.tree.map(zeros, rows), waiting)
        return sums if dy is None else self.enter_last_tick(sums, dy)

    def enter_last_tick(self, sums: Sums, dy) -> Sums:
        """The sums as the last tick takes them. dy: of the tick before."""
        if not self.has_cuts:
            return sums
        rows = sums.rows if self.once or sums.waiting is None else self.flushed(sums, last=False)
        zeros = jax.tree.map(lambda a: zeros_after(dy, a.shape, a.dtype), self.ends)
        return Sums(rows, (jnp.int32(-1), zeros))

    def add(self, sums: Sums, place, gradients, last: bool) -> Sums:
        """`sums` with the gradients of the layer at a place, in the last tick or an earlier one."""
        last = last and self.has_cuts
        if sums.waiting is None:
            return sums._replace(rows=self.accumulated(sums.rows, place, gradients))
        rows, (ends, others) = self.flushed(sums, last), self.divide(gradients)
        rows = self.reduced_into(rows, place, others, last)
        if last:  # it runs the first chunk: the rows of the others are complete
            for chunk in range(1, self.chunks):
                rows = self.with_shards(rows, place + chunk * self.slots, scatter_layer)
        return Sums(rows, (jnp.int32(place), ends))

    def finished_gradients(self, sums: Sums):
        """The gradients of the group after the last tick."""
        if sums.waiting is None:
            return sums.rows
        rows = self.flushed(sums, self.has_cuts)
        if self.once:
            return rows

        def one(row, cut: Cut):
            dim = cut.dim + 1  # after the places
            size = row.shape[dim] // collectives.axis_size(cut.axes)
            return jax.lax.slice_in_dim(row.get_value(), 0, size, axis=dim)

        return map_cut(one, rows)

    def flushed(self, sums: Sums, last: bool):
        """The rows with what is waiting."""
        assert sums.waiting is not None
        return self.reduced_into(sums.rows, *sums.waiting, last)

    def reduced_into(self, rows, place, gradients, last: bool):
        """`rows` with some gradients of the layer at a place (-1: zeros), reduced over devices."""
        at = jnp.maximum(place, 0)
        if not last or self.once:
            reduce = self.reduced if last else self.over_fsdp
            _, shards = self.if_held([at], lambda _: (None, reduce(gradients)), None)
            return self.accumulated(rows, at, shards)

        def reduce_with(earlier):
            new = self.over_fsdp(gradients)
            total = combine(without(earlier, without(earlier, new)), new)
            return self.if_held([at], lambda _: (None, scatter_layer(total)), None)[1]

        return self.with_shards(rows, at, reduce_with, place >= 0)

    def with_shards(self, rows, place, reduce: Callable, is_real: typing.Any = True):
        """`rows` with reduce(row at a place) in the beginning of that row; without `is_real`, as
        they are."""
        row = read(rows, place)
        shards = reduce(row)

        def one(buffer, shard):
            if shard is None:
                return buffer
            start = (place, *(0,) * shard.ndim)
            before = jax.lax.dynamic_slice(buffer, start, (1, *shard.shape))
            value = jnp.where(is_real, shard[None].astype(buffer.dtype), before)
            return jax.lax.dynamic_update_slice(buffer, value, start)

        return jax.tree.map(one, rows, shards, is_leaf=_is_absent)

    def over_fsdp(self, gradients):
        return collectives.scatter_gradients(gradients)

    def reduced(self, gradients):
        """Scatter the gradients of a layer over fsdp and over the axes of ZeRO-1's cuts."""
        return scatter_layer(self.over_fsdp(gradients))

    def accumulated(self, rows, place, gradients):
        """`rows` with gradients added at a place. Where a gradient is None, its row stays."""
        rest = without(rows, gradients)
        add = write if self.once else combine_at
        return joined(add(without(rows, rest), gradients, place), rest)


def _is_absent(leaf) -> bool:
    return leaf is None
