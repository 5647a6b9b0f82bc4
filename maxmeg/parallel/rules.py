"""The one table from logical axes to mesh axes, and every partition spec derived from it.

Each parameter is an `nnx.Param`, and each state of a layer another `nnx.Variable`, with metadata
`axes`: a logical name (or None) per dimension. Stacking over layers adds a leading dimension,
"layers".
"""

import dataclasses
import math

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxmeg.parallel.mesh import EXPERT_AXES, MESH_AXES, TENSOR_AXES

RULES: dict[str | None, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("pipe", *TENSOR_AXES),
    "heads": TENSOR_AXES,
    "kv_heads": TENSOR_AXES,
    "mlp": TENSOR_AXES,
    "channels": TENSOR_AXES,
    "expert": EXPERT_AXES,
    "expert_mlp": ("tensor",),
    "embed": ("fsdp",),  # the residual width of every matrix
    "position": (),
    "norm": (),  # vectors along the residual width: small, replicated
    "head_dim": (),
    "latent": (),  # the rank of multi-latent attention: projections to it run on sequence shards
    "lora": (),  # the rank of adapters
    None: (),
}


def is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def is_frozen(variable: nnx.Variable) -> bool:
    """Whether the variable belongs to the frozen base of adapters."""
    return variable.get_metadata().get("frozen", False)


def is_state(variable: nnx.Variable) -> bool:
    """Whether the train step sets the variable from auxiliary values of its layer: it has no
    gradient and no optimizer state, and is never rounded to the compute dtype."""
    return variable.get_metadata().get("state", False)


def is_trained(variable: nnx.Variable) -> bool:
    """Whether the optimizer updates the variable."""
    return not (is_frozen(variable) or is_state(variable))


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Logical names of the variable's dimensions, with a leading "layers" if it is stacked."""
    axes = variable.get_metadata()["axes"]
    return ("layers",) * (variable.ndim - len(axes)) + axes


def set_kv_heads(module, num_kv_heads: int) -> None:
    """Record the number of key/value heads in the metadata of every parameter of `module` with a
    "kv_heads" dimension. That dimension is never sharded inside a head."""
    for variable in jax.tree.leaves(module, is_leaf=is_variable):
        if "kv_heads" in variable.get_metadata()["axes"]:
            variable.set_metadata(num_kv_heads=num_kv_heads)


@dataclasses.dataclass(frozen=True)
class KvSlice:
    """Dimension `dim` of a parameter holds `num_heads` key/value heads and is replicated over
    tensor; each device computes with the one head that its query heads attend to."""

    dim: int
    num_heads: int


def kv_slice(variable: nnx.Variable, mesh: Mesh) -> KvSlice | None:
    """The parameter's KvSlice; None if it has no key/value heads, or at least as many as tensor has
    devices. Then RULES shard the dimension like any other."""
    num_heads = variable.get_metadata().get("num_kv_heads", 0)
    tensor = math.prod(mesh.shape[axis] for axis in RULES["kv_heads"])
    if not 0 < num_heads < tensor:
        return None
    assert tensor % num_heads == 0  # by config.validate
    return KvSlice(logical_axes(variable).index("kv_heads"), num_heads)


def mesh_axes(variable: nnx.Variable, mesh: Mesh) -> list[tuple[str, ...]]:
    """Mesh axes over which each dimension of the parameter is sharded, without ZeRO-1."""
    axes, replicated = [RULES[name] for name in logical_axes(variable)], kv_slice(variable, mesh)
    if replicated is not None:
        axes[replicated.dim] = ()
    return axes


def zero1_dim(variable: nnx.Variable, mesh: Mesh) -> int | None:
    """The dimension that ZeRO-1 also shards over `data` for master and optimizer; None without one.

    It is the first dimension (except layers and that of a KvSlice) whose size is divisible by its
    mesh axes times data. A variable that is not trained has none: it has no optimizer state, and
    would be gathered every step.
    """
    names, shape = logical_axes(variable), variable.shape
    if mesh.shape["data"] == 1 or not is_trained(variable):
        return None
    sliced = kv_slice(variable, mesh)
    for dim, axes in enumerate(mesh_axes(variable, mesh)):
        parts = mesh.shape["data"] * math.prod(mesh.shape[axis] for axis in axes)
        if names[dim] == "layers" or (sliced is not None and sliced.dim == dim):
            continue
        if shape[dim] % parts == 0:
            return dim
    return None


def storage_axes(variable: nnx.Variable, mesh: Mesh, zero1: bool) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension of masters, moments and checkpoints, with ZeRO-1."""
    axes = mesh_axes(variable, mesh)
    dim = zero1_dim(variable, mesh) if zero1 else None
    if dim is not None:
        axes[dim] = (*axes[dim], "data")
    return axes


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a step makes the computing copy of a parameter from its master, and reduces its gradient.

    scatter_dim: dimension along which ZeRO-1 gathers the master over data and scatters the
    gradient. sum_axes: mesh axes over which the parameter is replicated and its gradient summed.
    exact: the parameter is not rounded to the compute dtype.
    kv_slice: the device computes with this part of the parameter; its gradient is zero elsewhere.
    Devices that share a head differentiate different query heads, so the sum over tensor counts
    each head's gradient once.
    """

    scatter_dim: int | None
    sum_axes: tuple[str, ...]
    exact: bool = False
    kv_slice: KvSlice | None = None


def reductions(model, mesh: Mesh, zero1: bool):
    """`model` with the Reduction of every variable."""

    def one(variable):
        dim = zero1_dim(variable, mesh) if zero1 else None
        used = {axis for axes in storage_axes(variable, mesh, zero1) for axis in axes}
        summed = tuple(axis for axis in MESH_AXES if axis not in used)
        sliced = kv_slice(variable, mesh)
        return variable.replace(Reduction(dim, summed, is_state(variable), sliced))

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
