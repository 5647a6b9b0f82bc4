"""Checksums of tensors (on device, the same for every sharding) and of files, and the manifest.

A tensor's digest is taken from the arrays on the devices before anything is copied, so it also
covers the copy to the host and the way to the disk; file checksums name the file that went bad.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_READ_BYTES = 1 << 20
_AXIS_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5)


class CorruptCheckpointError(Exception):
    """A checkpoint that does not hold what was saved; names the files and tensors."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What the manifest knows of an array."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint: tensors by path, (size, CRC-32) of files by relative name."""

    step: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, tuple[int, str]]


def flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Leaves of nested dicts by path: {"model": {"w": x}} -> {"model/w": x}."""
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


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of flatten."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _words(x: jax.Array) -> jax.Array:
    """The bits of x as uint32; 8-byte items become two along a new last axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    bits = jax.dtypes.itemsize_bits(x.dtype) if x.dtype.itemsize == 1 else 8 * x.dtype.itemsize
    if bits >= 32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = jnp.dtype(f"uint{bits}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _digest(x: jax.Array, starts: jax.Array | None = None) -> jax.Array:
    """Two 32-bit sums over hashed (word, global index): for one index a bijection of the word.

    Sums do not depend on order, hence not on the sharding; one changed word always shows. A piece
    of a tensor begins at index `starts` of it (uint32, one an axis); sums of pieces add up.
    """
    words = _words(x)
    key = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        odd = np.uint32(_AXIS_ODD[axis % len(_AXIS_ODD)] + 2 * (axis // len(_AXIS_ODD)))
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        if starts is not None and axis < x.ndim:
            index += starts[axis]
        key += index * odd
    mixed = (words ^ key) * np.uint32(0x7FEB352D)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    mixed = mixed ^ (mixed >> 16)
    weighted = mixed * (key | np.uint32(1))
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)])


@jax.jit
def _digest_all(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_digest(x) for x in arrays]


_digest_piece = jax.jit(_digest)


def digest_piece(piece: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """The digest's two sums over a piece that begins at index `starts` of its tensor.

    Added up (modulo 2^32) over all pieces they are the tensor's, which `render_digest` writes.
    """
    return np.asarray(_digest_piece(jnp.asarray(piece), np.array(starts, np.uint32)))


def render_digest(sums: np.ndarray) -> str:
    """16 hexadecimal digits."""
    return f"{int(sums[0]):08x}{int(sums[1]):08x}"


def start_digests(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Dispatches the digests and returns at once; every process calls it with the same leaves."""
    groups: dict[Any, list[str]] = {}
    for path, x in leaves.items():
        mesh = getattr(x.sharding, "mesh", None)
        devices = mesh.devices.flat if mesh is not None else sorted(x.devices(), key=lambda d: d.id)
        groups.setdefault(tuple(device.id for device in devices), []).append(path)
    digests: dict[str, jax.Array] = {}
    for paths in groups.values():
        results = _digest_all([leaves[path] for path in paths])
        digests |= dict(zip(paths, results, strict=True))
    return digests


def finish_digests(digests: Mapping[str, jax.Array]) -> dict[str, str]:
    """Waits for the devices and returns 16 hexadecimal digits a tensor."""
    return {path: render_digest(np.asarray(digest)) for path, digest in digests.items()}


def list_files(folder: Path) -> list[str]:
    """Relative names of the files below a checkpoint's folder, sorted, without the manifest."""
    names = [
        os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")
        for root, _, files in os.walk(folder)
        for name in files
    ]
    return sorted(name for name in names if name != MANIFEST)


def _checksum(path: Path) -> tuple[int, str]:
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(_READ_BYTES))
        while count := file.readinto(block):
            size += count
            crc = zlib.crc32(block[:count], crc)
    return size, f"{crc:08x}"


def checksum_files(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """(size, CRC-32) of files as they are on the disk now; raises OSError."""
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda n: _checksum(folder / n), names), strict=True))


def tensor_of(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Path of the tensor whose values a file holds; "" for files that describe the tree."""
    parts = name.split("/")
    path = parts[1].replace(".", "/") if len(parts) > 2 else ""
    return path if path in tensors else ""


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares files with the manifest; raises CorruptCheckpointError naming file and tensor."""

    def problem(name: str) -> str:
        size, crc = manifest.files[name]
        try:
            now = _checksum(folder / name)
        except OSError as error:
            found = f"cannot be read ({error.strerror})"
        else:
            if now == (size, crc):
                return ""
            found = f"has CRC-32 {now[1]} and {now[0]} bytes instead of {crc} and {size}"
        path = tensor_of(name, manifest.tensors)
        holds = f"of tensor {path}" if path else "which describes all tensors,"
        return f"file {folder / name} {holds} {found}"

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems = [text for text in pool.map(problem, names) if text]
    if problems:
        more = f"; and {len(problems) - 8} more files" if len(problems) > 8 else ""
        raise CorruptCheckpointError("; ".join(problems[:8]) + more)


def verify_digests(folder: Path, manifest: Manifest, found: Mapping[str, str]) -> None:
    """Compares restored tensors with what was on the devices at save."""
    bad = [path for path, digest in found.items() if digest != manifest.tensors[path].digest]
    if bad:
        files = {
            path: next((n for n in manifest.files if tensor_of(n, manifest.tensors) == path), "")
            for path in bad[:8]
        }
        places = "; ".join(f"tensor {p} in {(folder / name).parent}" for p, name in files.items())
        raise CorruptCheckpointError(
            f"{places}: values differ from those that were saved, though the files are as they"
            " were written: damaged on the way to the disk"
        )


def _render(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256":"{digest}","body":{text}}}\n'.encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, which makes a folder a checkpoint, and flushes it to the disk."""
    body = {"version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    with (folder / MANIFEST).open("wb") as file:
        file.write(_render(body))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Reads and verifies a manifest; raises CorruptCheckpointError."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpointError(f"file {path} cannot be read ({error.strerror})") from error
    try:
        body = json.loads(raw)["body"]
        intact = _render(body) == raw
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"file {path} of all tensors is damaged: {error}") from error
    if not intact:
        raise CorruptCheckpointError(f"file {path} of all tensors does not match its checksum")
    if body["version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {body['version']}, this program reads {FORMAT_VERSION}:"
            " load it with the version of maxmeg that wrote it"
        )
    tensors = {
        name: Tensor(tuple(t["shape"]), t["dtype"], t["digest"])
        for name, t in body["tensors"].items()
    }
    files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    return Manifest(body["step"], body["metadata"], tensors, files)
