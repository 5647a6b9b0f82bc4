"""8-bit copies ("codes") of the layers' weights, which train.fp8 multiplies.

A step quantizes the weights once, so that microbatches share the codes, and fsdp gathers one byte
per weight. The weight stays in the model, because its gradient is computed as usual. Its value is
not read: XLA neither casts it to the compute dtype nor gathers it.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxmeg.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from maxmeg.ops.backend import Device, target_device
from maxmeg.ops.quantized import Recipe, matmul, quantize, scale_of
from maxmeg.parallel.collectives import PIPE_AXIS, after, gather, max_over, unshard_parameter
from maxmeg.parallel.mesh import MESH_AXES

ADA = 8, 9  # compute capability of the first GPUs with 8-bit floats
MULTIPLE = 16  # sizes of matrices that cuBLAS multiplies


class Codes(nnx.Module):
    """The 8-bit copy of a weight [.., I, O], sharded like the weight, with one scale per layer. The
    experts of a layer share a scale."""

    def __init__(self, weight: nnx.Variable, codes, scale, recipe: Recipe):
        self.codes = weight.replace(codes, frozen=True, exact=True)
        self.scale = nnx.Variable(scale, axes=(), frozen=True, exact=True)
        self.recipe = recipe

    def product(self, x: jax.Array, weight: nnx.Variable) -> jax.Array:
        """x [.., T, I] times the codes; the gradient goes to `weight`."""
        return matmul(x, unshard_parameter(weight), *self.whole(), self.recipe)

    def whole(self) -> tuple[jax.Array, jax.Array]:
        """(codes gathered over fsdp, their scale)."""
        return unshard_parameter(self.codes), self.scale[...]


def recipe_of(config: Fp8Config) -> Recipe | None:
    """The recipe that the settings name; None: products are not quantized."""
    if config.recipe is Fp8Recipe.none:
        return None
    return Recipe(backward="float8_e5m2" if config.format is Fp8Format.hybrid else "float8_e4m3fn")


def check_device(device: Device) -> None:
    """ValueError for a GPU that cannot multiply 8-bit floats. CPUs multiply wider floats."""
    if device.is_cuda and (0, 0) < device.capability < ADA:
        major, minor = device.capability
        raise ValueError(
            f"train.fp8 needs compute capability 8.9 (Ada) or newer, found {major}.{minor}: set "
            "train.fp8.recipe=none"
        )


def with_codes(model, reductions, recipe: Recipe | None, before):
    """Return `model` and `reductions` with Codes of the matrices that the layers' modules name in
    `quantizable`, except those with sizes that cuBLAS cannot multiply in 8 bits.

    model: this device's shards (fsdp; in the stack also ZeRO-1). recipe: None changes nothing.
    before: arrays on which the collectives here wait.
    """
    if recipe is None:
        return model, reductions
    check_device(target_device())
    model, reductions = _copy(model), _copy(reductions)
    found = list(zip(quantized_matrices(model), quantized_matrices(reductions), strict=True))
    weights = [getattr(module, name) for (module, name), _ in found]
    scales = _scales(weights, recipe, before)
    for ((module, name), (places, _)), weight, scale in zip(found, weights, scales, strict=True):
        whole = scale.reshape(*scale.shape, *(1,) * (weight.ndim - scale.ndim))
        codes, _ = quantize(weight[...], recipe.forward, whole)
        cut = getattr(places, name).get_value().cut
        if cut is not None and scale.ndim:  # outside of the stack, ZeRO-1's shards are gathered
            codes = gather(codes, cut.axes, cut.dim)
        module.codes = module.codes | {name: Codes(weight, codes, scale, recipe)}
        places.codes = places.codes | {name: Codes(weight, None, None, recipe)}
    return model, reductions


def without_codes(gradients):
    """`gradients` of a model from `with_codes`, with the structure of the model without codes."""
    gradients = _copy(gradients)
    for module in _modules(gradients):
        module.codes = {}
    return gradients


def _scales(weights: list[nnx.Variable], recipe: Recipe, before) -> list[jax.Array]:
    """The scale of each weight and layer, the same on all devices that hold a part of it."""
    stacked = [weight.ndim - len(weight.get_metadata("axes")) for weight in weights]
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
    leaves = jax.tree.leaves((model.stack, model.mtp), is_leaf=_has_matrices)
    return [node for node in leaves if _has_matrices(node)]


def _has_matrices(node) -> bool:
    return hasattr(node, "quantizable")


def quantized_matrices(model) -> list[tuple]:
    """(module, attribute) of each matrix to quantize; fused projections count as one matrix."""
    named = [(module, name) for module in _modules(model) for name in module.quantizable]
    return [(module, name) for module, name in named if _is_quantized(getattr(module, name))]


def _is_quantized(weight: nnx.Variable | None) -> bool:
    if weight is None or weight.get_value() is None:
        return False
    *_, rows, columns = weight.get_metadata("sizes")
    return rows % MULTIPLE == columns % MULTIPLE == 0
