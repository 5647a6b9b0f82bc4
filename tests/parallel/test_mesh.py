"""Groups of the mesh."""

import jax
import numpy as np
import pytest

from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.validate import axis_sizes
from maxmeg.parallel.mesh import AXES, EXPERT_AXES, MESH_AXES, TENSOR_AXES, make_mesh


def mesh_with(**sizes: int):
    return make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices()[: np.prod(list(sizes.values()))])


def groups(mesh, *axes: str) -> list[list[int]]:
    """Device numbers that differ along these axes only, as Megatron-LM lists its groups."""
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    last = [MESH_AXES.index(axis) for axis in axes]
    others = [i for i in range(len(MESH_AXES)) if i not in last]
    rows = ids.transpose(*others, *last).reshape(-1, np.prod([mesh.shape[axis] for axis in axes]))
    return sorted(rows.tolist())


def test_groups_are_megatrons():
    mesh = mesh_with(tensor=2, data=2, pipe=2)
    assert groups(mesh, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(mesh, "data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(mesh, "pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    mesh = mesh_with(tensor=2, context=2, data=2)
    assert groups(mesh, "context") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(mesh, "data") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("options", "experts", "copies"),
    [
        ({"tensor": 2, "context": 2, "data": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5]]),
        ({"data": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5]]),
    ],
)
def test_folded_experts_lie_as_megatrons(options, experts, copies):
    """Expert parallelism 4, expert tensor parallelism 1; what reduces their gradients is data."""
    parallel = ParallelConfig(**options, fsdp=1, expert=4, expert_tensor=1)
    mesh = make_mesh(axis_sizes(parallel, 8), jax.devices(), parallel.fold)
    assert groups(mesh, *EXPERT_AXES) == experts
    width = options.get("tensor", 1)
    assert groups(mesh, *TENSOR_AXES) == np.arange(8).reshape(-1, width).tolist()
    assert groups(mesh, "data")[:2] == copies


def test_experts_that_are_cut_less_than_the_model():
    """Tensor parallelism 4, of experts 2, expert parallelism 4: as Megatron-LM's ETP 2, EP 4."""
    parallel = ParallelConfig(data=1, fsdp=1, tensor=4, expert=4, expert_tensor=2)
    mesh = make_mesh(axis_sizes(parallel, 8), jax.devices(), parallel.fold)
    assert groups(mesh, *TENSOR_AXES) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(mesh, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(mesh, *EXPERT_AXES) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_wrong_number_of_devices_is_refused():
    with pytest.raises(ValueError, match="needs 3 devices, but there are 8"):
        make_mesh(dict.fromkeys(AXES, 1) | {"tensor": 3})
