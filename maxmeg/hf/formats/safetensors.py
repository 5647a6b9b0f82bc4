"""Read and write safetensors files, one tensor at a time.

A file holds the length of its header (8 bytes), the header in JSON, and the tensors' bytes without
gaps. Files are not trusted: every value of a header is checked before it is used, and no memory is
allocated in proportion to a size that only the header states.
"""

import json
import math
import mmap
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from maxmeg.checkpoint.integrity import some
from maxmeg.checkpoint.stream import TensorInfo, row_blocks
from maxmeg.config.hints import hub_command

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 16
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NARROW = (DTYPES["BF16"], DTYPES["F16"])


class SafetensorsFile:
    """One file: `tensors` by name, `metadata`, and `read`; ValueError if it is damaged."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        if not self.path.is_file():  # reading a pipe would block
            raise ValueError(f"{self.path} is missing or not a file: download it again")
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, header = _read_header(file, size, self.path)
        self.metadata = _metadata(header.pop("__metadata__", {}), self.path)
        self._size = size
        spans = []
        for name, entry in header.items():
            info, begin, end = _entry(entry, f"{self.path}: tensor {reprlib.repr(name)}")
            self.tensors[name] = info
            self._begins[name] = start + begin
            spans.append((begin, end, name))
        _check_spans(spans, size - start, self.path)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of the file, which stays mapped as long as it."""
        info, begin = self.tensors[name], self._begins[name]
        count = math.prod(info.shape)
        if not count:
            return np.zeros(info.shape, info.dtype)
        flat = mapped(self.path, self._size, begin, count * info.dtype.itemsize)
        return np.frombuffer(flat, info.dtype).reshape(info.shape)


def mapped(path: Path, size: int, begin: int, length: int) -> memoryview:
    """Return bytes of a file of this size, which stays mapped as long as they are used."""
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError(f"{path} has changed since it was opened: start again")
        pages = mmap.mmap(
            file.fileno(), begin - first + length, access=mmap.ACCESS_READ, offset=first
        )
    return memoryview(pages)[begin - first :]


class TensorFile(Protocol):
    """A file of tensors by name."""

    path: Path
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray: ...


class SafetensorsFolder:
    """The weights of a Hugging Face folder, in one file or in shards with their index.

    single: name of the one file, to which that of the index adds an ending. suffix: of shards.
    opened: opens a file.
    """

    single, suffix = SINGLE, ".safetensors"
    opened: Callable[[Path], TensorFile] = SafetensorsFile

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        single = self.folder / self.single
        index = self.folder / f"{self.single}.index.json"
        if index.is_file() and single.is_file():
            raise ValueError(
                f"{self.folder} holds {single.name} and {index.name}, hence two models: delete one "
                "of them"
            )
        if index.is_file():
            self._files = self._shards(index)
        elif single.is_file():
            file = type(self).opened(single)
            self._files = dict.fromkeys(file.tensors, file)
        else:
            raise ValueError(_nothing_to_read(self.folder))
        self.tensors = {name: file.tensors[name] for name, file in self._files.items()}

    def read(self, name: str, *index: int) -> np.ndarray:
        """Return a tensor, or an entry of its first dimensions, as a read-only view of a file."""
        tensor = self._files[name].read(name)
        return tensor[index] if index else tensor

    def _shards(self, index: Path) -> dict[str, TensorFile]:
        body = read_json(index)
        places = body.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{index} has no weight_map (tensor -> shard): download it again")
        for shard in set(map(str, places.values())):
            _check_shard_name(shard, index, self.suffix)
        shards = sorted(set(places.values()))
        missing = [shard for shard in shards if not (self.folder / shard).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of the {len(shards)} shards that {index.name} "
                f"names: {some(missing)}; download them"
            )
        files = {shard: type(self).opened(self.folder / shard) for shard in shards}
        holders: dict[str, TensorFile] = {}
        for shard, file in files.items():
            for name in file.tensors:
                if name in holders:
                    raise ValueError(
                        f"tensor {reprlib.repr(name)} is in two shards, {holders[name].path.name} "
                        f"and {shard}: download the folder again"
                    )
                holders[name] = file
                if places.get(name) != shard:
                    raise ValueError(
                        f"tensor {reprlib.repr(name)} of {shard} is in "
                        f"{places.get(name, 'no shard')} by {index}: download the folder again"
                    )
        absent = [name for name in places if name not in holders]
        if absent:
            name = absent[0]
            raise ValueError(
                f"{len(absent)} tensors of {index} are not in their shards, the first "
                f"{reprlib.repr(name)} in {places[name]}: download the folder again"
            )
        return {name: holders[name] for name in places}


