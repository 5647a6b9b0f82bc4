"""8-bit copies ("codes") of the layers' weights, which train.quantization multiplies.

A step quantizes the weights once, so that microbatches share the codes, and fsdp gathers one byte
per weight. The weight stays in the model, because its gradient is computed as usual. Its value is
not read: XLA neither casts it to the compute dtype nor gathers it.

mxfp8 keeps two quantized copies of each weight, because forward sums over its rows and backward
over its columns. FSDP gathers the copy that a pass uses (8.25 bits per weight instead of 16).
Together they take as much memory as the 16-bit weight. Blockwise uses one copy for both passes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxmeg.ops.backend import target_device
from maxmeg.ops.quantized import Quantized, Recipe, check_device, matmul, quantize, scale_of
from maxmeg.parallel.collectives import PIPE_AXIS, after, gather, max_over, unshard_parameter
from maxmeg.parallel.mesh import MESH_AXES

MULTIPLE = 16  # sizes of matrices that cuBLAS multiplies


class Codes(nnx.Module):
    """The 8-bit copies of a weight [.., I, O], sharded like the weight.

    quantized: tensorwise, one copy with one scale per layer, shared by a layer's experts; mxfp8, a
    copy for forward and one for backward; blockwise, one copy for both.
    """

    def __init__(self, weight: nnx.Variable, quantized: list[tuple], recipe: Recipe):
        def sharded(array) -> nnx.Variable:
            return weight.replace(array, frozen=True, exact=True)

        def scalar(array) -> nnx.Variable:
            return nnx.Variable(array, axes=(), frozen=True, exact=True)

        self.codes = nnx.List([sharded(codes) for codes, _ in quantized])
        place = sharded if recipe.block else scalar
        self.scales = nnx.List([place(scale) for _, scale in quantized])
        self.recipe = recipe

    def product(self, x: jax.Array, weight: nnx.Variable) -> jax.Array:
        """x [.., T, I] times the codes; the gradient goes to `weight`."""
        copies = self.whole()
        return matmul(x, unshard_parameter(weight), copies[0], copies[-1], self.recipe)

    def whole(self) -> list[Quantized]:
        """The copies gathered over fsdp."""
        pairs = zip(self.codes, self.scales, strict=True)
        return [(unshard_parameter(codes), unshard_parameter(scale)) for codes, scale in pairs]


def with_codes(model, reductions, recipe: Recipe | None, before):
    """Return `model` and `reductions` with Codes of the matrices that the layers' modules name in
    `quantizable`, except those with sizes that cuBLAS or cuDNN cannot multiply in 8 bits.

    model: this device's shards (fsdp; in the stack also ZeRO-1). recipe: None changes nothing.
    before: arrays on which the collectives here wait. ValueError if a shard cuts a block.
    """
    if recipe is None:
        return model, reductions
    check_device(recipe, target_device())
    model, reductions = _copy(model), _copy(reductions)
    sides = [quantized_matrices(side, recipe) for side in (model, reductions)]
    weights = [getattr(module, name) for module, name in sides[0]]
    quantized = (in_blocks if recipe.block else in_whole)(weights, recipe, before)
    for (module, name), (places, _), weight, copies in zip(*sides, weights, quantized, strict=True):
        cut, in_stack = getattr(places, name).get_value().cut, _layers(weight) > 0
        if cut is not None and in_stack:  # elsewhere the shards of ZeRO-1 have been gathered

            def whole(array, cut=cut):
                return gather(array, cut.axes, cut.dim) if array.ndim > cut.dim else array

            copies = jax.tree.map(whole, copies)
        module.codes = module.codes | {name: Codes(weight, copies, recipe)}
        nothing = [(None, None)] * len(copies)
        places.codes = places.codes | {name: Codes(weight, nothing, recipe)}
    return model, reductions


def without_codes(gradients):
    """`gradients` of a model from `with_codes`, with the structure of the model without codes."""
    gradients = _copy(gradients)
    for module in _modules(gradients):
        module.codes = {}
    return gradients


def in_blocks(weights: list[nnx.Variable], recipe: Recipe, before) -> list[list[Quantized]]:
    """Quantize each weight in blocks: the copies for forward and for backward (`Codes`)."""
    for weight in weights:
        if any(size % recipe.block for size in weight.shape[-2:]):
            raise ValueError(
                f"train.quantization.recipe has blocks of {recipe.block} weights, so the sizes of "
                f"the {weight.shape[-2]} x {weight.shape[-1]} shard of a matrix "
                f"{weight.get_metadata('sizes')} must be multiples of {recipe.block}: lower "
                "parallel.fsdp, tensor or (with zero1) data, or set "
                "train.quantization.recipe=tensorwise"
            )
    arrays = after([weight[...] for weight in weights], before)
    return [recipe.weights(w) for w in arrays]


def in_whole(weights: list[nnx.Variable], recipe: Recipe, before) -> list[list[Quantized]]:
    """Quantize each weight with one scale per layer."""
    copies = []
    for weight, scale in zip(weights, _scales(weights, recipe, before), strict=True):
        whole = scale.reshape(*scale.shape, *(1,) * (weight.ndim - scale.ndim))
        copies.append([(quantize(weight[...], recipe.forward, whole)[0], scale)])
    return copies


def _layers(weight: nnx.Variable) -> int:
    """Number of leading dimensions over which layers are stacked."""
    return weight.ndim - len(weight.get_metadata("axes"))


def _scales(weights: list[nnx.Variable], recipe: Recipe, before) -> list[jax.Array]:
    """The scale of each weight and layer, the same on all devices that hold a part of it."""
    stacked = [_layers(weight) for weight in weights]
    largest = [
        jnp.max(jnp.abs(weight[...]), axis=range(layers, weight.ndim))
        for weight, layers in zip(weights, stacked, strict=True)
    ]
    for has_layers in (False, True):  # stages have different layers; the others are on all
        axes = tuple(axis for axis in MESH_AXES if axis != PIPE_AXIS or not has_layers)
        members = [i for i, layers in enumerate(stacked) if bool(layers) == has_layers]
        if members:
            before = max_over(after([largest[i] for i in members], before), axes)
            for i, most in zip(members, before, strict=True):
                largest[i] = most
    return [scale_of(most, recipe.forward) for most in largest]


def _copy(tree):
    return jax.tree.map(lambda leaf: leaf, tree)  # new modules around the same arrays


def _modules(model) -> list:
    """The modules of the layers that name matrices in `quantizable`."""
    stack = model.stack
    groups = [group for i, group in enumerate(stack.groups) if i not in stack.unquantized]
    leaves = jax.tree.leaves((groups, model.mtp), is_leaf=_has_matrices)
    return [node for node in leaves if _has_matrices(node)]


def _has_matrices(node) -> bool:
    return hasattr(node, "quantizable")


def quantized_matrices(model, recipe: Recipe) -> list[tuple]:
    """(module, attribute) of each matrix to quantize; fused projections count as one matrix."""
    named = [(module, name) for module in _modules(model) for name in module.quantizable]
    multiple = recipe.block or MULTIPLE
    return [(m, name) for m, name in named if _is_quantized(getattr(m, name), multiple)]


def _is_quantized(weight: nnx.Variable | None, multiple: int) -> bool:
    if weight is None or weight.get_value() is None:
        return False
    *_, rows, columns = weight.get_metadata("sizes")
    return rows % multiple == columns % multiple == 0
