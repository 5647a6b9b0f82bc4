"""The device mesh: six named axes, slowest first, so that groups are Megatron-LM's.

The mesh divides the last axis, tensor, into `fold` and `tensor`. Experts may be cut over fewer
devices than the rest of the model: then they are cut over `tensor` alone, and different experts lie
along `fold`. Everything else is cut over both.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
MESH_AXES = (*AXES[:-1], "fold", "tensor")
TENSOR_AXES = ("fold", "tensor")
EXPERT_AXES = ("expert", "context", "fold")  # where experts lie
EXPERT_TENSOR_AXES = ("tensor",)  # devices that share each expert
BATCH_AXES = ("data", "fsdp", "expert")  # the batch dimension is sharded over these
CONTEXT_AXES = ("context",)  # the sequence dimension of a batch is sharded over these
TOKEN_AXES = (*BATCH_AXES, *CONTEXT_AXES)  # devices along these hold different tokens


def make_mesh(sizes: dict[str, int], devices: list | None = None, fold: int = 1) -> Mesh:
    """Mesh with `sizes[axis]` devices along each of AXES, in rank order. fold: number of groups
    with different experts along tensor.

    With tensor=2, pipe=4, data=2 on 16 devices the groups are Megatron-LM's: tensor [0,1], [2,3];
    data [0,2], [1,3]; pipe [0,4,8,12].
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, fold)
    if int(np.prod(shape)) != len(devices):
        raise ValueError(
            f"the mesh {sizes} needs {int(np.prod(shape))} devices, but there are {len(devices)}: "
            "change config.parallel so that the product of its sizes is the number of devices"
        )
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=kinds)


def mesh_shape(sizes: dict[str, int], fold: int = 1) -> tuple[int, ...]:
    """Sizes of MESH_AXES."""
    return (*(sizes[axis] for axis in AXES[:-1]), fold, sizes["tensor"] // fold)


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """Sizes of AXES, fold included in tensor."""
    sizes = {axis: mesh.shape[axis] for axis in AXES}
    return sizes | {"tensor": sizes["tensor"] * mesh.shape["fold"]}


def batch_shards(mesh: Mesh) -> int:
    """Number of shards of the batch dimension."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
