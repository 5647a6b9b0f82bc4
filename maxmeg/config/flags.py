"""The command line: --config=FILE.py[:ARGUMENT], --config.FIELD=VALUE and a command's own options.

absl and ml_collections parse. Before they do, every override is checked against the schema, so
that a mistake is one clear line instead of a traceback.
"""

import dataclasses
import difflib
import enum
import linecache
import pathlib
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags

from maxmeg.config import files
from maxmeg.config.schema import Config

Texts = Sequence[str]  # an option that may be repeated, each value as it stands

# Raised with a `raise` statement of this program, these speak to the user: no traceback.
_EXIT_CODES = {ValueError: 2, NotImplementedError: 2, OSError: 2, FloatingPointError: 1}
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]


def run_command(
    main: Callable[..., None],
    options: type | None = None,
    needs_config: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the command line and call `main(config)`, `main(config, options)` or `main(options)`.

    `options` is a dataclass of settings that becomes the command's own flags (--name=value).
    What a user can correct ends as one line on stderr and exit code 2.
    """
    argv = list(sys.argv if argv is None else argv)
    if {"--help", "-h", "-help", "--helpfull"} & set(argv[1:]):
        print(describe(sys.modules[main.__module__].__doc__ or "", options, needs_config))
        return
    try:
        config, chosen = parse(argv, options, needs_config)
        main(*[part for part in (config, chosen) if part is not None])
    except tuple(_EXIT_CODES) as error:
        if not _speaks_to_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
        raise SystemExit(code) from None


def parse(
    argv: Sequence[str], options: type | None = None, needs_config: bool = True
) -> tuple[Config | None, typing.Any]:
    """(config, options) from a command line whose first item is the program's name.

    Raises ValueError, with the nearest valid name, for whatever is not understood.
    """
    overrides, own = _separate(list(argv[1:]), options, needs_config)
    canonical = [argv[0], *(f"--config{path}={value}" for path, value in overrides.items())]
    values = flags.FlagValues()
    if needs_config:
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=canonical)
    _define_options(options, values)
    try:
        values([*canonical, *_arguments(own)])
    except flags.Error as error:
        raise _root_cause(error) from error
    if not flags.FLAGS.is_parsed():  # libraries read their own absl flags' defaults
        flags.FLAGS.mark_as_parsed()
    config = _checked(values["config"].value) if needs_config else None
    return config, _read_options(options, values)


def describe(summary: str, options: type | None = None, needs_config: bool = True) -> str:
    """Help text: the command's docstring, its options and every field of the config."""
    lines = [summary.strip()]
    if options is not None:
        lines += ["", "options:"]
        for field in dataclasses.fields(options):
            default = field.default
            shown = "required" if default is dataclasses.MISSING else _text(default) or '""'
            lines.append(f"  --{field.name} ({shown}): {field.metadata.get('doc', '')}")
    if needs_config:
        lines += ["", "--config=FILE.py[:ARGUMENT] names the run; its fields (defaults):"]
        lines += _describe_section(Config(), "config.")
    return "\n".join(lines)


def _describe_section(section, prefix):
    lines = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            lines += ["", *_describe_section(value, f"{prefix}{field.name}.")]
        else:
            shown = _text(value) or '""'
            lines.append(f"  --{prefix}{field.name} ({shown}): {field.metadata['doc']}")
    return lines


def _separate(arguments, options, needs_config):
    """Arguments as {dotted override: absl value} and {option: value}, --config first."""
    own_kinds = files.fields(options) if options is not None else {}
    overrides, own, lists = {}, {}, {}
    while arguments:
        flag, equals, value = arguments.pop(0).partition("=")
        name, negated = _flag_name(flag, own_kinds)
        if name == "config" and needs_config:
            value = value if equals else _next_value(flag, arguments)
            overrides[""] = _config_file(value)
            continue
        if name.startswith("config.") and needs_config:
            path, target = name.removeprefix("config."), overrides
            kind = _field_kind(path)
        elif name in own_kinds:
            path, target, kind = name, own, own_kinds[name]
        else:
            raise ValueError(_unknown_flag(flag, own_kinds, needs_config))
        if kind == Texts:
            own.setdefault(name, []).append(value if equals else _next_value(flag, arguments))
            continue
        if kind is bool and not equals:
            value = "false" if negated else "true"
        elif not equals:
            value = _next_value(flag, arguments)
        converted = files.convert(path, value, kind)
        if isinstance(converted, tuple):  # repeated flags of a list add up
            converted = lists[path] = lists.get(path, ()) + converted
        target["." + path if target is overrides else path] = _absl_text(converted, target is own)
    if needs_config and "" not in overrides:
        raise ValueError(
            "no --config: name a run, for example --config=configs/gpt.py"
            " or --config=configs/yaml.py:RUN_DIR/config.yaml"
        )
    return {"": overrides.pop("")} | overrides if needs_config else {}, own


def _flag_name(flag, own_kinds):
    """Name without dashes, and whether it was --noNAME of a boolean."""
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
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "check the path"
        raise ValueError(f"no config file {path} (working folder {pathlib.Path.cwd()}): {hint}")
    return value


def _unknown_flag(flag, own_kinds, needs_config):
    megatron = {}
    for path, metadata in _metadata(Config()):
        megatron.setdefault(metadata["flag"], f"--config.{path}")
    if needs_config and flag in megatron:
        return f"unknown flag {flag}: here it is {megatron[flag]}"
    known = [f"--{name}" for name in own_kinds]
    if needs_config:
        known += ["--config"] + [f"--config.{path}" for path in files.leaves(Config)]
    near = difflib.get_close_matches(flag, known, 1)
    return f"unknown flag {flag}: " + (f"did you mean {near[0]}?" if near else "see --help")


def _metadata(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _metadata(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.metadata


def _arguments(own):
    """{option: value, or values} as absl reads them."""
    for name, given in own.items():
        for value in given if isinstance(given, list) else [given]:
            yield f"--{name}={value}"


def _define_options(options, values):
    define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    if options is None:
        return
    kinds = files.fields(options)
    for field in dataclasses.fields(options):
        kind = kinds[field.name]
        doc = field.metadata.get("doc", "")
        if kind == Texts:
            flags.DEFINE_multi_string(field.name, None, doc, flag_values=values)
            continue
        add = define.get(kind, flags.DEFINE_string)  # lists and enums as checked text
        default = None if add is flags.DEFINE_string else _default(field)
        add(field.name, default, doc, flag_values=values)


def _read_options(options, values):
    if options is None:
        return None
    chosen = {}
    for field in dataclasses.fields(options):
        flag = values[field.name]
        if not flag.present and field.default is dataclasses.MISSING:
            raise ValueError(f"--{field.name} is missing: {field.metadata.get('doc', '')}")
        kind = files.fields(options)[field.name]
        if not flag.present:
            chosen[field.name] = field.default
        elif kind == Texts:
            chosen[field.name] = tuple(flag.value)
        else:
            chosen[field.name] = files.convert(field.name, flag.value, kind)
    return options(**chosen)


def _default(field):
    return None if field.default is dataclasses.MISSING else field.default


def _text(value):
    """A value as it is written after `=`."""
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    if isinstance(value, enum.Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def _absl_text(value, own):
    """A checked value for absl; ml_collections reads a tuple from its literal."""
    return repr(value) if isinstance(value, tuple) and not own else _text(value)


def _checked(config):
    if not isinstance(config, Config):
        if type(config).__name__ == "_ErrorConfig":  # ml_collections keeps an OSError for later
            config.run_dir  # noqa: B018
        raise ValueError(
            f"get_config() returned {type(config).__name__}: return a maxmeg.config.schema.Config"
        )
    return files.from_dict(files.to_dict(config))


def _root_cause(error):
    """The exception under absl's and ml_collections' wrapping of it."""
    while error.__context__ is not None:
        error = error.__context__
    return error if not isinstance(error, flags.Error) else ValueError(str(error))


def _speaks_to_user(error):
    """Whether a `raise` statement of this program or of a config file raised it."""
    if isinstance(error, OSError):
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = pathlib.Path(frame.filename).resolve()
    library = any(pathlib.Path(folder) in path.parents for folder in _LIBRARIES)
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return line.startswith("raise ") and (_PACKAGE in path.parents or not library)
