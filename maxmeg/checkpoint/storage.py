"""Write and read the arrays of a tree: one Zarr array per tensor, one file per chunk.

Every process writes chunks of the shards on its own devices, and reads the chunks that its
devices need, without communication. Stacked arrays hold the layers in the model's order, without
padding, whatever the pipeline. Files are uncompressed, because weights do not compress. The folder
is an Orbax checkpoint of nested dicts (PyTreeCheckpointHandler, without OCDBT).
"""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxmeg.checkpoint.integrity import CorruptCheckpointError
from maxmeg.config.schema import Verify
from maxmeg.pipeline.layout import Layout

CHUNK_BYTES = 128 << 20  # a larger shard is cut into several files
MIN_REPLICA_BYTES = 1 << 20  # a smaller shard is written by one of its replicas
_THREADS = 8
TREE = "_METADATA"  # file in the folder of arrays, written by describe_tree
DICT_KEY = 2  # Orbax's number for keys of dicts
BYTES_CODEC = {"name": "bytes", "configuration": {"endian": "little"}}
STACKED = re.compile(r"(?:^|\.)stack\.groups\.(\d+)\.")
Order = Sequence[int]  # the model's layer in each row of a stacked array; -1: padding
T = TypeVar("T")
U = TypeVar("U")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The dtype and the shape on disk of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One file of a tensor: its name in the folder of arrays, and its slice of a shard."""

    name: str
    shard: jax.Array | np.ndarray
    inside: tuple[slice, ...]


def row_orders(names: Iterable[str], layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the model's layer in each row (-1: padding) of the arrays that a pipeline reorders.

    Keys are paths in a checkpoint: "model/stack/groups/0/...".
    """
    stacked = [(name, match) for name in names if (match := STACKED.search(name))]
    if layout.trivial:
        return {}
    return {name.replace(".", "/"): layout.orders[int(match[1])] for name, match in stacked}


def disk_shape(shape: tuple[int, ...], order: Order | None) -> tuple[int, ...]:
    """Return the shape on disk: a stacked array has the model's layers without padding."""
    return shape if order is None else (max(order) + 1, *shape[1:])


def tensor_folder(path: str) -> str:
    """Return the name of the folder that holds a tensor."""
    return path.replace("/", ".")


def info_of(array: jax.Array | jax.ShapeDtypeStruct, order: Order | None) -> TensorInfo:
    return TensorInfo(np.dtype(array.dtype), disk_shape(array.shape, order))


