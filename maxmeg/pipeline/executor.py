"""Runs any schedule table on all stages in lockstep, inside the one shard_map of a step.

Ticks with the same lanes form a run, and each run is one `lax.scan`: 1F1B is three scans, the same
program on every device. Where stages hold different layers, each is behind a `lax.cond`. Nothing
differentiates through the schedule: each lane calls `jax.vjp` on one layer, and residuals lie in a
ring buffer whose slots the table assigns, so that memory does not grow with the number of
microbatches. A layer writes its residuals there and adds its weight gradients to the sums.

Under fsdp a layer's parameters are gathered before it runs. Weights that ZeRO-1 cuts are gathered
in the first tick (pipeline/weights.py); gradients are reduced beside the backward lane
(pipeline/gradients.py).

Embedding and head are not stages: their weights are sharded over `pipe`, and every stage computes
its share in the same tick. Sums over `pipe` are outside of the vjps, but for those between the last
stage and the losses (pipeline/last_stage.py).
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.layers.auxiliary import choose, start_values
from maxmeg.parallel import collectives, ordering
from maxmeg.parallel.collectives import PIPE_AXIS
from maxmeg.parallel.maxima import combine
from maxmeg.parallel.ordering import never, together
from maxmeg.parallel.trainable import joined
from maxmeg.pipeline.gradients import GroupGradients, Sums
from maxmeg.pipeline.layout import Layout
from maxmeg.pipeline.program import Program
from maxmeg.pipeline.residuals import (
    Arrays,
    UnitVjp,
    check_offloaded,
    combine_at,
    empty_ring,
    read,
    read_ring,
    stacked,
    typed_shapes,
    write_ring,
    zeros_of,
)
from maxmeg.pipeline.schedule import Lane, Table, runs
from maxmeg.pipeline.split import SplitVjp
from maxmeg.pipeline.weights import GroupWeights


class Carry(typing.NamedTuple):
    """State of the scan over ticks.

    x, dy: received from the previous and the next stage. rings: residuals of each group by slot and
    layer. deferred: inputs of the weight lane from the backward lane.
    ended: a zero that depends on the gradients of the previous tick: without a pipeline it keeps
    XLA from overlapping two microbatches. weights: ZeRO-1 parameters of each group, gathered in the
    first tick. outer, groups: sums of gradients outside of the layers, and of each group. sums:
    sums of the head. aux: auxiliary values of each group, stacked over its layers in model order.
    """

    x: typing.Any
    dy: typing.Any
    rings: list
    deferred: list[Arrays]
    weights: list
    outer: typing.Any
    groups: list[Sums]
    sums: typing.Any
    aux: list
    ended: jax.Array


class Work(typing.NamedTuple):
    """Rows of a Lane at a tick, traced: [stages], or one stage's entries."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    deferred: jax.Array


def run_pipeline(program: Program, table: Table, layout: Layout):
    """((gradients of outer, of groups), sums of the head, auxiliary values of each group).

    Gradients are local, not reduced over devices, except over fsdp and the axes of ZeRO-1's cuts.
    They are float32, or in the dtype of the parameters where nothing is added: one microbatch, and
    one stage or, for groups, a weight lane. Auxiliary values [layers, ...] are in model order, with
    start values for the layers of other stages. A table without a backward lane gives neither.
    """
    executor = Executor(program, table, layout)
    carry = executor.start()
    for first, stop, lanes in runs(table, ends_apart=executor.has_cuts):
        rows: dict[str, typing.Any] = {
            name: work_of(lane, first, stop) for name, lane in table.lanes().items()
        }
        rows["head"] = jnp.asarray(table.head[first:stop])
        always = bool((table.head[first:stop] >= 0).all())
        if stop == table.ticks:
            carry = executor.enter_last_tick(carry)
        ends = (first == 0, stop == table.ticks)
        tick = functools.partial(executor.tick, lanes, always, ends)
        carry, _ = lax.scan(tick, carry, rows)
    return (carry.outer, executor.finished_gradients(carry)), carry.sums, carry.aux


def work_of(lane: Lane, first: int, stop: int) -> Work:
    return Work(*(jnp.asarray(getattr(lane, name)[first:stop]) for name in Work._fields))


