"""Hints to XLA about the order of operations. They change no value.

XLA drops optimization barriers before it schedules: `together` keeps it from merging, fusing and
moving operations across the barrier; the other functions order what runs, because one array depends
on another. Measurements: benchmarks/NOTES.md.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxmeg.parallel.collectives import PIPE_AXIS, axis_index, axis_size, present
from maxmeg.parallel.mesh import MESH_AXES


def together(tree):
    """The tree, behind a barrier: nothing that reads it is computed before all of it is.

    pipeline/executor.py, tick: sends stay in their tick; XLA moves them to where nothing hides them
        later, later_backward, last_stage.summed: no stage waits for sums of the last stage's layers
        output_backward: the output's gradient waits in the compute dtype, not in float32
    pipeline/weights.py: a layer's weights are gathered behind its products: 2.1 to 0.9 ms exposed
    models/stack.py: backward computes weight gradients layer by layer, and their inputs are freed
    ops/attention/xla.py: scores of one block at a time; backward recomputes instead of storing
    ops/cross_entropy/xla.py: the exponentials of logits are not stored on B200s (0.98 GiB)
    ops/cross_entropy/mosaic.py: the last chunk's gradient is not stored
    optim/storage.py: XLA would encode zeros slowly
    checkpoint/integrity.py: arrays in host memory come to the device one after another
    """
    return lax.optimization_barrier(tree)


def never(tree) -> jax.Array:
    """False, which XLA cannot know before it has computed the arrays of the tree.

    pipeline/executor.py, `ended`: a tick's indices depend on the gradients of the tick before; XLA
        unrolls two ticks and would run both forwards first (Qwen3 8B: 11.83 to 9.28 GiB)
    optim/update.py: XLA would inline a loop of one iteration, with its copies from host memory
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)]
    firsts = [jnp.ravel(leaf)[0] > jnp.inf for leaf in leaves]
    return functools.reduce(jnp.logical_or, firsts, jnp.asarray(False))


def is_key(array) -> bool:
    """Whether it holds random keys, which have no arithmetic."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def depending(tree, before):
    """The tree. Each of its elements depends on `before`, if that has arrays; random keys are left
    as they are.

    ops/experts/dispatch.py: the gradient of the weights before that of the rows
    distributed/experts/exchange.py: a loop of further rounds before backward of the earlier ones,
        whose results would take memory while the loop runs; and with lanes together, backward's
        experts after forward's, so that exchanges of both lanes have products beside them
    pipeline/residuals.py: with lanes together, what backward recomputes before its exchanges after
        forward's router, which its own exchange follows (DeepSeek-V3 on 1,024 H100s, both
        dependencies: 4,796 to 3,774 ms exposed)
    """
    if not jax.tree.leaves(before):
        return tree
    is_never = never(before)

    def one(leaf):
        return leaf if is_key(leaf) else leaf + is_never.astype(leaf.dtype)

    return jax.tree.map(one, tree)


def zeros_after(tree, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Zeros that exist once the arrays of the tree do. XLA makes all plain zeros of one shape
    together, before the first of them is needed, and keeps them (8B, data 64: 31.3 to 25.6 GiB)."""
    return jnp.broadcast_to(never(tree).astype(dtype), shape)


def not_before(x: jax.Array, done: jax.Array | None) -> jax.Array:
    """x, one element of which depends on `done`: in a ring XLA sends all pieces first, one at a
    time, and hides nothing behind attention (40 of 84 permutes exposed, 4 with this)."""
    if done is None:
        return x
    place = (0,) * x.ndim
    return x.at[place].set(jnp.where(never(done), 0, x[place]).astype(x.dtype))


def only_on_cpu(function: Callable, default: Callable, *arrays):
    """function(*arrays) in XLA's CPU runtime, default(*arrays) elsewhere."""
    return lax.platform_dependent(*arrays, cpu=function, default=default)


def after(tree, before):
    """The tree, which on CPUs is read once `before` is computed; elsewhere nothing changes.

    XLA's CPU runtime starts collectives that do not depend on each other at once and confuses those
    of one kind over the same devices, also with its sequential scheduler: without this the steps of
    `benchmarks/same_numbers.py exchange` have wrong losses. A loop is no barrier: a tick reads its
    rows after the tick before it, and the head its weights after the layers.
    """
    if not present(MESH_AXES):
        return tree
    return only_on_cpu(depending, lambda tree, before: tree, tree, before)


def at_once(stream):
    """The arrays of a residual stream, none of which is read on CPUs before all are computed: of
    two encoders, one group of layers reads one array, the next another, and their collectives
    would meet (`after`)."""
    return stream if len(jax.tree.leaves(stream)) < 2 else after(stream, stream)


def permute_in_stage(
    x: jax.Array, axes: tuple[str, ...], pairs: list[tuple[int, int]]
) -> jax.Array:
    """Send x between (source, target) ranks of axes of one pipeline stage, also where other stages
    do not come along. Ranks without a source get zeros.

    XLA's CPU runtime waits for all devices of a program in a permute, and would wait for ever: with
    several stages it gathers instead.
    """
    axes = present(axes)
    if not axes:
        return x
    sources = np.full(axis_size(axes), -1)
    for source, target in pairs:
        sources[target] = source

    def gathered(x: jax.Array) -> jax.Array:
        source = jnp.asarray(sources)[axis_index(axes)]
        everything = lax.all_gather(x, axes)
        return jnp.where(source < 0, 0, everything[jnp.maximum(source, 0)]).astype(x.dtype)

    def permuted(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, axes, pairs)

    return only_on_cpu(gathered, permuted, x) if present((PIPE_AXIS,)) else permuted(x)
