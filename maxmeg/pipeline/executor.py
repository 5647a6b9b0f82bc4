"""Runs any schedule table on all stages in lockstep, inside the one shard_map of a step.

Ticks with the same lanes form a run, each run is one `lax.scan`: 1F1B is three scans, the same
program on every device, without a branch. Nothing differentiates through the schedule: each lane
calls `jax.vjp` on one layer, and what backward needs lives in a ring buffer whose slots the table
assigns, so memory does not grow with the number of microbatches. A layer writes its residuals
straight into the ring and its weight gradients straight into the float32 sums.

Embedding and head are no stages: their weights are sharded over `pipe` too, and every stage does
its share of them in the tick. Sums over `pipe` stand outside the vjps.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxmeg.layers.auxiliary import choose, combine, start_values
from maxmeg.parallel import collectives
from maxmeg.parallel.collectives import PIPE_AXIS
from maxmeg.pipeline.layout import Layout
from maxmeg.pipeline.residuals import Arrays, UnitVjp, combine_at, empty_ring, read, write
from maxmeg.pipeline.schedule import Lane, Table, runs
from maxmeg.pipeline.split import SplitVjp


@dataclasses.dataclass(frozen=True)
class Program:
    """A model as the executor runs it, in the local view of one device.

    outer: trained parameters of embed and head. groups[g]: those of a repeated unit, stacked over
    this stage's places [chunks x slots]; fixed[g]: what else a unit is given, stacked alike. A
    microbatch is what `batches` hold at one index.
    embed(outer, microbatch) -> x: a share of the stack's input, to be summed over pipe.
    unit(params, x, (microbatch, layer, fixed)) -> (x, auxiliary values of the layer).
    head(outer, x, microbatch) -> (loss, sums, which may hold auxiliary values too).
    """

    outer: typing.Any
    groups: tuple
    fixed: tuple
    batches: typing.Any
    embed: Callable
    unit: Callable
    head: Callable


class Carry(typing.NamedTuple):
    """x, dy: what the stages before and after have sent. rings: residuals by slot and layer.
    deferred: what the weight lane needs of the backward lane. outputs: of the last stage.
    aux: auxiliary values of each group, stacked over all its layers in model order."""

    x: jax.Array
    dy: jax.Array
    rings: list[Arrays]
    deferred: list[Arrays]
    outputs: jax.Array | None
    outer: typing.Any
    groups: list
    sums: typing.Any
    aux: list


class Work(typing.NamedTuple):
    """What a stage does in a lane at a tick; rows of a Lane, traced."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    deferred: jax.Array


def run_pipeline(program: Program, table: Table, layout: Layout):
    """((gradients of outer, of groups), sums of the head, auxiliary values of each group).

    Gradients are float32 and unreduced: each device has those of its own share of the work. The
    auxiliary values lie in model order [layers, ...]; a stage has start values for the layers of
    others. A table of forward passes alone gives neither.
    """
    executor = Executor(program, table, layout)
    carry = executor.start()
    for first, stop, lanes in runs(table):
        rows: dict[str, typing.Any] = {
            name: work_of(lane, first, stop) for name, lane in table.lanes().items()
        }
        rows["head"] = jnp.asarray(table.head[first:stop])
        always = bool((table.head[first:stop] >= 0).all())
        tick = functools.partial(executor.tick, lanes, always)
        carry, _ = lax.scan(tick, carry, rows)
    return (carry.outer, carry.groups), carry.sums, carry.aux


def work_of(lane: Lane, first: int, stop: int) -> Work:
    return Work(*(jnp.asarray(getattr(lane, name)[first:stop]) for name in Work._fields))


