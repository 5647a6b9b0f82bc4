"""Write and read the arrays of a tree with TensorStore: a Zarr array per tensor, a file per chunk.

Every process writes chunks of the shards on its own devices, and reads the chunks that its
devices need, without communication. Stacked arrays hold the layers in the model's order, without
padding, whatever the pipeline. Files are uncompressed, because weights do not compress, and end
with a CRC-32C. The folder, local or at gs:// or s3://, is an Orbax checkpoint of nested dicts
(PyTreeCheckpointHandler, without OCDBT).
"""

import concurrent.futures
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from maxmeg.checkpoint.integrity import CorruptCheckpointError, write_file
from maxmeg.config.schema import Verify
from maxmeg.pipeline.layout import Layout
from maxmeg.processes.host import is_on_host
from maxmeg.runtime.object_storage import is_remote, key_value_store

CHUNK_BYTES = 128 << 20  # a larger shard is cut into several files
MIN_REPLICA_BYTES = 1 << 20  # replicas share the work of writing if each has as much to write
_THREADS = 8
TREE = "_METADATA"  # file in the folder of arrays, written by describe_tree
DICT_KEY = 2  # Orbax's number for keys of dicts
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CHECKED = [BYTES, {"name": "crc32c"}]  # the codecs of Zarr for bytes with a checksum
STACKED = re.compile(r"(?:^|\.)stack\.groups\.(\d+)\.")
RETRIES = {"max_retries": 6, "initial_delay": "100ms", "max_delay": "2s"}
CONTEXT = {
    "file_io_locking": {"mode": "none"},  # each file has one writer
    "gcs_request_retries": RETRIES,
    "s3_request_retries": RETRIES,
}
# TensorStore's statuses for files that are not as they were written, and for refused access.
DAMAGE = ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
Order = Sequence[int]  # the model's layer in each row of a stacked array; -1: padding
T = TypeVar("T")
U = TypeVar("U")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The dtype and the shape on disk of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a tensor, and the index of its first entry in the array in memory."""

    path: str
    start: tuple[int, ...]
    data: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a process writes of a tree: tensors and the shapes of their chunks by path, its pieces,
    which are copies, and the orders of stacked arrays."""

    tensors: dict[str, TensorInfo]
    chunks: dict[str, tuple[int, ...]]
    pieces: list[Piece]
    orders: Mapping[str, Order]


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


def describes(name: str) -> bool:
    """Whether a file describes an array or the tree, and holds no values."""
    return name.rpartition("/")[2] in (TREE, "zarr.json")


def tensor_folder(path: str) -> str:
    """Return the name of the folder that holds a tensor."""
    return path.replace("/", ".")


def info_of(array: jax.Array | jax.ShapeDtypeStruct, order: Order | None) -> TensorInfo:
    return TensorInfo(np.dtype(array.dtype), disk_shape(array.shape, order))


def take_snapshot(leaves: Mapping[str, jax.Array], orders: Mapping[str, Order]) -> Snapshot:
    """Copy what this process writes, so that a step may donate the buffers.

    On CPUs, where a host array would be the device's buffer, the copies are made asynchronously.
    """
    tensors = {path: info_of(array, orders.get(path)) for path, array in leaves.items()}
    copies, on_cpu = _spread(leaves, orders), jax.default_backend() == "cpu"
    chunks, pieces = {}, []
    for path, leaf in leaves.items():
        alone = leaf.sharding.num_devices * math.prod(leaf.sharding.shard_shape(leaf.shape))
        copied = path in copies or not on_cpu
        if not copied and alone == leaf.size:  # no replicas: by one program
            copies[path], copied = jnp.copy(leaf), True
        array = copies.get(path, leaf)
        chunks[path] = _chunk_shape(array, orders.get(path))
        for shard in (each for each in array.addressable_shards if each.replica_id == 0):
            start = tuple(s.start or 0 for s in shard.index)
            pieces.append(Piece(path, start, shard.data if copied else jnp.copy(shard.data)))
    if not on_cpu:
        for piece in pieces:
            piece.data.copy_to_host_async()
        pieces = [dataclasses.replace(p, data=np.asarray(p.data)) for p in pieces]
    return Snapshot(tensors, chunks, pieces, orders)


def _spread(leaves: Mapping[str, jax.Array], orders: Mapping[str, Order]) -> dict[str, jax.Array]:
    """Return copies of large replicated arrays in which each device holds the part that it writes:
    no replica copies the whole array to the host. One program for each mesh, without
    communication."""
    meshes: dict[Any, dict[str, NamedSharding]] = {}
    for path, array in leaves.items():
        if (place := _divided(array, path in orders)) is not None:
            meshes.setdefault(place.mesh, {})[path] = place
    copies = {}
    for places in meshes.values():
        program = _copier(tuple(places.values()))
        copies |= dict(zip(places, program([leaves[path] for path in places]), strict=True))
    return copies


