"""One group of layers of a stage: forward, backward and weight gradients of its units.

A group is a unit of layers that repeats. The stage holds it in places [chunks x slots]; a tick runs
the slots of one chunk, in a loop. Where stages hold different layers, each is behind a `lax.cond`.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.layers.auxiliary import choose, start_values
from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.ordering import together
from maxmeg.parallel.trainable import joined
from maxmeg.pipeline.gradients import GroupGradients, Sums
from maxmeg.pipeline.layout import Layout
from maxmeg.pipeline.program import Program
from maxmeg.pipeline.residuals import (
    UnitVjp,
    combine_at,
    empty_ring,
    read,
    read_ring,
    stacked,
    typed_shapes,
    write_ring,
    zeros_of,
)
from maxmeg.pipeline.schedule import Table
from maxmeg.pipeline.split import SplitVjp
from maxmeg.pipeline.weights import GroupWeights


class Work(typing.NamedTuple):
    """Rows of a Lane at a tick, traced: [stages], or one stage's entries."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    deferred: jax.Array


class Units(typing.NamedTuple):
    """The units of a lane in a tick. work: of all stages; local: of this one. shared: what all of
    them read of the microbatch. at_end: whether it is the first or the last tick of the step."""

    work: Work
    local: Work
    shared: typing.Any
    at_end: bool


class GroupState(typing.NamedTuple):
    """weights: ZeRO-1 parameters, gathered in the first tick. ring: residuals by slot and layer.
    deferred: inputs of the weight lane from the backward lane. sums: of gradients. aux: auxiliary
    values, stacked over the group's layers in model order. None without backward."""

    weights: typing.Any
    ring: typing.Any = None
    deferred: typing.Any = None
    sums: typing.Any = None
    aux: typing.Any = None


