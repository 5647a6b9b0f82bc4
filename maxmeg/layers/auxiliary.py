"""Auxiliary values: small float32 arrays that a layer returns beside its output.

Examples are the number of tokens of each expert and the largest attention logit. A layer reports
{name: value} for its device's tokens. Over microbatches and devices, arrays are summed as gradients
are, and of values in `Max` the maximum is taken. All devices along tensor must report the same
array; a Max may differ between them.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from maxmeg.parallel import collectives
from maxmeg.parallel.mesh import MESH_AXES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """An array of which the maximum counts; all other arrays are summed."""

    value: typing.Any  # an array, or its shape or spec


def is_max(node) -> bool:
    return isinstance(node, Max)


def combine(total, new):
    """Combine two trees of arrays and Max leaf by leaf, in the dtypes of `total`."""

    def one(a, b):
        return Max(jnp.maximum(a.value, b.value)) if is_max(a) else a + b.astype(a.dtype)

    return jax.tree.map(one, total, new, is_leaf=is_max)


def start_values(shapes):
    """What `combine` starts from, for a tree of arrays or of their shapes: 0, or -inf for Max."""

    def one(a):
        if is_max(a):
            return Max(jnp.full(a.value.shape, -jnp.inf, a.value.dtype))
        return jnp.zeros(a.shape, a.dtype)

    return jax.tree.map(one, shapes, is_leaf=is_max)


def choose(condition, tree, other):
    """`tree` where the scalar condition holds, else `other`; what both share is not computed."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), tree, other)


def over_devices(tree, axes: tuple[str, ...]):
    """Combine the contributions of devices: one collective over `axes` for all sums, and one over
    all mesh axes for all maxima. Returns plain arrays."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_max)
    sums = iter(collectives.sum_over([leaf for leaf in leaves if not is_max(leaf)], axes))
    maxima = [leaf.value for leaf in leaves if is_max(leaf)]
    maxima = iter(collectives.max_over(maxima, MESH_AXES))
    combined = [next(maxima if is_max(leaf) else sums) for leaf in leaves]
    return jax.tree.unflatten(structure, combined)


def by_layer(sums: dict[str, typing.Any]) -> dict[str, jax.Array]:
    """{name: [layers that report it, ...]}, in the order of the layers.

    sums["stack_aux"]: auxiliary values of each group of units (models/stack.py) in model order;
    sums["mtp_aux"]: those of each MTP layer, if there are any.
    """
    found: dict[str, list[jax.Array]] = {}
    depths = jax.tree.map(lambda array: array[None], sums.get("mtp_aux", []))
    for sublayers in [*sums["stack_aux"], *depths]:
        of_unit: dict[str, list[jax.Array]] = {}
        for values in [values for mixers in sublayers for values in mixers.values()]:
            for name, array in values.items():
                of_unit.setdefault(name, []).append(array)
        for name, arrays in of_unit.items():
            rows = jnp.stack(arrays, axis=1)  # the layers of one unit follow one another
            found.setdefault(name, []).append(rows.reshape(-1, *rows.shape[2:]))
    return {name: jnp.concatenate(rows) for name, rows in found.items()}
