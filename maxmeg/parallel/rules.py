"""The one table from logical axes to mesh axes, and every partition spec derived from it.

Each parameter is an `nnx.Param`, and each state of a layer another `nnx.Variable`, with metadata
`axes`: a logical name (or None) per dimension. Stacking over layers adds a leading dimension,
"layers".
"""

import dataclasses
import enum
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import CONTEXT_AXES, EXPERT_AXES, MESH_AXES, TENSOR_AXES

RULES: dict[str | None, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("pipe", *TENSOR_AXES),
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
FSDP_AXES = ("fsdp",)
ZERO1_AXES = ("pipe", "data", "expert", "context")  # ZeRO-1 shards what they replicate
STACKING_AXES = ("layers", "expert")  # dimensions along which whole parameters are stacked
BLOCK_SIZE = "block_size"  # metadata of scales: elements along the last dimension with one scale
FACTOR = "factor"  # metadata of factors: the Side
MATRIX = "matrix"  # metadata of factors: the shape (m, n) of the matrix


class Side(enum.Enum):
    """A factor is an array [..., m, m] (left) or [..., n, n] (right) of an optimizer's state for
    parameters [..., m, n], with the metadata of the parameter."""

    left = "left"
    right = "right"


def is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def is_frozen(variable: nnx.Variable) -> bool:
    """Whether the variable belongs to the frozen base of adapters."""
    return variable.get_metadata("frozen", False)


def is_state(variable: nnx.Variable) -> bool:
    """Whether the train step sets the variable from auxiliary values of its layer: it has no
    gradient and no optimizer state, and is never rounded to the compute dtype."""
    return variable.get_metadata("state", False)


def is_exact(variable: nnx.Variable) -> bool:
    """Whether the variable is never rounded to the compute dtype: states, and parameters with
    `exact` in their metadata."""
    return is_state(variable) or variable.get_metadata("exact", False)


def is_trained(variable: nnx.Variable) -> bool:
    """Whether the optimizer updates the variable."""
    return not (is_frozen(variable) or is_state(variable))


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Logical names of the variable's dimensions, with a leading "layers" if it is stacked."""
    axes = variable.get_metadata("axes")
    return ("layers",) * (variable.ndim - len(axes)) + axes


def has_matrices(variable: nnx.Variable) -> bool:
    """Whether the variable is a matrix or a stack of matrices, not of vectors or scalars."""
    axes = variable.get_metadata("axes")
    return sum(axis not in STACKING_AXES for axis in axes) >= 2


def set_kv_heads(module, num_kv_heads: int) -> None:
    """Record the number of key/value heads in the metadata of every parameter of `module` with a
    "kv_heads" dimension. That dimension is never sharded inside a head."""
    for variable in jax.tree.leaves(module, is_leaf=is_variable):
        if "kv_heads" in variable.get_metadata()["axes"]:
            variable.set_metadata(num_kv_heads=num_kv_heads)


def set_gradient_dtype(module, dtype: jnp.dtype) -> None:
    """Record in the metadata of every parameter of `module` the dtype in which its gradient is
    summed over devices."""
    for variable in jax.tree.leaves(module, is_leaf=is_variable):
        variable.set_metadata(gradient_dtype=dtype)


def gradient_dtype(variable: nnx.Variable) -> jnp.dtype:
    """The dtype of `set_gradient_dtype`; float32 without it."""
    return variable.get_metadata().get("gradient_dtype", jnp.dtype(jnp.float32))


def shard_over_context(module) -> None:
    """Record in the metadata of every parameter of `module` that fsdp shards it over context too.
    Not of experts: different ones lie along context."""
    for variable in jax.tree.leaves(module, is_leaf=is_variable):
        if "expert" not in variable.get_metadata()["axes"]:
            variable.set_metadata(fsdp_axes=(*FSDP_AXES, *CONTEXT_AXES))


def fsdp_axes(variable: nnx.Variable) -> tuple[str, ...]:
    """Mesh axes over which fsdp shards a matrix: with `shard_over_context` also context."""
    return variable.get_metadata().get("fsdp_axes", FSDP_AXES)


@dataclasses.dataclass(frozen=True)
class KvSlice:
    """Dimension `dim` of a parameter holds `num_heads` key/value heads and is replicated over
    tensor; each device computes with the one head that its query heads attend to."""

    dim: int
    num_heads: int


def kv_slice(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> KvSlice | None:
    """The parameter's KvSlice; None if it has no key/value heads, or at least as many as tensor has
    devices. Then RULES shard the dimension like any other."""
    num_heads = variable.get_metadata().get("num_kv_heads", 0)
    tensor = math.prod(mesh.shape[axis] for axis in RULES["kv_heads"])
    if not 0 < num_heads < tensor:
        return None
    assert tensor % num_heads == 0  # by config.validate
    return KvSlice(logical_axes(variable).index("kv_heads"), num_heads)


def fsdp_dim(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> int | None:
    """The dimension of a matrix that fsdp shards; None for other parameters.

    The first one (after those of layers and experts) that all devices divide: there gathers and
    scatters need no transposed copy. If there is none, or the metadata have no `sizes` (the global
    size of each dimension, without layers), "embed".
    """
    metadata = variable.get_metadata()
    axes = metadata["axes"]
    if "embed" not in axes:
        return None
    first = variable.ndim - len(axes)  # after layers
    for dim, size in enumerate(metadata.get("sizes", ())):
        devices = math.prod(mesh.shape[axis] for axis in (*RULES[axes[dim]], *fsdp_axes(variable)))
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
        axes[dim] = (*axes[dim], *fsdp_axes(variable))
    return axes


@dataclasses.dataclass(frozen=True)
class Cut:
    """Dimension `dim` of a parameter's master and optimizer state is also sharded over `axes`."""

    dim: int
    axes: tuple[str, ...]


def zero1_cut(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> Cut | None:
    """The Cut of ZeRO-1: over as many as possible of the devices that compute with the same shard
    of the parameter; tensor and fsdp replicate little but vectors. None without one.

    The dimension is the first (except layers and that of a KvSlice) whose size the devices divide.
    A variable that is not trained has none: it has no optimizer state, and would be gathered every
    step.
    """
    if not is_trained(variable):
        return None
    names, sliced = logical_axes(variable), kv_slice(variable, mesh)
    shards = mesh_axes(variable, mesh)
    used = {axis for axes in shards for axis in axes}
    free = [axis for axis in ZERO1_AXES if axis not in used and mesh.shape[axis] > 1]
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
    shape = variable.shape
    if matrix := variable.get_metadata().get(MATRIX):
        return (*shape[:-2], *matrix)
    if block := variable.get_metadata().get(BLOCK_SIZE):
        return (*shape[:-1], shape[-1] * block)
    return shape


def storage_axes(
    variable: nnx.Variable, mesh: Mesh | AbstractMesh, zero1: bool
) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension of masters, moments and checkpoints, with ZeRO-1.

    Scales of blocks are sharded like their parameter, unless devices share blocks of the last
    dimension: they then hold copies. Rows of a factor are sharded over the axes that shard its
    parameter's rows and columns, in this order: over the longest run of them, from the first for
    left factors, up to the last for right ones, whose devices divide the rows.
    """
    axes = mesh_axes(variable, mesh)
    cut = zero1_cut(variable, mesh) if zero1 else None
    if cut is not None:
        axes[cut.dim] = (*axes[cut.dim], *cut.axes)
    if axes and variable.get_metadata().get(BLOCK_SIZE):
        shards = math.prod(mesh.shape[axis] for axis in axes[-1])
        axes[-1] = axes[-1] if variable.shape[-1] % shards == 0 else ()
    if side := variable.get_metadata().get(FACTOR):
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
        cut = zero1_cut(variable, mesh) if zero1 else None
        used = {axis for axes in storage_axes(variable, mesh, zero1) for axis in axes}
        summed = tuple(axis for axis in MESH_AXES if axis not in used)
        sliced = kv_slice(variable, mesh)
        dtype = gradient_dtype(variable)
        return variable.replace(Reduction(cut, summed, dtype, is_exact(variable), sliced))

    return jax.tree.map(one, model, is_leaf=is_variable)


def storage_specs(tree, mesh: Mesh, zero1: bool):
    """`tree` with the spec of every variable by storage_axes, and P() for every other array."""

    def spec(leaf):
        if not is_variable(leaf):
            return P()
        if leaf.get_value() is None:  # it belongs to another part
            return leaf
        return leaf.replace(P(*(axes or None for axes in storage_axes(leaf, mesh, zero1))))

    return jax.tree.map(spec, tree, is_leaf=is_variable)
