"""The process that reads pickles of torch: run as a script, with no other package than torch.

Requests are lines of JSON on stdin; a reply is a line of JSON on stdout, and after a `part` its
bytes. The list of tensors in pytorch_model.bin (`weights`), a torch_dist checkpoint's `.metadata`
(`catalogue`) and a run's arguments are pickles. Only this process reads them, by an unpickler
that replaces the classes that such files name by records without code, and refuses any other name.
Tensors of torch_dist are read by torch.load(weights_only=True).
"""

import io
import json
import pickle
import re
import struct
import sys
import typing
import zipfile

DCP = "torch.distributed.checkpoint"
# Modules whose classes `.metadata` names: torch's plans of what was saved, and Megatron's own.
PLANS = (DCP, "torch.distributed._shard", "torch.distributed.tensor", "pathlib")
PLANS += ("megatron.core.dist_checkpointing",)
# Modules whose classes a run's arguments name: enums, dtypes, places and functions of torch's.
ARGUMENTS = ("argparse", "megatron", "torch", "pathlib", "signal", "types", "enum", "collections")
# Constructors of containers, which tensors inside of arguments need too.
CONTAINERS = {"set", "frozenset", "bytearray", "slice", "range", "complex", "encode"}

STORAGES = {  # and their dtypes, as safetensors names them
    **{"torch.FloatStorage": "F32", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16"},
    **{"torch.DoubleStorage": "F64", "torch.LongStorage": "I64", "torch.IntStorage": "I32"},
    **{"torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8"},
    "torch.BoolStorage": "BOOL",
}
LOCAL_HEADER = 30  # bytes of an entry's header; the last two words are lengths of what follows it


class UnsafeError(Exception):
    """A pickle names a class or function that checkpoints do not need."""


class Record:
    """Stands for an object of any allowed class: its constructor's arguments and its state."""

    name = ""
    arguments: tuple
    state: typing.Any

    def __new__(cls, *arguments: typing.Any, **_: typing.Any) -> "Record":
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    def __setstate__(self, state: typing.Any) -> None:
        self.state = state

    def __setitem__(self, key: typing.Any, value: typing.Any) -> None:  # an OrderedDict's items
        self.state[key] = value

    def __getitem__(self, key: str) -> typing.Any:
        return self.state[key]

    def __hash__(self) -> int:
        """An index of storage is a key of a dict before it has its state."""
        return id(self)


class RecordUnpickler(pickle.Unpickler):
    """Returns records, tuples for torch.Size, and names for torch's dtypes; runs no code."""

    def __init__(self, file: typing.IO[bytes], modules: tuple[str, ...], what: str) -> None:
        super().__init__(file)
        self.modules, self.what = modules, what

    def find_class(self, module: str, name: str) -> typing.Any:
        within = any(module == m or module.startswith(f"{m}.") for m in self.modules)
        builtin = module in ("builtins", "__builtin__", "_codecs") and name in CONTAINERS
        layout = (module, name) == ("torch.serialization", "_get_layout")
        dtype = module == "torch" and re.fullmatch(r"[a-z]+[a-z0-9_]*", name)
        size = (module, name) == ("torch", "Size")
        if not (within or builtin or layout or dtype or size):
            raise UnsafeError(f"{self.what} wants {module}.{name}, which no checkpoint needs")
        if size:
            return tuple
        return name if dtype else type("Record", (Record,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: typing.Any) -> None:
        """Tensors inside of arguments are left out."""


class Items(dict):
    """Stands for an OrderedDict. Its attributes, torch's versions of modules, are left out."""

    def __setstate__(self, state: typing.Any) -> None:
        pass


class WeightsUnpickler(RecordUnpickler):
    """Returns a record for every tensor, whose storage is (class, key in the archive)."""

    def find_class(self, module: str, name: str) -> typing.Any:
        ordered = (module, name) == ("collections", "OrderedDict")
        return Items if ordered else super().find_class(module, name)

    def persistent_load(self, pid: typing.Any) -> typing.Any:
        return pid[1].name, pid[2]


def weights(path: str) -> dict[str, typing.Any]:
    """Return dtype, shape, strides, offset (in elements) and the storage's place in the file of
    every tensor of a state_dict."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "it is no zip archive, as torch.save writes since version 1.6: download it again if it "
            "is cut off; else load it with torch where you trust it, and save it"
        )
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        infos = {info.filename: info for info in archive.infolist()}
        (entry,) = [info for n, info in infos.items() if re.fullmatch(r"[^/]+/data\.pkl", n)]
        root = entry.filename.removesuffix("data.pkl")
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
            raise ValueError("it is compressed, which torch never does")
        order = infos.get(f"{root}byteorder")
        if order and archive.read(order) != b"little":
            raise ValueError("its numbers are big-endian: save it again on another machine")
        pickled = io.BytesIO(archive.read(entry))
        tensors = WeightsUnpickler(pickled, ("torch",), entry.filename).load()
        if not isinstance(tensors, dict):
            raise ValueError("it holds no state_dict, a dict of tensors")
        places: dict[str, typing.Any] = {}
        for name, value in tensors.items():
            while getattr(value, "name", "") == "torch._utils._rebuild_parameter":
                value = value.arguments[0]
            if getattr(value, "name", "") != "torch._utils._rebuild_tensor_v2":
                kind = getattr(value, "name", type(value).__name__)
                raise ValueError(f"{name} is no plain tensor but a {kind}: save the weights alone")
            (storage, key), offset, shape, strides = value.arguments[:4]
            if storage not in STORAGES:
                raise ValueError(f"{name} is stored as {storage}: save it in bfloat16 or float32")
            info = infos[f"{root}data/{key}"]
            file.seek(info.header_offset + LOCAL_HEADER - 4)
            start = info.header_offset + LOCAL_HEADER + sum(struct.unpack("<HH", file.read(4)))
            place = {"offset": numbers([offset])[0], "start": start, "length": info.file_size}
            sizes = {"shape": numbers(shape), "strides": numbers(strides)}
            places[str(name)] = {"dtype": STORAGES[storage], **sizes, **place}
    return places


def file_part(path: str, start: int, length: int) -> io.BytesIO:
    """Return `length` bytes of a file from `start` on; ValueError if the file ends before."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(length)
    if len(data) < length:
        raise ValueError(f"{path} ends before byte {start + length}: it is truncated")
    return io.BytesIO(data)


def catalogue(path: str) -> dict[str, typing.Any]:
    """Return dtype, shape and chunks of every tensor, and the place in a file of every object."""
    with open(path, "rb") as file:
        metadata = RecordUnpickler(file, PLANS, path).load()
    places = {}
    for index, info in metadata["storage_data"].items():
        key = (index["fqn"], tuple(index.state.get("offset") or ()))
        extra = info.state.get("transform_descriptors")
        if extra:
            raise ValueError(f"{key[0]} is stored as {extra}: save it without transforms")
        places[key] = [str(info["relative_path"]), *numbers([info["offset"], info["length"]])]
    tensors: dict[str, typing.Any] = {}
    objects: dict[str, typing.Any] = {}
    for name, stored in metadata["state_dict_metadata"].items():
        if stored.name == f"{DCP}.metadata.BytesStorageMetadata":
            objects[name] = places.get((name, ()))
            continue
        chunks = []
        for chunk in stored["chunks"]:
            begin = chunk["offsets"]
            place = places.get((name, begin), places.get((name, ())) if not any(begin) else None)
            if place is None:
                raise ValueError(f"{name}: {path} has no file for the part at {begin}")
            chunks.append([numbers(begin), numbers(chunk["sizes"]), *place])
        dtype = str(stored["properties"].state[0])
        tensors[str(name)] = {"dtype": dtype, "shape": numbers(stored["size"]), "chunks": chunks}
    return {"tensors": tensors, "objects": objects}


def numbers(values: typing.Any) -> list[int]:
    if not all(type(value) is int for value in values):
        raise TypeError(f"{values!r:.60} are not integers")
    return list(values)


def arguments(path: str, start: int, length: int) -> dict[str, typing.Any]:
    """Return the plain values of a run's arguments, and enums by their values."""
    with zipfile.ZipFile(file_part(path, start, length)) as archive:
        (info,) = [i for i in archive.infolist() if re.fullmatch(r"[^/]+/data\.pkl", i.filename)]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > length:
            raise ValueError(f"{path}: {info.filename} is compressed, which torch never does")
        common = RecordUnpickler(io.BytesIO(archive.read(info)), ARGUMENTS, path).load()
    if isinstance(common, list) and len(common) == 1:  # as an object among the tensors
        (common,) = common
    record = common.get("args") if isinstance(common, dict) else None
    if not isinstance(record, Record) or not isinstance(record.state, dict):
        return {}

    def plain(value: typing.Any) -> bool:
        return value is None or isinstance(value, bool | int | float | str)

    arguments_of_run = {}
    for name, value in record.state.items():
        if isinstance(value, Record) and len(value.arguments) == 1:
            value = value.arguments[0]
        is_list = isinstance(value, list | tuple) and all(plain(item) for item in value)
        if isinstance(name, str) and (plain(value) or is_list):
            arguments_of_run[name] = value
    return arguments_of_run


def part(
    path: str, start: int, length: int, dtype: str, size: list[int], box: list[list[int]]
) -> memoryview:
    """Return the bytes of a box (a slice of every dimension) of one stored tensor."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError(
            f"{sys.executable} has no torch, which these files need: pip install 'maxmeg[megatron]'"
        ) from error
    file = file_part(path, start, length)
    tensor = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{path} has no tensor at {start}, but a {type(tensor).__name__}")
    if list(tensor.shape) != size or tensor.dtype != getattr(torch, dtype):
        raise ValueError(
            f"{path} has {tensor.dtype}{list(tensor.shape)} at {start}, but {dtype}{size} by "
            ".metadata"
        )
    values = tensor[tuple(slice(*bounds) for bounds in box)].detach().contiguous()
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())


ANSWERS: dict[str, typing.Callable[..., typing.Any]] = {
    "weights": weights,
    "catalogue": catalogue,
    "arguments": arguments,
    "part": part,
}


def answer(request: dict[str, typing.Any]) -> tuple[str, memoryview | None]:
    """Return the line of a reply, and the bytes that follow it."""
    try:
        reply = ANSWERS[request["ask"]](*request["of"])
        if isinstance(reply, memoryview):
            return json.dumps({"bytes": reply.nbytes}), reply
        return json.dumps({"found": reply}), None
    except UnsafeError as error:
        return json.dumps({"unsafe": str(error)}), None
    except pickle.UnpicklingError as error:
        refusal = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"wants {refusal[1]}" if refusal else str(error).splitlines()[0]
        return json.dumps({"unsafe": f"{request['of'][0]}: {reason}"}), None
    except Exception as error:  # whatever a damaged file raises: the parent says which file
        reason = str(error).split("\n")[0]
        named = isinstance(error, ValueError)
        where = "" if named else f"{request['of'][0]} is damaged: {type(error).__name__}: "
        return json.dumps({"error": where + reason}), None


def main() -> None:
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # libraries print to stderr, not into the replies
    for line in sys.stdin.buffer:
        reply, data = answer(json.loads(line))
        out.write(reply.encode() + b"\n")
        if data is not None:
            out.write(data)
        out.flush()


if __name__ == "__main__":
    main()
