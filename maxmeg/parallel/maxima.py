"""Arrays that are reduced by maximum where other arrays are summed: over microbatches, devices and
the uses of a layer. So are their gradients, which autodiff alone would add up.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """An array that is reduced by maximum; other arrays are summed."""

    value: typing.Any  # an array, or its shape or spec


def is_max(node) -> bool:
    return isinstance(node, Max)


def combine(total, new):
    """Reduce two trees of arrays and Max leaf by leaf, in the dtypes of `total`."""

    def reduce(a, b):
        if is_max(a):  # without an array in a part of a tree
            return jax.tree.map(lambda a, b: jnp.maximum(a, b.astype(a.dtype)), a, b)
        return a + b.astype(a.dtype)

    return jax.tree.map(reduce, total, new, is_leaf=is_max)


def used_twice(tree):
    """(tree, tree), for two uses: the gradient of a Max is the maximum of theirs, not the sum."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_max)
    pairs = [map(Max, _twice(leaf.value)) if is_max(leaf) else (leaf, leaf) for leaf in leaves]
    first, second = zip(*pairs, strict=True)
    return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


_twice: typing.Any = jax.custom_vjp(lambda array: (array, array))
_twice.defvjp(lambda array: ((array, array), None), lambda _, slopes: (jnp.maximum(*slopes),))
