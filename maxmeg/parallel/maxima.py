"""Auxiliary values that are reduced by maximum over microbatches and devices; others are summed."""

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


def plain(tree):
    """`tree` with arrays in place of Max."""
    return jax.tree.map(lambda a: a.value if is_max(a) else a, tree, is_leaf=is_max)
