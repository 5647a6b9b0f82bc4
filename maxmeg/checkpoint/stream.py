"""Write and read a checkpoint one piece at a time, in the manager's format and with little memory.

A piece is a whole tensor, one entry of its dimension 0 (a layer of a stacked array), or one entry
of its first two dimensions (an expert of a layer). Pieces are cast, digested and written in blocks
of rows, so memory is bounded by the largest piece. Files are memory-mapped for reading.

Each file holds many pieces (one file per piece would be 45,000 files for DeepSeek-V3). They are
chunks of a Zarr shard, so that each can be read without the others.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxmeg.checkpoint import integrity
from maxmeg.checkpoint.integrity import Manifest, Tensor, some
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.places import ARRAYS
from maxmeg.checkpoint.storage import (
    CHECKED,
    TREE,
    TensorInfo,
    create_array,
    describe_tree,
    encoded,
    open_array,
    read_block,
    tensor_folder,
)
from maxmeg.runtime.disk import flush

BLOCK_BYTES = 64 << 20  # largest chunk, and largest block that is cast and digested at once
FILE_BYTES = 1 << 30  # largest file of several chunks
KEEP_ALL = 1 << 30  # checkpoints
Index = tuple[int, ...]  # of a piece: (), (layer,) or (layer, expert)


class StreamWriter:
    """Writes a checkpoint piece by piece; `with` publishes it at the end, or leaves nothing.

    tensors: all tensors to write, by path ("model/embedding/table"). ValueError for a tensor that
    no checkpoint can hold, and for a piece that is written twice, of another shape, or missing.
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
        self._entries: dict[str, set[Index]] = {path: set() for path in tensors}
        self._sums = {path: np.zeros(2, np.uint32) for path in tensors}
        self._cuts: dict[str, _Cut] = {}
        self._saving = Checkpointer(folder, keep_last=KEEP_ALL).start(step)

    def write(
        self,
        path: str,
        array: np.ndarray,
        index: Index | int | None = None,
        *,
        pad_rows: bool = False,
    ) -> None:
        """Write a tensor, or entry `index` of its first dimensions.

        The dtype may be one that casts exactly (bfloat16 for float32). With pad_rows an array with
        fewer rows than the piece is zero-padded.
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
        folder = self._saving.arrays / tensor_folder(path)
        if path not in self._cuts:  # the first piece decides the chunks of the tensor
            chunk = (*(1 for _ in lead), *_block_shape(shape, blocks[0]))
            cut = self._cuts[path] = _cut(info, chunk, 0 if len(blocks) > 1 else len(lead))
            create_array(self._saving.arrays, path, info, cut.file, cut.codecs())
        for number, rows in enumerate(blocks):
            block = np.zeros(_block_shape(shape, rows), info.dtype)
            values = array[rows] if shape else array
            target = block[: len(values)] if shape else block
            target[...] = values
            block = block.reshape((*(1 for _ in lead), *block.shape))
            self._sums[path] += integrity.digest_piece(block, _numbers(lead, shape, rows.start))
            self._cuts[path].store(folder / "c", _numbers(lead, shape, number), block)

    def close(self) -> None:
        """Publish the checkpoint; ValueError if pieces are missing."""
        missing = []
        for path, info in self._tensors.items():
            done = self._entries[path]
            if not done:
                missing.append(path)
            elif len(done) < (entries := _num_pieces(info, done)):
                missing.append(f"{path} (has {len(done)} of {entries} entries)")
        if missing:
            raise ValueError(f"{len(missing)} tensors are not written: {some(missing)}")
        tensors = {
            path: Tensor(info.shape, str(info.dtype), integrity.render_digest(self._sums[path]))
            for path, info in self._tensors.items()
        }
        (self._saving.arrays / TREE).write_bytes(describe_tree(tensors))
        manifest = dataclasses.replace(self._manifest, tensors=tensors)
        for path in self._saving.arrays.rglob("*"):
            flush(path)
        self._saving.publish(manifest)

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if kind is not None:
            return self._saving.give_up()
        try:
            self.close()
        except BaseException:
            self._saving.give_up()
            raise

    def _claim(self, path: str, index: Index) -> TensorInfo:
        """Mark a piece as written; ValueError if it was written before."""
        info = self._tensors.get(path)
        if info is None:
            raise ValueError(f"tensor {path} was not announced: announced are {len(self._tensors)}")
        _check_index(path, info, index)
        done = self._entries[path]
        if index in done or any(len(other) != len(index) for other in itertools.islice(done, 1)):
            piece = f"entry {_bracketed(index)}" if index else "as a whole"
            raise ValueError(f"tensor {path}, {piece}, is written twice: write each piece once")
        done.add(index)
        return info


class StreamReader:
    """Reads a checkpoint piece by piece: `tensors` by path, `metadata`, `digest`, and `read`.

    A tensor's files are verified at its first read, its digest once all of its pieces were read.
    ValueError if there is no such checkpoint, CorruptCheckpointError if it is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int) -> None:
        self._folder, self._manifest = Checkpointer(folder).find(step)
        self.metadata, self.digest = self._manifest.metadata, self._manifest.digest
        self.tensors = {
            path: TensorInfo(np.dtype(jax.numpy.dtype(tensor.dtype)), tensor.shape)
            for path, tensor in self._manifest.tensors.items()
        }
        self._names: dict[str, list[str]] = {path: [] for path in self.tensors}  # of files
        for name in self._manifest.files:
            if path := integrity.tensor_of(name, self._manifest.tensors):
                self._names[path].append(name)
        self._arrays: dict[str, Any] = {}
        self._sums: dict[str, np.ndarray] = {}
        self._read: dict[str, set[Index]] = {}

    def read(self, path: str, index: Index | int | None = None) -> np.ndarray:
        """Return a tensor, or entry `index` of its first dimensions."""
        opened, info = self._opened(path), self.tensors[path]
        lead = as_index(index)
        _check_index(path, info, lead)
        array = read_block(opened, [slice(i, i + 1) for i in lead])
        array = array[(0,) * len(lead)] if lead else array
        self._verify(path, info, array, lead)
        return array

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """Yield a tensor in blocks of rows, one in memory at a time; then verify its digest."""
        opened, info = self._opened(path), self.tensors[path]
        sums = np.zeros(2, np.uint32)
        for rows, block in _blocks(opened, info):
            sums += integrity.digest_piece(block, _numbers((), info.shape, rows.start))
            yield block
        digests = {path: integrity.render_digest(sums)}
        integrity.verify_digests(self._folder, self._manifest, digests)

    def verify_files(self, paths: Iterable[str]) -> None:
        """CorruptCheckpointError if files of these tensors are damaged; reads each file once."""
        for path in paths:
            opened = self._opened(path)
            if not all(self._manifest.files[name][1] for name in self._names[path]):
                for _ in _blocks(opened, self.tensors[path]):  # TensorStore checks its own files
                    pass

    def _opened(self, path: str) -> Any:
        """Return a tensor for `read_block`, once its files have been compared with the manifest."""
        if path not in self.tensors:
            raise ValueError(f"tensor {path} is not in {self._folder}")
        if path not in self._arrays:
            integrity.verify_sizes(self._folder, self._manifest, self._names[path])
            integrity.verify_files(self._folder, self._manifest, self._names[path])
            self._arrays[path] = open_array(self._folder / ARRAYS, path, self.tensors[path])
        return self._arrays[path]

    def _verify(self, path: str, info: TensorInfo, array: np.ndarray, lead: Index) -> None:
        """Add a piece to the tensor's digest; verify the digest when it is complete."""
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
            digests = {path: integrity.render_digest(sums)}
            integrity.verify_digests(self._folder, self._manifest, digests)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Shapes of a tensor's chunks, and of its files, which hold one chunk or several."""

    chunk: tuple[int, ...]
    file: tuple[int, ...]

    def codecs(self) -> list[dict[str, Any]]:
        """Return Zarr's codecs of the tensor."""
        if self.file == self.chunk:
            return CHECKED
        shard = {"chunk_shape": list(self.chunk), "codecs": CHECKED, "index_codecs": CHECKED}
        return [{"name": "sharding_indexed", "configuration": {**shard, "index_location": "end"}}]

    def store(self, folder: Path, numbers: Index, block: np.ndarray) -> None:
        """Write a chunk, or its first rows, at its offset in its file."""
        counts = [size // part for size, part in zip(self.file, self.chunk, strict=True)]
        places = [divmod(n, count) for n, count in zip(numbers, counts, strict=True)]
        file = folder.joinpath(*(str(number) for number, _ in places))
        data, total = encoded(block, self.chunk), math.prod(counts)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as opened:
                opened.truncate(total * len(data))
                opened.seek(total * len(data))
                if total > 1:  # Zarr's index: offset and length of each chunk
                    begins = np.arange(total, dtype=np.uint64) * len(data)
                    index = np.stack([begins, np.full_like(begins, len(data))], axis=1)
                    opened.write(encoded(index, index.shape))
        position = 0
        for (_, inside), count in zip(places, counts, strict=True):
            position = position * count + inside
        with file.open("r+b") as opened:
            opened.seek(position * len(data))
            opened.write(data)


def _cut(info: TensorInfo, chunk: tuple[int, ...], lead: int) -> _Cut:
    """Choose the shape of files: as many entries of dimension lead - 1 as FILE_BYTES can hold; if
    all fit, as many entries of the dimension before it, and so on."""
    file = list(chunk)
    for dimension in reversed(range(lead)):
        size = info.shape[dimension]
        file_bytes = math.prod(file) * info.dtype.itemsize
        file[dimension] = row_blocks((size,), file_bytes, FILE_BYTES)[0].stop
        if file[dimension] < size:
            break
    return _Cut(chunk, tuple(file))


def _blocks(array: Any, info: TensorInfo) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the blocks of a tensor that `open_array` opened, and their rows."""
    for rows in row_blocks(info.shape, info.dtype.itemsize):
        yield rows, read_block(array, [rows] if info.shape else [])


def as_index(index: Index | int | None) -> Index:
    return () if index is None else (index,) if isinstance(index, int) else index


def _check_index(path: str, info: TensorInfo, index: Index) -> None:
    inside = len(index) <= len(info.shape)
    if not inside or not all(0 <= i < size for i, size in zip(index, info.shape, strict=False)):
        raise ValueError(f"tensor {path} of shape {info.shape} has no entry {_bracketed(index)}")


def _num_pieces(info: TensorInfo, pieces: set[Index]) -> int:
    """Return the number of pieces of a tensor that is cut like these."""
    return math.prod(info.shape[: len(next(iter(pieces)))])


def _bracketed(index: Index) -> str:
    return ", ".join(map(str, index))


def row_blocks(shape: tuple[int, ...], itemsize: int, limit: int | None = None) -> list[slice]:
    """Return slices along dimension 0, each of at most `limit` bytes or one row; one for a scalar.

    Slices are equal if more than half of the largest number of rows divides dimension 0.
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
    """Return the index in the tensor at which a block of a piece begins."""
    return (*lead, *((first, *(0 for _ in shape[1:])) if shape else ()))
