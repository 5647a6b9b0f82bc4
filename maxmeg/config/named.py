"""What --config=VALUE names: a built-in configuration, an architecture, a run folder or a file."""

import difflib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import traceback

from maxmeg.config import files
from maxmeg.config.errors import is_for_user
from maxmeg.config.hints import hub_command
from maxmeg.config.schema import Config

EXAMPLES = "llama3-8b (`maxmeg models` lists all), run.yaml, RUN_DIR, my_run.py"
_BUILT_IN = pathlib.Path(__file__).resolve().parents[1] / "configs"
_OF_ARCHITECTURES = "gpt"  # the built-in configuration that takes an architecture's name


def load_config(value: str) -> Config:
    """Return the config that a value of --config names.

    gpt, finetune:FOLDER: get_config(ARGUMENT) of a module in maxmeg/configs. llama3-8b: that
    architecture with the settings of gpt. FILE.py[:ARGUMENT]: its get_config(ARGUMENT). FILE.yaml.
    RUN_DIR: the config.yaml in it. ValueError if it is none of these, or for a mistake in a file.
    """
    name, _, argument = value.partition(":")
    path = pathlib.Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(_missing_file(path))
        return _run_file(path, argument)
    if name in built_in():
        return _run_file(_BUILT_IN / f"{name}.py", argument)
    path = pathlib.Path(value)
    if path.suffix in (".yaml", ".yml"):
        return files.load(path)
    if path.is_dir():
        return files.load(path / files.CONFIG_FILE)
    if argument or path.exists() or len(path.parts) != 1:
        raise ValueError(
            f"--config={value} is no built-in configuration, architecture, run folder, .yaml or "
            f".py file (working folder {os.getcwd()}): name one such as {EXAMPLES}"
            + hub_command(value)
        )
    try:
        return _run_file(_BUILT_IN / f"{_OF_ARCHITECTURES}.py", name)
    except ValueError as error:
        near = difflib.get_close_matches(name, built_in(), 1)
        hint = f"no configuration is named {name!r}: did you mean {near[0]}? And " if near else ""
        others = f"other names for --config are {', '.join(built_in())}"
        raise ValueError(f"{hint}{error}; {others}") from error


def built_in() -> list[str]:
    """Return the names of the built-in configurations."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.py") if path.stem != "__init__")


def _missing_file(path):
    found = [p for folder in {path.parent, pathlib.Path()} for p in folder.glob("*.py")]
    near = difflib.get_close_matches(path.name, [p.name for p in found], 1)
    same = [str(p) for p in found if [p.name] == near]
    same = [path.stem] if path.stem in built_in() else same
    hint = f"did you mean {same[0]}?" if same else "check the path"
    return f"no config file {path} (working folder {os.getcwd()}): {hint}"


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a config file each time: a cached one of the same second could be an older one."""

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)


def _run_file(path, argument):
    """Return what get_config() of a Python file returns. The file may import its neighbours."""
    loader = _Loader("maxmeg_config_file", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    search_path = list(sys.path)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise ValueError(f"{path} defines no get_config(): let it return a Config")
        config = module.get_config(*([argument] if argument else []))
    except Exception as error:
        if is_for_user(error):
            raise
        raise ValueError(_problem(path, error)) from error
    finally:
        sys.path[:] = search_path
    if not isinstance(config, Config):
        raise ValueError(
            f"{path}: get_config() returned {type(config).__name__}: return a "
            "maxmeg.config.schema.Config"
        )
    try:
        return files.from_dict(files.to_dict(config))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _problem(path, error):
    """Return the line of a config file, the type and the text of an error in it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = f":{lines[-1]}" if lines else ""
    return f"{path}{line}: {type(error).__name__}: {error}"
