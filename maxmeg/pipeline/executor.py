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
from maxmeg.pipeline.group import Group, GroupState, Units, Work
from maxmeg.pipeline.layout import Layout
from maxmeg.pipeline.program import Program
from maxmeg.pipeline.residuals import check_offloaded, read
from maxmeg.pipeline.schedule import Lane, Table, runs


class Carry(typing.NamedTuple):
    """State of the scan over ticks.

    x, dy: received from the previous and the next stage. loss_dy: gradient of the last stage's
    output from the head of the tick before, where the lanes run together. outer: sums of gradients
    outside of the layers. sums: sums of the head. ended: a zero that depends on the gradients of
    the previous tick: without a pipeline it keeps XLA from overlapping two microbatches.
    """

    x: typing.Any
    dy: typing.Any
    loss_dy: typing.Any
    groups: list[GroupState]
    outer: typing.Any
    sums: typing.Any
    ended: jax.Array


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
        if stop == table.ticks and table.backward is not None:
            carry = executor.enter_last_tick(carry)
        ends = (first == 0, stop == table.ticks)
        tick = functools.partial(executor.tick, lanes, always, ends)
        carry, _ = lax.scan(tick, carry, rows)
    if table.backward is None:
        return (None, []), carry.sums, []
    gradients = carry.outer, executor.finished_gradients(carry)
    return gradients, carry.sums, [state.aux for state in carry.groups]


def work_of(lane: Lane, first: int, stop: int) -> Work:
    return Work(*(jnp.asarray(getattr(lane, name)[first:stop]) for name in Work._fields))


