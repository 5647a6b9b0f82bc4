"""Checkpoints written and read in pieces: the manager's, bit for bit, in bounded memory."""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax_checkpoints import restored_by_orbax

from maxmeg.checkpoint import integrity, storage, stream
from maxmeg.checkpoint.integrity import CorruptCheckpointError
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.names import nested
from maxmeg.checkpoint.places import COMMITTED
from maxmeg.checkpoint.stream import StreamReader, StreamWriter, TensorInfo, row_blocks

BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays():
    """A tensor of every dtype and rank, NaN payloads and negative zeros among them."""
    rng = np.random.default_rng(0)
    return {
        "model/stack/groups/0/w": rng.integers(0, 2**32, (3, 7, 5), dtype=np.uint32).view("f4"),
        "model/stack/groups/0/b": rng.standard_normal((3, 6)).astype("f4"),
        "model/stack/groups/0/scale": np.float32([0.5, -0.0, 2]),
        "model/stack/groups/0/experts/up": rng.standard_normal((3, 2, 5, 4)).astype("f4"),
        "model/table": rng.standard_normal((13, 4)).astype("f4"),
        "model/half": rng.standard_normal((4, 6)).astype(BF16),
        "step": np.int32(7).reshape(()),
        "flags": np.array([True, False, True]),
        "key": np.uint32([1, 2**32 - 1]),
    }


def infos(values):
    return {path: TensorInfo(array.dtype, array.shape) for path, array in values.items()}


def indices_of(path, array):
    """Of the pieces that it is written in: experts of layers, layers, or the whole."""
    dimensions = 2 if "experts" in path else int("stack" in path)
    return [*itertools.product(*map(range, array.shape[:dimensions]))]


def write_all(folder, values, step=3, order=lambda indices: indices):
    with StreamWriter(folder, step, infos(values), {"note": [1, None]}) as writer:
        for path, array in values.items():
            for index in order(indices_of(path, array)):
                writer.write(path, array[index] if index else array, index)


def as_tree(values):
    return nested({path.replace("/", "."): jnp.asarray(array) for path, array in values.items()})


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same_bits(actual, wanted):
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    assert np.asarray(actual).tobytes() == np.asarray(wanted).tobytes()