class SafetensorsWriter:
    """Writes the announced tensors in any order; the files appear when it is closed.

    A shard holds at most max_shard_bytes of tensors (or one larger tensor), in the order of
    `tensors`. A `with` block that raises an exception leaves no file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tensors: Mapping[str, TensorInfo],
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        if max_shard_bytes < 1 or not tensors:
            raise ValueError(
                f"max_shard_bytes={max_shard_bytes} must be at least 1, tensors={len(tensors)} too"
            )
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        old = sorted(path.name for path in self.folder.glob("*.safetensors*"))
        if old:
            raise ValueError(f"{self.folder} already holds {some(old)}: choose another folder")
        self._tensors = dict(tensors)
        self._names: set[str] = set()
        self._places: dict[str, tuple[Path, int]] = {}
        shards = _divided(self._tensors, max_shard_bytes)
        self._shards = [_shard_name(i, len(shards)) for i in range(len(shards))]
        for shard, names in zip(self._shards, shards, strict=True):
            self._start(self._partial(shard), names)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a tensor of the announced shape once.

        float32 is rounded to nearest even if a narrower dtype was announced.
        """
        blocks = row_blocks(array.shape, array.dtype.itemsize)
        self.write_rows(name, (array[rows] if array.shape else array for rows in blocks))

    def write_rows(self, name: str, blocks: Iterable[np.ndarray]) -> None:
        """Write a tensor as `write` does, in blocks of rows."""
        info = self._tensors.get(name)
        if info is None or name in self._names:
            problem = "was written already" if info else "was not announced"
            raise ValueError(f"tensor {name!r} {problem}: write every tensor once")
        path, begin = self._places[name]
        rows, content = 0, TensorInfo(info.dtype, info.shape and (0, *info.shape[1:]))
        with path.open("r+b") as file:
            file.seek(begin)
            for block in blocks:
                rows += len(block) if block.shape else 0
                content = TensorInfo(block.dtype, block.shape and (rows, *block.shape[1:]))
                if not _within(content, info):
                    break
                block = np.ascontiguousarray(block, info.dtype)
                file.write(block.reshape(-1).view(np.uint8).data)
        if content.shape != info.shape or not _within(content, info):
            raise ValueError(
                f"tensor {name!r} is {content.dtype}{list(content.shape)}, announced was "
                f"{info.dtype}{list(info.shape)}"
            )
        self._names.add(name)

    def close(self) -> None:
        """Rename the files to their final names; ValueError if a tensor was not written."""
        missing = [name for name in self._tensors if name not in self._names]
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written: {some(missing)}")
        for shard in self._shards:
            with self._partial(shard).open("rb") as file:
                os.fsync(file.fileno())
        for shard in self._shards:
            self._partial(shard).rename(self.folder / shard)
        if len(self._shards) == 1:
            return
        sizes = (_num_bytes(info) for info in self._tensors.values())
        shards = {self._partial(shard): shard for shard in self._shards}
        body = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {name: shards[self._places[name][0]] for name in sorted(self._tensors)},
        }
        (self.folder / INDEX).write_text(json.dumps(body, indent=2) + "\n", "utf-8")

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            for shard in self._shards:
                self._partial(shard).unlink(missing_ok=True)

    def _partial(self, shard: str) -> Path:
        return self.folder / f".{shard}.partial"

    def _start(self, path: Path, names: Iterable[str]) -> None:
        """Write the header of a shard, and extend the file to its final length."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Wide dtypes first: then the bytes of every tensor are aligned.
        order = sorted(names, key=lambda name: -self._tensors[name].dtype.itemsize)
        for name in order:
            info = self._tensors[name]
            if info.dtype not in _NAMES:
                raise ValueError(
                    f"tensor {name!r} is {info.dtype}: safetensors has {', '.join(_NAMES.values())}"
                )
            begin, end = end, end + _num_bytes(info)
            header[name] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        for name in order:
            self._places[name] = (path, 8 + len(text) + header[name]["data_offsets"][0])


def _within(content: TensorInfo, info: TensorInfo) -> bool:
    """Return whether the first rows of a tensor `info` can have this dtype and shape."""
    narrower = content.dtype == np.float32 and info.dtype in _NARROW
    same_rows = len(content.shape) == len(info.shape) and content.shape[1:] == info.shape[1:]
    return (narrower or content.dtype == info.dtype) and same_rows and content.shape <= info.shape


def _read_header(file: Any, size: int, path: Path) -> tuple[int, dict[str, Any]]:
    """Return the position of the first tensor, and the header."""
    if size < 8:
        raise ValueError(f"{path} has {size} bytes, less than a header's length: download it again")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: a header of {length} bytes, above the limit of {MAX_HEADER_BYTES}: this is "
            "not a safetensors file"
        )
    if length > size - 8:
        raise ValueError(
            f"{path}: a header of {length} bytes in a file of {size}: it is truncated or no "
            "safetensors file; download it again"
        )
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise ValueError(f"{path}: the header begins with {raw[:8]!r}, not with '{{'")
    return 8 + length, _json(raw, path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ValueError for anything else, and for duplicate keys."""
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise ValueError(f"{path} has more than {MAX_HEADER_BYTES} bytes: it is not JSON")
    return _json(path.read_bytes(), path)


