"""Weights of the stack that ZeRO-1 shards: a step gathers and reduces each layer's by itself."""

import dataclasses
import typing
from collections.abc import Callable

import jax

from maxmeg.parallel.collectives import gather, scatter
from maxmeg.parallel.ordering import after
from maxmeg.parallel.parameter import Cut, info, is_variable, replaced
from maxmeg.parallel.trainable import joined, partition, trained


@dataclasses.dataclass(frozen=True)
class ByLayer:
    """The transform (weights/transforms.py) that gives shards of the stack their Cut.

    Between `enter` and `leave` the pipeline gathers a layer's shards before the layer runs, and
    scatters its gradients. reductions: the Reduction of each parameter.
    """

    reductions: typing.Any

    def enter(self, model):
        def one(path, weight, reduction):
            cut = reduction.get_value().cut if path[0].name == "stack" else None
            return weight if cut is None else replaced(weight, weight.get_value(), cut=cut)

        return jax.tree_util.tree_map_with_path(one, model, self.reductions, is_leaf=is_variable)

    def leave(self, gradients):
        structure = jax.tree.structure(trained(self.reductions))
        outer, stack = partition(jax.tree.unflatten(structure, jax.tree.leaves(gradients)))
        return joined(after(outer, stack) if has_shards(gradients) else outer, stack)


def has_shards(model) -> bool:
    """Whether ZeRO-1 shards a weight of the stack."""
    return any(info(weight).cut for weight in jax.tree.leaves(model, is_leaf=is_variable))


def gather_layer(shards):
    """The weights of a layer gathered from their shards."""
    return map_cut(lambda weight, cut: gather(weight.get_value(), cut.axes, cut.dim), shards)


def scatter_layer(gradients):
    """The gradients of a layer summed over the axes of ZeRO-1, each device keeping its shard, in
    their `gradient_dtype`."""

    def one(gradient, cut: Cut) -> jax.Array:
        value = gradient.get_value().astype(info(gradient).gradient_dtype)
        return scatter(value, cut.axes, cut.dim)

    return map_cut(one, gradients)


def map_cut(function: Callable, tree):
    """`tree` with function(variable, Cut without the dimension of layers) as the value of each
    variable that ZeRO-1 shards."""

    def one(node):
        cut = info(node).cut if is_variable(node) and node.get_value() is not None else None
        if cut is None:
            return node
        return node.replace(function(node, dataclasses.replace(cut, dim=cut.dim - 1)))

    return jax.tree.map(one, tree, is_leaf=is_variable)
