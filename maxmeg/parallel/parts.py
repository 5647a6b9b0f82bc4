"""The two parts of a model: the parameters that are trained, and the frozen ones.

A parameter is frozen by metadata of its variable. A part is the whole tree with None in place of
the other part's arrays, so that gradients, moments and sums exist for what is trained alone. Of a
model without frozen parameters the trained part is the model and the frozen part is empty.
"""

import jax

from maxmeg.parallel.rules import is_frozen, is_variable


def trained(tree):
    """`tree`, variables in it or a whole state, without the arrays of frozen variables."""
    return part(tree, False)


def frozen(tree):
    """`tree` with the arrays of frozen variables alone."""
    return part(tree, True)


def part(tree, wanted: bool):
    def one(node):
        if not is_variable(node):
            return None if wanted else node
        return node if is_frozen(node) == wanted else node.replace(None)

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