class Group:
    """Group number g of the program. x: shapes of a unit's input; shared: of what units read."""

    def __init__(self, g: int, program: Program, table: Table, layout: Layout, x, shared):
        self.table, self.slots, self.padded = table, layout.slots(g), layout.padded(g)
        self.alone, self.fixed, self.unroll = table.stages == 1, program.fixed[g], program.unroll
        stage = collectives.axis_index(("pipe",))
        self.layers = jnp.asarray(layout.layers(g))[stage]
        self.repeats, self.first_layer = layout.repeats[g], sum(layout.repeats[:g])
        self.looped = 0 < program.unroll < self.slots
        self.weights = GroupWeights(program.groups[g], program.divide, self.slots, table.chunks)
        # On one stage without a whole loop, forward and backward of a unit are in one computation.
        has_full_loop = self.looped and self.slots % program.unroll == 0
        prevent_cse = self.alone and not has_full_loop
        self.unit = functools.partial(program.unit, prevent_cse=prevent_cse)
        self.progress = program.progress
        row = joined(self.weights.row, jax.eval_shape(lambda: read(self.weights.others, 0)))
        self.inputs = jax.eval_shape(functools.partial(self.unit_inputs, 0), shared, row)
        self.vjp: typing.Any = None
        self.gradients: typing.Any = None
        if table.backward is not None:
            kind, (params, constants) = SplitVjp if table.weight else UnitVjp, self.inputs
            self.vjp = kind(self.unit, params, x, constants)
            once = table.microbatches == 1 and (self.alone or table.weight is not None)
            self.gradients = GroupGradients(params, self.weights, once, self.if_held)

    def start(self) -> GroupState:
        weights = self.weights.start()
        if self.vjp is None:
            return GroupState(weights)
        ring, deferred = self.empty(self.vjp.residuals, self.table.slots), None
        if isinstance(self.vjp, SplitVjp):
            deferred = self.empty(self.vjp.deferred, self.table.deferred)
        aux = start_values(stacked(self.progress(self.vjp.aux)[0], self.repeats))
        return GroupState(weights, ring, deferred, self.gradients.start(), aux)

    def empty(self, shapes, size: int) -> list:
        """A ring for `shapes` of each place of a chunk, `size` of each: [size, slots, ...], or
        without a loop a list of [size, ...]. Idle stages read entries that nothing has written."""
        ring = functools.partial(empty_ring, shapes, size, is_read_first=not self.alone)
        return ring(self.slots) if self.looped else [ring() for _ in range(self.slots)]

    def run(self, forward: Units | None, backward: Units | None, x, dy, state: GroupState) -> tuple:
        """(x, dy, state, what backward has made without a loop) after the units of the lanes: x
        went through forward, dy through backward.

        With both, iteration i runs unit i forward and the last but i backward. With a weight lane,
        backward stores the inputs of that lane instead of weight gradients.
        """
        outputs: list = []
        if forward is not None and forward.at_end:
            state = state._replace(weights=self.weights.gather_first(state.weights, x))

        def body(carried, slot):
            x, dy, state = carried
            places, mirrored = [], self.slots - 1 - slot
            run_forward = run_backward = None
            if forward is not None:
                run_forward, state = self.unit_forward(forward, slot, x, state)
                places.append(self.place(forward, slot))
            if backward is not None:
                alone = forward is None
                run_backward, state = self.unit_backward(backward, mirrored, state, alone)
                places.append(self.place(backward, mirrored))

            def run(inputs):
                (y, dy), saved, values = inputs, [], None
                if run_forward is not None:
                    y, *saved = run_forward(y)
                if run_backward is not None:
                    dy, values = run_backward(dy, (y, saved))
                return (y, dy), saved, values

            (y, dx), saved, values = self.if_held(places, run, (x, dy))
            if self.padded and len(places) > 1:  # one lane's place may be without a layer
                is_forward, is_backward = (self.layers[place] >= 0 for place in places)
                y, dx = choose(is_forward, y, x), choose(is_backward, dx, dy)
            if forward is not None and self.vjp is not None:
                state = self.with_residuals(forward, slot, state, *saved)
            if backward is not None:
                outputs.extend([] if self.looped else jax.tree.leaves(values))
                state = self.with_gradients(backward, mirrored, state, values)
            return y, dx, state

        return *self.loop(body, (x, dy, state)), outputs

    def unit_forward(self, lane: Units, slot, x, state: GroupState) -> tuple:
        """(function(x) -> (y, residuals, auxiliary values) of the unit of a slot, state)."""
        place, weights = self.place(lane, slot), state.weights
        params = self.weights.at(weights, place)
        if lane.at_end:
            params, weights = self.weights.gather_next(params, weights, slot, x)

        def run(x):
            inputs = self.unit_inputs(place, lane.shared, params)
            if self.vjp is None:
                return self.unit(inputs[0], x, inputs[1])[0], [], None
            return self.vjp.forward(inputs[0], x, inputs[1])

        return run, state._replace(weights=weights)

    def unit_backward(self, lane: Units, slot, state: GroupState, alone: bool) -> tuple:
        """(function(dy, results of the forward lane) -> (dx, what follows from it) of the unit of a
        slot, state). alone: without a forward lane."""
        place, weights = self.place(lane, slot), state.weights
        residuals = functools.partial(read_ring, state.ring, lane.local.slot, slot)
        if not alone:  # read before the other lane writes: else XLA copies the ring
            arrays, ring = together((residuals(), state.ring))
            residuals, state = (lambda: arrays), state._replace(ring=ring)

        def run(dy, before):
            at, values, ends = place, residuals(), []
            if not alone:
                at, values, dy = ordering.after((at, values, dy), before)
                _, routed, ends = self.progress(before[1][1])
                values = self.vjp.following(values, routed)
            params = self.weights.at(weights, at)
            params, constants = self.unit_inputs(at, lane.shared, params, ends)
            if isinstance(self.vjp, SplitVjp):
                return self.vjp.backward_input(values, params, constants, dy)
            return self.vjp.backward(values, params, constants, dy)[::-1]

        return run, state

    def weight(self, lane: Units, dy, state: GroupState) -> GroupState:
        """`state` with the weight gradients of a chunk, whose backward lane has sent dy."""
        vjp, sums = self.vjp, state.sums
        if self.table.microbatches == 1:  # made before, they would exist during all other ticks
            sums = self.gradients.start(dy)

        def body(sums, slot):
            place = self.place(lane, slot)

            def run(_):
                rows = self.weights.at(state.weights, place)
                params, constants = self.unit_inputs(place, lane.shared, rows)
                residuals = read_ring(state.ring, lane.local.slot, slot)
                deferred = read_ring(state.deferred, lane.local.deferred, slot)
                return None, vjp.backward_weight(residuals, params, constants, deferred)

            return self.add(lane, slot, sums, self.if_held([place], run, None)[1])

        return state._replace(sums=self.loop(body, sums))

    def with_residuals(self, lane: Units, slot, state: GroupState, saved, aux) -> GroupState:
        """`state` with residuals and auxiliary values of the unit of a slot."""
        layer, (aux, _, _) = self.layers[self.place(lane, slot)], self.progress(aux)
        ring = write_ring(state.ring, saved, lane.local.slot, slot)
        aux = choose((lane.local.microbatch >= 0) & (layer >= 0), aux, start_values(aux))
        total = combine_at(state.aux, aux, jnp.maximum(layer - self.first_layer, 0))
        return state._replace(ring=ring, aux=total)

    def with_gradients(self, lane: Units, slot, state: GroupState, values) -> GroupState:
        """`state` with what backward of the unit of a slot has made."""
        if state.deferred is None:
            return state._replace(sums=self.add(lane, slot, state.sums, values))
        return state._replace(
            deferred=write_ring(state.deferred, values, lane.local.deferred, slot)
        )

    def add(self, lane: Units, slot, sums: Sums, gradients) -> Sums:
        """`sums` with the gradients of the unit of a slot; those of idle stages are zero."""
        place = self.place(lane, slot)
        if not self.alone:
            is_real = lane.local.microbatch >= 0
            if self.table.together and self.padded:
                is_real &= self.layers[place] >= 0
            gradients = jax.tree.map(lambda d: jnp.where(is_real, d, 0), gradients)
        return self.gradients.add(sums, place, gradients, lane.at_end)

    def enter_last_tick(self, state: GroupState, dy) -> GroupState:
        return state._replace(sums=self.gradients.enter_last_tick(state.sums, dy))

    def finished_gradients(self, state: GroupState, dy):
        """The gradients after the last tick. dy: what that tick has sent."""
        waiting = ordering.after(state.sums.waiting, dy)
        return self.gradients.finished_gradients(state.sums._replace(waiting=waiting))

    def unit_inputs(self, place, shared, params, before=()) -> tuple:
        """(trained parameters, constants) of the unit at a place, all gathered over fsdp. before:
        arrays that its experts follow."""
        params, rest = collectives.gather_parameters((params, read(self.fixed, place)))
        after = ordering.zeros_after(list(before), ()) if self.table.together else None
        return params, (shared, self.layers[place], rest, after)

    def place(self, lane: Units, slot):
        """The place of a slot of the lane's chunk."""
        return slot if self.alone else jnp.maximum(lane.local.chunk, 0) * self.slots + slot

    def loop(self, body: Callable, state):
        """`state` after body(state, slot) for all slots."""
        if not self.looped:
            for slot in range(self.slots):
                state = body(state, slot)
            return state

        def one(state, slot):
            return body(state, slot), None

        return lax.scan(one, state, jnp.arange(self.slots), unroll=self.unroll)[0]

    def if_held(self, places: list, run: Callable, x):
        """run(x), a tuple whose first part is like x; at places without a layer (x, zeros, ...).

        Collectives in the branch join devices of one stage, which take the same one. Ring buffers
        and sums stay outside: on GPUs XLA would copy what a branch updates.
        """
        if not self.padded:
            return run(x)

        def skip(x):
            return x, *jax.tree.map(zeros_of, typed_shapes(run, x)[1:])

        is_held = [self.layers[place] >= 0 for place in places]
        return lax.cond(functools.reduce(jnp.logical_or, is_held), run, skip, x)
