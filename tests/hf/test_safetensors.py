"""Our safetensors reader and writer: what the library reads, and hostile files."""

import json
import re
import resource

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.formats import safetensors
from maxmeg.hf.formats.safetensors import (
    DTYPES,
    INDEX,
    SINGLE,
    SafetensorsFile,
    SafetensorsFolder,
    SafetensorsWriter,
)

GROWTH_BYTES = 20 << 20  # of peak memory while a hostile file is refused
BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays():
    rng = np.random.default_rng(0)
    values = {
        f"t.{name}": (rng.integers(0, 2, (3, 2)) if name == "BOOL" else rng.integers(0, 99, (3, 2)))
        for name in DTYPES
    }
    values = {name: array.astype(DTYPES[name[2:]]) for name, array in values.items()}
    return values | {
        "scalar": np.array(1.5, "f4"),
        "empty": np.zeros((0, 4), "f4"),
        "norm": rng.standard_normal(7).astype("f4"),
        "wéight": rng.standard_normal((5, 4)).astype(BF16),
    }


def infos(values):
    return {name: TensorInfo(array.dtype, array.shape) for name, array in values.items()}


def write(folder, values, max_shard_bytes=1 << 30):
    with SafetensorsWriter(folder, infos(values), max_shard_bytes) as writer:
        for name in sorted(values):
            writer.write(name, values[name])


def assert_same_bits(actual, wanted):
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    assert actual.tobytes() == wanted.tobytes()


def file_of(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 64, 1])
def test_written_files_are_read_back(tmp_path, max_shard_bytes):
    values = arrays()
    write(tmp_path, values, max_shard_bytes)
    folder = SafetensorsFolder(tmp_path)
    assert folder.tensors == infos(values)
    for name, array in values.items():
        assert_same_bits(folder.read(name), array)
        assert not folder.read(name).flags.writeable or not array.size
    names = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_bytes > 1000:
        assert names == [SINGLE]
        return
    assert names[-1] == INDEX and len(names) > 3
    assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in values.values())
    for name in names[:-1]:
        file = SafetensorsFile(tmp_path / name)
        assert file.metadata == {"format": "pt"}
        sizes = [values[tensor].nbytes for tensor in file.tensors]
        assert sum(sizes) <= max_shard_bytes or len([size for size in sizes if size]) == 1


def test_float32_rounds_to_the_nearest_even(tmp_path):
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3e38, np.nan, -0.0])
    with SafetensorsWriter(tmp_path, {"x": TensorInfo(BF16, (6,))}) as writer:
        writer.write("x", values)
    actual = SafetensorsFolder(tmp_path).read("x").astype("f4")
    np.testing.assert_array_equal(actual[:3], [1, 1 + 2**-6, -1 - 2**-7])
    assert (
        np.isnan(actual[4]) and np.signbit(actual[5]) and actual[3] == np.float32(3e38).astype(BF16)
    )


WRITER_MISTAKES = {
    "unknown": (lambda w: w.write("z", np.zeros(2, "f4")), "'z' was not announced"),
    "dtype": (lambda w: w.write("x", np.zeros(2, "f2")), r"float16\[2\], announced was"),
    "shape": (lambda w: w.write("x", np.zeros((1, 2), "f4")), r"float32\[1, 2\], announced"),
    "rows": (
        lambda w: w.write_rows("x", [np.zeros(1, "f4")] * 3),
        r"float32\[3\], announced was float32\[2\]",
    ),
    "missing": (lambda w: w.write("x", np.zeros(2, "f4")), "1 tensors were not written: y"),
}  # fmt: skip
WRITER_MISTAKES["twice"] = (
    lambda w: [w.write("x", np.zeros(2, "f4")) for _ in range(2)],
    "'x' was written already",
)


