"""The weights of one group of layers that ZeRO-1 cuts: gathered in the first tick of a step.

A layer's are gathered beside the products of the layer before it, and stay whole for the other
ticks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.parallel import ordering
from maxmeg.parallel.ordering import together
from maxmeg.parallel.parameter import info
from maxmeg.parallel.trainable import joined, part, without
from maxmeg.pipeline.residuals import read, write
from maxmeg.weights.zero1 import gather_layer


class GroupWeights:
    """groups: parameters of a group, stacked over the stage's places [chunks x slots], as ZeRO-1
    cuts them. divide: of a pipeline's Program."""

    def __init__(self, group, divide: Callable, slots: int, chunks: int):
        self.divide = divide
        self.slots, self.chunks = slots, chunks
        self.cut = part(group, lambda weight: info(weight).cut is not None, others=False)
        self.others = without(group, self.cut)
        self.has_cuts = bool(jax.tree.leaves(self.cut))
        self.row = jax.eval_shape(lambda: gather_layer(read(self.cut, 0)))

    def start(self):
        """Room for the gathered weights of all places."""
        places = self.chunks * self.slots
        return jax.tree.map(lambda a: lax.empty((places, *a.shape), a.dtype), self.row)

    def at(self, weights, place):
        """All parameters of the unit at a place."""
        return joined(read(weights, place), read(self.others, place))

    def gather_first(self, weights, x):
        """`weights` with those of the first slot, gathered once x is there."""
        return self.with_slot(weights, 0, self.gathered(0, x))

    def gather_next(self, params, weights, slot, x) -> tuple:
        """(params, weights with those of the next slot), for a unit with `params` and input x.

        The products of the unit hide the gather: it follows the reading of all its weights, without
        which XLA would copy `weights`, and what the next unit needs first comes before the products
        with which this one ends.
        """
        if isinstance(slot, int) and slot + 1 == self.slots:
            return params, weights
        params, x = together((params, x))
        first, others = self.divide(params)
        rows = [self.divide(row) for row in self.gathered(slot + 1, x)]
        others, soon = together((others, [row for row, _ in rows]))
        rows = [joined(row, rest) for row, (_, rest) in zip(soon, rows, strict=True)]
        return joined(first, others), self.with_slot(weights, slot + 1, rows)

    def gathered(self, slot, x) -> list:
        """The weights of a slot of each chunk."""
        rows = [read(self.cut, place) for place in self.places(slot)]
        rows, _ = together((rows, x))
        return [gather_layer(row) for row in ordering.after(rows, x)]

    def with_slot(self, weights, slot, rows: list):
        """`weights` with the gathered rows of a slot of each chunk."""
        for row, place in zip(rows, self.places(slot), strict=True):
            weights = write(weights, row, place)
        return weights

    def places(self, slot) -> list:
        """The place of a slot in each chunk; beyond the last slot, of the last."""
        slot = jnp.minimum(slot, self.slots - 1)
        return [chunk * self.slots + slot for chunk in range(self.chunks)]
