"""Parts of a model or of a train state: what is trained, what is not, and what checkpoints hold.

The metadata of a variable says which part it belongs to (parallel/rules.py). A part is the whole
tree with None in place of all other arrays, so that gradients, moments and sums exist for the
trained part alone.
"""

from collections.abc import Callable

import jax

from maxmeg.parallel.rules import is_frozen, is_trained, is_variable


def trained(tree):
    """`tree` without the arrays of variables that are not trained."""
    return part(tree, is_trained, others=True)


def fixed(tree):
    """`tree` with the arrays alone that no gradient exists for: frozen weights and state."""
    return part(tree, lambda variable: not is_trained(variable), others=False)


def frozen(tree):
    """`tree` with the arrays of the frozen base alone; nothing of a model without adapters."""
    return part(tree, is_frozen, others=False)


def saved(tree):
    """`tree` without the frozen base: what checkpoints hold."""
    return part(tree, lambda variable: not is_frozen(variable), others=True)


def part(tree, wanted: Callable, others: bool):
    """The variables that `wanted` accepts; others: also the arrays that lie in no variable."""

    def one(node):
        if not is_variable(node):
            return node if others else None
        return node if wanted(node) else node.replace(None)

    return jax.tree.map(one, tree, is_leaf=is_variable)


def without(tree, part):
    """`tree` without the arrays that `part` has."""
    return jax.tree.map(
        lambda here, there: here if there is None else None,
        tree,
        part,
        is_leaf=lambda leaf: leaf is None,
    )


def joined(one, other):
    """The tree whose two parts these are."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None
    )
