"""Folders of checkpoints, on a disk or at gs:// or s3://, as paths that behave like pathlib's."""

import errno
import os
import re
import shutil
import typing
from collections.abc import Iterable
from pathlib import Path

from maxmeg.runtime.object_storage import as_os_errors, file_system, is_remote, keep_no_listings

ARRAYS = "arrays"
MANIFEST = "manifest.json"
COMMITTED = "commit_success.txt"  # Orbax writes it last: object storage cannot rename a folder
_STEP = re.compile(r"step_(\d{8,})")


def place_of(folder: str | os.PathLike[str]) -> Path:
    """Return a folder's path; of a URL one of etils.epath, which has the same methods.

    ValueError as from `file_system`. All threads share the file system of etils. That of
    `file_system` is another one for gs://, and with older fsspec, which has one per thread.
    """
    text = os.fspath(folder)
    if not is_remote(text):
        return Path(os.path.abspath(text))  # without "..", which TensorStore refuses
    from etils import epath
    from etils.epath import backend

    file_system(text)
    keep_no_listings(backend.fsspec_backend.fs(text))
    return typing.cast(Path, epath.Path(text))


def make(folder: Path) -> None:
    """Create a folder, and those above it. A bucket is not created: its name may be misspelt."""
    if not is_remote(folder):
        return folder.mkdir(parents=True, exist_ok=True)
    files, root = file_system(os.fspath(folder))
    if not files.exists(bucket := root.partition("/")[0]):
        raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}", os.fspath(folder))


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a complete checkpoint, oldest first."""
    with as_os_errors(folder):
        try:
            names = [path.name for path in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        if is_remote(folder):
            names = [name for name in names if (folder / name / COMMITTED).exists()]
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def sizes_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, int]:
    """Return the bytes of files below a folder, of these or of all, by relative name; files that
    are missing are left out."""
    if is_remote(folder):
        files, root = file_system(os.fspath(folder))
        entries = files.find(root, detail=True).items()
        sizes = {os.path.relpath(name, root): int(each["size"]) for name, each in entries}
        return sizes if names is None else {name: sizes[name] for name in names if name in sizes}
    if names is None:
        files = (path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
    sizes = {}
    for name in names:
        try:
            sizes[name] = (folder / name).stat().st_size
        except FileNotFoundError:
            continue
    return sizes


def device_of(folder: Path) -> int:
    """Return the number of the disk that holds a folder or, if that is absent, the nearest one
    above it; 0 for remote folders."""
    if is_remote(folder):
        return 0
    above = (folder, *folder.parents)
    return next(place for place in above if place.exists()).stat().st_dev


def remove(folder: Path) -> None:
    """Delete a folder as far as possible."""
    if is_remote(folder):
        files, root = file_system(os.fspath(folder))
        if files.exists(root):
            files.rm(root, recursive=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
