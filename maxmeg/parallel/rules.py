"""The one table from logical axes to mesh axes, and every partition spec derived from it.

Each parameter is an `nnx.Param` with metadata `axes`, a logical name (or None) a dimension. A
parameter stacked over layers has one dimension more, in front: "layers".
"""

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RULES: dict[str | None, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("pipe", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),  # the residual width of every matrix
    "position": (),
    "norm": (),  # vectors along the residual width: small, replicated
    "head_dim": (),
    None: (),
}


def is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Logical names of the variable's dimensions, "layers" in front where it is stacked."""
    axes = variable.get_metadata()["axes"]
    return ("layers",) * (variable[...].ndim - len(axes)) + axes


def compute_spec(variable: nnx.Variable) -> P:
    """How the variable lies on the mesh while layers use it (fsdp shards gathered at use)."""
    return P(*(RULES[name] or None for name in logical_axes(variable)))


def zero1_dim(variable: nnx.Variable, mesh: Mesh) -> int | None:
    """The dimension that is also sharded over `data` for master and optimizer; None if none can.

    The first (after layers) whose size divides by its own mesh axes times data.
    """
    names, shape = logical_axes(variable), variable[...].shape
    if mesh.shape["data"] == 1:
        return None
    for dim, name in enumerate(names):
        parts = mesh.shape["data"]
        for axis in RULES[name]:
            parts *= mesh.shape[axis]
        if name != "layers" and shape[dim] % parts == 0:
            return dim
    return None


def storage_spec(variable: nnx.Variable, mesh: Mesh, zero1: bool) -> P:
    """How master weights, optimizer moments and checkpoints lie: ZeRO-1 adds `data`."""
    spec = [RULES[name] for name in logical_axes(variable)]
    dim = zero1_dim(variable, mesh) if zero1 else None
    if dim is not None:
        spec[dim] = (*spec[dim], "data")
    return P(*(axes or None for axes in spec))


def compute_specs(tree):
    """`tree` with a compute_spec for every variable and P() for every other array."""

    def spec(leaf):
        return leaf.replace(compute_spec(leaf)) if is_variable(leaf) else P()

    return jax.tree.map(spec, tree, is_leaf=is_variable)


def storage_specs(tree, mesh: Mesh, zero1: bool):
    """`tree` with a storage_spec for every variable and P() for every other array."""

    def spec(leaf):
        return leaf.replace(storage_spec(leaf, mesh, zero1)) if is_variable(leaf) else P()

    return jax.tree.map(spec, tree, is_leaf=is_variable)


def shardings(specs, mesh: Mesh):
    """NamedShardings for a tree of specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )
