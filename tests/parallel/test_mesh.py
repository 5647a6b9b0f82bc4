"""Groups of the mesh, and which rows of a batch each process reads."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxmeg.config.parallel import ParallelConfig
from maxmeg.config.validate import axis_sizes
from maxmeg.parallel.mesh import (
    AXES,
    EXPERT_AXES,
    MESH_AXES,
    TENSOR_AXES,
    local_mesh,
    make_mesh,
    serving_mesh,
    sizes_of,
)
from maxmeg.parallel.placement import LocalRows, batch_spec, local_rows, place, place_flag


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
    with pytest.raises(ValueError, match=r"tensor=9 must lie in 1\.\.8"):
        local_mesh(9)


def test_replicas_fill_the_devices_of_several_processes(monkeypatch):
    assert sizes_of(serving_mesh(2, 1, 0)) == dict.fromkeys(AXES, 1) | {"tensor": 2}
    mesh = serving_mesh(1, 2, 3)
    assert sizes_of(mesh) == dict.fromkeys(AXES, 1) | {"expert": 2, "data": 3}
    with pytest.raises(ValueError, match=r"= 12 devices, but the process has 8: choose smaller"):
        serving_mesh(2, 2, 3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert groups(serving_mesh(2, 2, 0), "data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for sizes in ((2, 1, 2), (3, 1, 0)):
        with pytest.raises(ValueError, match="the 2 processes have 8: choose sizes whose product"):
            serving_mesh(*sizes)


@pytest.mark.parametrize("micro_batch_size", [0, 1, 3])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_processes_divide_a_batch(shards, micro_batch_size):
    size = 24
    microbatches = LocalRows(shards, (0,), micro_batch_size).microbatches(size)
    parts = [LocalRows(shards, (shard,), micro_batch_size)(size) for shard in range(shards)]
    assert sorted(np.concatenate(parts)) == list(range(size))
    each = size // shards // microbatches
    for shard, rows in enumerate(parts):  # microbatch-major, rank-minor
        expected = [m * each * shards + shard * each for m in range(microbatches)]
        assert rows.reshape(microbatches, each)[:, 0].tolist() == expected
        assert (np.diff(rows.reshape(microbatches, each), axis=1) == 1).all()


def test_batch_lies_as_its_spec_says():
    mesh = mesh_with(data=2, fsdp=2, tensor=2)
    rows = local_rows(mesh, 2)
    assert rows.owned == (0, 1, 2, 3) and rows.microbatches(16) == 2
    values = np.arange(16 * 3).reshape(16, 3)
    placed = place(values[rows(16)], rows, mesh, 16)
    assert placed.sharding == NamedSharding(mesh, batch_spec(3))
    np.testing.assert_array_equal(placed, values.reshape(2, 8, 3))
    assert int(place_flag(True, mesh).sum()) == 8 and not place_flag(False, mesh).any()