def _json(raw: bytes, path: Path) -> dict[str, Any]:
    """Return a JSON object; ValueError for duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = Counter(key for key, _ in pairs).most_common(1)
        if keys and keys[0][1] > 1:
            raise ValueError(f"{reprlib.repr(keys[0][0])} is given twice")
        return dict(pairs)

    try:
        body = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the JSON is damaged: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path}: the JSON is {type(body).__name__}, not an object")
    return body


def _metadata(metadata: Any, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__ is {reprlib.repr(metadata)}, not texts by name")
    return metadata


def _entry(entry: Any, what: str) -> tuple[TensorInfo, int, int]:
    """Return dtype and shape of a tensor by its header entry, and the range of its bytes."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} is {reprlib.repr(entry)}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{what} has dtype {reprlib.repr(dtype)}, supported are {', '.join(DTYPES)}: save it "
            "in one of them"
        )
    if not _naturals(shape, MAX_DIMENSIONS):
        raise ValueError(
            f"{what} has shape {reprlib.repr(shape)}: expected at most {MAX_DIMENSIONS} sizes >= 0"
        )
    if not _naturals(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{what} has data_offsets {reprlib.repr(offsets)}: expected [begin, end]")
    info = TensorInfo(DTYPES[dtype], tuple(shape))
    if _num_bytes(info) != offsets[1] - offsets[0]:
        raise ValueError(
            f"{what}, {dtype}{shape}, takes {_num_bytes(info)} bytes, but its data_offsets "
            f"{offsets} leave {offsets[1] - offsets[0]}"
        )
    return info, offsets[0], offsets[1]


def _naturals(numbers: Any, count: int) -> bool:
    """Return whether a value is a list of at most `count` integers from 0 to 2^63 - 1."""
    if not isinstance(numbers, list) or len(numbers) > count:
        return False
    return all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _check_spans(spans: list[tuple[int, int, str]], size: int, path: Path) -> None:
    """ValueError unless tensors fill the rest of the file without overlaps and gaps."""
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise ValueError(
                f"{path}: tensor {reprlib.repr(name)} at byte {begin} {kind}, which ends at {at}"
            )
        at = end
    if at != size:
        raise ValueError(
            f"{path}: tensors end at byte {at}, the file at {size}: "
            + ("it is truncated; download it again" if at > size else "no tensor has the rest")
        )


def _check_shard_name(shard: str, index: Path, suffix: str) -> None:
    """ValueError unless a shard lies beside its index (as a link, in download caches)."""
    plain = "/" not in shard and "\\" not in shard and "\0" not in shard
    if not plain or not shard.endswith(suffix):
        raise ValueError(
            f"{index} names the shard {reprlib.repr(shard)}: expected NAME{suffix} in the same "
            "folder"
        )


def _nothing_to_read(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"{folder} is not a folder: give the folder that holds {SINGLE} or {INDEX}"
            f"{hub_command(str(folder))}"
        )
    names = sorted(path.name for path in folder.iterdir())
    old = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".msgpack"))]
    if old:
        return (
            f"{folder} holds {some(old)}, which can run code when they are read, and no {SINGLE} "
            "or pytorch_model.bin. "
            'Convert them where you trust them: python -c "import transformers; '
            f"transformers.AutoModelForCausalLM.from_pretrained('{folder}', dtype='auto')"
            f".save_pretrained('{folder}-safetensors')\""
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}, but {some(names) or 'nothing'}"


def _num_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _divided(tensors: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Return the names of each shard, in order, so that no shard exceeds the limit."""
    shards: list[list[str]] = []
    room = -1
    for name, info in tensors.items():
        if _num_bytes(info) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= _num_bytes(info)
    return shards


def _shard_name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
