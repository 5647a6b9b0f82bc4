"""The weights that layers compute with, made from the stored ones by a list of transforms.

A transform sees the arrays of one device and has two methods:

- enter(model): the model with its weights one step nearer to the products;
- leave(gradients): the inverse, from gradients of the trained part of what `enter` returned to
  those of what it was given.

| transform | enter | leave |
|---|---|---|
| Cast | to the compute dtype | sum over the devices with the same master, in float32 |
| KvSlice | to the key/value head of this device | zeros for the other heads |
| Gather | all-gather what ZeRO-1 shards outside of the stack | reduce-scatter |
| ByLayer (zero1.py) | mark shards of ZeRO-1 in the stack | remove the marks |
| Fuse (fused.py) | projections of one input as one weight | separate them |
| Quantize (quantized.py) | add 8-bit or 4-bit codes | remove them |

A training step runs all of them, in this order and back; other programs run a part of them.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from maxmeg.ops.quantized import Recipe
from maxmeg.parallel import collectives
from maxmeg.parallel.rules import Reduction, reductions
from maxmeg.parallel.trainable import joined, partition, trained
from maxmeg.weights.fused import Fuse
from maxmeg.weights.zero1 import ByLayer


class Transform(typing.Protocol):
    def enter(self, model) -> typing.Any: ...

    def leave(self, gradients) -> typing.Any: ...


def enter(transforms: Sequence[Transform], model) -> typing.Any:
    """The model after all transforms."""
    for transform in transforms:
        model = transform.enter(model)
    return model


def leave(transforms: Sequence[Transform], gradients):
    """Gradients of the model before the transforms, from those of the model after them."""
    for transform in reversed(transforms):
        gradients = transform.leave(gradients)
    return gradients


def training_transforms(
    model, mesh: Mesh, zero1: bool, dtype, recipe: Recipe | None = None
) -> list[Transform]:
    """All transforms of a training step but Quantize, for an abstract model with shardings. recipe:
    that Quantize will be for."""
    by_parameter = reductions(model, mesh, zero1)
    outer, stack = partition(by_parameter)
    outer = joined(outer, jax.tree.map(lambda r: dataclasses.replace(r, cut=None), stack))
    fuse = Fuse(mesh, trained(by_parameter), recipe.multiple if recipe else 1)
    return [*whole_weights(outer, dtype), ByLayer(by_parameter), fuse]


def whole_weights(reductions, dtype) -> list[Transform]:
    """Transforms to weights in `dtype`, not sharded by ZeRO-1. reductions: of each parameter."""
    return [Cast(reductions, dtype), KvSlice(reductions), Gather(reductions)]


def elements(way: Reduction, count: int, mesh: Mesh | AbstractMesh) -> int:
    """Elements of a device's weight after all transforms, from those of its master."""
    devices = 1 if way.cut is None else math.prod(mesh.shape[axis] for axis in way.cut.axes)
    return devices * count // (1 if way.kv_slice is None else way.kv_slice.num_heads)


@dataclasses.dataclass(frozen=True)
class Cast:
    """reductions: the Reduction of each parameter. Those that are `exact` keep their dtype."""

    reductions: typing.Any
    dtype: typing.Any

    @jax.named_scope("compute_weights")
    def enter(self, model):
        def one(master, reduction: Reduction):
            return master if reduction.exact else master.astype(self.dtype)

        return jax.tree.map(one, model, self.reductions)

    @jax.named_scope("reduce_gradients")
    def leave(self, gradients):
        """One collective for each set of axes, in parallel.gradient_dtype."""
        leaves, tree = jax.tree.flatten(gradients)
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for i, reduction in enumerate(jax.tree.leaves(trained(self.reductions))):
            axes = collectives.present(reduction.sum_axes)
            leaves[i] = leaves[i].astype(reduction.dtype) if axes else leaves[i]
            by_axes.setdefault(axes, []).append(i)
        for axes, members in by_axes.items():
            sums = collectives.sum_over([leaves[i] for i in members], axes)
            for i, total in zip(members, sums, strict=True):
                leaves[i] = total.astype(jnp.float32)
        return jax.tree.unflatten(tree, leaves)


@dataclasses.dataclass(frozen=True)
class KvSlice:
    """reductions: the Reduction of each parameter."""

    reductions: typing.Any

    def enter(self, model):
        slice_head = functools.partial(_head, collectives.local_kv_head)
        return jax.tree.map(slice_head, model, self.reductions)

    def leave(self, gradients):
        gather_head = functools.partial(_head, collectives.at_kv_head)
        return jax.tree.map(gather_head, gradients, trained(self.reductions))


def _head(function, array: jax.Array, reduction: Reduction) -> jax.Array:
    heads = reduction.kv_slice
    return array if heads is None else function(array, heads.dim, heads.num_heads)


@dataclasses.dataclass(frozen=True)
class Gather:
    """reductions: the Reduction of each parameter."""

    reductions: typing.Any

    @jax.named_scope("compute_weights")
    def enter(self, model):
        def one(shard, reduction: Reduction):
            cut = reduction.cut
            return shard if cut is None else collectives.gather(shard, cut.axes, cut.dim)

        return jax.tree.map(one, model, self.reductions)

    @jax.named_scope("reduce_gradients")
    def leave(self, gradients):
        def one(gradient, reduction: Reduction):
            if (cut := reduction.cut) is None:
                return gradient
            return collectives.scatter(gradient.astype(reduction.dtype), cut.axes, cut.dim)

        return jax.tree.map(one, gradients, trained(self.reductions))
