"""Digests of tensors (on device, the same for every sharding), checksums of files, the manifest.

A tensor's digest is computed on the devices before anything is copied, so it also covers the copy
to the host and the write to the disk; file checksums name the damaged file.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxmeg.checkpoint.places import MANIFEST, sizes_of
from maxmeg.parallel.ordering import together
from maxmeg.processes.host import is_on_host, to_device
from maxmeg.runtime.object_storage import is_remote

FORMAT_VERSION = 2  # 1: files without a CRC-32C of their own; the manifest has their CRC-32
_READ_BYTES = 1 << 20
_AXIS_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5)


class CorruptCheckpointError(ValueError):
    """A checkpoint that does not hold what was saved; names the files and tensors."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Entry of an array in the manifest."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint: tensors by path, (size, CRC-32 or "") of files by relative name.

    Files of arrays that TensorStore has written have "": they end with a CRC-32C.

    digest: SHA-256 of the manifest's own file, which identifies the checkpoint; "" before it is
    written.
    """

    step: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, tuple[int, str]]
    digest: str = ""


def flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the leaves of nested dicts by path: {"model": {"w": x}} -> {"model/w": x}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "/" in key or "." in key:
            raise ValueError(
                f"keys of a checkpoint are non-empty strings without '/' and '.', not {key!r}"
                f" below {'/'.join(prefix) or 'the root'}: rename it"
            )
        if isinstance(value, Mapping):
            leaves |= flatten(value, (*prefix, key))
        else:
            leaves["/".join((*prefix, key))] = value
    return leaves


def some(texts: Sequence[str], between: str = ", ", most: int = 8) -> str:
    """Join the first few texts, and say how many more there are."""
    ending = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + ending


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of x as uint32; 8-byte items become two words along a new last axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    bits = jax.dtypes.itemsize_bits(x.dtype) if x.dtype.itemsize == 1 else 8 * x.dtype.itemsize
    if bits >= 32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = jnp.dtype(f"uint{bits}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _digest(
    x: jax.Array, starts: jax.Array | None = None, rows: jax.Array | np.ndarray | None = None
) -> jax.Array:
    """Return two 32-bit sums over hashes of (word, global index).

    At a fixed index the hash is a bijection of the word, so a single changed word is always found.
    Sums do not depend on order, hence not on the sharding. starts: index of a piece in its tensor
    (uint32, one per axis); the sums of pieces add up. rows: for each row of axis 0, its row in
    the tensor on disk (int32); -1: padding, not part of the digest.
    """
    words = _words(x)
    key = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        odd = np.uint32(_AXIS_ODD[axis % len(_AXIS_ODD)] + 2 * (axis // len(_AXIS_ODD)))
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        if axis == 0 and rows is not None:
            rows = rows.reshape(-1, *(1,) * (words.ndim - 1))
            index = jnp.broadcast_to(rows.astype(jnp.uint32), words.shape)
        if starts is not None and axis < x.ndim:
            index += starts[axis]
        key += index * odd
    mixed = (words ^ key) * np.uint32(0x7FEB352D)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    mixed = mixed ^ (mixed >> 16)
    if rows is not None:
        mixed = jnp.where(rows >= 0, mixed, jnp.uint32(0))
    weighted = mixed * (key | np.uint32(1))
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)])


@jax.jit
def digest_all(arrays: list[jax.Array], rows: list[np.ndarray | None]) -> list[jax.Array]:
    """Return the sums of each array; every shard contributes without communication. Arrays in host
    memory come to the device one after another."""
    sums = [jnp.zeros(2, jnp.uint32)]
    for x, order in zip(arrays, rows, strict=True):
        if is_on_host(x):
            x, _ = together((x, sums[-1]))
        sums.append(_digest(to_device(x), rows=order))
    return sums[1:]


_digest_piece = jax.jit(_digest)


def digest_piece(piece: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Return the digest's two sums over a piece that begins at index `starts` of its tensor.

    The tensor's sums are the sums over all pieces (modulo 2^32).
    """
    return np.asarray(_digest_piece(jnp.asarray(piece), np.array(starts, np.uint32)))


def render_digest(sums: np.ndarray) -> str:
    """Return the two sums as 16 hexadecimal digits."""
    return f"{int(sums[0]):08x}{int(sums[1]):08x}"


def start_digests(
    leaves: Mapping[str, jax.Array], orders: Mapping[str, Sequence[int]]
) -> dict[str, jax.Array]:
    """Dispatch the digests and return at once; all processes must pass the same leaves.

    orders: the row on disk of each row of a tensor, -1: not on disk.
    """
    groups: dict[Any, list[str]] = {}
    for path, x in leaves.items():
        mesh = getattr(x.sharding, "mesh", None)
        devices = mesh.devices.flat if mesh is not None else sorted(x.devices(), key=lambda d: d.id)
        groups.setdefault(tuple(device.id for device in devices), []).append(path)
    digests: dict[str, jax.Array] = {}
    for paths in groups.values():
        rows = [np.array(orders[p], np.int32) if p in orders else None for p in paths]
        results = digest_all([leaves[path] for path in paths], rows)
        digests |= dict(zip(paths, results, strict=True))
    return digests


