"""Read and verify a checkpoint's tensors, for any mesh and any padding of the vocabulary."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from maxmeg.checkpoint import integrity, storage
from maxmeg.checkpoint.integrity import Manifest, some
from maxmeg.checkpoint.storage import Order, disk_shape
from maxmeg.processes.host import to_device

Targets = Mapping[str, jax.ShapeDtypeStruct]
HISTORY = "history"  # tensors of delayed scaling, which earlier versions saved and no run reads


def check_tree(
    manifest: Manifest,
    targets: Targets,
    resizable: Mapping[str, int],
    orders: Mapping[str, Order],
    partial: bool,
) -> None:
    """Raise ValueError naming the tensors in which the checkpoint and the tree differ."""
    where = f"the checkpoint of step {manifest.step}"
    absent = [path for path in targets if path not in manifest.tensors]
    if absent:
        raise ValueError(
            f"{len(absent)} tensors are not in {where}: {some(absent)}; choose the architecture"
            " and optimizer that it was saved with"
        )
    others = [path for path in manifest.tensors if path not in targets]
    extra = [path for path in others if not path.startswith(f"{HISTORY}/")]
    if extra and not partial:
        raise ValueError(
            f"{where} has {len(extra)} unexpected tensors: {some(extra)}; choose the"
            " architecture and optimizer that it was saved with, or restore with partial=True"
        )
    for path, leaf in targets.items():
        stored = manifest.tensors[path]
        if stored.dtype != str(leaf.dtype):
            raise ValueError(
                f"tensor {path} is {stored.dtype} in {where}, {leaf.dtype} here: choose the dtype"
                " that it was saved with"
            )
        shape = disk_shape(leaf.shape, orders.get(path))
        if stored.shape != shape and not _resizes(stored.shape, shape, resizable.get(path)):
            raise ValueError(
                f"tensor {path} has shape {stored.shape} in {where}, {shape} here: choose the"
                " sizes that it was saved with, or another run_dir"
            )


def _resizes(stored: tuple[int, ...], target: tuple[int, ...], axis: int | None) -> bool:
    if axis is None or len(stored) != len(target):
        return False
    return all(a == b for i, (a, b) in enumerate(zip(stored, target, strict=True)) if i != axis)


def target_of(leaf: jax.ShapeDtypeStruct) -> Any:
    """Return the sharding of a wanted array, by default that of one device."""
    if leaf.sharding is None and jax.process_count() > 1:
        raise ValueError(f"{leaf} has no sharding: with several processes, give each leaf one")
    return leaf.sharding or SingleDeviceSharding(jax.devices()[0])


def _sharding(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...], axis: int | None) -> Any:
    """Return the sharding for reading: as wanted, unsharded along an axis that is not divisible."""
    sharding = target_of(leaf)
    if axis is None or shape == leaf.shape or not isinstance(sharding, NamedSharding):
        return sharding
    try:
        sharding.shard_shape(shape)
    except ValueError:
        names = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
        names[axis] = None
        return NamedSharding(sharding.mesh, PartitionSpec(*names))
    return sharding


def _resize(x: jax.Array, leaf: jax.ShapeDtypeStruct, axis: int, path: str) -> jax.Array:
    size = leaf.shape[axis]
    overlap = min(size, x.shape[axis])

    def cut_or_fill(x):
        x = to_device(x)
        dropped = jax.lax.slice_in_dim(x, overlap, x.shape[axis], axis=axis)
        padding = [(0, size - overlap if i == axis else 0, 0) for i in range(x.ndim)]
        part = jax.lax.slice_in_dim(x, 0, overlap, axis=axis)
        zero = jnp.zeros((), x.dtype)
        return jax.lax.pad(part, zero, padding), jnp.all(dropped == 0)

    target = target_of(leaf)
    everywhere = (
        NamedSharding(target.mesh, PartitionSpec()) if isinstance(target, NamedSharding) else target
    )
    resized, zeros = jax.jit(cut_or_fill, out_shardings=(target, everywhere))(x)
    if not zeros:
        raise ValueError(
            f"tensor {path} has {x.shape[axis]} entries along axis {axis} in the checkpoint,"
            f" {size} here, and those beyond {size} are not padding: choose a size of at least"
            " that of the checkpoint without its padding"
        )
    return resized


def read_tree(
    folder: Path,
    manifest: Manifest,
    targets: Targets,
    resizable: Mapping[str, int],
    orders: Mapping[str, Order],
    together: Callable[[str, Callable[[], Any]], Any],
) -> dict[str, jax.Array]:
    """Read tensors, verify them against the digests of the manifest, and resize them."""

    def stored(path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = leaf.shape if path in orders else manifest.tensors[path].shape
        sharding = _sharding(leaf, shape, resizable.get(path))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    on_disk = {path: stored(path, leaf) for path, leaf in targets.items()}
    leaves = together("read", lambda: storage.read(folder, on_disk, orders))
    digests = integrity.finish_digests(integrity.start_digests(leaves, orders))
    integrity.verify_digests(folder, manifest, digests)
    for path, leaf in targets.items():
        if leaves[path].shape != leaf.shape:
            leaves[path] = _resize(leaves[path], leaf, resizable[path], path)
    return leaves
