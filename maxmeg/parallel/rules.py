"""The one table from the logical axes of parameters (parameter.py) to mesh axes, and all partition
specs derived from it."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import CONTEXT_AXES, EXPERT_AXES, MESH_AXES, TENSOR_AXES
from maxmeg.parallel.parameter import (
    Cut,
    Side,
    annotate,
    info,
    is_variable,
    logical_axes,
    num_stacked,
)

RULES: dict[str | None, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("pipe", *TENSOR_AXES),
    "layer_vocab": TENSOR_AXES,  # of embeddings of each layer
    "heads": TENSOR_AXES,
    "kv_heads": TENSOR_AXES,
    "mlp": TENSOR_AXES,
    "channels": TENSOR_AXES,
    "expert": EXPERT_AXES,
    "expert_mlp": ("tensor",),
    "embed": (),  # the residual width of every matrix: see fsdp_dim
    "position": (),
    "norm": (),  # vectors along the residual width: small, replicated
    "head_dim": (),
    "latent": (),  # the rank of multi-latent attention: projections to it run on sequence shards
    "lora": (),  # the rank of adapters
    None: (),
}
ZERO1_AXES = ("pipe", "data", "expert", "context")  # ZeRO-1 shards what they replicate


def shard_over_context(module) -> None:
    """Let fsdp shard every parameter of `module` over context too, but not experts: different ones
    lie along context."""
    for variable in jax.tree.leaves(module, is_leaf=is_variable):
        if "expert" not in info(variable).axes:
            annotate(variable, fsdp_axes=("fsdp", *CONTEXT_AXES))


@dataclasses.dataclass(frozen=True)
class KvSlice:
    """Dimension `dim` of a parameter holds `num_heads` key/value heads and is replicated over
    tensor; each device computes with the one head that its query heads attend to."""

    dim: int
    num_heads: int


def kv_slice(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> KvSlice | None:
    """The parameter's KvSlice; None if it has no key/value heads, or at least as many as tensor has
    devices. Then RULES shard the dimension like any other."""
    num_heads = info(variable).num_kv_heads
    tensor = math.prod(mesh.shape[axis] for axis in RULES["kv_heads"])
    if not 0 < num_heads < tensor or "kv_heads" not in info(variable).axes:
        return None
    assert tensor % num_heads == 0  # by config.validate
    return KvSlice(logical_axes(variable).index("kv_heads"), num_heads)


def fsdp_dim(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> int | None:
    """The dimension of a matrix that fsdp shards; None for other parameters.

    The first one (after those of layers and experts) that all devices divide: there gathers and
    scatters need no transposed copy. If there is none, or the parameter has no `sizes`, "embed".
    """
    about, first = info(variable), num_stacked(variable)
    axes = about.axes
    if "embed" not in axes:
        return None
    for dim, size in enumerate(about.sizes):
        devices = math.prod(mesh.shape[axis] for axis in (*RULES[axes[dim]], *about.fsdp_axes))
        if axes[dim] != "expert" and size % devices == 0:
            return first + dim
    return first + axes.index("embed")


def mesh_axes(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> list[tuple[str, ...]]:
    """Mesh axes over which each dimension of the parameter is sharded, without ZeRO-1."""
    axes, replicated = [RULES[name] for name in logical_axes(variable)], kv_slice(variable, mesh)
    if replicated is not None:
        axes[replicated.dim] = ()
    dim = fsdp_dim(variable, mesh)
    if dim is not None:
        axes[dim] = (*axes[dim], *info(variable).fsdp_axes)
    return axes


def zero1_cut(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> Cut | None:
    """The Cut of ZeRO-1: over as many as possible of the devices that compute with the same shard
    of the parameter; tensor and fsdp replicate little but vectors. None without one.

    The dimension is the first (except layers and that of a KvSlice) whose size the devices divide.
    A variable that is not trained has none: it has no optimizer state, and would be gathered every
    step.
    """
    if not info(variable).is_trained:
        return None
    names, sliced = logical_axes(variable), kv_slice(variable, mesh)
    shards = mesh_axes(variable, mesh)
    shard_axes = {axis for axes in shards for axis in axes}
    free = [axis for axis in ZERO1_AXES if axis not in shard_axes and mesh.shape[axis] > 1]
    subsets = [c for n in range(1, len(free) + 1) for c in itertools.combinations(free, n)]

    def devices(axes: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    for axes in sorted(subsets, key=devices, reverse=True):
        for dim, cut in enumerate(shards):
            if names[dim] == "layers" or (sliced is not None and sliced.dim == dim):
                continue
            if parameter_shape(variable)[dim] % devices((*cut, *axes)) == 0:
                return Cut(dim, axes)
    return None


def parameter_shape(variable: nnx.Variable) -> tuple[int, ...]:
    """The shape of the variable or, if it holds the scales of a moment, of that moment, or of the
    parameter whose factor it is."""
    shape, about = variable.shape, info(variable)
    if about.matrix:
        return (*shape[:-2], *about.matrix)
    if about.block_size:
        return (*shape[:-1], shape[-1] * about.block_size)
    return shape


def storage_axes(
    variable: nnx.Variable, mesh: Mesh | AbstractMesh, zero1: bool
) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension of masters, moments and checkpoints, with ZeRO-1.

    Scales of blocks are sharded like their parameter, unless devices share blocks of the last
    dimension: they then hold copies. A factor is sharded by rows, over the longest prefix (left
    factors) or suffix (right factors) of its parameter's row and column axes whose number of
    devices divides the rows.
    """
    axes = mesh_axes(variable, mesh)
    cut = zero1_cut(variable, mesh) if zero1 else None
    if cut is not None:
        axes[cut.dim] = (*axes[cut.dim], *cut.axes)
    if axes and info(variable).block_size:
        shards = math.prod(mesh.shape[axis] for axis in axes[-1])
        axes[-1] = axes[-1] if variable.shape[-1] % shards == 0 else ()
    if side := info(variable).side:
        every, size = (*axes[-2], *axes[-1]), variable.shape[-1]
        starts = range(len(every) + 1)
        runs = [every[n:] if side is Side.right else every[: len(every) - n] for n in starts]
        fits = (run for run in runs if size % math.prod(mesh.shape[axis] for axis in run) == 0)
        axes[-2:] = next(fits), ()
    return axes


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a step makes the computing copy of a parameter from its master, and reduces its gradient.

    cut: where ZeRO-1 gathers the master and scatters the gradient. sum_axes: mesh axes over which
    the master is replicated and the gradient summed.
    dtype: of the gradient in those collectives.
    exact: the parameter is not rounded to the compute dtype.
    kv_slice: the device computes with this part of the parameter; its gradient is zero elsewhere.
    Devices that share a head differentiate different query heads, so the sum over tensor counts
    each head's gradient once.
    """

    cut: Cut | None
    sum_axes: tuple[str, ...]
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    exact: bool = False
    kv_slice: KvSlice | None = None


def reductions(model, mesh: Mesh, zero1: bool):
    """`model` with the Reduction of every variable."""

    def one(variable):
        return variable.replace(reduction(variable, mesh, zero1))

    return jax.tree.map(one, model, is_leaf=is_variable)


def reduction(variable: nnx.Variable, mesh: Mesh | AbstractMesh, zero1: bool) -> Reduction:
    """The Reduction of a parameter."""
    cut = zero1_cut(variable, mesh) if zero1 else None
    shard_axes = {axis for axes in storage_axes(variable, mesh, zero1) for axis in axes}
    summed = tuple(axis for axis in MESH_AXES if axis not in shard_axes)
    about, sliced = info(variable), kv_slice(variable, mesh)
    return Reduction(cut, summed, about.gradient_dtype, about.is_exact, sliced)


def storage_specs(tree, mesh: Mesh, zero1: bool):
    """`tree` with the spec of every variable by storage_axes, and P() for every other array."""

    def spec(leaf):
        if not is_variable(leaf):
            return P()
        if leaf.get_value() is None:  # it belongs to another part
            return leaf
        return leaf.replace(P(*(axes or None for axes in storage_axes(leaf, mesh, zero1))))

    return jax.tree.map(spec, tree, is_leaf=is_variable)
