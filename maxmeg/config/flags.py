"""The command line: --config=FILE.py[:ARGUMENT], --config.FIELD=VALUE and a command's options.

Every override is checked against the schema before ml_collections reads the config file, so that a
mistake is reported in one line instead of a traceback.
"""

import dataclasses
import difflib
import itertools
import linecache
import os
import pathlib
import signal
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags

from maxmeg.config import files
from maxmeg.config.hints import nearest
from maxmeg.config.schema import Config
from maxmeg.config.setting import walk

Texts = Sequence[str]  # an option that may be repeated; values are not split at commas

# Errors for the user, if a `raise` statement of this program raised them: no traceback.
_EXIT_CODES = {ValueError: 2, NotImplementedError: 2, OSError: 2}
_EXIT_CODES |= {FloatingPointError: 1, MemoryError: 1}
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib")).resolve()
_LIBRARIES = {"site-packages", "dist-packages"}  # folders of installed packages


def run_command(
    main: Callable[..., None],
    options: type | None = None,
    needs_config: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the command line and call `main(config)`, `main(config, options)` or `main(options)`.

    `options` is a dataclass of settings, which become the command's flags (--name=value). An error
    that a user can correct is printed as one line on stderr; the exit code is 2.
    """
    argv = list(sys.argv if argv is None else argv)
    config = chosen = None
    if {"--help", "-h", "-help", "--helpfull"} & set(argv[1:]):
        print(describe(sys.modules[main.__module__].__doc__ or "", options, needs_config))
        return
    try:
        config, chosen = parse(argv, options, needs_config)
        main(*[part for part in (config, chosen) if part is not None])
    except tuple(_EXIT_CODES) as error:
        if not _is_for_user(error):
            raise
        raise SystemExit(report(error, config, chosen)) from None


def report(error: BaseException, config: Config | None, options: typing.Any = None) -> int:
    """Print an error that ends a command: one line if it is for the user, else a traceback.

    Returns the command's exit code.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if not isinstance(error, tuple(_EXIT_CODES)) or not _is_for_user(error):
        traceback.print_exception(error)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    text = _os_error_text(error, config, options) if isinstance(error, OSError) else error
    print(f"error: {text}", file=sys.stderr)
    return next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))


def parse(
    argv: Sequence[str], options: type | None = None, needs_config: bool = True
) -> tuple[Config | None, typing.Any]:
    """Return (config, options) of a command line whose first item is the program's name.

    ValueError, with the nearest valid name, for an unknown flag, field or value.
    """
    file, overrides, chosen = _separate(list(argv[1:]), options, needs_config)
    if not flags.FLAGS.is_parsed():  # libraries read their own absl flags' defaults
        flags.FLAGS.mark_as_parsed()
    config = _load(argv[0], file, overrides) if needs_config else None
    if options is None:
        return config, None
    for field in dataclasses.fields(options):
        if field.name not in chosen and field.default is dataclasses.MISSING:
            raise ValueError(f"--{field.name} is missing: {field.metadata.get('doc', '')}")
    return config, options(**chosen)


def _load(program: str, file: str, overrides: dict[str, typing.Any]) -> Config:
    """Return the config of a file, with the overridden fields."""
    argv = [program, f"--config={file}"]
    for path, value in overrides.items():  # ml_collections reads a tuple from its literal
        argv.append(f"--config.{path}={value if isinstance(value, tuple) else files.text(value)}")
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.Error as error:
        raise _root_cause(error) from error
    return _checked(values["config"].value)


def describe(summary: str, options: type | None = None, needs_config: bool = True) -> str:
    """Return the help text: the command's docstring, its options and every field of the config."""
    lines = [summary.strip()]
    if options is not None:
        lines += ["", "options:"]
        for field in dataclasses.fields(options):
            is_required = field.default is dataclasses.MISSING
            lines.append(_described("", field, "required" if is_required else field.default))
    if needs_config:
        lines += ["", "--config=FILE.py[:ARGUMENT] names the run; its fields (defaults):"]
        for _, group in itertools.groupby(walk(Config()), lambda each: each[0].rpartition(".")[0]):
            lines += ["", *(_described("config.", f, value, path) for path, value, f in group)]
    return "\n".join(lines)


def _described(prefix: str, field: dataclasses.Field, value: typing.Any, path: str = "") -> str:
    shown = files.text(value) or '""'
    return f"  --{prefix}{path or field.name} ({shown}): {field.metadata.get('doc', '')}"