@pytest.mark.parametrize("case", WRITER_MISTAKES)
def test_mistakes_of_writing_leave_no_file(tmp_path, case):
    mistake, message = WRITER_MISTAKES[case]
    info = TensorInfo(np.dtype("f4"), (2,))
    writing = SafetensorsWriter(tmp_path, {"x": info, "y": info}, 8)
    with pytest.raises(ValueError, match=message), writing as writer:
        mistake(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_weights_is_not_written_over(tmp_path):
    write(tmp_path, {"x": np.zeros(2, "f4")})
    with pytest.raises(ValueError, match=r"already holds model\.safetensors"):
        SafetensorsWriter(tmp_path, {"y": TensorInfo(np.dtype("f4"), (2,))})
    with pytest.raises(ValueError, match="float8_e5m2: safetensors has BOOL"):
        SafetensorsWriter(tmp_path / "b", {"y": TensorInfo(np.dtype(ml_dtypes.float8_e5m2), (2,))})


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


EIGHT = b"01234567"
HOSTILE = {
    "nothing": (b"", "0 bytes"),
    "header beyond the file": (file_of({}, length=9), "truncated"),
    "header of 2^64 - 1 bytes": (file_of({}, length=2**64 - 1), "above the limit of 100000000"),
    "no JSON": (file_of(b"{nonsense}"), "JSON is damaged"),
    "no UTF-8": (file_of(b'{"\xff":1}'), "JSON is damaged"),
    "deep": (file_of(b'{"a":' * 100_000), "JSON is damaged"),
    "a number of many digits": (file_of(b'{"a":' + b"9" * 1_000_000 + b"}"), "JSON is damaged"),
    "key twice": (file_of(b'{"a":{},"a":{}}'), "'a' is given twice"),
    "metadata": (file_of({"__metadata__": {"format": 1}}), "__metadata__ is"),
    "no entry": (file_of({"a": 1}), "expected dtype, shape and data_offsets"),
    "more fields": (file_of({"a": entry(more=1)}, EIGHT), "expected dtype, shape"),
    "unknown dtype": (file_of({"a": entry("F8_E5M2", [8])}, EIGHT), "has dtype 'F8_E5M2'"),
    "negative size": (file_of({"a": entry(shape=[-2])}, EIGHT), "sizes >= 0"),
    "size true": (file_of({"a": entry("F64", shape=[True])}, EIGHT), "sizes >= 0"),
    "product beyond 64 bits": (file_of({"a": entry(shape=[2**62, 4, 2])}, EIGHT), "takes"),
    "many dimensions": (file_of({"a": entry(shape=[1] * 100_000)}, EIGHT), "at most 16"),
    "bytes do not fit": (file_of({"a": entry(shape=[3])}, EIGHT), "takes 12 bytes"),
    "offsets reversed": (file_of({"a": entry(offsets=[8, 0])}, EIGHT), r"expected \[begin, end\]"),
    "beyond the file": (file_of({"a": entry()}, b"1234"), "truncated"),
    "far beyond the file": (
        file_of({"a": entry("U8", [2**62], [0, 2**62])}, EIGHT), "truncated"
    ),
    "overlap": (
        file_of({"a": entry(), "b": entry(offsets=[4, 12])}, EIGHT + b"1234"), "'b' .* overlaps"
    ),
    "gap": (file_of({"a": entry(offsets=[4, 12])}, EIGHT + b"1234"), "leaves a gap"),
    "rest": (file_of({"a": entry()}, EIGHT + b"1"), "no tensor has the rest"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_before_memory_is_allocated(tmp_path, case):
    content, message = HOSTILE[case]
    path = tmp_path / SINGLE
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFile(path)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < GROWTH_BYTES
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    (tmp_path / SINGLE).write_bytes(file_of({"a": entry()}, EIGHT))
    file = SafetensorsFile(tmp_path / SINGLE)
    (tmp_path / SINGLE).write_bytes(b"")
    with pytest.raises(ValueError, match="has changed"):
        file.read("a")


VALID = {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("I8", (4, 1), (8, 12))}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
SMALL = st.integers(-2, 14)


@st.composite
def mutated(draw):
    """A valid file with a field replaced, or bytes changed, or cut."""
    header = json.loads(json.dumps(VALID))
    for _ in range(draw(st.integers(0, 2))):
        tensor = header.setdefault(draw(st.sampled_from(["a", "b", "c"])), entry())
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        tensor[field] = draw(
            st.sampled_from(list(DTYPES))
            | st.lists(SMALL, max_size=3)
            | st.tuples(SMALL, SMALL)
            | JSON
        )
    data = bytearray(file_of(header, b"x" * draw(st.sampled_from([12, 12, 12, 11, 13, 0]))))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data) - 1))
        data[at] = draw(st.integers(0, 255))
    return bytes(
        data[: draw(st.sampled_from([len(data), len(data), draw(st.integers(0, len(data)))]))]
    )


