"""Saves and restores the state of a run: asynchronous, atomic, verified, on any mesh.

FOLDER/step_00000100/manifest.json   metadata, digests of tensors, checksums of files
FOLDER/step_00000100/arrays/         an Orbax checkpoint, one folder a tensor
FOLDER/step_00000200.tmp/            a save in progress, or one that was interrupted
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxmeg.checkpoint import integrity, storage
from maxmeg.checkpoint.integrity import CorruptCheckpointError, Manifest, Tensor
from maxmeg.checkpoint.processes import Processes, describe
from maxmeg.checkpoint.restore import check_tree, read_tree

ARRAYS = "arrays"
_OLD = ".old"
_STEP = re.compile(r"step_(\d{8,})")
_log = logging.getLogger(__name__)

Tree = Mapping[str, Any]


class SaveError(Exception):
    """A checkpoint that could not be saved."""


class Checkpointer:
    """The checkpoints in one folder, which every process of the run sees.

    Keeps the newest `keep_last` and every step divisible by `keep_every` (0: none); nothing is
    deleted before a newer checkpoint is on the disk and read back. All processes call `save`,
    `restore` and `restore_latest` alike. One run writes to a folder; others may read it meanwhile.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        asynchronous: bool = True,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                f"keep_last={keep_last} must be >= 1 and keep_every={keep_every} must be >= 0"
            )
        self.folder = Path(folder).absolute()
        self.last_error: Exception | None = None
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._asynchronous = asynchronous
        self._processes = Processes()
        self._thread: threading.Thread | None = None
        self._corrupt: set[int] = set()

    def save(self, step: int, tree: Tree, metadata: dict[str, Any]) -> bool:
        """Saves nested dicts of jax.Array; returns when they are copied to the host.

        False, an alarm in the log and `last_error` if the save could not begin; a failure in the
        background sets `last_error` and makes `wait` return False. Raises ValueError for a tree
        or metadata that can never be saved. Waits first for the previous save.
        """
        if step < 0:
            raise ValueError(f"step={step} must be >= 0")
        leaves = _saveable(tree, self._processes.count)
        try:
            metadata = json.loads(json.dumps(metadata))
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata of a checkpoint must be JSON-able: {error}") from error
        self.wait()
        temporary = self.folder_of(step).with_suffix(".tmp")
        digests: dict[str, jax.Array] = {}
        futures: Sequence[Any] = ()
        problem = None
        try:
            self._processes.together("begin", lambda: self.begin(temporary), SaveError)
        except Exception as error:
            return self._failed(step, error)
        shapes = {path: (x.shape, str(x.dtype)) for path, x in leaves.items()}
        try:
            leaves = storage.snapshot(leaves)
            futures = storage.start_write(temporary / ARRAYS, leaves)
        except Exception as error:  # the others hear of it in _finish
            problem = error
        try:  # in any case: this runs on all processes or hangs
            digests = integrity.start_digests(leaves)
        except Exception as error:
            problem = problem or error
        del leaves

        def commit() -> bool:
            try:
                tensors = self._finish(temporary, shapes, digests, futures, problem)
                self.publish(Manifest(step, metadata, tensors, {}), temporary)
            except Exception as error:
                return self._failed(step, error, temporary)
            self.last_error = None
            self._corrupt.discard(step)
            self._prune(step)
            return True

        if problem is not None or not self._asynchronous:
            return commit()
        self._thread = threading.Thread(target=commit, name="checkpoint")
        self._thread.start()
        return True

    def wait(self) -> bool:
        """Waits for the save in the background; False if the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.last_error is None

    def close(self) -> None:
        """Waits for the save in the background; a program that ends without it loses that save."""
        self.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = (_STEP.fullmatch(name.removesuffix(_OLD)) for name in names)
        return sorted({int(match[1]) for match in matches if match})

    def latest_step(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> dict[str, Any]:
        """What was passed to `save`, verified; no array is read."""
        return integrity.read_manifest(self.existing(step)).metadata

    def restore(
        self,
        step: int,
        abstract_tree: Tree,
        *,
        resizable: Mapping[str, int] | None = None,
        partial: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tree and metadata of a step, every bit verified.

        abstract_tree: nested dicts of jax.ShapeDtypeStruct with shardings of any mesh.
        resizable: path ("model/embedding/w") -> axis along which the tensor is cut or filled up
        with zeros to the wanted size; only zeros may be cut off.
        partial: read and verify only what abstract_tree holds.
        Raises ValueError where tree and checkpoint differ, CorruptCheckpointError for damage.
        """
        self.wait()
        self.existing(step)
        return self._restore(step, abstract_tree, resizable or {}, partial)

    def _restore(
        self, step: int, abstract_tree: Tree, resizable: Mapping[str, int], partial: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        folder = self._existing(step)
        manifest = self._together("manifest", lambda: integrity.read_manifest(folder))
        wanted = integrity.flatten(abstract_tree)
        check_tree(manifest, wanted, resizable, partial)
        names = sorted(
            name
            for name in manifest.files
            if (path := integrity.tensor_of(name, manifest.tensors)) == "" or path in wanted
        )
        share = names[self._processes.index :: self._processes.count]
        self._together("verify", lambda: integrity.verify_files(folder, manifest, share))
        leaves = read_tree(folder / ARRAYS, manifest, wanted, resizable, self._together)
        return _like(abstract_tree, leaves), manifest.metadata

    def restore_latest(
        self,
        abstract_tree: Tree,
        *,
        resizable: Mapping[str, int] | None = None,
        partial: bool = False,
    ) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """Step, tree and metadata of the newest intact checkpoint; None if there is none at all.

        Damaged ones are reported loudly and passed over; if all are, CorruptCheckpointError.
        """
        self.wait()
        problems = []
        steps = self._processes.gather("steps", self.steps, CorruptCheckpointError)[0]
        for step in reversed(steps):
            try:
                tree, metadata = self._restore(step, abstract_tree, resizable or {}, partial)
            except CorruptCheckpointError as error:
                problems.append(f"step {step}: {error}")
                self._corrupt.add(step)
                _log.error("CHECKPOINT OF STEP %d IS DAMAGED, trying an older: %s", step, error)
                continue
            if problems:
                _log.error("RESTORED THE OLDER STEP %d of %s instead", step, self.folder)
            return step, tree, metadata
        if problems:
            raise CorruptCheckpointError(
                f"all {len(problems)} checkpoints in {self.folder} are damaged: "
                f"{' | '.join(problems)}; to start anew, choose another folder"
            )
        return None

    def folder_of(self, step: int) -> Path:
        """Where a step's checkpoint is, or will be."""
        return self.folder / f"step_{step:08d}"

    def _existing(self, step: int) -> Path:
        """The step's folder; its predecessor if a crash came between the two renames."""
        folder = self.folder_of(step)
        old = folder.with_suffix(_OLD)
        return old if old.exists() and not folder.exists() else folder

    def existing(self, step: int) -> Path:
        """The folder of a step's checkpoint; ValueError where there is none."""
        folder = self._existing(step)
        if not folder.exists():
            raise ValueError(f"no checkpoint of step {step} in {self.folder}: has {self.steps()}")
        return folder

    def _together(self, tag: str, function: Callable[[], Any]) -> Any:
        return self._processes.together(tag, function, CorruptCheckpointError)

    def begin(self, temporary: Path) -> None:
        """Removes what interrupted saves left and makes the new folder."""
        if not self._processes.primary:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.suffix == _OLD and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (_OLD, ".tmp") and _STEP.match(path.name):
                shutil.rmtree(path, ignore_errors=True)
        (temporary / ARRAYS).mkdir(parents=True)

    def _finish(
        self,
        temporary: Path,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        digests: Mapping[str, jax.Array],
        futures: Sequence[Any],
        problem: Exception | None,
    ) -> dict[str, Tensor]:
        """Waits for the devices and for the disk."""

        def finish() -> dict[str, str]:
            first = problem
            for future in futures:  # all: when the folder is removed, no one writes any more
                try:
                    future.result()
                except Exception as error:
                    first = first or error
            if first is not None:
                raise first
            return integrity.finish_digests(digests)

        found = self._processes.together("written", finish, SaveError)
        return {path: Tensor(shape, dtype, found[path]) for path, (shape, dtype) in shapes.items()}

    def publish(self, manifest: Manifest, temporary: Path) -> None:
        """Reads all files back, writes the manifest, gives the folder its name."""
        processes = self._processes

        def read_back() -> dict[str, tuple[int, str]]:
            names = integrity.list_files(temporary)[processes.index :: processes.count]
            return integrity.checksum_files(temporary, names)

        parts = processes.gather("files", read_back, SaveError)

        def publish() -> None:
            if not processes.primary:
                return
            found = {name: (size, crc) for part in parts for name, (size, crc) in part.items()}
            names = integrity.list_files(temporary)
            found |= integrity.checksum_files(temporary, [n for n in names if n not in found])
            whole = dataclasses.replace(manifest, files={name: found[name] for name in names})
            integrity.write_manifest(temporary, whole)
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
        """Deletes what is older than the step just saved, neither new nor kept for good."""
        if not self._processes.primary:
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
            _log.error("OLD CHECKPOINTS IN %s ARE NOT DELETED: %s", self.folder, error)

    def _failed(self, step: int, error: Exception, temporary: Path | None = None) -> bool:
        self.last_error = error
        try:
            kept = [saved for saved in self.steps() if saved not in self._corrupt]
        except OSError:
            kept = []
        _log.error(
            "CHECKPOINT OF STEP %d WAS NOT SAVED, training goes on; the last good one is %s: %s."
            " Check space and permissions of %s",
            step,
            f"step {kept[-1]}" if kept else "unknown",
            describe(error),
            self.folder,
        )
        if temporary is not None and self._processes.primary:
            shutil.rmtree(temporary, ignore_errors=True)
        return False


def _flush(folder: Path) -> None:
    """Makes renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _saveable(tree: Tree, num_processes: int) -> dict[str, jax.Array]:
    """Leaves by path; raises ValueError for what a checkpoint cannot hold."""
    leaves = integrity.flatten(tree)
    if not leaves:
        raise ValueError("the tree to save has no arrays")
    for path, x in leaves.items():
        if not isinstance(x, jax.Array):
            remedy = "put it into the metadata or make it a jax.Array"
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
    """The leaves in the structure of a tree, empty dicts included."""
    return {
        key: _like(value, leaves, f"{prefix}{key}/")
        if isinstance(value, Mapping)
        else leaves[f"{prefix}{key}"]
        for key, value in tree.items()
    }
