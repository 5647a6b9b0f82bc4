"""maxmeg COMMAND [--config=NAME] [--SETTING=VALUE ...]"""

import ast
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from maxmeg import __version__
from maxmeg.config.commands import COMMANDS, Command
from maxmeg.config.flags import names_config, run_command, show
from maxmeg.config.help import asked_help, describe, options_of
from maxmeg.config.hints import nearest
from maxmeg.config.schema import Config
from maxmeg.config.validate import check_settings


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names. SystemExit with code 2 after a mistake."""
    name, *arguments = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name == "help":  # maxmeg help train
        name, arguments = (arguments or ["--help"])[0], ["--help"]
    if asked_help([name]) is not None:
        show(usage())
    elif name == "--version":
        print(f"maxmeg {__version__}")
    elif name not in COMMANDS:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        raise SystemExit(2)
    else:
        if argv is None:  # a command reads from it how it was started
            sys.argv = [f"maxmeg {name}", *arguments]
        start(name, COMMANDS[name], arguments)


def run_module(name: str) -> NoReturn:
    """Run a command as `python -m maxmeg.NAME`, which then ends the program."""
    sys.argv.insert(1, name)
    raise SystemExit(main())


def start(name: str, command: Command, arguments: list[str]) -> None:
    """Run a command. Its settings are read and checked before its module, and JAX, is imported."""
    module, _, function = command.target.partition(":")

    def run(*parts: Any) -> Any:
        for part in parts:
            if isinstance(part, Config):
                check_settings(part)
        return getattr(importlib.import_module(module), function)(*parts)

    def run_arguments() -> None:
        raise SystemExit(run(arguments))

    if command.arguments:
        return run_command(run_arguments, needs_config=False, argv=[name])
    needs_config = names_config(arguments) if command.config is None else command.config
    if (group := asked_help(arguments)) is not None:

        def run_help() -> None:
            options = options_of(command.options)
            show(describe(_docstring(module), options, command.config, group))

        return run_command(run_help, needs_config=False, argv=[name])
    run_command(run, command.options, needs_config, [f"maxmeg {name}", *arguments])


def usage() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: maxmeg COMMAND [--config=NAME] [--SETTING=VALUE ...]",
            "",
            *lines,
            "",
            "`maxmeg COMMAND --help` lists a command's main options, --help=all all of them.",
        ]
    )


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"no command before {name}: write maxmeg COMMAND {name}, as in maxmeg train {name}"
    match = nearest(name, COMMANDS)
    hint = f"did you mean {match}?" if match else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown command {name!r}: {hint}"


def _docstring(module: str) -> str:
    """Return a module's docstring, read from its file."""
    path = pathlib.Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    main()
