"""Save and restore: bitwise on any mesh, what is kept, what a failure leaves behind."""

import dataclasses
import itertools
import logging
import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax_checkpoints import restore_latest

from maxmeg.checkpoint import folders, manager, storage
from maxmeg.checkpoint.integrity import CorruptCheckpointError
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.places import COMMITTED, place_of, sizes_of
from maxmeg.runtime.object_storage import is_remote


def make_mesh(*shape):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def put(value, mesh, *spec):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def make_tree(mesh, seed=0):
    """Every dtype a training state has, among them NaN payloads and negative zeros."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (16, 8), dtype=np.uint32)
    half = jnp.asarray(rng.standard_normal((8, 4)), jnp.bfloat16).at[0, 0].set(-0.0)
    return {
        "model": {
            "w": put(bits.view(np.float32), mesh, "x", "y"),
            "half": put(half, mesh, None, "x"),
            "zeros": put(np.zeros((8, 2), np.float32), mesh, "x"),
            "bias": put(rng.standard_normal(7).astype(np.float32), mesh),
        },
        "optimizer": {"count": put(np.int32(seed), mesh), "empty": {}},
        "seen": put(np.uint32(2**32 - 1 - seed), mesh),
        "flag": put(np.array([True, False]), mesh),
        "rng": put(np.asarray(jax.random.key_data(jax.random.key(seed))), mesh),
    }


def abstract(tree, mesh=None, **specs):
    def leaf(x):
        spec = specs.get(str(x.ndim), P())
        sharding = NamedSharding(mesh, spec) if mesh else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def two_steps(folder):
    """A folder with steps 1 and 2, and the trees."""
    mesh = make_mesh(2, 1)
    trees = {step: make_tree(mesh, step) for step in (1, 2)}
    with_saved = Checkpointer(folder)
    for step, tree in trees.items():
        assert with_saved.save(step, tree, {"step": step})
    assert with_saved.wait()
    return with_saved, trees


def files_of(checkpointer, step):
    root = checkpointer.folder_of(step)
    return [root / name for name in sorted(sizes_of(root))]


def key_of(path):
    """Its path, or in object storage its key."""
    return str(path).partition("://")[2].partition("/")[2] or str(path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 4)])
def test_restores_bitwise_on_any_mesh(folder, shape):
    tree = make_tree(make_mesh(4, 2))
    checkpointer = Checkpointer(folder)
    assert checkpointer.save(7, tree, {"samples": 3, "loss": [0.1, None, float("nan")]})
    mesh = make_mesh(*shape)
    wanted = abstract(tree, mesh, **{"2": P(("x",), "y")} if shape != (2, 4) else {})
    restored, metadata = checkpointer.restore(7, wanted)
    assert_same_bits(restored, tree)
    assert restored["optimizer"]["empty"] == {}
    assert metadata["samples"] == 3 and checkpointer.manifest(7).metadata["loss"][:2] == [0.1, None]
    assert restored["model"]["w"].sharding.is_equivalent_to(wanted["model"]["w"].sharding, 2)


def test_buffers_may_be_donated_after_save(folder):
    tree = make_tree(make_mesh(4, 2))
    expected = jax.tree.map(lambda x: np.array(x), tree)
    wanted = abstract(tree)
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, tree, {})
    step = jax.jit(
        lambda t: jax.tree.map(lambda x: x ^ x if x.dtype == bool else x * 0, t), donate_argnums=0
    )
    jax.block_until_ready(step(tree))
    assert_same_bits(checkpointer.restore(1, wanted)[0], expected)


def test_large_replicated_and_single_device_arrays(folder, monkeypatch):
    """Replicas write slices; one device's array is cut into chunks; devices are mixed."""
    monkeypatch.setattr(storage, "MIN_REPLICA_BYTES", 1 << 12)
    monkeypatch.setattr(storage, "CHUNK_BYTES", 1 << 15)
    values = np.random.default_rng(0).standard_normal((256, 128), np.float32)
    mesh = make_mesh(4, 2)
    tree = {"all": put(values, mesh), "one": jnp.asarray(values), "half": put(values, mesh, "y")}
    checkpointer = Checkpointer(folder)
    assert checkpointer.save(1, tree, {}) and checkpointer.wait()
    sharding = NamedSharding(make_mesh(2, 4), P("y", "x"))
    struct = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
    assert_same_bits(checkpointer.restore(1, dict.fromkeys(tree, struct))[0], tree)


def test_keeps_last_and_every(folder):
    tree = {"w": jnp.arange(4.0)}
    checkpointer = Checkpointer(folder, keep_last=2, keep_every=4, asynchronous=False)
    for step in range(1, 8):
        assert checkpointer.save(step, tree, {})
    assert checkpointer.steps() == [4, 6, 7]
    assert names(folder) == ["step_00000004", "step_00000006", "step_00000007"]
    assert checkpointer.save(5, tree, {})  # after going back: what came later stays
    assert checkpointer.steps() == [4, 5, 6, 7]
    assert checkpointer.save(6, tree, {}) and checkpointer.save(7, tree, {})
    with pytest.raises(ValueError, match=r"no checkpoint of step 5 .* \[4, 6, 7\]"):
        checkpointer.restore(5, tree)


def test_a_step_is_saved_again(folder):
    checkpointer = Checkpointer(folder)
    for value in (1.0, 2.0):
        assert checkpointer.save(3, {"w": jnp.full(4, value)}, {"value": value})
    assert checkpointer.wait() and names(folder) == ["step_00000003"]
    assert checkpointer.manifest(3).metadata == {"value": 2.0}


def test_damage_is_named_and_an_older_step_is_used(two_steps, caplog):
    checkpointer, trees = two_steps
    (bad,) = [p for p in files_of(checkpointer, 2) if "model.half/c/0/0" in str(p)]
    flip(bad, 5)
    with pytest.raises(CorruptCheckpointError) as error:
        checkpointer.restore(2, abstract(trees[2]))
    assert key_of(bad) in str(error.value) and "tensor model/half: " in str(error.value)
    with caplog.at_level(logging.WARNING):
        step, tree, metadata = restore_latest(checkpointer, abstract(trees[2]))
    assert step == 1 and metadata == {"step": 1} and "STEP 2 IS DAMAGED" in caplog.text
    assert_same_bits(tree, trees[1])
    # training goes on from the older; the damaged one does not push it out
    checkpointer._keep_last = 1
    assert checkpointer.save(2, trees[2], {"step": 2}) and checkpointer.wait()
    assert restore_latest(checkpointer, abstract(trees[2]))[0] == 2
    for path in files_of(checkpointer, 2):
        flip(path, 0)
    with pytest.raises(CorruptCheckpointError, match=r"all 1 checkpoints .* are damaged"):
        restore_latest(checkpointer, abstract(trees[2]))


def test_longer_and_missing_files_are_damage(two_steps):
    checkpointer, trees = two_steps
    (bad,) = [p for p in files_of(checkpointer, 2) if "model.zeros/c/0/0" in str(p)]
    bad.write_bytes(bad.read_bytes() + b"x")
    with pytest.raises(CorruptCheckpointError, match=r"tensor model/zeros has 37 bytes, not 36"):
        checkpointer.restore(2, abstract(trees[2]))
    bad.unlink()
    with pytest.raises(CorruptCheckpointError, match="tensor model/zeros is missing"):
        checkpointer.restore(2, abstract(trees[2]))


def test_damage_before_the_write_is_found_by_digests(two_steps):
    """The files are as they were written, yet not what the devices held."""
    checkpointer, trees = two_steps
    folder = checkpointer.folder / "step_00000002"
    record = manager.integrity.read_manifest(folder)
    held = record.tensors["model/w"]
    record.tensors["model/w"] = dataclasses.replace(held, digest=held.digest[::-1])
    manager.integrity.write_manifest(folder, record)
    with pytest.raises(CorruptCheckpointError, match=r"tensor model/w in .*values differ"):
        checkpointer.restore(2, abstract(trees[2]))
    assert restore_latest(checkpointer, abstract(trees[2]))[0] == 1