def finish_digests(digests: Mapping[str, jax.Array]) -> dict[str, str]:
    """Wait for the devices. Returns 16 hexadecimal digits per tensor."""
    return {path: render_digest(np.asarray(digest)) for path, digest in digests.items()}


def _checksum(path: Path) -> tuple[int, str]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, f"{crc:08x}"


def describe_files(folder: Path, checked: Callable[[str], bool]) -> dict[str, tuple[int, str]]:
    """Return the size and the CRC-32 of every file, by relative name. checked: whether a file's
    CRC-32 is computed; otherwise it is ""."""
    sizes = sizes_of(folder)
    names = [name for name in sizes if checked(name)]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = dict(zip(names, pool.map(lambda n: _checksum(folder / n), names), strict=True))
    return {name: sums.get(name, (size, "")) for name, size in sorted(sizes.items())}


def tensor_of(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the path of the tensor in a file; "" for a file that describes the tree."""
    parts = name.split("/")
    path = parts[1].replace(".", "/") if len(parts) > 2 else ""
    return path if path in tensors else ""


def _location(folder: Path, manifest: Manifest, name: str) -> str:
    path = tensor_of(name, manifest.tensors)
    subject = f"of tensor {path}" if path else "which describes all tensors,"
    return f"file {folder / name} {subject}"


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with their checksums in the manifest; CorruptCheckpointError naming file and
    tensor. Files without one are skipped: TensorStore checks their CRC-32C when it reads them."""
    names = [name for name in names if manifest.files[name][1]]

    def problem(name: str) -> str:
        size, crc = manifest.files[name]
        try:
            now = _checksum(folder / name)
        except FileNotFoundError:
            difference = "is missing"
        else:
            if now == (size, crc):
                return ""
            difference = f"has CRC-32 {now[1]} and {now[0]} bytes instead of {crc} and {size}"
        return f"{_location(folder, manifest, name)} {difference}"

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems = [text for text in pool.map(problem, names) if text]
    if problems:
        raise CorruptCheckpointError(some(problems, "; "))


def verify_sizes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """CorruptCheckpointError for files of another size than when they were written."""
    names = list(names)
    sizes = sizes_of(folder, names)

    def problem(name: str) -> str:
        size, expected_size = sizes.get(name), manifest.files[name][0]
        difference = "is missing" if size is None else f"has {size} bytes, not {expected_size}"
        return "" if size == expected_size else f"{_location(folder, manifest, name)} {difference}"

    if problems := [text for text in map(problem, names) if text]:
        raise CorruptCheckpointError(some(problems, "; "))


def verify_digests(folder: Path, manifest: Manifest, digests: Mapping[str, str]) -> None:
    """Compare restored tensors with the digests computed on the devices at save."""
    bad = [path for path, digest in digests.items() if digest != manifest.tensors[path].digest]
    if bad:
        files = {
            path: next((n for n in manifest.files if tensor_of(n, manifest.tensors) == path), "")
            for path in bad[:8]
        }
        places = "; ".join(f"tensor {p} in {(folder / name).parent}" for p, name in files.items())
        raise CorruptCheckpointError(f"{places}: values differ from the saved values")


def _render(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256":"{digest}","body":{text}}}\n'.encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and flush it to the disk."""
    body = {"version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    del body["digest"]
    write_file(folder / MANIFEST, _render(body))


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, and flush it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        if not is_remote(path):
            file.flush()
            os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read and verify a manifest; CorruptCheckpointError if it is damaged or missing.

    FileNotFoundError if the whole checkpoint is gone, and OSError if it cannot be read."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        if not folder.exists():
            raise
        raise CorruptCheckpointError(f"file {path} is missing") from error
    try:
        body = json.loads(raw)["body"]
        intact = _render(body) == raw
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"file {path} is no manifest: {error!r}") from error
    if not intact:
        raise CorruptCheckpointError(f"file {path} does not match its checksum")
    if body["version"] not in range(1, FORMAT_VERSION + 1):
        raise ValueError(
            f"{path} has format version {body['version']}, this program reads 1 to "
            f"{FORMAT_VERSION}: load it with the version of maxmeg that wrote it"
        )
    tensors = {
        name: Tensor(tuple(t["shape"]), t["dtype"], t["digest"])
        for name, t in body["tensors"].items()
    }
    files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    digest = hashlib.sha256(raw).hexdigest()
    return Manifest(body["step"], body["metadata"], tensors, files, digest)