def _divided(array: jax.Array, ordered: bool) -> NamedSharding | None:
    """Return an array's sharding divided between its replicas, too; None if that changes nothing.

    ordered: dimension 0 cannot be divided.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or is_on_host(array):
        return None
    spec = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
    names = [(entry,) if isinstance(entry, str) else (*(entry or ()),) for entry in spec]
    axes, shape = {*itertools.chain(*names)}, [*sharding.shard_shape(array.shape)]
    for name, size in sharding.mesh.shape.items():
        enough = math.prod(shape) * array.dtype.itemsize >= size * MIN_REPLICA_BYTES
        dims = (i for i in range(int(ordered), array.ndim) if shape[i] % size == 0)
        if size > 1 and name not in axes and enough and (dim := next(dims, None)) is not None:
            names[dim] += (name,)
            shape[dim] //= size
    changed = shape != [*sharding.shard_shape(array.shape)]
    return NamedSharding(sharding.mesh, PartitionSpec(*names)) if changed else None


@functools.cache
def _copier(places: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=[*places])


def _chunk_shape(array: jax.Array, order: Order | None) -> tuple[int, ...]:
    """Return the shape of a tensor's chunks, each of which lies within one shard.

    Shards are cut further along their first dimensions, to bound the size of a chunk.
    """
    shape = list(array.sharding.shard_shape(array.shape))
    if order is not None:
        shape[0] = _rows_per_chunk(order, shape[0])
    parts = -(-math.prod(shape) * array.dtype.itemsize // CHUNK_BYTES)
    for dim, length in enumerate(shape):
        divisor = next((n for n in range(min(parts, length), 1, -1) if length % n == 0), 1)
        shape[dim] //= divisor
        parts //= divisor
    return tuple(shape)


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


def write(folder: Path, snapshot: Snapshot, verify: Verify, *, describe: bool) -> None:
    """Write the pieces of a snapshot to the disk; OSError if one is not written.

    describe: also write what describes the arrays, which one process does.
    """
    pieces: dict[str, list[Piece]] = {path: [] for path in snapshot.tensors if describe}
    for piece in snapshot.pieces:
        pieces.setdefault(piece.path, []).append(piece)
    codecs = [BYTES] if verify is Verify.off else CHECKED

    def one(path: str) -> None:
        order, about = snapshot.orders.get(path), (snapshot.tensors[path], snapshot.chunks[path])
        array = create_array(folder, path, *about, codecs, described=not describe)
        parts = [_part(array, piece, order) for piece in pieces[path]]
        writes = [  # without a copy: the values stay as they are until all are written
            target.write(data, can_reference_source_data_indefinitely=True)
            for target, data in parts
            if data.size
        ]
        for writing in writes:
            checked(writing, path)
        if verify is Verify.readback:
            _read_back(folder, path, parts)

    in_threads(one, [*pieces])
    if describe:
        write_file(folder / TREE, describe_tree(snapshot.tensors))


def _part(array: Any, piece: Piece, order: Order | None) -> tuple[Any, np.ndarray]:
    """Return the part of the array on disk that a piece becomes, and its values."""
    data = np.asarray(piece.data)
    ranges = [slice(i, i + n) for i, n in zip(piece.start, data.shape, strict=True)]
    if order is None:
        return array[tuple(ranges)], data
    layers = np.array(order[ranges[0]])
    return array.vindex[layers[layers >= 0]][(slice(None), *ranges[1:])], data[layers >= 0]


def _read_back(folder: Path, path: str, parts: Sequence[tuple[Any, np.ndarray]]) -> None:
    """OSError unless the files hold what was written; from the disk, not from the page cache."""
    place = folder / tensor_folder(path)
    if not is_remote(folder) and hasattr(os, "posix_fadvise"):
        for file in (f for f in place.rglob("*") if f.is_file()):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        same = all(checked(part.read(), path).tobytes() == data.tobytes() for part, data in parts)
    except CorruptCheckpointError:
        same = False
    if not same:
        raise OSError(f"{place} does not hold the bytes that were written to it: check the disk")


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


def create_array(
    folder: Path | None,
    path: str,
    info: TensorInfo,
    chunk: Sequence[int],
    codecs: Sequence[Mapping[str, Any]],
    *,
    described: bool = False,
) -> Any:
    """Create a tensor on disk, with files of the shape `chunk`, and open it for writing.

    described: another process writes its zarr.json. folder: None is a folder in memory.
    """
    metadata = {
        "shape": list(info.shape),
        "data_type": str(info.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": list(codecs),
    }
    options = {"assume_metadata": True} if described else {"create": True}
    return _open(folder, path, metadata=metadata, **options)


def encoded(values: np.ndarray, shape: tuple[int, ...]) -> bytes:
    """Return a chunk of this shape as Zarr stores it: the values, zeros after them, a CRC-32C."""
    chunk = create_array(None, "", TensorInfo(values.dtype, shape), shape, CHECKED)
    part = chunk[tuple(slice(0, size) for size in values.shape)]
    checked(part.write(values, can_reference_source_data_indefinitely=True), "chunk")
    return checked(chunk.kvstore.read("/".join(["c", *["0"] * len(shape)])), "chunk").value


def open_array(folder: Path, path: str, info: TensorInfo) -> Any:
    """Open a tensor for `read_block`; CorruptCheckpointError if it is not of dtype and shape."""
    array = _open(folder, path)
    if array.shape != info.shape or array.dtype.numpy_dtype != info.dtype:
        stored = f"{array.dtype.name}{list(array.shape)}"
        raise CorruptCheckpointError(
            f"{folder / tensor_folder(path) / 'zarr.json'} describes {stored}, not the {info} that "
            "the manifest names"
        )
    return array


def _open(folder: Path | None, path: str, **options: Any) -> Any:
    import tensorstore

    spec = {
        "driver": "zarr3",
        "kvstore": key_value_store(f"{folder}/{tensor_folder(path)}/") if folder else "memory://",
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        "context": CONTEXT,
    }
    return checked(tensorstore.open({**spec, **options}), path)


def checked(future: Any, tensor: str) -> Any:
    """Return the result of a TensorStore call; its errors as CorruptCheckpointError for damaged
    files, else as OSError, with the tensor's path."""
    try:
        return future.result()
    except ValueError as error:
        status, _, text = str(error).partition(" [tensorstore_spec=")[0].partition(": ")
        text = f"tensor {tensor}: {text}"
        if number := re.search(r"os_error_code='(\d+)'", text):
            file, code = re.search(r'"(/[^"]*)"', text), int(number[1])
            raise OSError(code, os.strerror(code), file[1] if file else tensor) from None
        if status in DAMAGE:
            raise CorruptCheckpointError(text) from None
        refused = status in REFUSED or "credentials" in text
        raise OSError(errno.EACCES if refused else errno.EIO, text) from None


