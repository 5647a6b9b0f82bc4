"""The model that a pipeline runs, as functions of one device."""

import dataclasses
import typing
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Program:
    """A model in the local view of one device.

    outer: trained parameters of embed and head. groups[g]: trained parameters of a repeated unit,
    stacked over this stage's places [chunks x slots], as ZeRO-1 cuts them. fixed[g]: its other
    arrays, stacked alike.
    batches: arrays [microbatches, ...].
    embed(outer, microbatch) -> x: partial input of the stack, a tree of floating arrays, to be
    summed over pipe.
    shared(microbatch) -> what all units read of a microbatch, computed once for a stage's.
    unit(params, x, (shared, layer, fixed, after), prevent_cse) -> (x, auxiliary values of the
    layer); params and fixed are gathered over fsdp. after: an array that its experts follow; None:
    lanes are apart. prevent_cse: whether forward and backward of the unit are in one computation,
    where XLA would merge a recomputation with forward.
    output(outer) -> the output weight, gathered over fsdp.
    head(outer, output, y, head_inputs, microbatch) -> (loss, sums, also of auxiliary values). y:
    the stack's output on the last stage; other stages hold what the head must not read.
    head_inputs(outer, microbatch) -> arrays that the head reads besides, summed over pipe: partial
    embeddings of other tokens.
    offloaded: names of activations that some layer must store, for host memory.
    unroll: places per iteration of the loops over a chunk's places; 0: no loop.
    divide(gradients of a unit) -> (those that backward computes last, the others), None in place
    of the other part's arrays.
    progress(auxiliary values of a unit) -> (them without those that only tell the progress, arrays
    that exist once its routers have chosen experts, and once these have run).
    """

    outer: typing.Any
    groups: tuple
    fixed: tuple
    batches: typing.Any
    embed: Callable
    shared: Callable
    unit: Callable
    output: Callable
    head: Callable
    head_inputs: Callable = lambda outer, microbatch: []
    unroll: int = 1
    offloaded: frozenset[str] = frozenset()
    progress: Callable = lambda aux: (aux, [], [])
    divide: Callable = lambda gradients: (gradients, jax.tree.map(lambda _: None, gradients))
