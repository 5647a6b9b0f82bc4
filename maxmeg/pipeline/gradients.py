"""Sums of the gradients of one group of layers over the ticks of a step, and their reduction.

A layer's gradients are added to its row of the sums. Under fsdp they are summed over devices and
scattered first. In the last tick, every row becomes complete: what ZeRO-1 cuts is then summed and
scattered over the axes of its cut. Both happen beside products: the gradients that backward
computes last wait, whole, until the next layer of the lane runs.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxmeg.layers.auxiliary import start_values
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import FSDP_AXES
from maxmeg.parallel.trainable import joined, without
from maxmeg.pipeline.residuals import combine_at, read, write


class Sums(typing.NamedTuple):
    """rows: sums of gradients [places, ...]. In the last tick, rows of what ZeRO-1 cuts are shards,
    and `before` holds the whole sums of the ticks before it. waiting: the place whose layer ran
    last (-1: none) and those of its gradients that are not yet in `rows`."""

    rows: typing.Any
    waiting: tuple[jax.Array, typing.Any] | None = None
    before: typing.Any = None


class GroupGradients:
    """The Sums of one group of layers, and what is added to them.

    gradients: shapes of a layer's gradients, gathered over fsdp. reductions: the Reduction of each.
    divide: of a pipeline's Program. slots, chunks: of the stage's places. once: nothing is added,
    as there is one stage and one microbatch. if_held(place, run, x): run(x) on stages that hold a
    layer at this place.
    """

    def __init__(
        self,
        gradients,
        reductions,
        divide: Callable,
        slots: int,
        chunks: int,
        once: bool,
        if_held: Callable,
    ):
        self.gradients, self.reductions, self.divide = gradients, reductions, divide
        self.slots, self.chunks, self.once, self.if_held = slots, chunks, once, if_held
        self.has_cuts = any(place.cut is not None for place in jax.tree.leaves(reductions))

    def start(self) -> Sums:
        """Zeros for a whole step."""
        shards = jax.eval_shape(self.reduced if self.once else self.over_fsdp, self.gradients)
        rows = jax.tree.map(self.zeros, shards)
        return Sums(rows, self.nothing() if collectives.present(FSDP_AXES) else None)

    def zeros(self, shard) -> jax.Array:
        dtype = shard.dtype if self.once else jnp.float32
        return jnp.zeros((self.chunks * self.slots, *shard.shape), dtype)

    def nothing(self) -> tuple:
        return jnp.int32(-1), start_values(self.divide(self.gradients)[0])

    def enter_last_tick(self, sums: Sums) -> Sums:
        """The sums as the last tick takes them; the same without a cut of ZeRO-1."""
        if not self.has_cuts:
            return sums
        whole = jax.tree.map(
            lambda row, place: None if place.cut is None else row, sums.rows, self.reductions
        )
        if self.once:
            return Sums(sums.rows, self.nothing(), jax.tree.map(lambda _: None, whole))
        rows = self.settled(sums)
        whole = without(rows, without(rows, whole))
        shards = jax.eval_shape(lambda rows: self.over_cuts(read(rows, 0)), whole)
        rows = joined(jax.tree.map(self.zeros, shards), without(rows, whole))
        return Sums(rows, self.nothing(), whole)

    def add(self, sums: Sums, place, gradients) -> Sums:
        """`sums` with the gradients of the layer at a place."""
        if sums.waiting is None:
            return sums._replace(rows=self.accumulated(sums.rows, place, gradients))
        last, others = self.divide(gradients)
        sums = self.reduce_into(self.reduce_into(sums, *sums.waiting), place, others)
        if sums.before is not None:  # the last tick runs the first chunk: others are complete
            for chunk in range(1, self.chunks):
                sums = self.complete(sums, place + chunk * self.slots)
        return sums._replace(waiting=(jnp.int32(place), last))

    def settled(self, sums: Sums):
        """The rows with what is waiting."""
        return sums.rows if sums.waiting is None else self.reduce_into(sums, *sums.waiting).rows

    def reduce_into(self, sums: Sums, place, gradients) -> Sums:
        """`sums` with some gradients of the layer at a place, reduced over devices."""
        at = jnp.maximum(place, 0)

        def reduce(_):
            if sums.before is None:
                return None, self.over_fsdp(gradients)
            earlier = jax.tree.map(lambda row: jnp.where(place >= 0, row, 0), read(sums.before, at))
            return None, self.reduced(gradients, earlier)

        _, shards = self.if_held(at, reduce, None)
        return sums._replace(rows=self.accumulated(sums.rows, at, shards))

    def complete(self, sums: Sums, place) -> Sums:
        """`sums` with the row at a place, to which the last tick adds nothing, scattered."""
        shards = self.over_cuts(read(sums.before, place))
        return sums._replace(rows=self.accumulated(sums.rows, place, shards))

    def over_fsdp(self, gradients):
        return collectives.scatter_gradients(gradients)

    def reduced(self, gradients, earlier=None):
        """Gradients of a layer over fsdp and the cuts of ZeRO-1, with the sums of earlier ticks."""
        shards = self.over_fsdp(gradients)
        if earlier is not None:
            shards = jax.tree.map(_sum, shards, earlier, is_leaf=_is_absent)
        return self.over_cuts(shards)

    def over_cuts(self, gradients):
        """A layer's gradients scattered where ZeRO-1 cuts their parameters, in their dtypes."""

        def one(gradient, place):
            if gradient is None or place.cut is None:
                return gradient
            value = gradient.astype(place.dtype)
            return collectives.scatter(value, place.cut.axes, place.cut.dim - 1)  # without layers

        return jax.tree.map(one, gradients, self.reductions, is_leaf=_is_absent)

    def accumulated(self, rows, place, gradients):
        """`rows` with gradients added at a place; those that are None keep their rows."""
        kept = without(rows, gradients)
        add = write if self.once else combine_at
        return joined(add(without(rows, kept), gradients, place), kept)


def _is_absent(leaf) -> bool:
    return leaf is None


def _sum(gradient, earlier):
    if gradient is None or earlier is None:
        return gradient
    return earlier + gradient.astype(earlier.dtype)