def _separate(arguments, options, needs_config):
    """Return the config file, the values of overridden fields, and those of options."""
    own_kinds = files.fields(options) if options is not None else {}
    file, overrides, own = "", {}, {}
    while arguments:
        flag, equals, value = arguments.pop(0).partition("=")
        name, negated = _flag_name(flag, own_kinds)
        path, target, kind = name, own, own_kinds.get(name)
        if name == "config" and needs_config:
            file = _config_file(value if equals else _next_value(flag, arguments))
            continue
        if name.startswith("config.") and needs_config:
            path, target = name.removeprefix("config."), overrides
            kind = _field_kind(path)
        if kind is None:
            raise ValueError(_unknown_flag(flag, own_kinds, needs_config))
        if kind is bool and not equals:
            value = "false" if negated else "true"
        elif not equals:
            value = _next_value(flag, arguments)
        converted = (value,) if kind == Texts else files.convert(path, value, kind)
        if isinstance(converted, tuple):  # repeated flags of a list add up
            converted = target.get(path, ()) + converted
        target[path] = converted
    if needs_config and not file:
        raise ValueError(
            "no --config: name a run, for example --config=configs/gpt.py"
            " or --config=configs/yaml.py:RUN_DIR/config.yaml"
        )
    return file, overrides, own


def _flag_name(flag, own_kinds):
    """Return the name without dashes, and whether it was --noNAME of a boolean."""
    if not flag.startswith("-"):
        raise ValueError(f"unexpected argument {flag!r}: flags are written --name=value")
    name = flag.lstrip("-")
    if name.startswith("noconfig."):
        if files.leaves(Config).get(name.removeprefix("noconfig.")) is bool:
            return name.removeprefix("no"), True
    elif own_kinds.get(name.removeprefix("no")) is bool and name not in own_kinds:
        return name.removeprefix("no"), True
    return name, False


def _next_value(flag, arguments):
    if not arguments or arguments[0].startswith("--"):
        raise ValueError(f"{flag} has no value: write {flag}=VALUE")
    return arguments.pop(0)


def _field_kind(path):
    known = files.leaves(Config)
    if path in known:
        return known[path]
    inside = [name for name in known if name.startswith(path + ".")]
    if inside:
        raise ValueError(f"{path} is a section: set its fields, for example --config.{inside[0]}")
    raise ValueError(files.unknown_field(path, known))


def _config_file(value):
    path = pathlib.Path(value.partition(":")[0])
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"--config={value} is YAML: write --config=configs/yaml.py:{value}")
    if not path.is_file():
        found = [
            p for folder in (path.parent, "configs") for p in pathlib.Path(folder).glob("*.py")
        ]
        near = difflib.get_close_matches(path.name, [p.name for p in found], 1)
        same = [p for p in found if [p.name] == near]
        hint = f"did you mean {same[0]}?" if same else "check the path"
        raise ValueError(f"no config file {path} (working folder {pathlib.Path.cwd()}): {hint}")
    return value


def _unknown_flag(flag, own_kinds, needs_config):
    fields = reversed([*walk(Config())])  # the first field that replaces a flag counts
    megatron = {field.metadata["flag"]: f"--config.{path}" for path, _, field in fields}
    if needs_config and flag in megatron:
        return f"unknown flag {flag}: here it is {megatron[flag]}"
    name = flag.lstrip("-").removeprefix("config.")
    if near := nearest(name, own_kinds):
        return f"unknown flag {flag}: did you mean --{near}?"
    if needs_config and (near := nearest(name, files.leaves(Config))):
        return f"unknown flag {flag}: did you mean --config.{near}?"
    return f"unknown flag {flag}: see --help"


def _checked(config):
    if not isinstance(config, Config):
        if type(config).__name__ == "_ErrorConfig":  # ml_collections keeps an OSError for later
            config.run_dir  # noqa: B018
        raise ValueError(
            f"get_config() returned {type(config).__name__}: return a maxmeg.config.schema.Config"
        )
    return files.from_dict(files.to_dict(config))


def _root_cause(error):
    """Return the error that ml_collections wrapped: one for the user, else the innermost."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    kinds = tuple(_EXIT_CODES)
    ours = (cause for cause in chain if isinstance(cause, kinds) and _is_for_user(cause))
    root = next(ours, chain[-1])
    return ValueError(str(root)) if isinstance(root, flags.Error) else root


def _os_error_text(error, config, options):
    """Return the text of an OSError, with the setting that holds its path."""
    if not isinstance(error.filename, str) or not error.strerror:
        return str(error)
    place = os.path.abspath(error.filename)
    settings = [
        (f"{prefix}{name}", value)
        for section, prefix in ((config, "config."), (options, ""))
        if section is not None
        for name, value, _ in walk(section)
        if isinstance(value, str) and value
    ]
    inside = [s for s in settings if _is_inside(place, s[1])]
    above = [s for s in settings if _is_inside(s[1], place)]  # parent folders are created too
    if not inside + above:
        return str(error)
    name, value = max(inside or above[:1], key=lambda setting: len(os.path.abspath(setting[1])))
    where = "" if value == error.filename else f" ({error.filename})"
    return f"--{name}={value}: {error.strerror}{where}; name a path that can be used"


def _is_inside(path, folder):
    return pathlib.Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _is_for_user(error):
    """Return whether a `raise` statement of this program or of a config file raised an error."""
    if isinstance(error, OSError):
        return True
    *_, frame = traceback.extract_tb(error.__traceback__)
    path = pathlib.Path(frame.filename).resolve()
    library = not _LIBRARIES.isdisjoint(path.parts) or _STANDARD_LIBRARY in path.parents
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return line.startswith("raise ") and (_PACKAGE in path.parents or not library)
