"""Auxiliary values: small float32 arrays that a layer returns beside its output.

Examples are the number of tokens per expert and the largest attention logit. A layer returns {name:
value} for the tokens of its sequence shard. Over microbatches and devices, arrays are summed like
gradients, and `Max` values are reduced to the maximum.
"""

import typing

import jax
import jax.numpy as jnp

from maxmeg.parallel import collectives
from maxmeg.parallel.maxima import is_max
from maxmeg.parallel.mesh import MESH_AXES


def start_values(shapes):
    """Initial values of `combine` for a tree of arrays or shapes: 0, or -inf for Max."""

    def start(a):
        if is_max(a):
            return jax.tree.map(lambda a: jnp.full(a.shape, -jnp.inf, a.dtype), a)
        return jnp.zeros(a.shape, a.dtype)

    return jax.tree.map(start, shapes, is_leaf=is_max)


def choose(condition, tree, other):
    """`tree` if the scalar condition holds, else `other`; shared leaves are not computed."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), tree, other)


def counted_once(tree, axes: tuple[str, ...]):
    """Values that are equal along `axes`, for a sum over them: zero except on rank 0. Max values
    are unchanged."""

    def one(a):
        return a if is_max(a) else collectives.counted_once(a, axes)

    return jax.tree.map(one, tree, is_leaf=is_max)


def over_devices(tree, axes: tuple[str, ...]):
    """Reduce over devices to plain arrays: one collective over `axes` for all sums, and one over
    all mesh axes for all maxima."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_max)
    sums = iter(collectives.sum_over([leaf for leaf in leaves if not is_max(leaf)], axes))
    maxima = [leaf.value for leaf in leaves if is_max(leaf)]
    maxima = iter(collectives.max_over(maxima, MESH_AXES))
    combined = [next(maxima if is_max(leaf) else sums) for leaf in leaves]
    return jax.tree.unflatten(structure, combined)


def by_layer(sums: dict[str, typing.Any]) -> dict[str, jax.Array]:
    """{name: array [layers with this value, ...]}, in model order.

    sums["stack_aux"]: auxiliary values of each group of units (models/stack.py); sums["mtp_aux"]:
    of each MTP layer, if the model has any.
    """
    by_name: dict[str, list[jax.Array]] = {}
    depths = jax.tree.map(lambda array: array[None], sums.get("mtp_aux", []))
    for sublayers in [*sums["stack_aux"], *depths]:
        in_unit: dict[str, list[jax.Array]] = {}
        for values in [values for mixers in sublayers for values in mixers.values()]:
            for name, array in values.items():
                in_unit.setdefault(name, []).append(array)
        for name, arrays in in_unit.items():
            rows = jnp.stack(arrays, axis=1)  # the layers of a unit are adjacent
            by_name.setdefault(name, []).append(rows.reshape(-1, *rows.shape[2:]))
    return {name: jnp.concatenate(rows) for name, rows in by_name.items()}