class Executor:
    def __init__(self, program: Program, table: Table, layout: Layout):
        self.program, self.table, self.layout = program, table, layout
        self.stage = collectives.axis_index((PIPE_AXIS,))
        self.last = table.stages - 1
        self.alone = table.stages == 1
        self.once = self.alone and table.microbatches == 1  # each sum has one term
        self.split_once = table.weight is not None and table.microbatches == 1
        self.layers = [jnp.asarray(layout.layers(g))[self.stage] for g in range(len(layout.orders))]
        self.x = jax.eval_shape(program.embed, program.outer, self.microbatch(0))
        self.looped = [0 < program.unroll < layout.slots(g) for g in range(len(program.groups))]
        self.weights = [
            GroupWeights(group, program.divide, layout.slots(g), table.chunks)
            for g, group in enumerate(program.groups)
        ]
        self.has_cuts = any(group.has_cuts for group in self.weights)
        shared = jax.eval_shape(self.shared, 0)
        kind = SplitVjp if table.weight else UnitVjp
        self.inputs = [
            jax.eval_shape(
                lambda shared, row, g=g: self.unit_inputs(
                    g, shared, 0, joined(row, read(self.weights[g].others, 0))
                ),
                shared,
                group.row,
            )
            for g, group in enumerate(self.weights)
        ]
        self.vjps = [
            kind(self.unit(g), params, self.x, constants)
            for g, (params, constants) in enumerate(self.inputs)
            if table.backward
        ]
        check_offloaded(program.offloaded, self.vjps, self.inputs, self.x)
        once = self.once or self.split_once  # likewise in each group
        self.gradients = [
            GroupGradients(params, self.weights[g], once, functools.partial(self.if_held, g))
            for g, (params, _) in enumerate(self.inputs)
            if table.backward
        ]

    def unit(self, g: int) -> Callable:
        """The unit of group g. On one stage without a whole loop, its forward and backward are in
        one computation."""
        has_full_loop = self.looped[g] and self.layout.slots(g) % self.program.unroll == 0
        return functools.partial(self.program.unit, prevent_cse=self.alone and not has_full_loop)

    def start(self) -> Carry:
        table, program = self.table, self.program
        x = start_values(self.x)
        head_inputs = jax.eval_shape(program.head_inputs, program.outer, self.microbatch(0))
        w = jax.eval_shape(program.output, program.outer)
        head = functools.partial(program.head, program.outer)
        sums = jax.eval_shape(lambda *args: head(*args)[1], w, x, head_inputs, self.microbatch(0))
        weights, ended = [group.start() for group in self.weights], jnp.int32(0)
        if table.backward is None:
            return Carry(x, x, [], [], weights, None, [], start_values(sums), [], ended)
        rings = [self.empty(g, vjp.residuals, table.slots) for g, vjp in enumerate(self.vjps)]
        deferred = [
            self.empty(g, vjp.deferred, table.deferred)
            for g, vjp in enumerate(self.vjps)
            if isinstance(vjp, SplitVjp)
        ]
        aux = [
            start_values(stacked(vjp.aux, repeats))
            for vjp, repeats in zip(self.vjps, self.layout.repeats, strict=True)
        ]
        outer = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype if self.once else jnp.float32), program.outer
        )
        groups, head = [group.start() for group in self.gradients], start_values(sums)
        return Carry(x, x, rings, deferred, weights, outer, groups, head, aux, ended)

    def enter_last_tick(self, carry: Carry) -> Carry:
        groups = zip(self.gradients, carry.groups, strict=True)
        entered = [group.enter_last_tick(sums, carry.dy) for group, sums in groups]
        return carry._replace(groups=entered)

    def finished_gradients(self, carry: Carry) -> list:
        """The gradients of each group after the last tick."""
        gradients = []
        for group, sums in zip(self.gradients, carry.groups, strict=True):
            waiting = ordering.after(sums.waiting, carry.dy)
            gradients.append(group.finished_gradients(sums._replace(waiting=waiting)))
        return gradients

    def empty(self, g: int, shapes, size: int) -> list:
        """A ring for `shapes` of each place of a chunk, `size` of each: [size, slots, ...], or
        without a loop a list of [size, ...]. Idle stages read entries that nothing has written."""
        slots = self.layout.slots(g)
        ring = functools.partial(empty_ring, shapes, size, is_read_first=not self.alone)
        return ring(slots) if self.looped[g] else [ring() for _ in range(slots)]

    def tick(self, lanes: tuple[str, ...], always: bool, ends: tuple, carry: Carry, rows: dict):
        """One tick of a run with these active lanes. always: the head has work at every tick.
        ends: whether the run begins with the first tick, and ends with the last."""
        y, dy, head_inputs, d_inputs, d_output, (first, last) = None, None, [], [], None, ends
        if self.alone and (ends == (False, True) or not (self.has_cuts or all(self.looped))):
            # Else XLA, which unrolls two ticks, may run this one before the previous one has ended.
            rows = jax.tree.map(lambda row: row + carry.ended, rows)
        if "head" in lanes:
            head_inputs, carry = self.head_inputs(carry, rows["head"], always)
        if "forward" in lanes:
            y, carry = self.forward(carry, rows["forward"], first and self.has_cuts)
            carry = carry._replace(x=self.send(y, 1))
        if "head" in lanes:
            dy, d_inputs, d_output, carry = self.head(carry, y, head_inputs, rows["head"], always)
        if "backward" in lanes:
            carry = self.backward(carry, dy, rows["backward"], last)
        if d_output is not None:
            carry = self.output_backward(carry, d_output)
        if d_inputs:
            carry = self.head_inputs_backward(carry, d_inputs, rows["head"], always)
        if "weight" in lanes:
            carry = self.weight(carry, rows["weight"], last)
        if {"forward", "backward"} <= set(lanes) and not self.alone:
            # Keep the sends in this tick, beside the other lane's work: XLA would delay them.
            x, dy = together((carry.x, carry.dy))
            carry = carry._replace(x=x, dy=dy)
        return carry, None

    def forward(self, carry: Carry, work: Work, gathers: bool) -> tuple:
        """Run this stage's chunk on its microbatch, and store the residuals in the rings."""
        local, x = self.local(work), self.embed_forward(carry.x, work)
        rings, aux_of_groups, all_weights = [], [], []
        shared = self.shared(local.microbatch)
        for g in range(len(self.program.groups)):
            first = sum(self.layout.repeats[:g])

            def body(state, slot, place, g=g, first=first):
                x, ring, total, weights = state
                parts = self.weights[g].at(weights, place)
                if gathers:
                    parts, weights = self.weights[g].gather_next(parts, weights, slot, x)

                def run(x):
                    params, constants = self.unit_inputs(g, shared, place, parts)
                    if not self.vjps:
                        return self.unit(g)(params, x, constants)[0], [], None
                    return self.vjps[g].forward(params, x, constants)

                y, residuals, aux = self.if_held(g, place, run, x)
                if not self.vjps:
                    return y, ring, total, weights
                ring, layer = write_ring(ring, residuals, local.slot, slot), self.layers[g][place]
                is_real = (local.microbatch >= 0) & (layer >= 0)
                aux = choose(is_real, aux, start_values(aux))
                return y, ring, combine_at(total, aux, jnp.maximum(layer - first, 0)), weights

            weights = carry.weights[g]
            if gathers:
                weights = self.weights[g].gather_first(weights, x)
            memory = (carry.rings[g], carry.aux[g]) if self.vjps else ([], [])
            x, ring, aux, weights = self.loop(g, local, body, (x, *memory, weights))
            rings.append(ring)
            aux_of_groups.append(aux)
            all_weights.append(weights)
        if not self.vjps:
            return x, carry
        return x, carry._replace(rings=rings, aux=aux_of_groups, weights=all_weights)

    def backward(self, carry: Carry, loss_dy, work: Work, last: bool) -> Carry:
        """Add up the gradients of this stage's chunk, and send that of its input back.

        With a weight lane, store the inputs of that lane instead of weight gradients.
        """
        local, dx, outs = self.local(work), carry.dy, list(carry.deferred or carry.groups)
        shared, outputs = self.shared(local.microbatch), []
        if loss_dy is not None:
            at_end = (self.stage == self.last) & (local.chunk == self.table.chunks - 1)
            dx = loss_dy if self.alone else choose(at_end, loss_dy, dx)
        for g in reversed(range(len(self.vjps))):

            def body(state, slot, place, g=g, vjp=self.vjps[g]):
                dy, out = state

                def run(dy):
                    parts = self.weights[g].at(carry.weights[g], place)
                    params, constants = self.unit_inputs(g, shared, place, parts)
                    residuals = read_ring(carry.rings[g], local.slot, slot)
                    if isinstance(vjp, SplitVjp):
                        return vjp.backward_input(residuals, params, constants, dy)
                    return vjp.backward(residuals, params, constants, dy)[::-1]

                dx, values = self.if_held(g, place, run, dy)
                outputs.extend([] if self.has_cuts or self.looped[g] else jax.tree.leaves(values))
                if isinstance(vjp, SplitVjp):
                    return dx, write_ring(out, values, local.deferred, slot)
                return dx, self.add(g, out, place, values, local, last)

            dx, outs[g] = self.loop(g, local, body, (dx, outs[g]), reverse=True)
        outer = self.embed_backward(carry.outer, dx, work)
        ended = never((dx, outputs)).astype(jnp.int32) if self.alone else carry.ended
        carry = carry._replace(dy=self.send(dx, -1), outer=outer, ended=ended)
        return carry._replace(deferred=outs) if carry.deferred else carry._replace(groups=outs)

    def weight(self, carry: Carry, work: Work, last: bool) -> Carry:
        """Add up the weight gradients of a chunk after its backward lane."""
        local, sums = self.local(work), list(carry.groups)
        shared = self.shared(local.microbatch)
        if self.split_once:  # made before, they would exist during all other ticks
            sums = [group.start(carry.dy) for group in self.gradients]
        for g, vjp in enumerate(self.vjps):
            assert isinstance(vjp, SplitVjp)

            def body(total, slot, place, g=g, vjp=vjp):
                def run(_):
                    parts = self.weights[g].at(carry.weights[g], place)
                    params, constants = self.unit_inputs(g, shared, place, parts)
                    residuals = read_ring(carry.rings[g], local.slot, slot)
                    deferred = read_ring(carry.deferred[g], local.deferred, slot)
                    return None, vjp.backward_weight(residuals, params, constants, deferred)

                _, gradients = self.if_held(g, place, run, None)
                return self.add(g, total, place, gradients, local, last)

            sums[g] = self.loop(g, local, body, sums[g])
        return carry._replace(groups=sums)

    def loop(self, g: int, local: Work, body: Callable, state, reverse: bool = False):
        """`state` after body(state, slot, place) for the places of group g in the stage's chunk."""
        slots = self.layout.slots(g)
        first = 0 if self.alone else jnp.maximum(local.chunk, 0) * slots
        if not self.looped[g]:
            for slot in reversed(range(slots)) if reverse else range(slots):
                state = body(state, slot, first + slot)
            return state

        def one(state, slot):
            return body(state, slot, first + slot), None

        indices, unroll = jnp.arange(slots), self.program.unroll
        return lax.scan(one, state, indices, reverse=reverse, unroll=unroll)[0]

    def if_held(self, g: int, place, run: Callable, x):
        """run(x), a tuple whose first part is like x; at a place without a layer (x, zeros, ...).

        Collectives in the branch join devices of one stage, which take the same one. Ring buffers
        and sums stay outside: on GPUs XLA would copy what a branch updates.
        """
        if not self.layout.padded(g):
            return run(x)

        def skip(x):
            return x, *jax.tree.map(zeros_of, typed_shapes(run, x)[1:])

        return lax.cond(self.layers[g][place] >= 0, run, skip, x)

    def unit_inputs(self, g: int, shared, place, params) -> tuple:
        """(trained parameters, constants) of the unit at a place, all gathered over fsdp."""
        parts = params, read(self.program.fixed[g], place)
        params, rest = collectives.gather_parameters(parts)
        return params, (shared, self.layers[g][place], rest)

    def add(self, g: int, sums: Sums, place, gradients, local: Work, last: bool) -> Sums:
        """`sums` with the gradients of the layer at a place; those of idle stages are zero."""
        if not self.alone:
            gradients = jax.tree.map(lambda d: jnp.where(local.microbatch >= 0, d, 0), gradients)
        return self.gradients[g].add(sums, place, gradients, last)

    def embed_forward(self, arrived, work: Work):
        """The chunk's input: for the first chunk the embedding, computed by all stages together;
        otherwise what the previous stage has sent."""
        microbatch = work.microbatch[0]

        def embedded():
            share = self.program.embed(self.program.outer, self.microbatch(microbatch))
            return collectives.sum_over(ordering.after(share, arrived), (PIPE_AXIS,))

        entering = (microbatch >= 0) & (work.chunk[0] == 0)
        if self.alone:
            return embedded()
        if self.table.chunks == 1:
            x = embedded()
        else:
            x = lax.cond(entering, embedded, lambda: start_values(self.x))
        return choose((self.stage == 0) & entering, x, arrived)

    def embed_backward(self, total, dx, work: Work):
        """`total` plus the embedding's gradients, from the gradient of the first chunk's input."""
        if not jax.tree.leaves(total):  # the embedding is not trained
            return total
        number = work.microbatch[0]
        leaving = (number >= 0) & (work.chunk[0] == 0)

        def add(total):
            is_left = (self.stage == 0) & leaving
            left = dx if self.alone else choose(is_left, dx, start_values(dx))
            return self.add_embedding(total, self.program.embed, number, left)

        return add(total) if self.table.chunks == 1 else lax.cond(leaving, add, lambda t: t, total)

    def add_embedding(self, total, embed: Callable, number, d_embedded):
        """`total` plus the gradients of embed(outer, microbatch), from those of its sum over pipe,
        which the stages hold in parts."""
        microbatch = self.microbatch(number)
        _, pull = jax.vjp(lambda outer: embed(outer, microbatch), self.program.outer)
        return combine(total, pull(collectives.sum_over(d_embedded, (PIPE_AXIS,)))[0])

    def head_inputs(self, carry: Carry, number: jax.Array, always: bool) -> tuple[list, Carry]:
        """What the head reads of a microbatch beside the stack's output; before the forward lane,
        after which the last stage would wait for the others."""

        def compute():
            shares = self.program.head_inputs(self.program.outer, self.microbatch(number))
            return collectives.sum_over(shares, (PIPE_AXIS,)) if shares else []

        if not (shapes := jax.eval_shape(compute)):
            return [], carry
        zeros = functools.partial(start_values, shapes)
        head_inputs = compute() if always else lax.cond(number >= 0, compute, zeros)
        head_inputs, x = together((head_inputs, carry.x))
        return head_inputs, carry._replace(x=ordering.after(x, head_inputs))

    def head_inputs_backward(self, carry: Carry, d_inputs: list, number, always: bool) -> Carry:
        """Add the gradients of what the head has read, after the backward lane: the other stages
        would wait for the last one before it."""
        d_inputs, dy = together((d_inputs, carry.dy))
        d_inputs = ordering.after(d_inputs, dy)

        def add(total):
            return self.add_embedding(total, self.program.head_inputs, number, d_inputs)

        outer = add(carry.outer) if always else lax.cond(number >= 0, add, lambda t: t, carry.outer)
        return carry._replace(outer=outer, dy=dy)

    def head(self, carry: Carry, y, head_inputs: list, number: jax.Array, always: bool) -> tuple:
        """(gradients of the last stage's output, of `head_inputs` and, without a pipeline, of the
        whole output weight, None without backward; carry with the head's sums)."""
        outer, trained = self.program.outer, self.table.backward is not None

        def compute(total):
            microbatch = self.microbatch(number)
            w, scatter = jax.vjp(self.program.output, outer)
            if not trained:
                _, sums = self.program.head(outer, w, y, head_inputs, microbatch)
                return None, None, None, (None, combine(total[1], sums))
            run = functools.partial(self.program.head, microbatch=microbatch)
            _, pull, sums = jax.vjp(run, outer, w, y, head_inputs, has_aux=True)
            gradients, dw, dy, d_inputs = pull(jnp.ones((), jnp.float32))
            outer_sums = combine(total[0], gradients)
            if not self.alone:
                outer_sums, dw = combine(outer_sums, *scatter(dw)), None
            return dy, d_inputs, dw, (outer_sums, combine(total[1], sums))

        def idle(total):
            if not trained:
                return None, None, None, total
            return start_values(y), start_values(head_inputs), None, total

        total = (carry.outer, carry.sums)
        dy, d_inputs, dw, (outer_sums, sums) = (
            compute(total) if always else lax.cond(number >= 0, compute, idle, total)
        )
        return dy, d_inputs, dw, carry._replace(outer=outer_sums, sums=sums)

    def output_backward(self, carry: Carry, d_output: jax.Array) -> Carry:
        """Add the output weight's gradient. XLA adds it, or scatters it over fsdp, after the layers
        in any case; without the barrier it may convert it to float32 before them."""
        d_output, dy = together((d_output, carry.dy))
        (gradients,) = jax.vjp(self.program.output, self.program.outer)[1](d_output)
        return carry._replace(dy=dy, outer=combine(carry.outer, gradients))

    def local(self, work: Work) -> Work:
        """This stage's entries of `work`."""
        return Work(*(entry[self.stage] for entry in work))

    def microbatch(self, number):
        return read(self.program.batches, jnp.maximum(number, 0))

    def shared(self, number):
        return self.program.shared(self.microbatch(number))

    def send(self, x, step: int):
        """Send to the next stage (step 1) or the previous one (-1); cyclic with several chunks."""
        cyclic, stages = self.table.chunks > 1, range(self.table.stages)
        pairs = [(i, (i + step) % len(stages)) for i in stages if cyclic or i + step in stages]
        return collectives.permute(x, PIPE_AXIS, pairs)
