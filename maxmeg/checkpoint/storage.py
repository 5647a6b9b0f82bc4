"""Orbax: arrays of a tree to and from a folder, one folder of Zarr chunks a tensor.

Without OCDBT's shared data files, so that a damaged file names its tensor and a part of the tree
is read and verified on its own; uncompressed, because weights do not compress.
"""

import asyncio
import concurrent.futures
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.checkpoint.integrity import unflatten

_CHUNK_BYTES = 128 << 20  # bounds host memory and what a restore on more devices reads twice
_MIN_REPLICA_SLICE_BYTES = 1 << 20  # smaller arrays are written by one replica, not cut up


class _OrbaxFilter(logging.Filter):
    """Keeps Orbax's progress off the console; its errors pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno >= logging.ERROR


@functools.cache
def _orbax() -> tuple[Any, Any, Any]:
    """Orbax and its paths, imported late because that takes seconds, and the handler."""
    import orbax.checkpoint as ocp
    from etils import epath

    logging.getLogger("absl").addFilter(_OrbaxFilter())
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=True, min_slice_bytes_for_replica_parallel=_MIN_REPLICA_SLICE_BYTES
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False, type_handler_registry=registry
    )
    return ocp, epath, handler


def _outside_event_loops(function: Callable[[], Any]) -> Any:
    """Runs in a thread of its own: a notebook's thread already has an event loop."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def snapshot(leaves: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """The arrays, to be written and digested while the originals may be donated.

    On a CPU, copies: there the host reads the device's own buffer, and a step that donates it
    would wait for the disk.
    """
    if jax.default_backend() != "cpu":
        return leaves
    return {path: jnp.copy(x) for path, x in leaves.items()}


def start_write(folder: Path, leaves: Mapping[str, jax.Array]) -> Sequence[Any]:
    """Copies to the host and starts to write; the futures' result() waits for the disk."""
    ocp, epath, handler = _orbax()
    tree = unflatten(leaves)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    arguments = ocp.args.PyTreeSave(tree, save_args=save_args)
    return _outside_event_loops(
        lambda: asyncio.run(handler.async_save(epath.Path(folder), args=arguments)) or ()
    )


def read(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads these tensors, sharded as asked, and no others."""
    ocp, epath, handler = _orbax()
    tree = unflatten(wanted)
    restore_args = jax.tree.map(
        lambda s: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape, dtype=s.dtype),
        tree,
    )
    arguments = ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=True)
    restored = _outside_event_loops(lambda: handler.restore(epath.Path(folder), args=arguments))
    leaves, _ = jax.tree.flatten(restored)
    paths, _ = jax.tree.flatten(unflatten({path: path for path in wanted}))
    return dict(zip(paths, leaves, strict=True))
