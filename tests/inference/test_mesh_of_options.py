"""Meshes that commands make of --tensor, --expert and --data."""

import jax
import pytest

from maxmeg.inference.mesh import local_mesh, serving_mesh
from maxmeg.parallel.mesh import AXES, sizes_of


def test_a_process_has_so_many_devices():
    with pytest.raises(ValueError, match=r"tensor=9 must lie in 1\.\.8"):
        local_mesh(9)


def test_replicas_fill_the_devices_of_several_processes(monkeypatch):
    assert sizes_of(serving_mesh(2, 1, 0)) == dict.fromkeys(AXES, 1) | {"tensor": 2}
    mesh = serving_mesh(1, 2, 3)
    assert sizes_of(mesh) == dict.fromkeys(AXES, 1) | {"expert": 2, "data": 3}
    with pytest.raises(ValueError, match=r"= 12 devices, but the process has 8: choose smaller"):
        serving_mesh(2, 2, 3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = serving_mesh(2, 2, 0)
    assert sizes_of(mesh) == dict.fromkeys(AXES, 1) | {"data": 2, "expert": 2, "tensor": 2}
    for sizes in ((2, 1, 2), (3, 1, 0)):
        with pytest.raises(ValueError, match="the 2 processes have 8: choose sizes whose product"):
            serving_mesh(*sizes)
