"""The optimizer's update of the trained part of a state.

With `optim.offload`, moments and remainders of masters lie in pinned host memory. They are updated
on the device, for one layer of a stack at a time: a loop reads its rows from the host and writes
them back into the same arrays. Parameters outside of stacks follow one after another.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxmeg.layers.auxiliary import choose
from maxmeg.optim.storage import STACKED, divided, orders, parameter_name, whole
from maxmeg.parallel.host import is_on_host, to_device, to_memory_of
from maxmeg.parallel.rules import is_variable
from maxmeg.parallel.trainable import joined, part


class Parts(typing.NamedTuple):
    """Of the trained part of a model: weights (with remainders, bfloat16; without, float32 masters),
    remainders or None (optim/storage.py), and the state of the optimizer."""

    weights: typing.Any
    remainders: typing.Any
    moments: typing.Any


def update(optimizer, gradients, old: Parts, finite: jax.Array, stages: int, **arguments) -> Parts:
    """The parts after a step; `old` unless `finite`. stages: devices over which stacks are sharded
    along their layers. arguments: of the optimizer's update."""
    run = functools.partial(apply, optimizer, finite, arguments)
    if not any(map(is_on_host, jax.tree.leaves(old))):
        return run(gradients, old)
    layouts, new, earlier = orders(old.weights), old, finite
    for name in part_names(old.weights):
        mine = select(name, gradients), Parts(*[select(name, tree) for tree in old])
        if group := STACKED.match(name):
            number = int(group[1])
            result = over_layers(run, *mine, stages, number, layouts[number])
        else:
            result = alone(run, *mine, earlier)
        new = joined(result, new)
        earlier = jax.tree.leaves(result.weights)[0]
    return new


def apply(optimizer, finite, arguments: dict, gradients, old: Parts, **rows) -> Parts:
    """`update` of parts in device memory."""
    own = whole(old.weights, old.remainders)
    updates, moments = optimizer.update(gradients, old.moments, own, **arguments, **rows)
    weights, remainders = jax.tree.map(jnp.add, own, updates), None
    if old.remainders is not None:
        weights, remainders = divided(weights)
    return choose(finite, Parts(weights, remainders, moments), old)


def part_names(weights) -> list[str]:
    """The parts that are updated one after another: groups of stacked layers, other parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_variable)
    names = [part_name(path) for path, variable in leaves if variable.get_value() is not None]
    return [*dict.fromkeys(names)]


def part_name(path) -> str:
    name = parameter_name(path)
    group = STACKED.match(name)
    return group[0] if group else name


def select(name: str, tree):
    """`tree` with the variables of one part, and all arrays that are not in a variable."""

    def one(path, node):
        is_other = is_variable(node) and part_name(path) != name
        return node.replace(None) if is_other else node

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_variable)


def over_layers(
    run: Callable, gradients, old: Parts, stages: int, group: int, order: tuple[int, ...]
) -> Parts:
    """`update` of a group of stacked layers, one of each stage at a time. order: as in `orders`."""
    arrays, scalars = variables_of(old), without_variables(old)
    layers = jnp.array(order).reshape(stages, -1)

    def by_stage(tree):
        return jax.tree.map(lambda a: a.reshape(stages, -1, *a.shape[1:]), tree)

    def rows_of(tree, i):
        def one(array):
            row = lax.dynamic_slice_in_dim(array, i, 1, axis=1)
            return row.reshape(stages, *array.shape[2:])

        return jax.tree.map(one, tree)

    def body(i, state):
        arrays, _ = state
        parts = joined(to_device(rows_of(arrays, i)), scalars)
        new = run(rows_of(gradients, i), parts, layers={group: rows_of(layers, i)})
        rows = jax.tree.map(lambda a: a[:, None], variables_of(new))
        arrays = jax.tree.map(
            lambda array, row: lax.dynamic_update_slice_in_dim(array, row, i, 1),
            arrays,
            to_memory_of(rows, arrays),
        )
        return arrays, without_variables(new)

    arrays, gradients = by_stage((arrays, gradients))
    length = jax.tree.leaves(arrays)[0].shape[1]
    arrays, scalars = lax.fori_loop(0, length, body, (arrays, scalars))
    arrays = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays)
    return joined(arrays, scalars)


def variables_of(tree):
    return part(tree, lambda _: True, others=False)


def without_variables(tree):
    return part(tree, lambda _: False, others=True)


def alone(run: Callable, gradients, old: Parts, earlier: jax.Array) -> Parts:
    """`update` of one parameter, whose state leaves the host once `earlier` exists."""
    waiting, _ = lax.optimization_barrier((old, earlier))
    new = lax.optimization_barrier(run(gradients, to_device(waiting)))
    return to_memory_of(new, old)
