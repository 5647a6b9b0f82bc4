"""The command line: --config=NAME, settings as --SECTION.FIELD=VALUE, and a command's options.

A setting may also be written SECTION.FIELD=VALUE or --config.SECTION.FIELD=VALUE, an option
NAME=VALUE. A mistake is a ValueError of one line, with the nearest valid name.
"""

import dataclasses
import os
import shlex
import sys
import typing
from collections.abc import Callable, Sequence

from maxmeg.config import files, values
from maxmeg.config.errors import is_for_user, report
from maxmeg.config.hints import DEVICES, nearest, removed
from maxmeg.config.model_rules import has_pattern, unread_settings
from maxmeg.config.named import EXAMPLES, load_config
from maxmeg.config.schema import Config
from maxmeg.config.setting import (
    check_bounds,
    declared_problems,
    fields,
    former_names,
    set_field,
    walk,
)

Texts = Sequence[str]  # an option that may be repeated; values are not split at commas
WARMUPS = ("optim.warmup_steps", "optim.warmup_samples", "optim.warmup_fraction")
UNNAMED = {"log", "run_dir"}  # the first of these that a command has may stand without its name
PRINT = {"--print_config": False, "--print_config=diff": True}  # whether only changed fields


def run_command(
    main: Callable[..., None],
    options: type | None = None,
    needs_config: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the command line and call `main(config)`, `main(config, options)` or `main(options)`.

    `options` is a dataclass of settings, which become the command's flags (--name=value). An error
    that a user can correct is printed as one line on stderr; the exit code is 2. --print_config
    prints the settings as YAML instead; --print_config=diff prints only the changed ones.
    """
    argv = list(sys.argv if argv is None else argv)
    prints = [PRINT[word] for word in argv if word in PRINT and needs_config]
    argv = [word for word in argv if word not in PRINT or not needs_config]
    config = chosen = None
    try:
        config, chosen = parse(argv, options, needs_config)
        if config is not None and prints:
            show(files.to_yaml(config, changed=prints[-1]).rstrip())
            return
        main(*[part for part in (config, chosen) if part is not None])
    except Exception as error:
        if not is_for_user(error):
            raise
        raise SystemExit(report(error, config, chosen)) from None


def show(text: str) -> None:
    """Print a text that may be read through a pipe whose reader, such as head, stops early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def names_config(argv: Sequence[str]) -> bool:
    """Return whether a command line has --config, which some commands do not need."""
    return any(argument.partition("=")[0] == "--config" for argument in argv)


def parse(
    argv: Sequence[str], options: type | None = None, needs_config: bool = True
) -> tuple[Config | None, typing.Any]:
    """Return (config, options) of a command line whose first item is the program's name.

    ValueError, with the nearest valid name, for an unknown flag, field or value.
    """
    name, settings, chosen = _separate(list(argv[1:]), options, needs_config)
    config = load_config(name) if needs_config else None
    for path, value in settings.items():
        set_field(config, path, value)
    if config is not None:
        check_bounds(config)
        if len(warmups := [name for name in WARMUPS if name in settings]) > 1:
            raise ValueError(f"{' and '.join(warmups)} are set, but one alone is read: choose one")
        if has_pattern(config.model) and (unread := [*unread_settings(config.model, settings)]):
            raise ValueError("\n".join(unread))
    if options is None:
        return config, None
    for field in dataclasses.fields(options):
        if field.name not in chosen and field.default is dataclasses.MISSING:
            raise ValueError(f"--{field.name} is missing: {field.metadata.get('doc', '')}")
    chosen = options(**chosen)
    if problems := list(declared_problems(chosen)):
        raise ValueError("\n".join(problems))
    return config, chosen


def _separate(arguments, options, needs_config):
    """Return the value of --config, the values of settings, and those of options."""
    option_kinds = fields(options) if options is not None else {}
    setting_kinds = files.leaves(Config) if needs_config else {}
    former = former_names(options) if options is not None else {}
    config, settings, chosen = "", {}, {}
    while arguments:
        argument = _renamed(arguments.pop(0), former)
        flag, equals, value = argument.partition("=")
        if not flag.startswith("-") and not (equals and (needs_config or flag in option_kinds)):
            unnamed = next((name for name in option_kinds if name in UNNAMED), None)
            if unnamed is None or unnamed in chosen:
                names = {**option_kinds, **({} if config or not needs_config else {"config": str})}
                raise ValueError(_unexpected(argument, names))
            chosen[unnamed] = argument  # maxmeg chat RUN
            continue
        if flag in ("--config", "config") and needs_config:
            value = value if equals else _next_value(flag, arguments)
            if config:
                raise ValueError(f"--config is given twice, {config} and {value}: leave one out")
            config = value
            continue
        name, kind, negated = _find(flag, option_kinds, setting_kinds)
        if kind is bool and not equals:
            value = "false" if negated else "true"
        elif not equals:
            value = _next_value(flag, arguments)
        target = chosen if name in option_kinds else settings
        converted = (value,) if kind == Texts else values.convert(name, value, kind)
        if isinstance(converted, tuple):  # repeated flags of a list add up
            converted = target.get(name, ()) + converted
        target[name] = converted
    if needs_config and not config:
        raise ValueError(
            f"no --config: name a run, such as --config=configs/gpt.py; others are {EXAMPLES}"
        )
    return config, settings, chosen


def _renamed(argument, former):
    """Return an argument with the present name of an option, and warn of its former one."""
    name = argument.partition("=")[0].removeprefix("--")
    if name not in former or argument == name:
        return argument
    words = f"--{name} is now --{former[name]}; the old name ends with the next release"
    print(words, file=sys.stderr)
    return f"--{former[name]}{argument.removeprefix('--').removeprefix(name)}"


def _find(flag, option_kinds, setting_kinds):
    """Return the name and the type of an option or setting, and whether it was written --noNAME.

    The name of an option hides that of a setting without a section, such as seed.
    """
    word = flag.lstrip("-")
    for name, negated in ((word, False), (word.removeprefix("no"), True)):
        kinds = option_kinds if name in option_kinds else setting_kinds
        path = name if name in option_kinds else name.removeprefix("config.")
        if path in kinds and (kinds[path] is bool or not negated):
            return path, kinds[path], negated
    raise ValueError(_unknown(flag, option_kinds, setting_kinds))


def _next_value(flag, arguments):
    if not arguments or arguments[0].startswith("--"):
        raise ValueError(f"{flag} has no value: write {flag}=VALUE")
    return arguments.pop(0)


def _unexpected(argument, names):
    name = next((name for name in ("config", "input", "prompt") if name in names), "")
    hint = f"did you mean --{name}={shlex.quote(argument)}?" if name else "write --name=value"
    return f"unexpected argument {argument!r}: {hint}"


def _unknown(flag, option_kinds, setting_kinds):
    fields = reversed([*walk(Config())])  # the first field that replaces a flag counts
    megatron = {name: p for p, _, field in fields for name in field.metadata["flag"].split(", ")}
    if setting_kinds and flag in megatron:
        return f"unknown flag {flag}: here it is --{megatron[flag]}"
    path = flag.lstrip("-").removeprefix("config.")
    if setting_kinds and (message := removed(path)):
        return message
    if inside := [name for name in setting_kinds if name.startswith(path + ".")]:
        return f"{path} is a section: set its fields, for example --{inside[0]}"
    match = nearest(path, [*option_kinds, *setting_kinds, *(["config"] if setting_kinds else [])])
    if setting_kinds and path in DEVICES.split() and match != "hardware":
        return (
            f"unknown flag {flag}: every GPU that JAX sees is used; CUDA_VISIBLE_DEVICES selects "
            "some, and the settings parallel.* divide the work"
        )
    return f"unknown flag {flag}: " + (f"did you mean --{match}?" if match else "see --help")
