"""Paths in settings: made absolute, and adapted after the run folder was moved; and the folders of
configurations and launch scripts."""

import copy
import os
import pathlib
import re
from collections.abc import Callable

from maxmeg.config.schema import Config

KINDS_WITHOUT_FILES = ("bytes", "null")  # of tokenizers
_STEP = re.compile(r"\d+:")  # before an item of data.blend_changes
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def source_folder(name: str) -> pathlib.Path:
    """Return the folder of "configs" or "launch": in a wheel maxmeg/NAME, in a clone NAME."""
    inside, neighbour = _PACKAGE / name, _PACKAGE.parent / name
    return inside if any(inside.glob("*.py")) else neighbour


def split_spec(spec: str) -> tuple[str, str, str]:
    """Split data.tokenizer, KIND:ARGUMENT?NAME=VALUE&..., into kind, argument, "?options"."""
    place, question, words = spec.rpartition("?") if "?" in spec else (spec, "", "")
    kind, _, argument = place.partition(":")
    return kind, argument, question + words


def absolute(config: Config) -> Config:
    """Return a copy with absolute paths."""
    return with_paths(config, os.path.abspath)


def relocated(config: Config, folder: str | os.PathLike) -> Config:
    """Return a copy of settings that were stored in a run folder which is now `folder`.

    Paths inside the run folder stay inside. A path outside it that no longer exists is replaced by
    the same relative path from the new folder, if that exists.
    """
    before, now = config.run_dir, os.path.abspath(folder)
    if not os.path.isabs(before) or before == now:
        return copy.deepcopy(config)

    def new_place(path: str) -> str:
        moved = path_after_move(path, before, now)
        inside = pathlib.Path(path).is_relative_to(before)
        return moved if inside or (not _exists(path) and _exists(moved)) else path

    return with_paths(config, new_place)


def path_after_move(path: str, before: str, now: str) -> str:
    """Return the place of `path` if it moved together with the run folder."""
    return os.path.normpath(os.path.join(now, os.path.relpath(path, before)))


def with_paths(config: Config, change: Callable[[str], str]) -> Config:
    """Return a copy with `change` applied to every path, but not to addresses of objects."""

    def changed(path: str) -> str:
        return change(path) if path and "://" not in path else path

    def item(text: str) -> str:
        change_at = _STEP.match(text)
        step = change_at.group() if change_at else ""
        rest = text.removeprefix(step)
        return text if _is_number(rest) else step + changed(rest)

    config = copy.deepcopy(config)
    data, checkpoint = config.data, config.checkpoint
    config.run_dir = changed(config.run_dir)
    for name in ("paths", "train_paths", "validation_paths", "test_paths", "blend_changes"):
        setattr(data, name, tuple(map(item, getattr(data, name))))
    for name in ("blend", "chat_template", "cache_dir"):
        setattr(data, name, changed(getattr(data, name)))
    kind, argument, options = split_spec(data.tokenizer)
    if kind not in KINDS_WITHOUT_FILES:
        data.tokenizer = f"{kind}:{changed(argument)}{options}"
    checkpoint.dir, checkpoint.init_from = changed(checkpoint.dir), changed(checkpoint.init_from)
    if checkpoint.load not in ("auto", "none"):
        checkpoint.load = changed(checkpoint.load)
    return config


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _exists(path: str) -> bool:
    """Return whether a file, a folder, or a corpus with this prefix exists."""
    return any(os.path.exists(path + suffix) for suffix in ("", ".idx", ".bin"))