def read_block(array: Any, ranges: Sequence[slice], order: Order | None = None) -> np.ndarray:
    """Return a block of an array that `open_array` opened, with rows in `order` if there is one.

    ranges: slices of the first dimensions; the others are read whole. Padding is zero.
    CorruptCheckpointError for files that are missing or damaged.
    """
    tensor = array.kvstore.path.rstrip("/").rpartition("/")[2].replace(".", "/")
    if order is None:
        return checked(array[tuple(ranges)].read(), tensor)
    layers = np.array(order[ranges[0]])
    shape = (len(layers), *(r.stop - r.start for r in ranges[1:]))
    block = np.zeros(shape, array.dtype.numpy_dtype)
    if (is_layer := layers >= 0).any():
        part = array.vindex[layers[is_layer]][(slice(None), *ranges[1:])]
        block[is_layer] = checked(part.read(), tensor)
    return block


def read(
    folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct], orders: Mapping[str, Order]
) -> dict[str, jax.Array]:
    """Read tensors with the shapes and shardings of `targets`.

    The rows of a tensor in `orders` hold the layers in that order; padding is zero.
    """

    def one(path: str) -> jax.Array:
        leaf, order = targets[path], orders.get(path)
        array = open_array(folder, path, info_of(leaf, order))
        assert leaf.sharding is not None
        blocks, arrays = {}, []
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            index = index or ()
            ranges = tuple(
                slice(*s.indices(size)[:2]) for s, size in zip(index, leaf.shape, strict=True)
            )
            key = tuple((r.start, r.stop) for r in ranges)
            if key not in blocks:
                blocks[key] = read_block(array, ranges, order)
            memory = SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind)
            arrays.append(jax.device_put(blocks[key], memory))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return dict(zip(targets, in_threads(one, list(targets)), strict=True))


def in_threads(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(function, item) for item in items]
        concurrent.futures.wait(futures)  # wait for all: after an error the folder is removed
        return [future.result() for future in futures]
