"""A checkpoint written and read one piece at a time: the manager's format, in little memory.

A piece is a whole tensor, one entry of its dimension 0 (a layer of a stacked array), or one of both
its first dimensions (an expert of a layer). Pieces are
cast, digested and written in blocks of rows, so what counts is the largest piece that the caller
holds, never the tensor. Files of the manager's own checkpoints are mapped, not read whole.

A file holds many pieces, each written in its place as it comes: one each would be 45,000 files for
DeepSeek-V3. They are chunks of one of Zarr's shards, so that whoever wants one reads no other.
"""

import dataclasses
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxmeg.checkpoint import integrity
from maxmeg.checkpoint.integrity import CorruptCheckpointError, Manifest, Tensor
from maxmeg.checkpoint.manager import ARRAYS, Checkpointer

BLOCK_BYTES = 64 << 20  # of a chunk, and of what is cast and digested at once
FILE_BYTES = 1 << 30  # of a file of several chunks
_BYTES_CODEC = {"name": "bytes", "configuration": {"endian": "little"}}
_SHOWN = 5
Index = tuple[int, ...]  # of a piece: (), (layer,) or (layer, expert)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before its values."""

    dtype: np.dtype
    shape: tuple[int, ...]


class StreamWriter:
    """Writes a checkpoint piece by piece; `with` publishes it at the end, or leaves nothing.

    tensors: what will be written, by path ("model/embedding/table"). ValueError for a tensor that
    no checkpoint can hold, for a piece given twice, of another shape, or missing at the end.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: int,
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, Any],
    ) -> None:
        if step < 0 or not tensors:
            raise ValueError(f"step={step} must be >= 0 and tensors={len(tensors)} at least 1")
        for path, info in tensors.items():
            if 0 in info.shape or jax.dtypes.canonicalize_dtype(info.dtype) != info.dtype:
                raise ValueError(
                    f"{path} ({info.dtype}{list(info.shape)}) cannot be saved: leave out what is "
                    "empty, and cast what is wider than 32 bits"
                )
        self._manifest = Manifest(step, json.loads(json.dumps(metadata)), {}, {})
        self._tensors = dict(tensors)
        self._written: dict[str, set[Index]] = {path: set() for path in tensors}
        self._sums = {path: np.zeros(2, np.uint32) for path in tensors}
        self._cuts: dict[str, _Cut] = {}
        self._checkpointer = Checkpointer(folder)
        self._temporary = self._checkpointer.folder_of(step).with_suffix(".tmp")
        self._checkpointer.begin(self._temporary)
        described = json.dumps(_describe_tree(self._tensors))
        (self._temporary / ARRAYS / "_METADATA").write_text(described, "utf-8")

    def write(
        self,
        path: str,
        array: np.ndarray,
        index: Index | int | None = None,
        *,
        pad_rows: bool = False,
    ) -> None:
        """Writes a tensor, or entry `index` of its first dimensions.

        The dtype may be one that casts exactly (bfloat16 for float32). With pad_rows the array
        may have fewer rows than the piece: zeros follow.
        """
        lead = as_index(index)
        info = self._claim(path, lead)
        shape = info.shape[len(lead) :]
        padded = array.shape
        if pad_rows and shape and len(padded) == len(shape) and padded[0] < shape[0]:
            padded = (shape[0], *padded[1:])
        if padded != shape or not np.can_cast(array.dtype, info.dtype):
            raise ValueError(
                f"a piece of {path} is {array.dtype}{list(array.shape)}: expected "
                f"{info.dtype}{list(shape)}"
            )
        blocks = row_blocks(shape, info.dtype.itemsize)
        folder = self._temporary / ARRAYS / path.replace("/", ".")
        if path not in self._cuts:  # the first piece decides how the tensor is cut
            chunk = (*(1 for _ in lead), *_block_shape(shape, blocks[0]))
            cut = self._cuts[path] = _cut(info, chunk, 0 if len(blocks) > 1 else len(lead))
            folder.mkdir()
            (folder / "zarr.json").write_text(json.dumps(_describe_array(info, cut)), "utf-8")
        for number, rows in enumerate(blocks):
            block = np.zeros(_block_shape(shape, rows), info.dtype)
            values = array[rows] if shape else array
            target = block[: len(values)] if shape else block
            target[...] = values
            block = block.reshape((*(1 for _ in lead), *block.shape))
            self._sums[path] += integrity.digest_piece(block, _numbers(lead, shape, rows.start))
            self._cuts[path].store(folder / "c", _numbers(lead, shape, number), block)

    def close(self) -> None:
        """Publishes the checkpoint; ValueError where pieces are missing."""
        missing = []
        for path, info in self._tensors.items():
            done = self._written[path]
            if not done:
                missing.append(path)
            elif len(done) < (entries := _num_pieces(info, done)):
                missing.append(f"{path} (has {len(done)} of {entries} entries)")
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(
                f"{len(missing)} tensors are not written: {', '.join(missing[:_SHOWN])}{more}"
            )
        tensors = {
            path: Tensor(info.shape, str(info.dtype), integrity.render_digest(self._sums[path]))
            for path, info in self._tensors.items()
        }
        manifest = dataclasses.replace(self._manifest, tensors=tensors)
        self._checkpointer.publish(manifest, self._temporary)

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _claim(self, path: str, index: Index) -> TensorInfo:
        """Marks a piece as written."""
        info = self._tensors.get(path)
        if info is None:
            raise ValueError(f"tensor {path} was not announced: announced are {len(self._tensors)}")
        _check_index(path, info, index)
        done = self._written[path]
        if index in done or any(len(other) != len(index) for other in itertools.islice(done, 1)):
            piece = f"entry {_shown(index)}" if index else "as a whole"
            raise ValueError(f"tensor {path}, {piece}, is written twice: write each piece once")
        done.add(index)
        return info


class StreamReader:
    """Reads a checkpoint piece by piece: `tensors` by path, `metadata`, and `read`.

    The files of a tensor are verified when it is first read, its digest when all of it was read.
    ValueError where there is no such checkpoint, CorruptCheckpointError for damage.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int) -> None:
        self._folder = Checkpointer(folder).existing(step)
        self._manifest = integrity.read_manifest(self._folder)
        self.metadata = self._manifest.metadata
        self.tensors = {
            path: TensorInfo(np.dtype(jax.numpy.dtype(tensor.dtype)), tensor.shape)
            for path, tensor in self._manifest.tensors.items()
        }
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._sums: dict[str, np.ndarray] = {}
        self._read: dict[str, set[Index]] = {}

    def read(self, path: str, index: Index | int | None = None) -> np.ndarray:
        """A tensor, or entry `index` of its first dimensions."""
        info, folder = self._opened(path)
        lead = as_index(index)
        _check_index(path, info, lead)
        array = _assemble(folder, info, self._chunks[path], [slice(i, i + 1) for i in lead])
        array = array[(0,) * len(lead)] if lead else array
        self._verify(path, info, array, lead)
        return array

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """A tensor in blocks of rows: one is in memory at a time. Its digest comes at the end."""
        info, folder = self._opened(path)
        sums = np.zeros(2, np.uint32)
        for rows in row_blocks(info.shape, info.dtype.itemsize):
            block = _assemble(folder, info, self._chunks[path], [rows] if info.shape else [])
            sums += integrity.digest_piece(block, _numbers((), info.shape, rows.start))
            yield block
        found = {path: integrity.render_digest(sums)}
        integrity.verify_digests(self._folder, self._manifest, found)

    def _opened(self, path: str) -> tuple[TensorInfo, Path]:
        """What is known of a tensor whose files are as they were written, and their folder."""
        info = self.tensors.get(path)
        if info is None:
            raise ValueError(f"tensor {path} is not in {self._folder}")
        folder = self._folder / ARRAYS / path.replace("/", ".")
        if path not in self._chunks:
            files = self._manifest.files
            own = [n for n in files if integrity.tensor_of(n, self._manifest.tensors) == path]
            integrity.verify_files(self._folder, self._manifest, own)
            self._chunks[path] = _chunk_shape(folder / "zarr.json", info)
        return info, folder / "c"

    def _verify(self, path: str, info: TensorInfo, array: np.ndarray, lead: Index) -> None:
        """Adds a piece to the tensor's digest, and compares that when it is complete."""
        done = self._read.setdefault(path, set())
        if lead in done or () in done:
            return
        if any(len(other) != len(lead) for other in itertools.islice(done, 1)):
            done.clear()
            self._sums[path] = np.zeros(2, np.uint32)
        done.add(lead)
        sums = self._sums.setdefault(path, np.zeros(2, np.uint32))
        for rows in row_blocks(array.shape, info.dtype.itemsize):
            block = np.ascontiguousarray(array[rows] if array.shape else array)
            block = block.reshape((*(1 for _ in lead), *_block_shape(array.shape, rows)))
            sums += integrity.digest_piece(block, _numbers(lead, array.shape, rows.start))
        if len(done) == _num_pieces(info, done):
            found = {path: integrity.render_digest(sums)}
            integrity.verify_digests(self._folder, self._manifest, found)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Shapes of a tensor's chunks, and of its files: of several chunks where those are larger."""

    chunk: tuple[int, ...]
    file: tuple[int, ...]

    def store(self, folder: Path, numbers: Index, block: np.ndarray) -> None:
        """Writes a chunk, or the first rows of one, at its place in its file."""
        counts = [whole // part for whole, part in zip(self.file, self.chunk, strict=True)]
        places = [divmod(n, count) for n, count in zip(numbers, counts, strict=True)]
        file = folder.joinpath(*(str(number) for number, _ in places))
        chunk_bytes, total = math.prod(self.chunk) * block.itemsize, math.prod(counts)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as opened:
                opened.truncate(total * chunk_bytes)
                opened.seek(total * chunk_bytes)
                if total > 1:  # where each begins, and its length
                    begins = np.arange(total, dtype="<u8") * chunk_bytes
                    index = np.stack([begins, np.full_like(begins, chunk_bytes)], axis=1)
                    opened.write(index.tobytes())
        position = 0
        for (_, inside), count in zip(places, counts, strict=True):
            position = position * count + inside
        with file.open("r+b") as opened:
            opened.seek(position * chunk_bytes)
            opened.write(block.reshape(-1).view(np.uint8).data)


def _cut(info: TensorInfo, chunk: tuple[int, ...], lead: int) -> _Cut:
    """Of the first `lead` dimensions, a file holds as many entries of the last as FILE_BYTES have
    room for; if that is all of them, then of the one before it."""
    file = list(chunk)
    for dimension in reversed(range(lead)):
        size = info.shape[dimension]
        file_bytes = math.prod(file) * info.dtype.itemsize
        file[dimension] = row_blocks((size,), file_bytes, FILE_BYTES)[0].stop
        if file[dimension] < size:
            break
    return _Cut(chunk, tuple(file))


def as_index(index: Index | int | None) -> Index:
    return () if index is None else (index,) if isinstance(index, int) else index


def _check_index(path: str, info: TensorInfo, index: Index) -> None:
    inside = len(index) <= len(info.shape)
    if not inside or not all(0 <= i < size for i, size in zip(index, info.shape, strict=False)):
        raise ValueError(f"tensor {path} of shape {info.shape} has no entry {_shown(index)}")


def _num_pieces(info: TensorInfo, pieces: set[Index]) -> int:
    """Of how many pieces such as these a tensor consists."""
    return math.prod(info.shape[: len(next(iter(pieces)))])


def _shown(index: Index) -> str:
    return ", ".join(map(str, index))


def row_blocks(shape: tuple[int, ...], itemsize: int, limit: int | None = None) -> list[slice]:
    """Slices along dimension 0, each of at most `limit` bytes or one row; one for a scalar.

    As many rows in each as can be, but in equal parts where that costs less than half of them.
    """
    if not shape:
        return [slice(0, 1)]
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    most = max(1, min((limit or BLOCK_BYTES) // row_bytes, shape[0]))
    rows = next((n for n in range(most, most // 2, -1) if shape[0] % n == 0), most)
    return [slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows)]


def _block_shape(shape: tuple[int, ...], rows: slice) -> tuple[int, ...]:
    return (rows.stop - rows.start, *shape[1:]) if shape else ()


def _numbers(lead: tuple[int, ...], shape: tuple[int, ...], first: int) -> tuple[int, ...]:
    """Index in the whole tensor of a block of a piece: its rows are the dimension after lead."""
    return (*lead, *((first, *(0 for _ in shape[1:])) if shape else ()))


def _describe_tree(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Orbax's `_METADATA` of nested dicts."""

    def one(parts: list[str]) -> dict[str, Any]:
        return {
            "key_metadata": [{"key": part, "key_type": 2} for part in parts],  # a dict's key
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }

    split = [path.split("/") for path in tensors]
    return {
        "tree_metadata": {str(tuple(parts)): one(parts) for parts in split},
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _describe_array(info: TensorInfo, cut: _Cut) -> dict[str, Any]:
    """zarr.json of an array whose chunks are plain bytes, in files of one or, in order, more."""
    codecs: list[Any] = [_BYTES_CODEC if info.dtype.itemsize > 1 else {"name": "bytes"}]
    if cut.file != cut.chunk:
        shard = {"chunk_shape": list(cut.chunk), "codecs": codecs, "index_codecs": [_BYTES_CODEC]}
        shard["index_location"] = "end"
        codecs = [{"name": "sharding_indexed", "configuration": shard}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": str(info.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(cut.file)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": np.zeros((), info.dtype).astype(object).item(),
        "codecs": codecs,
    }


def _chunk_shape(path: Path, info: TensorInfo) -> tuple[int, ...]:
    """How a tensor is cut into files; each begins with its values, whoever wrote it.

    Orbax writes one chunk a file as a shard: its values, then an index of 20 bytes. StreamWriter's
    shards, alone without a checksum of their index, have all of their chunks in C's order.
    """
    described = json.loads(path.read_bytes())
    chunk = described["chunk_grid"]["configuration"]["chunk_shape"]
    codecs = described["codecs"]
    if codecs[0]["name"] == "sharding_indexed":
        shard = codecs[0]["configuration"]
        ours = shard.get("index_codecs") == [_BYTES_CODEC] and _in_order(
            shard["chunk_shape"], chunk
        )
        first = shard.get("index_location", "end") == "end"
        whole = first and (shard["chunk_shape"] == chunk or ours)
        codecs = shard["codecs"] if whole else codecs
    plain = codecs in ([_BYTES_CODEC], [{"name": "bytes"}])
    if not plain or described["chunk_key_encoding"] != {"name": "default"}:
        raise ValueError(f"{path} has codecs {codecs}: read this checkpoint with Checkpointer")
    if tuple(described["shape"]) != info.shape or described["data_type"] != str(info.dtype):
        raise CorruptCheckpointError(f"{path} is not of the {info} that the manifest names")
    return tuple(chunk)


def _in_order(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether parts of this shape, one after the other, are the bytes of the whole."""
    cut = next((i for i, size in enumerate(part) if size > 1), len(part))
    return len(part) == len(whole) and [*part[cut + 1 :]] == [*whole[cut + 1 :]]


def _assemble(
    folder: Path, info: TensorInfo, chunk: tuple[int, ...], ranges: Sequence[slice]
) -> np.ndarray:
    """A part of a tensor, the ranges being of its first dimensions, copied from the mapped files
    that hold it."""
    begins = (*(r.start for r in ranges), *(0 for _ in info.shape[len(ranges) :]))
    ends = (*(r.stop for r in ranges), *info.shape[len(ranges) :])
    spans = list(zip(begins, ends, chunk, strict=True))
    array = np.empty([end - begin for begin, end, _ in spans], info.dtype)
    for numbers in itertools.product(*(range(b // part, -(-e // part)) for b, e, part in spans)):
        name = folder.joinpath(*map(str, numbers)) if numbers else folder
        values = np.memmap(name, info.dtype, "r", shape=chunk or (1,))
        here, there = [], []
        for number, (begin, end, part) in zip(numbers, spans, strict=True):
            first = number * part
            low, high = max(first, begin), min(first + part, end)
            here.append(slice(low - first, high - first))
            there.append(slice(low - begin, high - begin))
        array[(*there,)] = values[(*here,)] if chunk else values[0]
    return array
