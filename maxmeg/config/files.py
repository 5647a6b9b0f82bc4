"""Read and write configs as plain dicts and YAML files."""

import dataclasses
import enum
import os
import pathlib
import sys
import typing

import yaml

from maxmeg.config.hints import REMOVED, hub_command, removed
from maxmeg.config.paths import relocated
from maxmeg.config.schema import Config
from maxmeg.config.setting import declarations, fields
from maxmeg.config.values import EMPTY, convert, mismatch, text, unknown_field

CONFIG_FILE, CHECKPOINTS = "config.yaml", "checkpoints"  # in a run folder
COMPILE_CACHE = "compile_cache"  # there too: programs compiled for GPUs
MODEL_FILES = {"config.json", "model.safetensors", "model.safetensors.index.json"}
MODEL_FILES |= {"pytorch_model.bin", "pytorch_model.bin.index.json"}
_HEADER = """\
# The settings of a run; start it again with: maxmeg train --config={name}
# run_dir is the folder of this file, even after a move; start another with --run_dir=FOLDER
"""


def checkpoint_folder(config: Config) -> str:
    """Return the folder of a run's checkpoints, or its URL."""
    return config.checkpoint.dir or os.path.join(config.run_dir, CHECKPOINTS)


def checkpoints_of(run_dir: str | os.PathLike[str]) -> str:
    """Return the folder of the checkpoints of a run folder, or its URL, by its config.yaml."""
    path, folder = pathlib.Path(run_dir, CONFIG_FILE), os.path.join(run_dir, CHECKPOINTS)
    if os.path.isdir(folder) or not path.is_file():
        return folder
    return load(path).checkpoint.dir or folder


def is_model_folder(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is one of Hugging Face, with a config.json or weights, and no run."""
    names = {path.name for path in pathlib.Path(folder).glob("*")}
    return bool(names & MODEL_FILES) and not {CONFIG_FILE, CHECKPOINTS} <= names


def to_dict(config: typing.Any) -> dict[str, typing.Any]:
    """Return a config as a plain nested dict: enums by name, tuples as lists.

    ValueError for an attribute that is not a field (a misspelt assignment in a config file).
    """
    return _section_to_dict(config, "")


def from_dict(values: dict[str, typing.Any]) -> Config:
    """Return a config from a nested dict; other fields keep their defaults."""
    return _section(Config, values, "")


def to_yaml(config: Config, changed: bool = False) -> str:
    """Return a config as YAML. changed: only the fields that are not at their defaults."""
    values = to_dict(config)
    if changed:
        values = _changed(values, to_dict(Config()))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _changed(values, defaults):
    """Return the items of a nested dict that differ from those of another."""
    changed = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and default is not None:
            value, default = _changed(value, default), {}
        if value != default:
            changed[name] = value
    return changed


def save(config: Config, path: str | os.PathLike) -> None:
    """Write every field as YAML, atomically."""
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(_HEADER.format(name=path) + to_yaml(config))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike) -> Config:
    """Return a config from a YAML file, which may set only some of the fields.

    Paths in the config.yaml of a run folder with checkpoints are adapted if the folder was moved.
    ValueError for a file that is not a valid config.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        hint = hub_command(str(path.parent)) if path.name == CONFIG_FILE else ""
        if is_model_folder(path.parent):
            hint = f" (--config=finetune:{path.parent} trains the Hugging Face model in it)"
        raise ValueError(
            f"no config file {path}: check the path (working folder {os.getcwd()}){hint}"
        )
    try:
        values = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError:
        raise
    except Exception as error:  # PyYAML raises errors of many types
        raise ValueError(f"{path} is not valid YAML: {_yaml_problem(error)}") from None
    try:
        if values is None:
            raise ValueError("it is empty; name settings in it, or a built-in configuration")
        config = from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    has_checkpoints = bool(config.checkpoint.dir) or (path.parent / CHECKPOINTS).is_dir()
    is_run = path.name == CONFIG_FILE and has_checkpoints
    return relocated(config, path.parent) if is_run else config


def differences(saved: dict[str, typing.Any], config: Config) -> list[str]:
    """Return settings that differ from those of a checkpoint: ["optim.lr 0.003 -> 0.001", ...].

    config: as a run folder stores it (`data.run_folder.stored`). Moving the run folder is not a
    difference. Settings that the checkpoint lacks had their defaults.
    """
    before = relocated(from_dict(saved), config.run_dir)
    before.run_dir = config.run_dir
    return changes(before, config)


def changes(before: Config, after: Config) -> list[str]:
    """Return the settings that differ: ["optim.lr 0.003 -> 0.001", "encoder absent -> present"].

    The fields of an absent section count as its defaults.
    """
    old, new = dict(_values(before)), dict(_values(after))
    return [
        f"{path} {text(old[path]) or EMPTY} -> {text(value) or EMPTY}"
        for path, value in new.items()
        if old[path] != value
    ]


def _values(section, prefix=""):
    for field, is_section in declarations(type(section)):
        value, path = getattr(section, field.name), f"{prefix}{field.name}"
        if not is_section:
            yield path, value
            continue
        if field.default is None:
            yield path, "absent" if value is None else "present"
        yield from _values(field.metadata["section"]() if value is None else value, f"{path}.")


def leaves(section: type, prefix: str = "") -> dict[str, typing.Any]:
    """Return the type of every field below a section, by dotted path; of absent sections too."""
    kinds: dict[str, typing.Any] = {}
    for (field, is_section), kind in zip(
        declarations(section), fields(section).values(), strict=True
    ):
        path = f"{prefix}{field.name}"
        kinds |= leaves(field.metadata["section"], path + ".") if is_section else {path: kind}
    return kinds


def _check_name(name, kinds, prefix):
    if name not in kinds:
        names = [prefix + field for field in kinds] + list(leaves(Config))
        raise ValueError(unknown_field(f"{prefix}{name}", names))


def _section(section, values, prefix):
    if not isinstance(values, dict):
        raise mismatch(prefix.rstrip(".") or "the config", values, "a section of named fields")
    kinds = fields(section)
    result = section()
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in REMOVED:  # a run of an earlier version
            if str(value) not in REMOVED[path][0].split():
                print(removed(path), file=sys.stderr)
            continue
        if message := removed(f"{path}={value}"):
            print(message, file=sys.stderr)
            value = REMOVED[f"{path}={value}"][0]
        _check_name(name, kinds, prefix)
        field = section.__dataclass_fields__[name]
        below = field.metadata.get("section")
        if below is None:
            value = convert(path, value, kinds[name])
        elif value is not None or field.default is not None:  # else it stays absent
            value = _section(below, {} if value is None else value, path + ".")
        setattr(result, name, value)
    return result


def _section_to_dict(section, prefix):
    kinds = fields(type(section))
    for name in vars(section):
        _check_name(name, kinds, prefix)
    values = {name: getattr(section, name) for name in kinds}  # None: an absent section
    return {n: _plain(value, f"{prefix}{n}.") for n, value in values.items() if value is not None}


def _plain(value, prefix):
    if dataclasses.is_dataclass(value):
        return _section_to_dict(value, prefix)
    if isinstance(value, enum.Enum):
        return value.name
    return list(value) if isinstance(value, tuple) else value


class _Dumper(yaml.SafeDumper):
    """Block mappings, lists on one line."""


_Dumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=True
    ),
)


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently keep the last."""


def _yaml_problem(error):
    """Return what is wrong, and where, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def _mapping(loader, node):
    names = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, "the name of a field must be text", key.start_mark
            )
        if key.value in names:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key.value} is given twice", key.start_mark
            )
        names.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
