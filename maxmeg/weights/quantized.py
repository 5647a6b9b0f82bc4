"""8-bit or 4-bit copies ("codes") of the layers' weights, which train.quantization multiplies.

A step quantizes the weights once, so that microbatches share the codes, and fsdp gathers one byte
per weight. The weight stays in the model, because its gradient is computed as usual. Its value is
not read: XLA neither casts it to the compute dtype nor gathers it.

mxfp8 keeps two quantized copies of each weight, because forward sums over its rows and backward
over its columns. FSDP gathers the copy that a pass uses (8.25 bits per weight instead of 16).
Together they take as much memory as the 16-bit weight. Other recipes use one copy for both passes.
Two 4-bit codes are in a byte.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from flax import nnx

from maxmeg.ops.backend import target_device
from maxmeg.ops.quantized import MULTIPLE, Quantized, Recipe, Shares, check_device, matmul
from maxmeg.ops.random import fold
from maxmeg.parallel.collectives import (
    PIPE_AXIS,
    axis_index,
    gather,
    max_over,
    unshard_parameter,
)
from maxmeg.parallel.mesh import MESH_AXES
from maxmeg.parallel.ordering import after
from maxmeg.parallel.parameter import Cut, ParameterInfo, info, num_stacked, replaced
from maxmeg.parallel.rules import mesh_axes
from maxmeg.parallel.trainable import copied

KEY = 2**20  # folded into a step's key: of the rounding of gradients (layers are fewer)


class Codes(nnx.Module):
    """The quantized copies of a weight [.., I, O], sharded like the weight.

    copies: tensorwise, one copy with one scale per layer, shared by a layer's experts; mxfp8, a
    copy for forward and one for backward; others, one copy for both. keys: for the stochastic
    rounding of gradients, one per layer; None: they are rounded to nearest.
    """

    def __init__(
        self,
        weight: nnx.Variable,
        copies: list[Quantized],
        recipe: Recipe,
        keys: jax.Array | None = None,
    ):
        def variable(array: jax.Array, *axes: None) -> nnx.Variable:
            return nnx.Variable(array, info=ParameterInfo(axes, frozen=True, exact=True))

        def stored(array: jax.Array) -> nnx.Variable:
            if array.ndim == weight.ndim:
                return replaced(weight, array, frozen=True, exact=True, cut=None)
            return variable(array)

        self.copies = nnx.List([nnx.List([stored(array) for array in copy]) for copy in copies])
        self.keys = nnx.data(None if keys is None else variable(keys, None))
        self.recipe = recipe

    def product(self, x: jax.Array, weight: nnx.Variable) -> jax.Array:
        """x [.., T, I] times the codes; the gradient goes to `weight`."""
        copies, w = self.gather(), unshard_parameter(weight)
        key = None if self.keys is None else self.keys[...]
        return matmul(x, w, copies[0], copies[-1], self.recipe, key)

    def of_groups(self) -> dict[str, typing.Any]:
        """Arguments of `grouped_matmul`. ValueError if it cannot multiply these copies."""
        if not self.recipe.grouped:
            raise ValueError(
                "train.quantization.recipe=nvfp4, mxfp4 and qat_... need equally many rows for "
                "each expert: set model.moe.backend=batched, or an 8-bit recipe"
            )
        return {"codes": self.gather(), "recipe": self.recipe}

    def gather(self) -> list[Quantized]:
        """The copies gathered over fsdp."""
        return [tuple(unshard_parameter(array) for array in copy) for copy in self.copies]


@dataclasses.dataclass(frozen=True)
class Quantize:
    """The transform (weights/transforms.py) that adds Codes of the matrices that the layers'
    modules name in `quantizable`, except those with sizes that cuBLAS or cuDNN cannot multiply in
    8 bits.

    recipe: None changes nothing. before: arrays on which the collectives here wait. raw_key: the
    step's, for recipes that round gradients stochastically.
    """

    recipe: Recipe | None
    before: typing.Any
    raw_key: jax.Array | None = None

    def enter(self, model):
        """ValueError if a shard cuts a block, or no matrix can be quantized."""
        recipe = self.recipe
        if recipe is None:
            return model
        check_device(recipe, target_device())
        model = copied(model)
        matrices = quantized_matrices(model, recipe)
        if not matrices:
            raise ValueError(
                "train.quantization.recipe has no effect: no matrix of the layers has sizes that "
                f"are multiples of {recipe.multiple}; choose such sizes (model.hidden_size"
                ", model.mlp.ffn_size ...), another recipe (tensorwise: multiples of "
                f"{MULTIPLE}), or none"
            )
        weights = [getattr(module, name) for module, name in matrices]
        quantized = quantized_weights(weights, recipe, self.before)
        raw_key = self.raw_key if recipe.draws else None
        key = None if raw_key is None else jax.random.wrap_key_data(raw_key)
        rows = zip(matrices, weights, quantized, strict=True)
        for number, ((module, name), weight, copies) in enumerate(rows):
            copies = jax.tree.map(functools.partial(gathered, info(weight).cut), copies)
            keys = None if key is None else layer_keys(fold(key, KEY, number), weight)
            module.codes = module.codes | {name: Codes(weight, copies, recipe, keys)}
        return model

    def leave(self, gradients):
        gradients = copied(gradients)
        for module in quantizable_modules(gradients):
            module.codes = {}
        return gradients


def gathered(cut: Cut | None, array: jax.Array) -> jax.Array:
    """Codes or scales of a weight, gathered over the axes of ZeRO-1."""
    return gather(array, cut.axes, cut.dim) if cut and array.ndim > cut.dim else array


def layer_keys(key: jax.Array, weight: nnx.Variable) -> jax.Array:
    """The data of a key for each of this stage's layers of the weight: [.., 2]."""
    layers = weight.shape[: num_stacked(weight)]
    key = fold(key, axis_index((PIPE_AXIS,)))
    keys = [jax.random.key_data(fold(key, layer)) for layer in range(math.prod(layers))]
    return jnp.stack(keys).reshape(*layers, 2)


