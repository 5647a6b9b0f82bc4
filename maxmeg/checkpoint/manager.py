"""Save and restore the state of a run: asynchronously, atomically, verified, on any mesh.

FOLDER/step_00000100/manifest.json   metadata, digests of tensors, checksums of files
FOLDER/step_00000100/arrays/         an Orbax checkpoint: a Zarr array per tensor
FOLDER/step_00000200.tmp/            a save in progress, or one that was interrupted
"""

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from maxmeg.checkpoint import integrity, storage
from maxmeg.checkpoint.integrity import CorruptCheckpointError, Manifest, Tensor
from maxmeg.checkpoint.processes import TIMEOUT_SECONDS, Processes, describe
from maxmeg.checkpoint.restore import check_tree, read_tree
from maxmeg.checkpoint.storage import Order
from maxmeg.config.errors import TRANSIENT
from maxmeg.config.schema import Verify

ARRAYS = "arrays"
_OLD = ".old"
_STEP = re.compile(r"step_(\d{8,})")
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
        self.folder = Path(folder).absolute()
        self.last_error: Exception | None = None
        self.seconds: float | None = None  # duration of the last save, until it was published
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._asynchronous = asynchronous
        self._verify = verify
        self.processes = Processes(f"checkpoint/{folder}", timeout_seconds)
        self.before_publish: Callable[[], None] = lambda: None  # an error of it fails the save
        self._thread: threading.Thread | None = None
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
        previous save. If the save cannot begin, logs an error, sets `last_error` and returns False;
        a failure in the background sets `last_error` and makes `wait` return False. Raises
        ValueError for a tree or metadata that can never be saved.
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
        temporary = self.folder_of(step).with_suffix(".tmp")
        try:
            self.processes.together("begin", lambda: self.begin(temporary), SaveError)
        except Exception as error:
            return self._failed(step, error)
        problem, chunks, digests = None, [], {}
        try:
            chunks = storage.take_snapshot(leaves, orders)
        except Exception as error:  # `write` raises it on all processes
            problem = error
        try:  # also after a problem: a computation over all processes hangs if one is missing
            digests = integrity.start_digests(leaves, orders)
        except Exception as error:
            problem = problem or error
        infos = {p: storage.info_of(x, orders.get(p)) for p, x in leaves.items()}
        shapes = {p: storage.chunk_shape(x, orders.get(p)) for p, x in leaves.items()}
        rendered: dict[str, str] = {}
        del leaves

        def write() -> dict[str, tuple[int, str]]:
            if problem is not None:
                raise problem
            arrays = temporary / ARRAYS
            written = storage.write(arrays, chunks, self._verify)
            chunks.clear()  # frees the snapshot
            rendered.update(integrity.finish_digests(digests))
            if self.processes.primary:
                described = {
                    f"{storage.tensor_folder(p)}/zarr.json": storage.describe(info, shapes[p])
                    for p, info in infos.items()
                }
                described[storage.TREE] = storage.describe_tree(infos)
                for name, data in described.items():
                    written[name] = storage.write_file(arrays / name, data, self._verify)
            return {f"{ARRAYS}/{name}": sums for name, sums in written.items()}

        def commit() -> bool:
            try:
                parts = self.processes.gather("written", write, SaveError)
                files = {n: (size, crc) for part in parts for n, (size, crc) in part.items()}
                tensors = {p: Tensor(i.shape, str(i.dtype), rendered[p]) for p, i in infos.items()}
                self.publish(Manifest(step, metadata, tensors, files), temporary)
            except Exception as error:
                return self._failed(step, error, temporary)
            self.last_error, self.seconds = None, time.monotonic() - begin
            self._corrupt.discard(step)
            self._prune(step)
            return True

        if problem is not None or not self._asynchronous:
            return commit()
        self._thread = threading.Thread(target=commit, name="checkpoint")
        self._thread.start()
        return True

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
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = (_STEP.fullmatch(name.removesuffix(_OLD)) for name in names)
        return sorted({int(match[1]) for match in matches if match})

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
        problems = []
        steps = self.processes.broadcast("steps", self.steps)
        while steps:
            step = steps.pop()
            try:
                found = use(step, self.manifest(step))
            except (CorruptCheckpointError, FileNotFoundError, NoCheckpointError) as error:
                if self.processes.broadcast("gone", lambda s=step: not self._existing(s).exists()):
                    steps = self.processes.broadcast("steps", self.steps)
                    continue
                if not isinstance(error, CorruptCheckpointError):
                    raise
                problems.append(f"step {step}: {error}")
                self._corrupt.add(step)
                self._alarm(
                    "CHECKPOINT OF STEP %d IS DAMAGED, trying an older one: %s", step, error
                )
                continue
            if problems:
                self._alarm("USED THE OLDER STEP %d of %s instead", step, self.folder)
            return found
        if problems:
            raise CorruptCheckpointError(
                f"all {len(problems)} checkpoints in {self.folder} are damaged: "
                f"{' | '.join(problems)}; to start anew, choose another folder"
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
        wanted = integrity.flatten(abstract_tree)
        resizable, orders = resizable or {}, orders or {}
        check_tree(manifest, wanted, resizable, orders, partial)
        names = [n for n in manifest.files if integrity.tensor_of(n, manifest.tensors) in wanted]
        share = names[self.processes.index :: self.processes.count]
        described = [name for name in names if name.endswith("/zarr.json")]
        described += [name for name in manifest.files if name == f"{ARRAYS}/{storage.TREE}"]
        try:
            self._together("sizes", lambda: integrity.verify_sizes(folder, manifest, share))
            self._together("describe", lambda: integrity.verify_files(folder, manifest, described))
            leaves = read_tree(folder / ARRAYS, manifest, wanted, resizable, orders, self._together)
        except CorruptCheckpointError:  # checksums name the damaged file
            self._together("verify", lambda: integrity.verify_files(folder, manifest, share))
            raise
        return _like(abstract_tree, leaves), manifest.metadata

    def folder_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step_{step:08d}"

    def _existing(self, step: int) -> Path:
        """Return the step's folder, or its `.old` folder after a crash between two renames."""
        folder = self.folder_of(step)
        old = folder.with_suffix(_OLD)
        return old if old.exists() and not folder.exists() else folder

    def find(self, step: int) -> tuple[Path, Manifest]:
        """Return the folder of a step, as process 0 chooses it, and its manifest.

        Raises the errors of `manifest`.
        """

        def decide() -> tuple[str, str, list[int]]:
            folder = self._existing(step)
            if not folder.exists():
                return "", "", self.steps()
            return folder.name, retried(lambda: integrity.read_manifest(folder)).digest, []

        name, digest, steps = self.processes.broadcast("newest", decide)
        if not name:
            raise NoCheckpointError(f"no checkpoint of step {step} in {self.folder}: has {steps}")
        folder = self.folder / name

        def read() -> Manifest:
            path, end = folder / integrity.MANIFEST, time.monotonic() + _VISIBLE_SECONDS
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

    def begin(self, temporary: Path) -> None:
        """Remove the leftovers of interrupted saves, and create the new folder."""
        if not self.processes.primary:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.suffix == _OLD and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (_OLD, ".tmp") and _STEP.match(path.name):
                shutil.rmtree(path, ignore_errors=True)
        (temporary / ARRAYS).mkdir(parents=True)

    def publish(self, manifest: Manifest, temporary: Path) -> None:
        """Write the manifest and rename the folder, which makes it a checkpoint."""
        processes = self.processes

        def publish() -> None:
            if not processes.primary:
                return
            self.before_publish()
            integrity.write_manifest(temporary, manifest)
            _flush(temporary)
            folder = self.folder_of(manifest.step)
            if folder.exists():
                folder.rename(folder.with_suffix(_OLD))
            temporary.rename(folder)
            _flush(self.folder)
            integrity.read_manifest(folder)
            shutil.rmtree(folder.with_suffix(_OLD), ignore_errors=True)

        processes.together("publish", publish, SaveError)

    def _prune(self, saved: int) -> None:
        """Delete checkpoints older than the saved one, by keep_last and keep_every."""
        if not self.processes.primary:
            return
        try:
            past = [step for step in self.steps() if step <= saved]
            intact = [step for step in past if step not in self._corrupt]
            kept = set(intact[-self._keep_last :])
            for step in past:
                if step not in kept and not (self._keep_every and step % self._keep_every == 0):
                    folder = self.folder_of(step)
                    shutil.rmtree(folder.rename(folder.with_suffix(".deleted.tmp")))
        except OSError as error:
            _log.error("OLD CHECKPOINTS IN %s WERE NOT DELETED: %s", self.folder, error)

    def _newest(self) -> str:
        """Return "step N" for the newest step that is not known to be damaged, or "unknown"."""
        try:
            kept = [step for step in self.steps() if step not in self._corrupt]
        except OSError:
            kept = []
        return f"step {kept[-1]}" if kept else "unknown"

    def _failed(self, step: int, error: Exception, temporary: Path | None = None) -> bool:
        self.last_error = error
        self._alarm(
            "CHECKPOINT OF STEP %d WAS NOT SAVED, training continues; the last good one is %s: %s."
            " Check space and permissions of %s",
            step,
            self._newest(),
            describe(error),
            self.folder,
        )
        if temporary is not None and self.processes.primary:
            shutil.rmtree(temporary, ignore_errors=True)
        return False


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


def _flush(folder: Path) -> None:
    """Flush the renames in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _like(tree: Tree, leaves: Mapping[str, jax.Array], prefix: str = "") -> dict[str, Any]:
    """Return the leaves in the structure of a tree, including empty dicts."""
    return {
        key: _like(value, leaves, f"{prefix}{key}/")
        if isinstance(value, Mapping)
        else leaves[f"{prefix}{key}"]
        for key, value in tree.items()
    }
