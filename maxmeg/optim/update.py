"""The optimizer's update of the trained part of a state.

With `optim.offload`, moments and remainders of masters are stored in pinned host memory. A loop
over the layers of each stack copies one layer's arrays to the device, updates them, and writes them
back in place. Parameters outside of stacks are updated together.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.layers.auxiliary import choose
from maxmeg.ops.broadcast import never
from maxmeg.optim.storage import STACKED, divided, orders, parameter_name, whole
from maxmeg.parallel.host import is_on_host, to_device, to_memory_of
from maxmeg.parallel.rules import is_variable
from maxmeg.parallel.trainable import joined, part


class Parts(typing.NamedTuple):
    """The trained part of a state. weights: with remainders bfloat16, without them float32 masters.
    remainders: None, or as in optim/storage.py. moments: the state of the optimizer."""

    weights: typing.Any
    remainders: typing.Any
    moments: typing.Any


def update(optimizer, gradients, old: Parts, finite: jax.Array, stages: int, **arguments) -> Parts:
    """Run the optimizer on the trained parameters.

    Without offload: returns float32 masters and new moments, for the caller to store (`chosen` in
    state.py). With offload: returns the parts in the form of `old`, and `old` itself if the step is
    not `finite`. stages: number of pipeline stages that shard the stacks' layers. arguments: for
    the optimizer's update.
    """
    run = functools.partial(apply, optimizer, arguments)
    if not any(map(is_on_host, jax.tree.leaves(old))):
        return run(gradients, old)
    run = functools.partial(store, finite, run)
    layouts, new = orders(old.weights), old
    for group in groups_of(old.weights):
        mine = select(group, gradients), Parts(*[select(group, tree) for tree in old])
        if group is not None:
            layers = {group: jnp.array(layouts[group])}
            result = in_loop(run, mine[0], mine[1], layers, stages)
        else:  # as a stack of one layer
            one = jax.tree.map(lambda a: a[None] if a.ndim else a, mine)
            result = in_loop(run, one[0], one[1], {}, 1)
            result = jax.tree.map(lambda a: a[0] if a.ndim else a, result)
        new = joined(result, new)
    return new


def apply(optimizer, arguments: dict, gradients, old: Parts, **rows) -> Parts:
    """Run the optimizer on arrays in device memory; returns float32 masters and new moments."""
    own = whole(old.weights, old.remainders)
    updates, moments = optimizer.update(gradients, old.moments, own, **arguments, **rows)
    return Parts(jax.tree.map(jnp.add, own, updates), None, moments)


def store(finite: jax.Array, run: Callable, gradients, old: Parts, **rows) -> Parts:
    """Call `run` and return its result in the form of `old`, or `old` if the step is not finite."""
    weights, remainders, moments = run(gradients, old, **rows)
    if old.remainders is not None:
        weights, remainders = divided(weights)
    # Scales of moments that are in another group lose the size of their blocks.
    moments = jax.tree.unflatten(jax.tree.structure(old.moments), jax.tree.leaves(moments))
    return choose(finite, Parts(weights, remainders, moments), old)


def in_loop(
    run: Callable, gradients, old: Parts, layers: dict[int, jax.Array], stages: int
) -> Parts:
    """Apply `run` to one layer of each pipeline stage at a time. old: a group of stacked layers.
    layers: {group number: layer number of each row}; empty outside of stacks."""
    arrays, scalars = variables_of(old), without_variables(old)

    def by_stage(tree):
        return jax.tree.map(lambda a: a.reshape(stages, -1, *a.shape[1:]), tree)

    def rows_of(tree, i):
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 1, keepdims=False), tree)

    def body(i, state):
        arrays, _ = state
        parts = joined(to_device(rows_of(arrays, i)), scalars)
        new = run(rows_of(gradients, i), parts, layers=rows_of(layers, i))
        rows = to_memory_of(variables_of(new), arrays)
        arrays = jax.tree.map(
            lambda array, row: lax.dynamic_update_index_in_dim(array, row, i, 1), arrays, rows
        )
        return arrays, without_variables(new)

    arrays, gradients, layers = by_stage((arrays, gradients, layers))
    # Hide the number of iterations from XLA: it would inline a loop of one iteration, and copy its
    # arrays from the host before other loops run.
    length = jax.tree.leaves(arrays)[0].shape[1] + never(jax.tree.leaves(gradients)[0])
    arrays, scalars = lax.fori_loop(0, length, body, (arrays, scalars))
    return joined(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays), scalars)


def groups_of(weights) -> list[int | None]:
    """The groups of stacked layers, and None if there are other parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_variable)
    groups = [group_of(path) for path, variable in leaves if variable.get_value() is not None]
    return [*dict.fromkeys(groups)]


def group_of(path) -> int | None:
    """The group of stacked layers that a parameter, or its moment, belongs to."""
    group = STACKED.match(parameter_name(path))
    return int(group[1]) if group else None


def select(group: int | None, tree):
    """Keep the variables of one group and all arrays outside of variables."""

    def one(path, node):
        is_other = is_variable(node) and group_of(path) != group
        return node.replace(None) if is_other else node

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_variable)


def variables_of(tree):
    return part(tree, lambda _: True, others=False)


def without_variables(tree):
    return part(tree, lambda _: False, others=True)