class Executor:
    def __init__(self, program: Program, table: Table, layout: Layout):
        self.program, self.table, self.layout = program, table, layout
        self.stage = collectives.axis_index((PIPE_AXIS,))
        self.last = table.stages - 1
        self.layers = [jnp.asarray(layout.layers(g))[self.stage] for g in range(len(layout.orders))]
        self.x = jax.eval_shape(program.embed, program.outer, self.microbatch(0))
        kind = SplitVjp if table.weight else UnitVjp
        self.vjps = [
            kind(program.unit, read(group, 0), self.x, self.given(g, self.microbatch(0), 0))
            for g, group in enumerate(program.groups)
            if table.backward
        ]

    def start(self) -> Carry:
        table, program = self.table, self.program
        x = jnp.zeros(self.x.shape, self.x.dtype)
        head = functools.partial(program.head, program.outer)
        sums = jax.eval_shape(lambda x: head(x, self.microbatch(0))[1], x)
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))
        rings = [
            empty_ring(vjp.residuals, table.slots, self.layout.slots(g))
            for g, vjp in enumerate(self.vjps)
        ]
        deferred = [
            empty_ring(vjp.deferred, table.deferred, self.layout.slots(g))
            for g, vjp in enumerate(self.vjps)
            if isinstance(vjp, SplitVjp)
        ]
        outputs = jnp.zeros((table.outputs, *x.shape), x.dtype) if table.outputs else None
        trained = table.backward is not None
        outer = zeros(program.outer) if trained else None
        groups = [zeros(group) for group in program.groups] if trained else []
        aux = [
            start_values(stacked(vjp.aux, repeats))
            for vjp, repeats in zip(self.vjps, self.layout.repeats, strict=False)
        ]
        return Carry(x, x, rings, deferred, outputs, outer, groups, start_values(sums), aux)

    def tick(self, lanes: tuple[str, ...], always: bool, carry: Carry, rows: dict):
        """One tick of a run with `lanes` on; always: the head has work at every tick."""
        y = dy = None
        if "forward" in lanes:
            y, carry = self.forward(carry, rows["forward"])
            carry = carry._replace(x=self.send(y, 1))
            if carry.outputs is not None:
                leaving = jnp.maximum(rows["forward"].microbatch[self.last], 0)
                carry = carry._replace(outputs=write([carry.outputs], [y], leaving)[0])
        if "head" in lanes:
            if carry.outputs is not None:
                y = read(carry.outputs, jnp.maximum(rows["head"], 0))
            dy, carry = self.head(carry, y, rows["head"], always)
        if "backward" in lanes:
            carry = self.backward(carry, dy, rows["backward"])
        if "weight" in lanes:
            carry = self.weigh(carry, rows["weight"])
        if {"forward", "backward"} <= set(lanes):
            # Sent beside the other lane's work: XLA would move sends to the next tick's start.
            x, dy = lax.optimization_barrier((carry.x, carry.dy))
            carry = carry._replace(x=x, dy=dy)
        return carry, None

    def forward(self, carry: Carry, work: Work) -> tuple[jax.Array, Carry]:
        """This stage's chunk on its microbatch; residuals go into the rings."""
        own, x, rings, auxes = self.own(work), self.enter(carry.x, work), [], []
        microbatch = self.microbatch(own.microbatch)
        for g, group in enumerate(self.program.groups):
            slots, first = self.layout.slots(g), sum(self.layout.repeats[:g])

            def body(state, slot, g=g, group=group, slots=slots, first=first):
                x, ring, total = state
                place = jnp.maximum(own.chunk, 0) * slots + slot
                params, given = read(group, place), self.given(g, microbatch, place)
                if self.vjps:
                    y, residuals, aux = self.vjps[g].forward(params, x, given)
                    ring = write(ring, residuals, own.slot, slot)
                    used = (own.microbatch >= 0) & (given[1] >= 0)
                    aux = choose(used, aux, start_values(aux))
                    total = combine_at(total, jnp.maximum(given[1] - first, 0), aux)
                else:
                    y, _ = self.program.unit(params, x, given)
                return (self.unless_skipped(y, x, given[1]), ring, total), None

            memory = (carry.rings[g], carry.aux[g]) if self.vjps else ([], [])
            (x, ring, aux), _ = lax.scan(body, (x, *memory), jnp.arange(slots))
            rings.append(ring)
            auxes.append(aux)
        return x, carry._replace(rings=rings, aux=auxes) if self.vjps else carry

    def backward(self, carry: Carry, loss_dy: jax.Array | None, work: Work) -> Carry:
        """Gradients of this stage's chunk, added up, and of its input, sent back.

        With a weight lane, what that lane needs instead of the weights' gradients.
        """
        own, dx, outs = self.own(work), carry.dy, list(carry.deferred or carry.groups)
        microbatch = self.microbatch(own.microbatch)
        if loss_dy is not None:
            at_end = (self.stage == self.last) & (own.chunk == self.table.chunks - 1)
            dx = jnp.where(at_end, loss_dy, dx)
        for g in reversed(range(len(self.vjps))):

            def body(state, slot, g=g, vjp=self.vjps[g]):
                dy, out = state
                place, params, given, residuals = self.kept(carry, g, own, microbatch, slot)
                if isinstance(vjp, SplitVjp):
                    dx, deferred = vjp.backward_input(residuals, params, given, dy)
                    out = write(out, deferred, jnp.maximum(own.deferred, 0), slot)
                else:
                    gradients, dx = vjp.backward(residuals, params, given, dy)
                    out = self.sum_at(out, place, gradients, own, given[1])
                return (self.unless_skipped(dx, dy, given[1]), out), None

            slots = jnp.arange(self.layout.slots(g))
            (dx, outs[g]), _ = lax.scan(body, (dx, outs[g]), slots, reverse=True)
        outer = self.leave(carry.outer, dx, work)
        carry = carry._replace(dy=self.send(dx, -1), outer=outer)
        return carry._replace(deferred=outs) if carry.deferred else carry._replace(groups=outs)

    def weigh(self, carry: Carry, work: Work) -> Carry:
        """Weight gradients of a chunk that has been backward, added up."""
        own, sums = self.own(work), list(carry.groups)
        microbatch = self.microbatch(own.microbatch)
        for g, vjp in enumerate(self.vjps):
            assert isinstance(vjp, SplitVjp)

            def body(total, slot, g=g, vjp=vjp):
                place, params, given, residuals = self.kept(carry, g, own, microbatch, slot)
                deferred = read(carry.deferred[g], jnp.maximum(own.deferred, 0), slot)
                gradients = vjp.backward_weight(residuals, params, given, deferred)
                return self.sum_at(total, place, gradients, own, given[1]), None

            sums[g], _ = lax.scan(body, sums[g], jnp.arange(self.layout.slots(g)))
        return carry._replace(groups=sums)

    def kept(self, carry: Carry, g: int, own: Work, microbatch, slot) -> tuple:
        """(place, its parameters, given, residuals) of a layer whose forward is done."""
        place = jnp.maximum(own.chunk, 0) * self.layout.slots(g) + slot
        residuals = read(carry.rings[g], jnp.maximum(own.slot, 0), slot)
        given = self.given(g, microbatch, place)
        return place, read(self.program.groups[g], place), given, residuals

    def given(self, g: int, microbatch, place) -> tuple:
        """What the unit at a place reads beside x and its trained parameters."""
        return microbatch, self.layers[g][place], read(self.program.fixed[g], place)

    def sum_at(self, total, place, gradients, own: Work, layer):
        """`total` with a layer's gradients added, unless the stage idles or skips the place."""
        used = (own.microbatch >= 0) & (layer >= 0)
        gradients = jax.tree.map(lambda d: jnp.where(used, d, 0), gradients)
        return combine_at(total, place, gradients)

    def enter(self, arrived: jax.Array, work: Work) -> jax.Array:
        """The chunk's input: embedded by all stages together for the first, else what arrived."""
        microbatch = work.microbatch[0]

        def embedded() -> jax.Array:
            share = self.program.embed(self.program.outer, self.microbatch(microbatch))
            return collectives.sum_over(share, (PIPE_AXIS,))

        entering = (microbatch >= 0) & (work.chunk[0] == 0)
        if self.table.chunks == 1:
            x = embedded()
        else:
            x = lax.cond(entering, embedded, lambda: jnp.zeros(self.x.shape, self.x.dtype))
        return jnp.where((self.stage == 0) & entering, x, arrived)

    def leave(self, total, dx: jax.Array, work: Work):
        """`total` and the embedding's gradients of what leaves the first chunk backward."""
        if not jax.tree.leaves(total):  # nothing before the first chunk is trained
            return total
        number = work.microbatch[0]
        leaving = (number >= 0) & (work.chunk[0] == 0)

        def add(total):
            outer, microbatch = self.program.outer, self.microbatch(number)
            left = jnp.where((self.stage == 0) & leaving, dx, 0)
            left = collectives.sum_over(left, (PIPE_AXIS,))
            _, pull = jax.vjp(lambda outer: self.program.embed(outer, microbatch), outer)
            return combine(total, pull(left)[0])

        return add(total) if self.table.chunks == 1 else lax.cond(leaving, add, keep, total)

    def head(self, carry: Carry, y, number: jax.Array, always: bool) -> tuple:
        """(gradient of the last stage's output or None, carry with the loss's sums)."""
        outer, trained = self.program.outer, self.table.backward is not None

        def compute(total):
            microbatch = self.microbatch(number)
            x = collectives.sum_over(jnp.where(self.stage == self.last, y, 0), (PIPE_AXIS,))
            if not trained:
                _, sums = self.program.head(outer, x, microbatch)
                return None, (None, combine(total[1], sums))
            _, pull, sums = jax.vjp(
                lambda outer, x: self.program.head(outer, x, microbatch), outer, x, has_aux=True
            )
            gradients, dx = pull(jnp.ones((), jnp.float32))
            dx = collectives.sum_over(dx, (PIPE_AXIS,))
            return dx, (combine(total[0], gradients), combine(total[1], sums))

        def idle(total):
            return jnp.zeros_like(y) if trained else None, total

        total = (carry.outer, carry.sums)
        dy, (outer_sums, sums) = (
            compute(total) if always else lax.cond(number >= 0, compute, idle, total)
        )
        return dy, carry._replace(outer=outer_sums, sums=sums)

    def own(self, work: Work) -> Work:
        """This stage's entries of a row."""
        return Work(*(entry[self.stage] for entry in work))

    def microbatch(self, number):
        return read(self.program.batches, jnp.maximum(number, 0))

    def unless_skipped(self, result: jax.Array, before: jax.Array, layer: jax.Array) -> jax.Array:
        return jnp.where(layer >= 0, result, before) if self.layout.padded else result

    def send(self, x: jax.Array, step: int) -> jax.Array:
        """To the next stage (step 1) or the one before (-1); around the ring with chunks."""
        stages = np.arange(self.table.stages)
        pairs = np.stack([stages, (stages + step) % len(stages)], axis=1)
        if self.table.chunks == 1:
            pairs = pairs[np.abs(pairs[:, 1] - pairs[:, 0]) == 1]
            pairs = pairs[pairs[:, 1] - pairs[:, 0] == step]
        return collectives.permute(x, PIPE_AXIS, [tuple(p) for p in pairs.tolist()])


def keep(total):
    return total


def stacked(shapes, size: int):
    """Shapes with one more dimension in front."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape), a.dtype), shapes)
