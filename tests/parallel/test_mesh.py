"""Groups of the mesh, and which rows of a batch each process reads."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxmeg.parallel.mesh import AXES, local_mesh, make_mesh
from maxmeg.parallel.placement import LocalRows, batch_spec, local_rows, place_batch, place_flag


def mesh_with(**sizes: int):
    return make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices()[: np.prod(list(sizes.values()))])


def groups(mesh, axis: str) -> list[list[int]]:
    """Device numbers that differ along one axis only, as Megatron-LM lists its groups."""
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    rows = np.moveaxis(ids, AXES.index(axis), -1).reshape(-1, mesh.shape[axis])
    return sorted(rows.tolist())


def test_groups_are_megatrons():
    mesh = mesh_with(tensor=2, data=2, pipe=2)
    assert groups(mesh, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(mesh, "data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(mesh, "pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    mesh = mesh_with(tensor=2, context=2, data=2)
    assert groups(mesh, "context") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(mesh, "data") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_wrong_number_of_devices():
    with pytest.raises(ValueError, match="needs 3 devices and 8 are here"):
        make_mesh(dict.fromkeys(AXES, 1) | {"tensor": 3})
    with pytest.raises(ValueError, match=r"tensor=9 must lie in 1\.\.8"):
        local_mesh(9)


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
    placed = place_batch({"x": values[rows(16)]}, rows, mesh, 16)["x"]
    assert placed.sharding == NamedSharding(mesh, batch_spec(3))
    np.testing.assert_array_equal(placed, values.reshape(2, 8, 3))
    assert int(place_flag(True, mesh).sum()) == 8 and not place_flag(False, mesh).any()
