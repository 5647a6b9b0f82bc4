"""Readers of checkpoints for tests: Orbax, and the manager for the newest one."""

import concurrent.futures
from pathlib import Path
from typing import Any

from maxmeg.checkpoint.manager import Checkpointer


def restored_by_orbax(folder: Path) -> dict[str, Any]:
    """Nested dicts of arrays from the folder `arrays` of a checkpoint, by its own metadata."""
    import orbax.checkpoint as ocp
    from etils import epath

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)

    def restore() -> dict[str, Any]:
        return handler.restore(epath.Path(folder))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # outside of any event loop
        return pool.submit(restore).result()


def restore_latest(checkpointer: Checkpointer, wanted):
    """Step, tree and metadata of the newest intact checkpoint."""
    return checkpointer.latest(lambda step, _: (step, *checkpointer.restore(step, wanted)))
