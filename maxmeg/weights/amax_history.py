"""The histories of delayed scaling (ops/delayed.py), one for each quantized matrix and layer.

They are a tree like the model, with a history in place of the matrix's weight and nothing else.
Projections that can be fused (weights/fused.py) share that of the first one, whether or not they
are, so that histories do not depend on the mesh.

The maxima of inputs and of outputs' gradients leave a step as the gradient of an array that each
matrix has beside its codes, a `Max`: it is then reduced over microbatches by maximum.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from maxmeg.ops.delayed import OPERANDS, rolled, scales_of
from maxmeg.ops.quantized import Recipe
from maxmeg.parallel.rules import is_variable
from maxmeg.weights.fused import fused_groups
from maxmeg.weights.quantized import (
    layers_of,
    max_of_devices,
    quantizable_modules,
    quantized_matrices,
)


def empty_history(model, recipe: Recipe | None):
    """The tree of histories before the first step; None unless `recipe` has histories."""
    if recipe is None or recipe.history is None:
        return None
    size, firsts = 1 + recipe.history.length, _first_of_group(model)
    kept = {firsts.get(id(w), id(w)) for _, _, w in _named(model)}

    def one(variable):
        if id(variable) not in kept:
            return None
        layers = variable.shape[: layers_of(variable)]
        zeros = jnp.zeros((*layers, len(OPERANDS), size))
        return nnx.Variable(zeros, axes=(None, None), state=True)

    return jax.tree.map(one, model, is_leaf=is_variable)


def delayed_scales(history, model, recipe: Recipe | None) -> list[jax.Array] | None:
    """The scales [.., 3] of each of `quantized_matrices`; None without a history."""
    if history is None or recipe is None:
        return None
    table = _histories(history, model)
    return [
        scales_of(table[id(getattr(module, name))][...])
        for module, name in quantized_matrices(model, recipe)
    ]


def next_history(history, model, gradients, recipe: Recipe | None):
    """The tree after a step. model: with Codes of this device's matrices; gradients: of `model`,
    of this device. Maxima are reduced over the devices that share a matrix."""
    if history is None or recipe is None:
        return None
    history = jax.tree.map(lambda leaf: leaf, history)  # new modules
    table, maxima = _histories(history, model), {}
    modules = zip(quantizable_modules(model), quantizable_modules(gradients), strict=True)
    for module, slopes in modules:
        for name, codes in module.codes.items():
            variable = table[id(getattr(module, name))]
            known = maxima.setdefault(id(variable), (variable, []))[1]
            known += [side.past[1].value for side in (codes, slopes.codes[name])]
    variables, sides = zip(*maxima.values(), strict=True)
    largest = [jnp.max(jnp.stack(arrays), axis=0) for arrays in sides]
    for variable, most in zip(variables, max_of_devices(largest, variables, ()), strict=True):
        variable.set_value(rolled(variable[...], most, recipe))
    return history


def _histories(history, model) -> dict[int, nnx.Variable]:
    """{id of a weight of `model`: its history}"""
    pairs = zip(_named(history), _named(model), strict=True)
    own = {id(weight): variable for (_, _, variable), (_, _, weight) in pairs}
    firsts = _first_of_group(model)
    return {weight: own[firsts.get(weight, weight)] for weight in own}


def _named(model) -> Iterator[tuple]:
    """(module, attribute, weight or None) of all quantizable matrices."""
    for module in quantizable_modules(model):
        for name in module.quantizable:
            yield module, name, getattr(module, name)


def _first_of_group(model) -> dict[int, int]:
    """{id of a weight that can be fused with others: id of the first of them}"""
    return {id(weight): id(group[0]) for group in fused_groups(model) for weight in group}
