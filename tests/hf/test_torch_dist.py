"""What torch_dist folders list is read, and nothing that they name is run.

No torch is needed: opcodes name its classes, which need not exist.
"""

import dataclasses
import io
import itertools
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from maxmeg.checkpoint.stream import TensorInfo
from maxmeg.hf.formats.torch_files import open_weights
from maxmeg.megatron.torch_dist import TorchDistReader, UnsafePickleError, common, volume

DCP = "torch.distributed.checkpoint"


def test_boxes_share_what_arrays_share():
    random = np.random.default_rng(0)
    for _ in range(200):
        corners = np.sort(random.integers(0, 5, (2, 3, 2)), axis=-1)
        masks = [np.zeros((5, 5, 5), bool) for _ in range(3)]
        boxes = [tuple((int(b), int(e)) for b, e in box) for box in corners]
        for box, mask in zip([*boxes, common(*boxes)], masks, strict=True):
            mask[tuple(slice(*bounds) for bounds in box)] = True
            assert mask.sum() == volume(box)
        assert (masks[2] == (masks[0] & masks[1])).all()


@dataclasses.dataclass(eq=False)
class Called:
    """A call of MODULE.NAME, which need not exist, and the state that the result gets; without
    arguments the name itself."""

    module: str
    name: str
    arguments: tuple | None = None
    state: object = None


class Stored(tuple):
    """What torch's unpickler looks up: a storage."""


def pickled(value) -> bytes:
    """Opcodes that make a value."""
    if isinstance(value, Stored):
        return pickled(tuple(value)) + b"Q"
    if isinstance(value, Called):
        code = f"c{value.module}\n{value.name}\n".encode()
        code += b"" if value.arguments is None else pickled(value.arguments) + b"R"
        return code + (b"" if value.state is None else pickled(value.state) + b"b")
    if isinstance(value, dict):
        return b"(" + b"".join(pickled(k) + pickled(v) for k, v in value.items()) + b"d"
    if isinstance(value, list | tuple):
        inside = b"".join(pickled(item) for item in value)
        return b"(" + inside + (b"l" if isinstance(value, list) else b"t")
    if isinstance(value, bool) or value is None:
        return {None: b"N", True: b"I01\n", False: b"I00\n"}[value]
    return (f"V{value}\n" if isinstance(value, str) else f"I{value}\n").encode()


def record(name: str, **state) -> Called:
    module = f"{DCP}.{'filesystem' if name == '_StorageInfo' else 'metadata'}"
    return Called(module, name, (), state)


def size(*sizes: int) -> Called:
    return Called("torch", "Size", (sizes,))


Part = tuple[tuple[int, ...], tuple[int, ...], str, int, int]  # offsets, sizes, file, start, length
FILE = "__0_0.distcp"  # of 100 bytes
HALVES: list[Part] = [((0, 0), (3, 2), FILE, 0, 60), ((3, 0), (1, 2), FILE, 60, 40)]


def metadata(
    parts: list[Part], shape: tuple[int, ...] = (4, 2), common_state: tuple = ()
) -> Called:
    """Of a tensor "w", and of what all ranks share, (file, start, length)."""
    chunks = [
        record("ChunkStorageMetadata", offsets=size(*at), sizes=size(*of)) for at, of, *_ in parts
    ]
    storage = {
        record("MetadataIndex", fqn="w", offset=size(*at)): record(
            "_StorageInfo", relative_path=file, offset=start, length=length
        )
        for at, _, file, start, length in parts
    }
    properties = Called(f"{DCP}.metadata", "TensorProperties", ())
    properties.state = (Called("torch", "float32"), False)
    tensor = record(
        "TensorStorageMetadata", properties=properties, size=size(*shape), chunks=chunks
    )
    objects = {"w": tensor, "rng_state/shard_0_1": record("BytesStorageMetadata")}
    if common_state:
        name, (file, start, length) = "common_state/shard_0_1", common_state
        objects[name] = record("BytesStorageMetadata")
        place = record("_StorageInfo", relative_path=file, offset=start, length=length)
        storage[record("MetadataIndex", fqn=name)] = place
    return record("Metadata", state_dict_metadata=objects, storage_data=storage)