def chunk_shape(array: jax.Array, order: Order | None) -> tuple[int, ...]:
    """Return the shape of a tensor's chunks, each of which lies within one shard.

    Shards are cut further along their first dimensions, to bound the size of a chunk, and so
    that replicas share the work of writing large shards.
    """
    shape = list(array.sharding.shard_shape(array.shape))
    if order is not None:
        shape[0] = _rows_per_chunk(order, shape[0])
    size = math.prod(shape) * array.dtype.itemsize
    parts = max(-(-size // CHUNK_BYTES), min(_num_replicas(array), size // MIN_REPLICA_BYTES))
    for dim, length in enumerate(shape):
        divisor = next((n for n in range(min(parts, length), 1, -1) if length % n == 0), 1)
        shape[dim] //= divisor
        parts //= divisor
    return tuple(shape)


def _num_replicas(array: jax.Array) -> int:
    num_shards = math.prod(array.shape) // math.prod(array.sharding.shard_shape(array.shape))
    return len(array.sharding.device_set) // num_shards


def _rows_per_chunk(order: Order, rows: int) -> int:
    """Return the most layers per chunk so that no chunk crosses two shards."""
    bounds = [0]
    for first in range(0, len(order), rows):
        previous = -1
        for layer in (*order[first : first + rows], -1):
            if previous < 0 or layer != previous + 1:  # the end of consecutive layers
                bounds += [previous + 1, max(layer, 0)]
            previous = layer
    return math.gcd(*bounds)


def take_snapshot(leaves: Mapping[str, jax.Array], orders: Mapping[str, Order]) -> list[Chunk]:
    """Return copies of the chunks that this process writes, so that a step may donate buffers."""
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:  # host arrays would alias the device buffers: copy those asynchronously
        leaves = {path: jnp.copy(array) for path, array in leaves.items()}
    chunks = []
    for path, array in leaves.items():
        order, replicas = orders.get(path), _num_replicas(array)
        shape = chunk_shape(array, order)
        for shard in array.addressable_shards:
            starts = [s.start or 0 for s in shard.index]
            pieces = _pieces(shard.data.shape, starts, shape, order)
            for inside, numbers in itertools.islice(pieces, shard.replica_id, None, replicas):
                name = "/".join([tensor_folder(path), "c", *map(str, numbers)])
                chunks.append(Chunk(name, shard.data, inside))
    if on_cpu:
        return chunks
    for chunk in chunks:
        chunk.shard.copy_to_host_async()
    return [dataclasses.replace(chunk, shard=np.asarray(chunk.shard)) for chunk in chunks]


def _pieces(
    shape: Sequence[int], starts: Sequence[int], chunk: Sequence[int], order: Order | None
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Yield (slice of the shard, number) of every chunk of a shard that begins at `starts`."""
    dims = []
    for dim, (size, start, length) in enumerate(zip(shape, starts, chunk, strict=True)):
        if dim == 0 and order is not None:
            layers = order[start : start + size]
            firsts = [(i, n) for i, n in enumerate(layers) if n >= 0 and n % length == 0]
        else:
            firsts = [(i, start + i) for i in range(0, size, length)]
        dims.append([(slice(i, i + length), first // length) for i, first in firsts])
    for places in itertools.product(*dims):
        yield tuple(place for place, _ in places), tuple(number for _, number in places)


def write(folder: Path, chunks: Sequence[Chunk], verify: Verify) -> dict[str, tuple[int, str]]:
    """Write files to the disk. Returns (size, checksum) by name; OSError if one is not written."""
    for parent in {(folder / chunk.name).parent for chunk in chunks}:
        parent.mkdir(parents=True, exist_ok=True)

    def one(chunk: Chunk) -> tuple[int, str]:
        values = np.ascontiguousarray(np.asarray(chunk.shard)[chunk.inside])
        data = values.reshape(-1).view(np.uint8).data
        return write_file(folder / chunk.name, data, verify)

    names = [chunk.name for chunk in chunks]
    return dict(zip(names, _in_threads(one, chunks), strict=True))


def write_file(path: Path, data: bytes | memoryview, verify: Verify) -> tuple[int, str]:
    """Write a file to the disk. Returns its size, and its CRC-32 unless `verify` is off."""
    crc = "" if verify is Verify.off else f"{zlib.crc32(data):08x}"
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if verify is Verify.readback:
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):  # from the disk, not from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if file.read() != data:
                raise OSError(
                    f"{path} does not hold the bytes that were written to it: check the disk"
                )
    return len(data), crc


def describe(info: TensorInfo, chunk: Sequence[int], file: Sequence[int] | None = None) -> bytes:
    """Return zarr.json of an uncompressed array; a file holds one chunk or, in order, several."""
    file = chunk if file is None else file
    codecs: list[Any] = [BYTES_CODEC if info.dtype.itemsize > 1 else {"name": "bytes"}]
    if tuple(file) != tuple(chunk):
        shard = {"chunk_shape": list(chunk), "codecs": codecs, "index_codecs": [BYTES_CODEC]}
        codecs = [{"name": "sharding_indexed", "configuration": {**shard, "index_location": "end"}}]
    described = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(info.shape),
        "data_type": str(info.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(file)}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": np.zeros((), info.dtype).astype(object).item(),
        "codecs": codecs,
    }
    return json.dumps(described).encode()


def describe_tree(paths: Iterable[str]) -> bytes:
    """Return Orbax's _METADATA of nested dicts, so that Orbax can restore the folder of arrays."""

    def one(parts: list[str]) -> dict[str, Any]:
        return {
            "key_metadata": [{"key": part, "key_type": DICT_KEY} for part in parts],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }

    described = {
        "tree_metadata": {str(tuple(path.split("/"))): one(path.split("/")) for path in paths},
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(described).encode()


def file_shape(path: Path, info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of the values in each file of a tensor, by its zarr.json.

    A file holds one chunk, or several in C order, and may end with Zarr's index.
    CorruptCheckpointError for anything else.
    """
    try:
        described = json.loads(path.read_bytes())
        shape = described["chunk_grid"]["configuration"]["chunk_shape"]
        codecs = described["codecs"]
        if codecs[0]["name"] == "sharding_indexed":
            shard = codecs[0]["configuration"]
            ordered = shard.get("index_codecs") == [BYTES_CODEC] and _in_order(
                shard["chunk_shape"], shape
            )
            first = shard.get("index_location", "end") == "end"
            plain = first and (shard["chunk_shape"] == shape or ordered)
            codecs = shard["codecs"] if plain else codecs
        plain = codecs in ([BYTES_CODEC], [{"name": "bytes"}])
        if not plain or described["chunk_key_encoding"] != {"name": "default"}:
            raise CorruptCheckpointError(f"{path} has codecs {codecs}: only plain bytes are read")
        if tuple(described["shape"]) != info.shape or described["data_type"] != str(info.dtype):
            raise CorruptCheckpointError(f"{path} is not of the {info} that the manifest names")
        return tuple(shape)
    except (FileNotFoundError, LookupError, TypeError, json.JSONDecodeError) as error:
        raise CorruptCheckpointError(f"{path} describes no array: {error}") from error


def _in_order(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether parts of this shape, one after the other, are the bytes of the whole."""
    cut = next((i for i, size in enumerate(part) if size > 1), len(part))
    return len(part) == len(whole) and [*part[cut + 1 :]] == [*whole[cut + 1 :]]


def read_block(
    folder: Path, info: TensorInfo, file: tuple[int, ...], ranges: Sequence[slice]
) -> np.ndarray:
    """Return a block of the tensor in `folder`, whose files have the shape `file`.

    ranges: slices of the first dimensions; the others are read whole. CorruptCheckpointError for
    files that are missing or too short.
    """
    ranges = [*ranges, *(slice(0, size) for size in info.shape[len(ranges) :])]
    raw = np.dtype(f"V{info.dtype.itemsize}")  # copies of plain bytes let other threads run
    block = np.empty([r.stop - r.start for r in ranges], raw)
    spans = [range(r.start // n, -(-r.stop // n)) for r, n in zip(ranges, file, strict=True)]
    for numbers in itertools.product(*spans):
        inside, target = [], []
        for number, part, r in zip(numbers, file, ranges, strict=True):
            low, high = max(number * part, r.start), min((number + 1) * part, r.stop)
            inside.append(slice(low - number * part, high - number * part))
            target.append(slice(low - r.start, high - r.start))
        path = folder.joinpath("c", *map(str, numbers))
        try:
            values = np.memmap(path, raw, "r", shape=file or (1,))
        except (FileNotFoundError, ValueError) as error:
            raise CorruptCheckpointError(f"file {path} is missing or too short") from error
        block[tuple(target)] = values[tuple(inside)] if file else values[0]
    return block.view(info.dtype)


def read(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], orders: Mapping[str, Order]
) -> dict[str, jax.Array]:
    """Read tensors with the shapes and shardings of `wanted`.

    The rows of a tensor in `orders` hold the layers in that order; padding is zero.
    """

    def one(path: str) -> jax.Array:
        leaf, order = wanted[path], orders.get(path)
        info = info_of(leaf, order)
        place = folder / tensor_folder(path)
        file = file_shape(place / "zarr.json", info)
        assert leaf.sharding is not None
        blocks, arrays = {}, []
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            index = index or ()
            ranges = tuple(
                slice(*s.indices(size)[:2]) for s, size in zip(index, leaf.shape, strict=True)
            )
            key = tuple((r.start, r.stop) for r in ranges)
            if key not in blocks:
                blocks[key] = _read_rows(place, info, file, ranges, order)
            memory = SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind)
            arrays.append(jax.device_put(blocks[key], memory))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return dict(zip(wanted, _in_threads(one, list(wanted)), strict=True))


def _read_rows(
    folder: Path,
    info: TensorInfo,
    file: tuple[int, ...],
    ranges: Sequence[slice],
    order: Order | None,
) -> np.ndarray:
    """As `read_block`, with rows in `order` if there is one."""
    if order is None:
        return read_block(folder, info, file, ranges)
    block = np.zeros([r.stop - r.start for r in ranges], info.dtype)
    for row, layer in enumerate(order[ranges[0]]):
        if layer >= 0:
            block[row] = read_block(folder, info, file, [slice(layer, layer + 1), *ranges[1:]])[0]
    return block


def _in_threads(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(function, item) for item in items]
        concurrent.futures.wait(futures)  # wait for all: after an error the folder is removed
        return [future.result() for future in futures]