def test_random_bit_flips_are_never_loaded(two_steps):
    checkpointer, trees = two_steps
    wanted = abstract(trees[2])
    by_orbax = {COMMITTED, "_CHECKPOINT_METADATA"}  # nothing reads them
    files = [path for path in files_of(checkpointer, 2) if path.name not in by_orbax]
    ends = np.cumsum([len(path.read_bytes()) * 8 for path in files])
    rng = np.random.default_rng(int(os.environ.get("MAXMEG_FLIP_SEED", "0")))
    harmless = 0
    for position in rng.integers(0, ends[-1], int(os.environ.get("MAXMEG_FLIPS", "100"))):
        index = int(np.searchsorted(ends, position, side="right"))
        bit = int(position - (ends[index - 1] if index else 0))
        flip(files[index], bit)
        try:
            tree, metadata = checkpointer.restore(2, wanted)
        except CorruptCheckpointError as error:
            assert key_of(files[index]) in str(error)
        else:
            harmless += 1
            assert metadata == {"step": 2}
            assert_same_bits(tree, trees[2])
        flip(files[index], bit)
    assert harmless == 0
    assert_same_bits(checkpointer.restore(2, wanted)[0], trees[2])


def test_digest_is_that_of_the_values():
    """Every single bit counts, and the sharding does not."""
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    mesh = make_mesh(4, 2)

    def digest(x):
        return manager.integrity.finish_digests(manager.integrity.start_digests({"x": x}, {}))["x"]

    expected = digest(jnp.asarray(values))
    for spec in [(), ("x",), ("x", "y"), (("x", "y"),), (None, "y")]:
        assert digest(put(values, mesh, *spec)) == expected
    seen = {expected}
    for bit in range(0, values.nbytes * 8, 7):
        changed = values.copy()
        changed.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest(jnp.asarray(changed)))
    seen.add(digest(jnp.asarray(values.T.copy().T[::-1])))
    assert len(seen) == len(range(0, values.nbytes * 8, 7)) + 2


def test_partial_restore_reads_only_its_part(two_steps):
    checkpointer, trees = two_steps
    for path in files_of(checkpointer, 2):
        if "/optimizer." in str(path):
            path.unlink()
    wanted = abstract({"model": trees[2]["model"]})
    with pytest.raises(ValueError, match=r"unexpected tensors: .*partial=True"):
        checkpointer.restore(2, wanted)
    restored, _ = checkpointer.restore(2, wanted, partial=True)
    assert_same_bits(restored, {"model": trees[2]["model"]})


def test_histories_of_delayed_scaling_are_passed_over(folder):
    tree = make_tree(make_mesh(2, 1))
    saved = Checkpointer(folder)
    assert saved.save(1, tree | {"history": {"scales": jnp.ones(3)}}, {}) and saved.wait()
    assert_same_bits(saved.restore(1, abstract(tree))[0], tree)


def test_differences_are_named(two_steps):
    checkpointer, trees = two_steps
    wanted = abstract(trees[2])
    struct = jax.ShapeDtypeStruct
    for path, leaf, message in [
        ("w", struct((16, 9), jnp.float32), r"model/w has shape \(16, 8\) .* \(16, 9\) here"),
        ("w", struct((16, 8), jnp.bfloat16), "model/w is float32 in .* bfloat16 here"),
        ("v", struct((2,), jnp.float32), "not in the checkpoint of step 2: model/v;"),
    ]:
        with pytest.raises(ValueError, match=message):
            restore_latest(checkpointer, wanted | {"model": wanted["model"] | {path: leaf}})


