"""Save and restore the state of a run: asynchronously, atomically, verified, on any mesh.

FOLDER/step_00000100/manifest.json   metadata, digests of tensors, sizes of files
FOLDER/step_00000100/arrays/         an Orbax checkpoint: a Zarr array per tensor
FOLDER/step_00000200.orbax-checkpoint-tmp/   a save in progress, or one that was interrupted
"""

import errno
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from maxmeg.checkpoint import integrity, storage
from maxmeg.checkpoint.integrity import CorruptCheckpointError, Manifest, Tensor
from maxmeg.checkpoint.places import ARRAYS, MANIFEST, device_of, place_of, steps_in
from maxmeg.checkpoint.processes import TIMEOUT_SECONDS, Processes, describe
from maxmeg.checkpoint.restore import check_tree, read_tree
from maxmeg.checkpoint.storage import Order
from maxmeg.config.errors import TRANSIENT
from maxmeg.config.schema import Verify

if TYPE_CHECKING:
    from maxmeg.checkpoint.folders import Saving

RETRY_SECONDS = (1, 4, 16)
_VISIBLE_SECONDS = 90  # a network file system may show a new file to other hosts a minute later
_log = logging.getLogger(__name__)

T = TypeVar("T")
Tree = Mapping[str, Any]


class SaveError(OSError):
    """A checkpoint that could not be saved."""


class NoCheckpointError(ValueError):
    """The requested step has no checkpoint."""