def quantized_weights(weights: list[nnx.Variable], recipe: Recipe, before) -> list[list[Quantized]]:
    """The copies of each weight (`Codes`)."""
    for weight in weights:
        if recipe.block and any(size % recipe.block for size in weight.shape[-2:]):
            raise ValueError(
                f"train.quantization.recipe has blocks of {recipe.block} weights, so the sizes of "
                f"the {weight.shape[-2]} x {weight.shape[-1]} shard of a matrix "
                f"{info(weight).sizes} must be multiples of {recipe.block}: lower "
                "parallel.fsdp, tensor or (with zero1) data, or set "
                "train.quantization.recipe=tensorwise"
            )
    if recipe.shares is Shares.nothing:
        arrays = after([weight[...] for weight in weights], before)
        return [recipe.weights(w, None) for w in arrays]
    if recipe.shares is Shares.layer:
        largest = max_of_devices([*map(largest_of_layers, weights)], weights, before)
    else:
        largest = _largest_of_columns(weights, before)
    return [recipe.weights(w[...], most) for w, most in zip(weights, largest, strict=True)]


def largest_of_layers(weight: nnx.Variable) -> jax.Array:
    """The largest magnitude in each layer of the local weight."""
    return jnp.max(jnp.abs(weight[...]), axis=range(num_stacked(weight), weight.ndim))


def max_of_devices(maxima: list[jax.Array], weights, before) -> list[jax.Array]:
    """The maxima, one array for each weight, over all devices that hold a part of it: by one
    collective for all stacked layers and one for the others."""
    maxima = list(maxima)
    for has_layers in (False, True):  # stages have different layers; the others are on all
        axes = tuple(axis for axis in MESH_AXES if axis != PIPE_AXIS or not has_layers)
        members = [i for i, weight in enumerate(weights) if (num_stacked(weight) > 0) == has_layers]
        if members:
            before = max_over(after([maxima[i] for i in members], before), axes)
            for i, most in zip(members, before, strict=True):
                maxima[i] = most
    return maxima


def _largest_of_columns(weights: list[nnx.Variable], before) -> list[jax.Array]:
    """[.., 1, O]: the largest magnitude in each column of each weight, over all devices that hold
    a part of the column."""
    mesh, largest = jax.sharding.get_abstract_mesh(), []
    for weight in weights:
        axes, cut = mesh_axes(weight, mesh)[-2], info(weight).cut
        if cut is not None and cut.dim == weight.ndim - 2:
            axes = (*axes, *cut.axes)
        most = jnp.max(jnp.abs(weight[...]), axis=-2, keepdims=True)
        before = most = max_over(after(most, before), axes)
        largest.append(most)
    return largest


def quantizable_modules(model) -> list:
    """The modules of the layers that name matrices in `quantizable`."""
    stack = model.stack
    groups = [group for i, group in enumerate(stack.groups) if i not in stack.unquantized]
    leaves = jax.tree.leaves((groups, model.mtp), is_leaf=_has_matrices)
    return [node for node in leaves if _has_matrices(node)]


def _has_matrices(node) -> bool:
    return hasattr(node, "quantizable")


def quantized_matrices(model, recipe: Recipe) -> list[tuple]:
    """(module, attribute) of each matrix to quantize; fused projections count as one matrix."""
    named = [(module, name) for module in quantizable_modules(model) for name in module.quantizable]
    return [(m, name) for m, name in named if _is_quantized(getattr(m, name), recipe.multiple)]


def _is_quantized(weight: nnx.Variable | None, multiple: int) -> bool:
    if weight is None or weight.get_value() is None:
        return False
    *_, rows, columns = info(weight).sizes
    return rows % multiple == columns % multiple == 0
