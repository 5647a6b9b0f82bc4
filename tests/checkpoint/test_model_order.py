"""Layers in model order on disk, whatever the pipeline in memory."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.checkpoint.layout import evenly_sharded, from_disk, on_disk, to_disk
from maxmeg.parallel.mesh import AXES, make_mesh
from maxmeg.pipeline.layout import arrange

LAYOUTS = [
    (8, 2, (4, 4)),
    (8, 2, (2, 2, 2, 2)),
    (8, 4, (1, 3, 3, 1)),
    (7, 2, (2, 2, 2, 1)),
    (6, 4, (2, 2, 1, 1)),
]


@pytest.mark.parametrize(("layers", "stages", "counts"), LAYOUTS)
def test_there_and_back(layers, stages, counts):
    layout = arrange((layers,), stages, counts)
    mesh = make_mesh(
        dict.fromkeys(AXES, 1) | {"pipe": stages, "fsdp": 2}, jax.devices()[: 2 * stages]
    )
    sharding = NamedSharding(mesh, P("pipe", None, "fsdp"))
    order = np.array(layout.orders[0])
    model = np.random.default_rng(0).normal(size=(layers, 4, 8)).astype(np.float32)
    placed = np.where(order[:, None, None] >= 0, model[np.maximum(order, 0)], 0)
    arrays = {
        "model.stack.groups.0.weight": jax.device_put(placed, sharding),
        "model.embedding.table": jax.device_put(model[0], NamedSharding(mesh, P(None, "fsdp"))),
    }
    abstract = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
        for name, a in arrays.items()
    }
    wanted, saved = on_disk(abstract, layout), to_disk(arrays, layout)
    for name, array in saved.items():
        assert array.shape == wanted[name].shape
        assert array.sharding.is_equivalent_to(wanted[name].sharding, array.ndim)
    np.testing.assert_array_equal(saved["model.stack.groups.0.weight"], model)
    assert saved["model.embedding.table"] is arrays["model.embedding.table"]
    assert layout.trivial == (saved["model.stack.groups.0.weight"] is next(iter(arrays.values())))
    again = from_disk(saved, abstract, layout)
    for name, array in again.items():
        assert array.sharding.is_equivalent_to(abstract[name].sharding, array.ndim)
    np.testing.assert_array_equal(again["model.stack.groups.0.weight"], placed)


def test_axes_that_do_not_divide_the_layers_move_to_another_dimension():
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"pipe": 4, "fsdp": 2}, jax.devices())
    sharding = NamedSharding(mesh, P("pipe", "fsdp", None))
    assert evenly_sharded((8, 6, 5), sharding).spec == P("pipe", "fsdp", None)
    assert evenly_sharded((6, 16, 5), sharding).spec == P(None, ("fsdp", "pipe"), None)
    assert evenly_sharded((6, 6, 12), sharding).spec == P(None, "fsdp", "pipe")
    assert evenly_sharded((6, 6, 5), sharding).spec == P(None, "fsdp", None)
    assert evenly_sharded((6, 6), NamedSharding(mesh, P("pipe"))).spec == P(None, None)