class Checkpointer:
    """The checkpoints in one folder, which must be visible to every process of the run.

    Keeps the newest `keep_last` and every step divisible by `keep_every` (0: none); nothing is
    deleted before a newer checkpoint is on the disk. All processes must call `save`, `manifest`,
    `restore` and `latest` in the same order; process 0 decides which checkpoint is read. Only one
    run may write to a folder; others may read it at the same time.

    Every restore compares the values with digests that were computed on the devices at save.
    verify: whether the manifest also has checksums of the files, computed in memory while they are
    written, so that errors name the damaged file; and whether files are read back after the save.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        asynchronous: bool = True,
        verify: Verify = Verify.crc,
        timeout_seconds: int = TIMEOUT_SECONDS,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                f"keep_last={keep_last} must be >= 1 and keep_every={keep_every} must be >= 0"
            )
        self.folder = place_of(folder)
        self.last_error: Exception | None = None
        self.seconds: float | None = None  # duration of the last save, until it was published
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._asynchronous = asynchronous
        self._verify = verify
        self.processes = Processes(f"checkpoint/{folder}", timeout_seconds)
        # Called before a save begins and before it is published; its error fails the save.
        self.may_write: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._device: int | None = None  # of the last save
        self._corrupt: set[int] = set()

    def save(
        self,
        step: int,
        tree: Tree,
        metadata: dict[str, Any],
        orders: Mapping[str, Order] | None = None,
    ) -> bool:
        """Save nested dicts of jax.Array; return when they are copied to the host.

        orders: path ("model/stack/w") -> the model's layer in each row of a stacked array, -1 for
        padding: on disk the layers are in the model's order, without padding. Waits first for the
        previous save. A failure logs an error, sets `last_error` and makes `wait` return False, or
        `save` itself unless it is asynchronous. Raises ValueError for a tree or metadata that can
        never be saved.
        """
        if step < 0:
            raise ValueError(f"step={step} must be >= 0")
        leaves, orders = _saveable(tree, self.processes.count), orders or {}
        try:
            metadata = json.loads(json.dumps(metadata))
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoint metadata must be JSON-serializable: {error}") from error
        self.wait()
        begin = time.monotonic()
        contents = _Contents(leaves, orders)
        del leaves
        saving: list[Saving] = []  # of process 0

        def start() -> str:
            saving.append(self.start(step))
            return str(saving[0].arrays)

        def publish(tensors: dict[str, Tensor]) -> None:
            for each in saving:
                self.may_write()
                each.publish(Manifest(step, metadata, tensors, {}))

        def work() -> None:
            try:
                arrays = place_of(self.processes.broadcast("begin", start, SaveError))
                write = functools.partial(contents.write, arrays, self._verify, bool(saving))
                tensors = self.processes.together("written", write, SaveError)
                self.processes.together("publish", lambda: publish(tensors), SaveError)
            except Exception as error:
                self._failed(step, error, saving)
                return
            self.last_error, self.seconds = None, time.monotonic() - begin
            self._device = device_of(self.folder)
            self._corrupt.discard(step)

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()
        return self._asynchronous or self.wait()

    def start(self, step: int) -> "Saving":
        """Create the temporary folder of a step's checkpoint, on one process."""
        from maxmeg.checkpoint.folders import Retention, Saving  # imports Orbax: a second

        self.may_write()
        if self._device not in (None, device_of(self.folder)):
            raise OSError(errno.ENODEV, "its disk is no longer mounted", str(self.folder))
        damaged = self._corrupt - {step}
        retention = Retention(step, self._keep_last, self._keep_every, damaged)
        return Saving(self.folder, retention)

    def wait(self) -> bool:
        """Wait for the save in the background. Returns False if the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last_error is None

    def check(self) -> None:
        """Wait for the save in the background; SaveError if the last save failed."""
        self.wait()
        if self.last_error is not None:
            raise SaveError(
                f"the last checkpoint was not saved in {self.folder} (the last good one is "
                f"{self._newest()}): {describe(self.last_error)}"
            )

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, oldest first."""
        return steps_in(self.folder)

    def manifest(self, step: int) -> Manifest:
        """Return the verified manifest of a step, the same on all processes; read no array.

        ValueError if there is no such checkpoint, CorruptCheckpointError if it is damaged.
        """
        return self.find(step)[1]

    def latest(self, use: Callable[[int, Manifest], T]) -> T | None:
        """Return use(step, manifest) for the newest intact checkpoint; None if there is none.

        If reading the manifest or `use` raises CorruptCheckpointError, logs the error and tries the
        next older checkpoint; raises it if all checkpoints are damaged. Begins again if a run that
        trains meanwhile has replaced a checkpoint by a newer one.
        """
        self.wait()
        problems: dict[int, str] = {}
        all_steps = steps = self.processes.broadcast("steps", self.steps)
        while steps:
            step, steps = steps[-1], steps[:-1]
            try:
                restored = use(step, self.manifest(step))
            except (CorruptCheckpointError, FileNotFoundError, NoCheckpointError) as error:
                now = self.processes.broadcast("steps", self.steps)
                if step not in now or now[-1] > all_steps[-1]:  # a run deletes it, or soon will
                    all_steps, steps = now, [other for other in now if other not in problems]
                    continue
                if not isinstance(error, CorruptCheckpointError):
                    raise
                problems[step] = f"step {step}: {error}"
                self._corrupt.add(step)
                self._alarm(
                    "CHECKPOINT OF STEP %d IS DAMAGED, trying an older one: %s", step, error
                )
                continue
            if problems:
                self._alarm("USED THE OLDER STEP %d of %s instead", step, self.folder)
            return restored
        if problems:
            raise CorruptCheckpointError(
                f"all {len(problems)} checkpoints in {self.folder} are damaged: "
                f"{' | '.join(problems.values())}; to start anew, choose another folder"
            )
        return None

    def restore(
        self,
        step: int,
        abstract_tree: Tree,
        *,
        resizable: Mapping[str, int] | None = None,
        orders: Mapping[str, Order] | None = None,
        partial: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tree and metadata of a step, every value verified.

        abstract_tree: nested dicts of jax.ShapeDtypeStruct with shardings of any mesh.
        resizable: path ("model/embedding/w") -> axis along which the tensor is cut or zero-padded
        to the size in abstract_tree; only zeros may be cut off.
        orders: as for `save`, for the restored arrays.
        partial: the checkpoint may have other tensors, which are neither read nor verified.
        Raises ValueError if tree and checkpoint differ, CorruptCheckpointError for damage.
        """
        self.wait()
        folder, manifest = self.find(step)
        like = integrity.flatten(abstract_tree)
        resizable, orders = resizable or {}, orders or {}
        check_tree(manifest, like, resizable, orders, partial)
        names = [n for n in manifest.files if integrity.tensor_of(n, manifest.tensors) in like]
        names += [name for name in manifest.files if name == f"{ARRAYS}/{storage.TREE}"]
        share = names[self.processes.index :: self.processes.count]
        described = [name for name in share if storage.describes(name)]
        try:
            self._together("sizes", lambda: integrity.verify_sizes(folder, manifest, share))
            self._together("describe", lambda: integrity.verify_files(folder, manifest, described))
            leaves = read_tree(folder / ARRAYS, manifest, like, resizable, orders, self._together)
        except CorruptCheckpointError:  # checksums name the damaged file
            self._together("verify", lambda: integrity.verify_files(folder, manifest, share))
            raise
        return in_structure(abstract_tree, leaves), manifest.metadata

    def folder_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step_{step:08d}"

    def find(self, step: int) -> tuple[Path, Manifest]:
        """Return the folder of a step, as process 0 chooses it, and its manifest.

        Raises the errors of `manifest`.
        """

        def decide() -> tuple[str, str, list[int]]:
            folder = self.folder_of(step)
            if step not in (steps := self.steps()):
                return "", "", steps
            return folder.name, retried(lambda: integrity.read_manifest(folder)).digest, []

        name, digest, steps = self.processes.broadcast("newest", decide)
        if not name:
            raise NoCheckpointError(f"no checkpoint of step {step} in {self.folder}: has {steps}")
        folder = self.folder / name

        def read() -> Manifest:
            path, end = folder / MANIFEST, time.monotonic() + _VISIBLE_SECONDS
            while not path.exists() and time.monotonic() < end:
                time.sleep(1)
            manifest = integrity.read_manifest(folder)
            if manifest.digest != digest:
                raise CorruptCheckpointError(f"file {path} is not the one that process 0 reads")
            return manifest

        return folder, self._together("manifest", read)

    def _alarm(self, message: str, *arguments: object) -> None:
        """Log an error on process 0; all processes have it."""
        if self.processes.primary:
            _log.error(message, *arguments)

    def _together(self, tag: str, function: Callable[[], Any]) -> Any:
        return self.processes.together(tag, lambda: retried(function))

    def _newest(self) -> str:
        """Return "step N" for the newest step that is not known to be damaged, or "unknown"."""
        try:
            steps = [step for step in self.steps() if step not in self._corrupt]
        except OSError:
            steps = []
        return f"step {steps[-1]}" if steps else "unknown"

    def _failed(self, step: int, error: Exception, saving: "list[Saving]") -> bool:
        self.last_error = error
        self._alarm(
            "CHECKPOINT OF STEP %d WAS NOT SAVED, training continues; the last good one is %s: %s."
            " Check space and permissions of %s",
            step,
            self._newest(),
            describe(error),
            self.folder,
        )
        for each in saving:
            each.give_up()
        return False


class _Contents:
    """Copies of the arrays that this process writes, and digests of all; or the problem that they
    could not be made, which `write` raises on all processes."""

    def __init__(self, leaves: Mapping[str, jax.Array], orders: Mapping[str, Order]) -> None:
        self.problem: Exception | None = None
        self._digests: dict[str, jax.Array] = {}
        try:
            self._snapshot = storage.take_snapshot(leaves, orders)
        except Exception as error:
            self.problem = error
        try:  # also after a problem: a computation over all processes hangs if one is missing
            self._digests = integrity.start_digests(leaves, orders)
        except Exception as error:
            self.problem = self.problem or error

    def write(self, arrays: Path, verify: Verify, describes: bool) -> dict[str, Tensor]:
        """Write the copies, and free them; return all tensors' entries in the manifest."""
        if self.problem is not None:
            raise self.problem
        storage.write(arrays, self._snapshot, verify, describe=describes)
        self._snapshot.pieces.clear()
        digests = integrity.finish_digests(self._digests)
        return {
            path: Tensor(info.shape, str(info.dtype), digests[path])
            for path, info in self._snapshot.tensors.items()
        }


def retried(function: Callable[[], T]) -> T:
    """Call a function again after errors of a file system that may pass."""
    for seconds in RETRY_SECONDS:
        try:
            return function()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            _log.warning("%s: trying again in %d s", error, seconds)
            time.sleep(seconds)
    return function()


def _saveable(tree: Tree, num_processes: int) -> dict[str, jax.Array]:
    """Return leaves by path; ValueError for a leaf that a checkpoint cannot hold."""
    leaves = integrity.flatten(tree)
    if not leaves:
        raise ValueError("the tree to save has no arrays")
    for path, x in leaves.items():
        if not isinstance(x, jax.Array):
            remedy = "put it into the metadata or convert it to a jax.Array"
        elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            remedy = "save jax.random.key_data(key)"
        elif x.size == 0:
            remedy = f"its shape is {x.shape}: leave it out"
        elif len({device.process_index for device in x.sharding.device_set}) != num_processes:
            remedy = f"it is not on all {num_processes} processes: make it a global array"
        else:
            continue
        raise ValueError(f"{path} ({type(x).__name__}) cannot be saved: {remedy}")
    return leaves


def in_structure(tree: Tree, leaves: Mapping[str, jax.Array], prefix: str = "") -> dict[str, Any]:
    """Return the leaves in the structure of a tree, including empty dicts."""
    return {
        key: in_structure(value, leaves, f"{prefix}{key}/")
        if isinstance(value, Mapping)
        else leaves[f"{prefix}{key}"]
        for key, value in tree.items()
    }
