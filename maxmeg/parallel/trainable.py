"""Parts of a model or a train state, by the ParameterInfo of each variable.

A part is the whole tree with None instead of all other arrays, so that gradients and moments exist
for the trained part alone; `joined` puts parts together, `without` takes one away.
"""

from collections.abc import Callable

import jax

from maxmeg.parallel.parameter import info, is_variable


def trained(tree):
    """`tree` without the arrays of variables that are not trained."""
    return part(tree, lambda variable: info(variable).is_trained, others=True)


def fixed(tree):
    """`tree` with only the arrays without a gradient: frozen weights and state."""
    return part(tree, lambda variable: not info(variable).is_trained, others=False)


def frozen(tree):
    """`tree` with only the arrays of the frozen base; none without adapters."""
    return part(tree, lambda variable: info(variable).frozen, others=False)


def saved(tree):
    """`tree` without the frozen base, as in checkpoints."""
    return part(tree, lambda variable: not info(variable).frozen, others=True)


def part(tree, accepts: Callable, others: bool):
    """`tree` with only the variables that `accepts` allows. others: keep arrays that are not in a
    variable."""

    def one(node):
        if not is_variable(node):
            return node if others else None
        return node if accepts(node) else node.replace(None)

    return jax.tree.map(one, tree, is_leaf=is_variable)


def partition(model) -> tuple:
    """(the model without its stack, its stack alone), None in place of the other's arrays."""

    def keep(inside: bool):
        def one(path, array):
            return array if (path[0].name == "stack") == inside else None

        return jax.tree_util.tree_map_with_path(one, model)

    return keep(False), keep(True)


def without(tree, part):
    """`tree` without the arrays of `part`."""
    return jax.tree.map(
        lambda array, other: array if other is None else None,
        tree,
        part,
        is_leaf=lambda leaf: leaf is None,
    )


def joined(first, second):
    """The tree with the arrays of two parts."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None
    )


def copied(tree):
    """New modules around the same arrays."""
    return jax.tree.map(lambda leaf: leaf, tree)
