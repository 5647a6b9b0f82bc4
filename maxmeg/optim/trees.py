"""Trees of variables in optimizers: parts of a tree, functions of several trees, and states whose
shapes are not those of their parameters."""

from collections.abc import Callable

import jax
from flax import nnx

from maxmeg.parallel.parameter import (
    STACKING_AXES,
    Side,
    info,
    is_variable,
    logical_axes,
    replaced,
)

OF_LAYERS = ("stack", "mtp")  # parts of a model with matrices that Muon and SOAP update


def is_matrix(part: str, axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter of this part of the model ("stack", "embedding", ...) with these logical
    axes is a matrix of a layer or, stacked, one of each layer and expert; not an embedding."""
    count = sum(axis not in STACKING_AXES for axis in axes)
    return part in OF_LAYERS and count == 2 and "layer_vocab" not in axes


def is_matrix_of_layer(path, variable: nnx.Variable) -> bool:
    """Whether the variable at this path of a model holds a matrix of a layer (`is_matrix`)."""
    if variable.get_value() is None:
        return False
    first = str(getattr(path[0], "name", getattr(path[0], "key", "")))
    return is_matrix(first, logical_axes(variable))


def part(tree, matrices: bool):
    """`tree` with None in place of all arrays but the layers' matrices (matrices=True), or in place
    of these (matrices=False)."""

    def one(path, variable):
        if variable.get_value() is None or is_matrix_of_layer(path, variable) == matrices:
            return variable
        return variable.replace(None)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_variable)


def map_variables(function: Callable[..., tuple], *trees) -> tuple:
    """Trees of the results, a tuple, of `function` of the variables at each place of `trees`. Where
    the first tree has no array, the results have none either; where it has none at all, there are
    as many results as trees."""
    leaves = [jax.tree.leaves(tree, is_leaf=is_variable) for tree in trees]
    structure = jax.tree.structure(trees[0], is_leaf=is_variable)
    rows = zip(*leaves, strict=True)
    results = [function(*row) if row[0].get_value() is not None else None for row in rows]
    count = max((len(row) for row in results if row is not None), default=len(trees))
    empty = [leaf.replace(None) for leaf in leaves[0]]
    columns = zip(
        *(row or (none,) * count for row, none in zip(results, empty, strict=True)), strict=True
    )
    return tuple(jax.tree.unflatten(structure, column) for column in columns)


def without_matrix(variable: nnx.Variable, value) -> nnx.Variable:
    """A variable of `value`, whose shape has one dimension in place of the matrices of `variable`.
    It is not sharded but by ZeRO-1; stacks are sharded as before."""
    axes = (*info(variable).axes[:-2], None)
    return replaced(variable, value, axes=axes, sizes=(), num_kv_heads=0)


def factor(parameter: nnx.Variable, value, side: Side) -> nnx.Variable:
    """A variable of `value`, a factor of the matrices of `parameter`."""
    return replaced(parameter, value, side=side, matrix=parameter.shape[-2:])