def test_resizes_padding_with_zeros(folder):
    mesh = make_mesh(4, 2)
    values = np.zeros((12, 3), np.float32)
    values[:10] = np.random.default_rng(0).standard_normal((10, 3))
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, {"table": put(values, mesh, "x")}, {})
    sharding = NamedSharding(mesh, P(("x", "y")))  # 8 does not divide the 12 stored rows

    def restore(rows):
        wanted = {"table": jax.ShapeDtypeStruct((rows, 3), jnp.float32, sharding=sharding)}
        return checkpointer.restore(1, wanted, resizable={"table": 0})[0]["table"]

    grown = restore(16)
    assert grown.sharding == sharding
    np.testing.assert_array_equal(grown, np.pad(values, ((0, 4), (0, 0))))
    with pytest.raises(ValueError, match=r"12 entries along axis 0 .* those beyond 8 are not"):
        restore(8)
    sharding = NamedSharding(mesh, P("y"))
    np.testing.assert_array_equal(restore(10), values[:10])


def test_listings_of_a_bucket_are_not_kept(monkeypatch):
    """etils has a file system of its own, which another thread may have used before."""
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda _: files)
    files.dircache["bucket/run"] = [{"name": "bucket/run/step_00000002"}]
    place_of("s3://bucket/run")
    files.dircache["bucket/run"] = []
    assert not files.dircache


def test_a_bucket_is_not_created(s3):
    checkpointer = Checkpointer("s3://absent-bucket/run")
    assert checkpointer.steps() == []
    assert checkpointer.save(1, {"w": jnp.ones(2)}, {}) and not checkpointer.wait()
    assert "there is no bucket absent-bucket" in str(checkpointer.last_error)


@pytest.mark.parametrize("calls", [0, 1], ids=["before it begins", "before it is published"])
def test_a_run_that_has_lost_its_folder_writes_nothing(folder, calls):
    """Another run may write there now."""
    checkpointer = Checkpointer(folder)
    assert checkpointer.save(1, {"w": jnp.ones(2)}, {}) and checkpointer.wait()
    left = iter(range(calls))

    def may_write():
        if next(left, None) is None:
            raise OSError("taken over")

    checkpointer.may_write = may_write
    assert checkpointer.save(2, {"w": jnp.ones(2)}, {}) and not checkpointer.wait()
    assert "taken over" in str(checkpointer.last_error)
    assert names(folder) == ["step_00000001"]