@pytest.fixture(params=[(64 << 20, 1 << 30), (64 << 20, 330), (40, 330)])
def block_bytes(request, monkeypatch):
    """One block a piece, and several; files of all pieces, and of some."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", request.param[0])
    monkeypatch.setattr(stream, "FILE_BYTES", request.param[1])


def test_the_reader_and_the_manager_restore_what_was_streamed(tmp_path, block_bytes):
    values = arrays()
    write_all(tmp_path / "streamed", values, order=lambda indices: indices[::-1])
    check_reader(tmp_path / "streamed", values)
    checkpointer = Checkpointer(tmp_path / "streamed")
    assert checkpointer.steps() == [3]
    tree = as_tree(values)
    restored, metadata = checkpointer.restore(3, abstract(tree))
    assert metadata == {"note": [1, None]}
    jax.tree.map(assert_same_bits, restored, tree)
    usual = Checkpointer(tmp_path / "whole")
    assert usual.save(3, tree, metadata) and usual.wait()
    tensors = [
        integrity.read_manifest(tmp_path / name / "step_00000003").tensors
        for name in ("streamed", "whole")
    ]
    assert tensors[0] == tensors[1]
    by_orbax = restored_by_orbax(tmp_path / "streamed" / "step_00000003" / "arrays")
    jax.tree.map(assert_same_bits, by_orbax, tree)


def check_reader(folder, values):
    reader = StreamReader(folder, 3)
    assert reader.tensors == infos(values)
    assert reader.metadata["note"] == [1, None]
    for path, array in values.items():
        indices = indices_of(path, array)
        for index in [indices[-1], *indices] if "stack" in path else []:
            assert_same_bits(reader.read(path, index), array[index])
        if "experts" in path:
            assert_same_bits(reader.read(path, 1), array[1])  # pieces of another kind
        assert_same_bits(reader.read(path), array)
        blocks = [*reader.blocks(path)]
        assert_same_bits(np.concatenate(blocks) if array.shape else blocks[0], array)


@pytest.mark.parametrize("spec", [P(), P(None, "x"), P("y", "x")])
def test_the_reader_and_orbax_restore_what_the_manager_wrote(tmp_path, spec, monkeypatch):
    """However the arrays lay on devices and were cut into files."""
    monkeypatch.setattr(storage, "CHUNK_BYTES", 64)
    mesh = jax.make_mesh((2, 3), ("x", "y"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[:6])  # fmt: skip
    values = arrays() | {
        "model/stack/groups/0/u": np.arange(3 * 4 * 8.0, dtype="f4").reshape(3, 4, 8)
    }
    tree = nested(
        {
            path.replace("/", "."): jax.device_put(
                array, NamedSharding(mesh, spec if array.ndim == 3 and array.shape[1] == 4 else P())
            )
            for path, array in values.items()
        }
    )
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(3, tree, {"note": [1, None]}) and checkpointer.wait()
    check_reader(tmp_path, values)
    by_orbax = restored_by_orbax(tmp_path / "step_00000003" / "arrays")
    jax.tree.map(assert_same_bits, by_orbax, as_tree(values))


# Of a piece of 80 bytes, and of 6 layers of 5 experts: bytes of a file, (layers, experts) of one.
FILES = {79: (1, 1), 80: (1, 1), 170: (1, 2), 399: (1, 4), 400: (1, 5), 800: (2, 5), 1999: (3, 5)}


@pytest.mark.parametrize("file_bytes", FILES)
def test_files_of_many_pieces(tmp_path, monkeypatch, file_bytes):
    """Each as large as there is room for; a device that wants some pieces reads no others."""
    monkeypatch.setattr(stream, "FILE_BYTES", file_bytes)
    layers, experts = FILES[file_bytes]
    values = np.random.default_rng(0).standard_normal((6, 5, 5, 4)).astype("f4")
    order = np.random.default_rng(1).permutation([*np.ndindex(6, 5)])
    with StreamWriter(tmp_path, 0, infos({"w": values}), {}) as writer:
        for layer, expert in order.tolist():
            writer.write("w", values[layer, expert], (layer, expert))
    folder = tmp_path / "step_00000000" / "arrays" / "w"
    files = [path for path in (folder / "c").rglob("*") if path.is_file()]
    assert len(files) == 6 // layers * -(-5 // experts)
    index = 16 * layers * experts + 4 if layers * experts > 1 else 0
    assert {path.stat().st_size for path in files} == {84 * layers * experts + index}
    described = json.loads((folder / "zarr.json").read_text())
    if index:
        assert described["codecs"][0]["configuration"]["chunk_shape"] == [1, 1, 5, 4]

    mesh = jax.make_mesh((2, 3), ("x", "y"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[:6])  # fmt: skip
    for spec in (P(("x", "y")), P("y", None, None, "x")):
        sharding = NamedSharding(mesh, spec)
        wanted = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
        assert_same_bits(Checkpointer(tmp_path).restore(0, wanted)[0]["w"], values)
    reader = StreamReader(tmp_path, 0)
    assert_same_bits(reader.read("w", (5, 4)), values[5, 4])
    assert_same_bits(reader.read("w", 1), values[1])
    assert_same_bits(np.concatenate([*reader.blocks("w")]), values)


def test_casts_exactly_and_pads_with_zeros(tmp_path, block_bytes):
    half = np.random.default_rng(0).standard_normal((3, 5, 2)).astype(BF16)
    tensors = {
        "table": TensorInfo(np.dtype("f4"), (9, 2)),
        "w": TensorInfo(np.dtype("f4"), (3, 7, 2)),
    }
    with StreamWriter(tmp_path, 0, tensors, {}) as writer:
        writer.write("table", half[0], pad_rows=True)
        for index in range(3):
            writer.write("w", half[index], index, pad_rows=True)
    reader = StreamReader(tmp_path, 0)
    wide = half.astype("f4")
    assert_same_bits(reader.read("table"), np.pad(wide[0], [(0, 4), (0, 0)]))
    assert_same_bits(reader.read("w"), np.pad(wide, [(0, 0), (0, 2), (0, 0)]))


W, B, U = (f"model/stack/groups/0/{name}" for name in ("w", "b", "experts/up"))
MISTAKES = {
    "no such entry": (lambda w, v: w.write(W, v[W][0], 3), "has no entry 3"),
    "shape": (lambda w, v: w.write(W, v[W][0].T, 0), r"float32\[5, 7\]: expected float32\[7, 5\]"),
    "dtype": (
        lambda w, v: w.write("model/half", v["model/half"].astype("f4")),
        "expected bfloat16",
    ),
    "entry twice": (
        lambda w, v: [w.write(B, v[B][1], 1) for _ in range(2)],
        "entry 1, is written twice",
    ),
    "entry and whole": (lambda w, v: [w.write(B, v[B][0], 0), w.write(B, v[B])], "written twice"),
    "missing": (
        lambda w, v: w.write(B, v[B][0], 0),
        r"9 tensors are not written: .*b \(has 1 of 3",
    ),
    "no such expert": (lambda w, v: w.write(U, v[U][0, 1], (0, 2)), "has no entry 0, 2"),
    "layer and expert": (
        lambda w, v: [w.write(U, v[U][0], 0), w.write(U, v[U][0, 1], (0, 1))],
        "entry 0, 1, is written twice",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_errors_and_leave_nothing(tmp_path, case):
    mistake, message = MISTAKES[case]
    values = arrays()
    writing = StreamWriter(tmp_path, 0, infos(values), {})
    with pytest.raises(ValueError, match=message), writing as writer:
        mistake(writer, values)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "info", [TensorInfo(np.dtype("f8"), (2,)), TensorInfo(np.dtype("f4"), (0, 2))]
)
def test_tensors_that_no_checkpoint_holds_are_refused(tmp_path, info):
    with pytest.raises(ValueError, match="cannot be saved"):
        StreamWriter(tmp_path, 0, {"x": info}, {})


def test_every_flipped_byte_of_a_file_is_found(tmp_path):
    values = {"model/w": np.arange(6, dtype="f4").reshape(3, 2)}
    with StreamWriter(tmp_path / "good", 0, infos(values), {}) as writer:
        for index in range(3):
            writer.write("model/w", values["model/w"][index], index)
    files = sorted(p for p in (tmp_path / "good").rglob("*") if p.is_file())
    by_orbax = {"_METADATA", "_CHECKPOINT_METADATA", COMMITTED}
    files = [path.relative_to(tmp_path / "good") for path in files if path.name not in by_orbax]
    assert len(files) == 3  # the manifest, what describes the tensor, its values and their places
    for file, part in itertools.product(files, (0.1, 0.5)):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        data = bytearray((tmp_path / "bad" / file).read_bytes())
        data[int(len(data) * part)] ^= 4
        (tmp_path / "bad" / file).write_bytes(data)
        with pytest.raises(CorruptCheckpointError):
            StreamReader(tmp_path / "bad", 0).read("model/w", 0)
        shutil.rmtree(tmp_path / "bad")


def test_damage_before_the_disk_is_found_when_all_is_read(tmp_path):
    """Files that hold other values than were digested."""
    values = {"w": np.ones((3, 2), "f4")}
    with StreamWriter(tmp_path, 0, infos(values), {}) as writer:
        for index in range(3):
            writer.write("w", values["w"][index], index)
        writer._sums["w"] += np.uint32(1)
    reader = StreamReader(tmp_path, 0)
    reader.read("w", 0), reader.read("w", 1)
    with pytest.raises(CorruptCheckpointError, match="values differ"):
        reader.read("w", 2)
    with pytest.raises(CorruptCheckpointError, match="values differ"):
        [*reader.blocks("w")]


def test_absent_checkpoints_and_tensors(tmp_path):
    write_all(tmp_path, {"w": np.ones(2, "f4")}, step=1)
    with pytest.raises(ValueError, match=r"no checkpoint of step 2 in .*: has \[1\]"):
        StreamReader(tmp_path, 2)
    with pytest.raises(ValueError, match="tensor v is not in"):
        StreamReader(tmp_path, 1).read("v")
    with pytest.raises(ValueError, match="has no entry 2"):
        StreamReader(tmp_path, 1).read("w", 2)


def test_row_blocks_cover_every_row_once_within_the_limit():
    for rows, width, limit in itertools.product(range(1, 40), (1, 3), (1, 8, 40, 1000)):
        blocks = row_blocks((rows, width), 4, limit)
        covered = [i for block in blocks for i in range(block.start, block.stop)]
        assert covered == list(range(rows))
        sizes = [block.stop - block.start for block in blocks]
        assert max(sizes) * width * 4 <= max(limit, width * 4)
        assert set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
