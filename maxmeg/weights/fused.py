"""Projections that read the same input as one weight, in the parameters that a train step computes
with: fsdp then gathers one array, and layers compute one product.

A module names such projections in `fused_projections`, a tuple of groups: Linear layers or
parameters. Masters, optimizer state and checkpoints have a weight for each.
"""

import dataclasses
import typing
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from maxmeg.parallel.parameter import Cut, info, is_variable, replaced
from maxmeg.parallel.rules import fsdp_dim
from maxmeg.parallel.trainable import copied


@dataclasses.dataclass(frozen=True)
class Fuse:
    """The transform (weights/transforms.py) to one parameter for the weights of each group.

    The first weight of a group becomes their concatenation along the last dimension; the others
    have no array. A device's columns of each weight belong together. Weights stay separate if they
    are not trained, if ZeRO-1 or fsdp treat them differently or shard their last dimension, or if
    the columns of one are no multiple of `multiple`: it is not quantized, whatever the mesh.
    trained: a tree like the trained part of the model.
    """

    mesh: Mesh
    trained: typing.Any
    multiple: int = 1

    def enter(self, model):
        model = copied(model)
        for module in _modules(model):
            for names in _groups(module):
                weights = [_weight(module, name) for name in names]
                cuts = {info(weight).cut for weight in weights}
                if not can_fuse(weights, cuts, self.mesh, self.multiple):
                    continue
                first, widths = weights[0], tuple(weight.shape[-1] for weight in weights)
                columns = sum(info(weight).sizes[-1] for weight in weights)
                sizes = (*info(first).sizes[:-1], columns)
                value = jnp.concatenate([weight[...] for weight in weights], axis=-1)
                fused = replaced(first, value, fused_widths=widths, sizes=sizes)
                _set_weight(module, names[0], fused)
                for name, weight in zip(names[1:], weights[1:], strict=True):
                    _set_weight(module, name, weight.replace(None))
        return model

    def leave(self, gradients):
        gradients = copied(gradients)
        for module, like in zip(_modules(gradients), _modules(self.trained), strict=True):
            for names in _groups(module):
                first = _weight(module, names[0])
                if not (widths := info(first).fused_widths):
                    continue
                parts = split_columns(first[...], widths)
                for name, part in zip(names, parts, strict=True):
                    _set_weight(module, name, _weight(like, name).replace(part))
        return gradients


def fused_groups(model) -> Iterator[tuple[nnx.Variable, ...]]:
    """The weights of each group of projections of a model."""
    for module in _modules(model):
        for names in _groups(module):
            yield tuple(_weight(module, name) for name in names)


def split_columns(array: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    """The parts of these widths of the last dimension."""
    return jnp.split(array, np.cumsum(widths)[:-1], axis=-1)


def can_fuse(
    weights: Sequence[nnx.Variable],
    cuts: set[Cut | None],
    mesh: Mesh | AbstractMesh,
    multiple: int = 1,
) -> bool:
    """Whether trained weights differ at most in the width of their last dimension, a multiple of
    `multiple`, and neither fsdp nor ZeRO-1 shards it. cuts: of ZeRO-1."""
    if not all(info(weight).is_trained for weight in weights) or len(cuts) > 1:
        return False
    if any(info(weight).sizes[-1] % multiple for weight in weights):
        return False
    (cut,), last = cuts, weights[0].ndim - 1
    kinds = {
        (w.shape[:-1], w.dtype, fsdp_dim(w, mesh), info(w).fsdp_axes, info(w).gradient_dtype)
        for w in weights
    }
    sharded = fsdp_dim(weights[0], mesh), None if cut is None else cut.dim
    return len(kinds) == 1 and last not in sharded


def _declares(node) -> bool:
    return hasattr(node, "fused_projections")


def _modules(tree) -> list:
    """The modules of `tree` that declare groups of projections."""
    return [node for node in jax.tree.leaves(tree, is_leaf=_declares) if _declares(node)]


def _groups(module) -> Iterator[tuple[str, ...]]:
    """The groups of a module that has all their projections."""
    for names in module.fused_projections:
        if all(getattr(module, name) is not None for name in names):
            yield names


def _weight(module, name: str) -> nnx.Variable:
    projection = getattr(module, name)
    return projection if is_variable(projection) else projection.weight


def _set_weight(module, name: str, weight: nnx.Variable) -> None:
    if is_variable(getattr(module, name)):
        setattr(module, name, weight)
    else:
        getattr(module, name).weight = weight
