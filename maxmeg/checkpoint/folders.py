"""Folders of checkpoints, local or remote: names, atomic commit and retention by Orbax.

Orbax runs on process 0 alone, so that no process waits inside it for another that is gone: the
processes agree through `processes.Processes`, which names the one that failed. Only a save imports
this module, because importing Orbax takes a second.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from maxmeg.checkpoint.integrity import Manifest, describe_files, write_manifest
from maxmeg.checkpoint.places import ARRAYS, make, place_of, remove, steps_in
from maxmeg.checkpoint.storage import describes
from maxmeg.runtime.object_storage import is_remote

_log = logging.getLogger(__name__)
_NO_LIMIT = 7 * 24 * 3600  # seconds; Checkpointer's timeout_seconds is the limit


class Handler(ocp.AsyncCheckpointHandler):
    """Takes the folder that Orbax has created for the arrays, and lets Orbax wait for
    `Written.done`."""

    async def async_save(self, directory: Any, args: "Written") -> list[Any]:
        args.folder = str(directory)
        return [args.done]

    def save(self, directory: Any, args: "Written") -> None:
        raise NotImplementedError("saved by async_save alone")

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError("restored by Checkpointer.restore")


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Written(ocp.args.CheckpointArgs):
    """folder: of the arrays, set by Orbax. done: set when arrays and manifest are written."""

    folder: str = ""
    done: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)


@dataclasses.dataclass(frozen=True)
class Retention(checkpoint_managers.PreservationPolicy):
    """Keeps the newest `keep_last` that are not damaged, every step divisible by `keep_every` (0:
    none), and what is newer than the saved step."""

    saved: int
    keep_last: int
    keep_every: int
    damaged: Collection[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [each.step for each in checkpoints]
        intact = [step for step in steps if step <= self.saved and step not in self.damaged]
        newest = intact[-self.keep_last :]
        return [
            step > self.saved
            or step in newest
            or bool(self.keep_every and step % self.keep_every == 0)
            for step in steps
        ]


class Saving:
    """A save by Orbax: creates the temporary folder, removes what earlier saves have left.

    arrays: the folder to write them to. `publish` makes it a checkpoint, and deletes what is not
    kept. A step that is saved again is deleted first.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        make(folder)
        if not is_remote(folder):
            for left in folder.glob("step_*.tmp"):  # by versions that wrote format 1
                shutil.rmtree(left, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(
            step_prefix="step",
            step_format_fixed_length=8,
            preservation_policy=retention,
            atomicity_options=atomicity(folder),
            cleanup_tmp_directories=True,
            create=False,
            save_root_metadata=False,
            lightweight_initialize=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=0, active_processes={0}
            ),
            async_options=ocp.AsyncOptions(
                timeout_secs=_NO_LIMIT, create_directories_asynchronously=False
            ),
        )
        self._manager = ocp.CheckpointManager(
            folder, options=options, item_names=(ARRAYS,), item_handlers={ARRAYS: Handler()}
        )
        handler = Written()
        self._done = handler.done
        if retention.saved in steps_in(folder):
            self._manager.delete(retention.saved)
        self._manager.save(
            retention.saved, args=ocp.args.Composite(**{ARRAYS: handler}), force=True
        )
        self.arrays = place_of(handler.folder)
        self._folder, self._step = folder, retention.saved

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest and publish the checkpoint; raise what went wrong."""
        files = describe_files(self.arrays, describes)
        files = {f"{ARRAYS}/{name}": entry for name, entry in files.items()}
        write_manifest(self.arrays.parent, dataclasses.replace(manifest, files=files))
        self._done.set_result(None)
        try:
            self._end()
        except OSError as error:
            if self._step not in steps_in(self._folder):
                raise
            _log.error("OLD CHECKPOINTS IN %s WERE NOT DELETED: %s", self._folder, error)

    def _end(self) -> None:
        try:
            self._manager.wait_until_finished()
        finally:
            self._manager.close()

    def give_up(self) -> None:
        """End a save that failed, and delete its files."""
        if not self._done.done():
            self._done.set_exception(OSError("given up"))
        with contextlib.suppress(Exception):
            self._end()
        remove(self.arrays.parent)


def atomicity(folder: Path) -> Any:
    """Return how a folder becomes a checkpoint: by renaming it, or in object storage, where folders
    cannot be renamed, by a file that is written last."""
    modes = ocp.options.AtomicityMode
    mode = modes.COMMIT_FILE if is_remote(folder) else modes.ATOMIC_RENAME
    return ocp.options.AtomicityOptions(mode=mode)


class _WithoutOrbax(logging.Filter):
    """Drops Orbax's own log, which has tracebacks: its errors are raised, and logged in one line by
    `Checkpointer`."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


logging.getLogger("absl").addFilter(_WithoutOrbax())
