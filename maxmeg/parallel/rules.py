"""The one table from logical axes to mesh axes, and every partition spec derived from it.

Each parameter is an `nnx.Param` with metadata `axes`, a logical name (or None) a dimension. A
parameter stacked over layers has one dimension more, in front: "layers".
"""

import dataclasses

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
    """Whether the parameter is not trained, by its metadata."""
    return variable.get_metadata().get("frozen", False)


def is_counted(variable: nnx.Variable) -> bool:
    """Whether the parameter moves by counts of tokens (its gradient), not by the optimizer."""
    return bool(variable.get_metadata().get("counts"))


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Logical names of the variable's dimensions, "layers" in front where it is stacked."""
    axes = variable.get_metadata()["axes"]
    return ("layers",) * (variable.ndim - len(axes)) + axes


def zero1_dim(variable: nnx.Variable, mesh: Mesh) -> int | None:
    """The dimension that is also sharded over `data` for master and optimizer; None if none can.

    The first (after layers) whose size divides by its own mesh axes times data. Of a frozen
    parameter none: it is itself what computes, and would be gathered every step. Nor of a counted
    one, whose gradient is wider.
    """
    names, shape = logical_axes(variable), variable.shape
    if mesh.shape["data"] == 1 or is_frozen(variable) or is_counted(variable):
        return None
    for dim, name in enumerate(names):
        parts = mesh.shape["data"]
        for axis in RULES[name]:
            parts *= mesh.shape[axis]
        if name != "layers" and shape[dim] % parts == 0:
            return dim
    return None


def storage_axes(variable: nnx.Variable, mesh: Mesh, zero1: bool) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension of masters, moments and checkpoints: RULES, and ZeRO-1's data."""
    axes = [RULES[name] for name in logical_axes(variable)]
    dim = zero1_dim(variable, mesh) if zero1 else None
    if dim is not None:
        axes[dim] = (*axes[dim], "data")
    return axes


@dataclasses.dataclass(frozen=True)
class Reduction:
    """What a parameter's gradient needs: a scatter over data along `scatter_dim` (ZeRO-1; the
    master is gathered there), and a sum over the axes on which the parameter is replicated.

    exact: it is not rounded to the compute dtype."""

    scatter_dim: int | None
    sum_axes: tuple[str, ...]
    exact: bool = False


def reductions(model, mesh: Mesh, zero1: bool):
    """`model` with the Reduction of every variable."""

    def one(variable):
        dim = zero1_dim(variable, mesh) if zero1 else None
        used = {axis for axes in storage_axes(variable, mesh, zero1) for axis in axes}
        summed = tuple(axis for axis in MESH_AXES if axis not in used)
        return variable.replace(Reduction(dim, summed, is_counted(variable)))

    return jax.tree.map(one, model, is_leaf=is_variable)


def storage_specs(tree, mesh: Mesh, zero1: bool):
    """`tree` with the spec of every variable by storage_axes, and P() for every other array."""

    def spec(leaf):
        if not is_variable(leaf):
            return P()
        if leaf.get_value() is None:  # the other part's
            return leaf
        return leaf.replace(P(*(axes or None for axes in storage_axes(leaf, mesh, zero1))))

    return jax.tree.map(spec, tree, is_leaf=is_variable)