class Executor:
    def __init__(self, program: Program, table: Table, layout: Layout):
        self.program, self.table = program, table
        self.stage = collectives.axis_index((PIPE_AXIS,))
        self.alone = table.stages == 1
        self.x = jax.eval_shape(program.embed, program.outer, self.microbatch(0))
        shared = jax.eval_shape(self.shared, 0)
        self.groups = [
            Group(g, program, table, layout, self.x, shared) for g in range(len(program.groups))
        ]
        self.has_cuts = any(group.weights.has_cuts for group in self.groups)
        check_offloaded(
            program.offloaded, [(g.vjp, *g.inputs) for g in self.groups if g.vjp], self.x
        )

    def start(self) -> Carry:
        table, program = self.table, self.program
        x = start_values(self.x)
        head_inputs = jax.eval_shape(program.head_inputs, program.outer, self.microbatch(0))
        w = jax.eval_shape(program.output, program.outer)
        head = functools.partial(program.head, program.outer)
        sums = jax.eval_shape(lambda *args: head(*args)[1], w, x, head_inputs, self.microbatch(0))
        outer = loss_dy = None
        if table.backward is not None:
            once = self.alone and table.microbatches == 1  # each sum has one term
            outer = jax.tree.map(
                lambda a: jnp.zeros(a.shape, a.dtype if once else jnp.float32), program.outer
            )
            loss_dy = x if table.together else None
        groups = [group.start() for group in self.groups]
        return Carry(x, x, loss_dy, groups, outer, start_values(sums), jnp.int32(0))

    def enter_last_tick(self, carry: Carry) -> Carry:
        pairs = zip(self.groups, carry.groups, strict=True)
        return carry._replace(groups=[g.enter_last_tick(state, carry.dy) for g, state in pairs])

    def finished_gradients(self, carry: Carry) -> list:
        """The gradients of each group after the last tick."""
        pairs = zip(self.groups, carry.groups, strict=True)
        return [group.finished_gradients(state, carry.dy) for group, state in pairs]

    def tick(self, lanes: tuple[str, ...], always: bool, ends: tuple, carry: Carry, rows: dict):
        """One tick of a run with these active lanes. always: the head has work at every tick.
        ends: whether the run begins with the first tick, and ends with the last."""
        rows = ordering.after(rows, carry._replace(groups=[]))
        y, dx, loss_dy, head_inputs, d_inputs, d_output = None, None, carry.loss_dy, [], [], None
        all_loop = all(group.looped for group in self.groups)
        if self.alone and (ends == (False, True) or not (self.has_cuts or all_loop)):
            # Else XLA, which unrolls two ticks, may run this one before the previous one has ended.
            rows = jax.tree.map(lambda row: row + carry.ended, rows)
        forward, backward = (
            self.units(rows[lane], at_end) if lane in lanes else None
            for lane, at_end in zip(("forward", "backward"), ends, strict=True)
        )
        has_both = forward is not None and backward is not None
        in_one_loop = has_both and self.table.together
        if "head" in lanes:
            head_inputs, carry = self.head_inputs(carry, rows["head"], always)
        if forward is not None:
            beside_it = backward if in_one_loop else None
            y, dx, carry = self.run(carry, forward, beside_it, carry.loss_dy)
        if "head" in lanes:
            loss_dy, d_inputs, d_output, carry = self.head(
                carry, y, head_inputs, rows["head"], always
            )
        if backward is not None:
            if in_one_loop:
                dx = ordering.after(dx, loss_dy)
            else:
                _, dx, carry = self.run(carry, None, backward, loss_dy)
            carry = self.embed_backward(carry, dx, backward.work)
        if self.table.together:
            carry = carry._replace(loss_dy=loss_dy)
        if d_output is not None:
            carry = self.output_backward(carry, d_output)
        if d_inputs:
            carry = self.head_inputs_backward(carry, d_inputs, rows["head"], always)
        if "weight" in lanes:
            carry = self.weight(carry, self.units(rows["weight"], ends[1]))
        if has_both and not self.alone:
            # Keep the sends in this tick, beside the other lane's work: XLA would delay them.
            x, dy, loss_dy = together((carry.x, carry.dy, carry.loss_dy))
            carry = carry._replace(x=x, dy=dy, loss_dy=loss_dy)
        return carry, None

    def run(self, carry: Carry, forward: Units | None, backward: Units | None, loss_dy) -> tuple:
        """(output of the forward lane, gradient of the backward lane's input, carry) after the
        lanes' units; both are sent. A lane that is None gives None.

        With both lanes, one loop runs the group of most layers, so that the collectives of a lane
        have the products of the other beside them. The other groups run before and after it, one
        lane at a time.
        """
        x, dy, outputs, groups = None, None, [], list(carry.groups)
        if forward is not None:
            x = self.embed_forward(carry.x, forward.work)
        if backward is not None:
            dy = self.output_gradient(carry.dy, loss_dy, backward.local)
        for g, first, second in self.order(forward, backward):
            x, dy = ordering.at_once(x), ordering.at_once(dy)
            if forward is not None and backward is not None:
                x = x if first is None else ordering.after(x, dy)
                dy = dy if second is None else ordering.after(dy, x)
            x, dy, groups[g], values = self.groups[g].run(first, second, x, dy, groups[g])
            outputs += [] if self.has_cuts else values
        carry = carry._replace(groups=groups)
        if forward is not None:
            carry = carry._replace(x=self.send(x, 1))
        if backward is not None:
            dy = dy if forward is None else ordering.after(dy, carry.x)
            ended = never((dy, outputs)).astype(jnp.int32) if self.alone else carry.ended
            carry = carry._replace(dy=self.send(dy, -1), ended=ended)
        return x, dy, carry

    def order(self, forward: Units | None, backward: Units | None) -> list:
        """(group, forward lane, backward lane) in the order in which they run."""
        count = len(self.groups)
        ascending = [(g, forward, None) for g in range(count)]
        descending = [(g, None, backward) for g in reversed(range(count))]
        if forward is None or backward is None:
            return descending if forward is None else ascending
        largest = max(range(count), key=lambda g: self.groups[g].repeats)
        before = [*descending[: count - 1 - largest], *ascending[:largest]]
        after = [*ascending[largest + 1 :], *descending[count - largest :]]
        return [*before, (largest, forward, backward), *after]

    def output_gradient(self, received, loss_dy, local: Work):
        """The gradient of the chunk's output: from the head, or received from the next stage."""
        if self.alone or loss_dy is None:
            return received if loss_dy is None else loss_dy
        at_end = (self.stage == self.table.stages - 1) & (local.chunk == self.table.chunks - 1)
        return choose(at_end, loss_dy, received)

    def weight(self, carry: Carry, units: Units) -> Carry:
        """Add up the weight gradients of a chunk after its backward lane."""
        pairs = zip(self.groups, carry.groups, strict=True)
        return carry._replace(groups=[g.weight(units, carry.dy, state) for g, state in pairs])

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

    def embed_backward(self, carry: Carry, dx, work: Work) -> Carry:
        """Add the embedding's gradients, from the gradient of the first chunk's input."""
        if not jax.tree.leaves(carry.outer):  # the embedding is not trained
            return carry
        number = work.microbatch[0]
        leaving = (number >= 0) & (work.chunk[0] == 0)

        def add(total):
            is_left = (self.stage == 0) & leaving
            left = dx if self.alone else choose(is_left, dx, start_values(dx))
            return self.add_embedding(total, self.program.embed, number, left)

        if self.table.chunks == 1:
            return carry._replace(outer=add(carry.outer))
        return carry._replace(outer=lax.cond(leaving, add, lambda t: t, carry.outer))

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
        outer, trained = ordering.after(self.program.outer, y), self.table.backward is not None

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

    def units(self, work: Work, at_end: bool) -> Units:
        local = self.local(work)
        return Units(work, local, self.shared(local.microbatch), at_end and self.has_cuts)

    def microbatch(self, number):
        return read(self.program.batches, jnp.maximum(number, 0))

    def shared(self, number):
        return self.program.shared(self.microbatch(number))

    def send(self, x, step: int):
        """Send to the next stage (step 1) or the previous one (-1); cyclic with several chunks."""
        cyclic, stages = self.table.chunks > 1, range(self.table.stages)
        pairs = [(i, (i + step) % len(stages)) for i in stages if cyclic or i + step in stages]
        return collectives.permute(x, PIPE_AXIS, pairs)
