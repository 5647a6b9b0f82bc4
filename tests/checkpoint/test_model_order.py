"""Layers in model order on disk, whatever the pipeline in memory; nothing is gathered for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmeg.checkpoint.integrity import digest_all
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.storage import row_orders
from maxmeg.parallel.mesh import AXES, make_mesh
from maxmeg.pipeline.layout import arrange

LAYOUTS = [
    (8, 2, (2, 2, 2, 2)),
    (8, 4, (1, 3, 3, 1)),
    (7, 2, (2, 2, 2, 1)),
    (6, 4, (2, 2, 1, 1)),
]
COMMUNICATION = re.compile(r"(all-gather|all-to-all|collective-permute|reduce-scatter)")


def placed(layers: int, stages: int, counts: tuple[int, ...]):
    """(layout, sharding, arrays in model order, their rows as the pipeline places them)."""
    layout = arrange((layers,), stages, counts)
    sizes = dict.fromkeys(AXES, 1) | {"pipe": stages, "fsdp": 2}
    sharding = NamedSharding(make_mesh(sizes, jax.devices()[: 2 * stages]), P("pipe", None, "fsdp"))
    order = np.array(layout.orders[0])
    model = np.random.default_rng(0).normal(size=(layers, 4, 8)).astype(np.float32)
    return layout, sharding, model, np.where(order[:, None, None] >= 0, model[order], 0)


def tree_of(values, sharding) -> dict:
    weight = jax.device_put(values, sharding)
    table = jax.device_put(jnp.ones((4, 8)), NamedSharding(sharding.mesh, P(None, "fsdp")))
    return {"model": {"stack": {"groups": {"0": {"weight": weight}}}, "table": table}}


@pytest.mark.parametrize(("layers", "stages", "counts"), LAYOUTS)
def test_a_checkpoint_does_not_depend_on_the_pipeline(folder, layers, stages, counts):
    layout, sharding, model, rows = placed(layers, stages, counts)
    names = ["model.stack.groups.0.weight", "model.table"]
    orders = row_orders(names, layout)
    assert set(orders) == (set() if layout.trivial else {"model/stack/groups/0/weight"})
    plain = NamedSharding(sharding.mesh, P(None, "fsdp"))
    trees = {"placed": tree_of(rows, sharding), "plain": tree_of(model, plain)}
    saved = {
        "placed": Checkpointer(folder / "placed", asynchronous=False),
        "plain": Checkpointer(folder / "plain", asynchronous=False),
    }
    known = {"placed": orders, "plain": {}}
    for name, tree in trees.items():
        assert saved[name].save(1, tree, {}, known[name])
    assert saved["placed"].manifest(1).tensors == saved["plain"].manifest(1).tensors
    for source in saved.values():  # each restores as either
        for name, tree in trees.items():
            wanted = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
            )
            restored, _ = source.restore(1, wanted, orders=known[name])
            for array, expected in zip(
                jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True
            ):
                np.testing.assert_array_equal(array, expected)
                assert array.sharding == expected.sharding


@pytest.mark.parametrize(("layers", "stages", "counts"), LAYOUTS[1:])
def test_digests_are_computed_where_the_layers_are(layers, stages, counts):
    """The one program of a save or restore: it sends sums alone, and holds no second copy."""
    layout, sharding, _, rows = placed(layers, stages, counts)
    shape = jax.ShapeDtypeStruct((len(rows), 256, 256), jnp.float32, sharding=sharding)
    compiled = digest_all.lower([shape], [np.array(layout.orders[0], np.int32)]).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text and memory
    assert not COMMUNICATION.search(text)
    reduced = re.findall(r"= (.*) all-reduce\(", text)
    assert reduced and set(re.findall(r"\w+\[[\d,]*\]", " ".join(reduced))) <= {"u32[]", "u32[2]"}
    shard = np.prod(sharding.shard_shape(shape.shape)) * 4
    assert memory.temp_size_in_bytes <= 2 * shard + 1024