def put(folder: Path, listed, common_state=None) -> Path:
    """A folder with these pickles and one file of tensors."""
    (folder / ".metadata").write_bytes(pickled(listed) + b".")
    (folder / FILE).write_bytes(b"x" * 100)
    if common_state is not None:
        (folder / "common.pt").write_bytes(archived(common_state))
    return folder


def archived(value, compression=zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("common/data.pkl", pickled(value) + b".")
    return file.getvalue()


def test_lists_of_parts_are_read_without_torch(tmp_path: Path):
    with TorchDistReader(put(tmp_path, metadata(HALVES))) as reader:
        assert reader.tensors == {"w": TensorInfo(np.dtype(np.float32), (4, 2))}
        assert reader.arguments() == {}


PARTS = [
    ([((0, 0), (3, 2), FILE, 0, 60)], "parts of w cover 6 of 8 numbers"),
    ([((0, 0), (3, 2), FILE, 0, 60), ((2, 0), (1, 2), FILE, 0, 40)], "cover 8 of 8 .* or overlap"),
    ([((0, 0), (5, 2), FILE, 0, 60)], r"has a part \[5, 2\] at \[0, 0\], outside it"),
    ([((-1, 0), (4, 2), FILE, 0, 60)], "outside it"),
    ([((0, 0), (4, 2), FILE, 90, 60)], "bytes 90 to 150 .*, which has 100: the file is truncated"),
    ([((0, 0), (4, 2), FILE, 0, 31)], r"a part \[4, 2\] of float32 in 31 bytes"),
    ([((0, 0), (4, 2), "../__0_0.distcp", 0, 60)], "which .* does not have"),
]


@pytest.mark.parametrize(("parts", "message"), PARTS)
def test_parts_that_are_no_tensor_are_refused(parts, message: str, tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / FILE).write_bytes(b"x" * 100)
    put(tmp_path / "in", metadata(parts))
    with pytest.raises(ValueError, match=message), TorchDistReader(tmp_path / "in") as reader:
        reader.read("w")


def test_huge_sizes_cost_nothing(tmp_path: Path):
    vast = [((0, 0), (2**40, 2**20), FILE, 0, 60)]
    with pytest.raises(ValueError, match="of float32 in 60 bytes"):
        TorchDistReader(put(tmp_path, metadata(vast, (2**40, 2**20))))


def test_arguments_are_plain_values(tmp_path: Path):
    state = {
        "num_layers": 2,
        "swiglu": True,
        "window_size": (127, 0),
        "tokenizer_model": None,
        "params_dtype": Called("torch", "bfloat16"),
        "attention.backend": Called("megatron.core.transformer.enums", "AttnBackend", (5,)),
        "activation": Called("torch.nn.functional", "gelu"),
        "names": Called("__builtin__", "set", (["a"],)),
        "nested": {"a": 1},
    }
    common_state = {"args": Called("argparse", "Namespace", (), state), "iteration": 3}
    with TorchDistReader(put(tmp_path, metadata(HALVES), common_state)) as reader:
        actual = reader.arguments()
    kept = {name: state[name] for name in ("num_layers", "swiglu", "tokenizer_model")}
    assert actual == {
        **kept,
        "window_size": [127, 0],
        "params_dtype": "bfloat16",
        "attention.backend": 5,
        "names": ["a"],
    }


STORAGE = Stored(("storage", Called("torch", "FloatStorage"), "0", "cpu", 6))
TENSOR = Called("torch._utils", "_rebuild_tensor_v2", (STORAGE, 1, (2, 2), (1, 2), False, {}))
LONG = dataclasses.replace(TENSOR, arguments=(STORAGE, 1, (2, 3), (1, 2), False, {}))
STATES = [
    ({"w": TENSOR}, ""),
    ({"w": LONG}, r"w of shape \[2, 3\] does not fit into its 24 bytes"),
    ({"w": dataclasses.replace(TENSOR, name="_rebuild_tensor_v3")}, "w is no plain tensor but a t"),
    ({"w": Called("os", "system", ("touch ran",))}, "data.pkl wants os.system"),
    ([1], "holds no state_dict"),
]


@pytest.mark.parametrize(("state", "problem"), STATES, ids=range(len(STATES)))
def test_weights_of_torch_are_mapped_without_torch(tmp_path: Path, state, problem):
    numbers = np.arange(6, dtype=np.float32)
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("m/data.pkl", pickled(state) + b".")
        archive.writestr("m/data/0", numbers.tobytes())
    if problem:
        with pytest.raises(ValueError, match=problem):
            open_weights(tmp_path)
        return
    np.testing.assert_array_equal(open_weights(tmp_path).read("w"), numbers[1:5].reshape(2, 2).T)


def test_compressed_arguments_are_refused(tmp_path: Path):
    """A small file could unpack to more than the memory."""
    put(tmp_path, metadata(HALVES))
    (tmp_path / "common.pt").write_bytes(archived({"args": "a" * 10**6}, zipfile.ZIP_DEFLATED))
    with (
        TorchDistReader(tmp_path) as reader,
        pytest.raises(ValueError, match=r"common\.pt: common/data\.pkl is compressed"),
    ):
        reader.arguments()


def test_arguments_may_lie_among_the_tensors(tmp_path: Path):
    """As an object that all ranks share, in a list of one."""
    data = archived([{"args": Called("argparse", "Namespace", (), {"num_layers": 3})}])
    put(tmp_path, metadata(HALVES, common_state=(FILE, 100, len(data))))
    (tmp_path / FILE).write_bytes(b"x" * 100 + data + b"x")
    with TorchDistReader(tmp_path) as reader:
        assert reader.arguments() == {"num_layers": 3}


FILES = (".metadata", "common.pt")
# What runs a command where pickles are trusted.
GADGETS = [
    ("os", "system", ("touch ran",)),
    ("builtins", "eval", ("open('ran', 'w')",)),
    ("builtins", "getattr", ("a", "b")),
    ("subprocess", "Popen", (["touch", "ran"],)),
    ("copyreg", "__newobj__", ()),
]


@pytest.mark.parametrize(
    ("where", "module", "name", "arguments"),
    [(where, *gadget) for where, gadget in zip(itertools.cycle(FILES), GADGETS, strict=False)],
)
def test_commands_are_refused_by_name(
    where: str, module: str, name: str, arguments: tuple, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    gadget = Called(module, name, arguments)
    hostile = where == ".metadata"
    put(tmp_path, gadget if hostile else metadata(HALVES), {"args": gadget})
    message = rf"{where} wants {module}\.{name}, which no checkpoint needs"
    with pytest.raises(UnsafePickleError, match=message), TorchDistReader(tmp_path) as reader:
        reader.arguments()
    assert not (tmp_path / "ran").exists()


# Names that may stand in a file, called or changed as no file of torch's does: nothing runs.
INERT = [
    Called("torch.hub", "load", ("ran",)),
    Called("torch", "Size", None, {"__call__": 1}),
    Called(f"{DCP}.metadata", "Metadata.__init__.__globals__", ()),
    metadata([((0, 0), ("4", 2), FILE, 0, 60)]),
    metadata([((0, 0), (4, 2), FILE, "0", 60)]),
    [1, 2],
]


@pytest.mark.parametrize("value", INERT, ids=range(len(INERT)))
def test_other_values_are_damage(value, tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.metadata (is damaged|wants torch.hub.load)"):
        TorchDistReader(put(tmp_path, value))


def test_an_interpreter_without_torch_says_so(tmp_path: Path):
    """-S: no packages."""
    put(tmp_path, metadata(HALVES))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    with (
        TorchDistReader(tmp_path, python=str(script)) as reader,
        pytest.raises(ValueError, match=r"no torch, .* pip install 'maxmeg\[megatron\]'"),
    ):
        reader.read("w")