@given(mutated())
@settings(max_examples=300)
def test_mutated_files_are_read_as_the_library_reads_them_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / SINGLE
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except ValueError:
        return
    for name, info in file.tensors.items():
        array = file.read(name)
        assert array.dtype == info.dtype and array.shape == info.shape
        assert array.nbytes <= len(content)
    library = pytest.importorskip("safetensors")
    with library.safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == set(file.tensors)


def sharded(folder):
    values = {"a": np.ones(2, "f4"), "b": np.zeros(3, "f4")}
    write(folder, values, 1)
    return json.loads((folder / INDEX).read_text()), "model-0000{}-of-00002.safetensors"


def swap(folder, index, **places):
    index["weight_map"] |= places
    (folder / INDEX).write_text(json.dumps(index))


def twice(folder, index, shard):
    raw = (folder / shard.format(1)).read_bytes()
    (folder / shard.format(2)).write_bytes(raw)


BAD_FOLDERS = {
    "no such tensor": (lambda f, i, s: swap(f, i, c=s.format(1)), "1 tensors .* the first 'c' in"),
    "other shard": (
        lambda f, i, s: swap(f, i, a=s.format(2), b=s.format(1)), "'a' of .*1-of.* is in .*2-of"
    ),
    "escape": (lambda f, i, s: swap(f, i, a="../x.safetensors"), "names the shard '../x"),
    "no safetensors": (lambda f, i, s: swap(f, i, a="x.bin"), "names the shard 'x.bin'"),
    "missing shard": (lambda f, i, s: (f / s.format(2)).unlink(), "lacks 1 of the 2 shards"),
    "in two shards": (twice, "is in two shards"),
    "no index": (lambda f, i, s: (f / INDEX).write_text("[]"), "is list, not an object"),
    "both": (lambda f, i, s: (f / SINGLE).write_bytes(b""), "hence two models"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_do_not_agree_with_their_index(tmp_path, case):
    damage, message = BAD_FOLDERS[case]
    damage(tmp_path, *sharded(tmp_path))
    with pytest.raises(ValueError, match=message):
        SafetensorsFolder(tmp_path)


def test_a_tensor_missing_from_the_index_is_refused(tmp_path):
    index, _ = sharded(tmp_path)
    del index["weight_map"]["a"]
    swap(tmp_path, index, b="model-00002-of-00002.safetensors")
    assert len(SafetensorsFolder(tmp_path).tensors) == 1
    write(tmp_path / "new", {"a": np.ones(2, "f4"), "b": np.ones(2, "f4")})
    (tmp_path / "new" / SINGLE).rename(tmp_path / "new" / "model-1.safetensors")
    swap(tmp_path / "new", {"weight_map": {"b": "model-1.safetensors"}})
    with pytest.raises(ValueError, match=re.escape("'a' of model-1.safetensors is in no shard by")):
        SafetensorsFolder(tmp_path / "new")


@pytest.mark.parametrize("name", ["model.pt", "x.pth"])
def test_pickles_are_refused_with_a_way_to_convert_them(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=rf"holds {name}, which can run code.*save_pretrained"):
        SafetensorsFolder(tmp_path)


def test_folders_without_weights(tmp_path):
    with pytest.raises(ValueError, match="but nothing"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        SafetensorsFolder(tmp_path / "none")
    assert safetensors.MAX_HEADER_BYTES == 100_000_000