def test_a_disk_that_is_no_longer_mounted_is_not_replaced_by_the_one_below(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(1, {"w": jnp.ones(2)}, {}) and checkpointer.wait()
    monkeypatch.setattr(manager, "device_of", lambda folder: -1)
    assert checkpointer.save(2, {"w": jnp.ones(2)}, {}) and not checkpointer.wait()
    assert "its disk is no longer mounted" in str(checkpointer.last_error)
    assert names(tmp_path) == ["step_00000001"]


def test_a_failure_in_the_background(folder, caplog, monkeypatch):
    tree = {"w": jnp.arange(8.0)}
    checkpointer = Checkpointer(folder, keep_last=1)
    assert checkpointer.save(1, tree, {}) and checkpointer.wait()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(folders, "write_manifest", full)
        assert checkpointer.save(2, tree, {}) and not checkpointer.wait()
    assert "No space left" in str(checkpointer.last_error)
    assert "STEP 2 WAS NOT SAVED" in caplog.text and "is step 1" in caplog.text
    assert names(folder) == ["step_00000001"]
    assert checkpointer.save(3, tree, {}) and checkpointer.wait()
    assert checkpointer.steps() == [3]


def test_a_save_that_was_interrupted_is_no_checkpoint(two_steps):
    """As SIGKILL leaves it. The next save deletes it."""
    checkpointer, trees = two_steps
    left = ["step_00000003.tmp", "step_00000003.orbax-checkpoint-tmp"]  # of format 1, and of 2
    if is_remote(checkpointer.folder):
        left = ["step_00000003"]  # without the file that Orbax writes last
    for path, name in itertools.product(files_of(checkpointer, 2), left):
        copy = checkpointer.folder / name / path.relative_to(checkpointer.folder_of(2))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy != checkpointer.folder_of(3) / COMMITTED:
            copy.write_bytes(path.read_bytes())
    assert checkpointer.steps() == [1, 2]
    assert restore_latest(checkpointer, abstract(trees[2]))[0] == 2
    assert checkpointer.save(4, trees[2], {}) and checkpointer.wait()
    assert not {*left} & {*names(checkpointer.folder)}


def test_rejects_what_cannot_be_saved(folder):
    checkpointer = Checkpointer(folder)
    for tree, metadata, message in [
        (
            {"a": {"w": np.ones(2)}},
            {},
            "a/w .ndarray. cannot be saved: .* convert it to a jax.Array",
        ),
        ({"key": jax.random.key(0)}, {}, "key_data"),
        ({"a.b": jnp.ones(2)}, {}, "not 'a.b' below the root"),
        ({"w": jnp.ones(2)}, {"x": jnp.ones(2)}, "JSON-serializable"),
        ({"w": {}}, {}, "no arrays"),
        ({"w": jnp.ones((0, 2))}, {}, "leave it out"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpointer.save(1, tree, metadata)
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpointer(folder, keep_last=0)
    assert not folder.exists()


MULTI_PROCESS = """
    import json, os, sys, jax
    index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from maxmeg.checkpoint import folders, manager, storage
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def put(value, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

    tree = {"w": put(np.arange(32.0, dtype="f4").reshape(8, 4), "x"), "n": put(np.int32(5))}
    struct = jax.ShapeDtypeStruct
    wanted = jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=x.sharding), tree)
    saver = manager.Checkpointer(folder)
    for step in (1, 2):
        assert saver.save(step, tree, {"step": step}) and saver.wait()
    write = manager.storage.write
    if index == 1:  # fails on one process only, in the background
        def broken(*_, **__):
            raise OSError(28, "No space left on device")
        manager.storage.write = broken
    assert saver.save(3, tree, {}) and not saver.wait()
    assert "process 1: OSError: [Errno 28]" in str(saver.last_error), saver.last_error
    manager.storage.write = write
    assert saver.steps() == [1, 2]
    if index == 0:
        path = saver.folder / "step_00000002" / "arrays" / "w" / "c" / "3" / "0"
        data = bytearray(path.read_bytes())
        data[3] ^= 4
        path.write_bytes(data)
    manager.Checkpointer(folder)._together("damaged", lambda: None)
    step, restored, metadata = saver.latest(lambda n, _: (n, *saver.restore(n, wanted)))
    assert step == 1 and metadata == {"step": 1}
    for name in tree:
        for a, b in zip(tree[name].addressable_shards, restored[name].addressable_shards):
            assert np.array_equal(a.data, b.data)
    assert saver.save(4, restored, {}) and saver.wait()
    print("done", index)
"""


def test_two_processes(tmp_path):
    """Both write; a failure of one is known to both; a third reads what they wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(MULTI_PROCESS)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    children = [
        subprocess.Popen([*command, str(index), str(port), tmp_path], env=environment, **pipes)
        for index in range(2)
    ]
    for index, child in enumerate(children):
        output, _ = child.communicate(timeout=120)
        assert f"done {index}" in output, output
        damage = "STEP 2 IS DAMAGED" in output and "tensor w: " in output
        assert damage == (index == 0), output
    wanted = {
        "w": jax.ShapeDtypeStruct(
            (8, 4), jnp.float32, sharding=NamedSharding(make_mesh(1, 2), P(None, "y"))
        ),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    step, tree, _ = restore_latest(Checkpointer(tmp_path), wanted)
    assert step == 4 and tree["n"] == 5
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000004"]  # 2 was damaged
    np.testing.assert_array_equal(tree["w"], np.arange(32).reshape(8, 4))
