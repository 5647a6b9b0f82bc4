"""What --config=VALUE names: a file, a built-in configuration, an architecture or a run folder."""

import difflib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import traceback

from maxmeg.config import config_dict, files
from maxmeg.config.errors import is_for_user
from maxmeg.config.hints import hub_command
from maxmeg.config.paths import source_folder
from maxmeg.config.schema import Config

EXAMPLES = "llama3-8b (`maxmeg models` lists all), run.yaml, RUN_DIR, my_run.py"
_FOLDER = pathlib.Path("configs")  # of the built-in configurations, in a clone
_OF_ARCHITECTURES = "gpt"  # the built-in configuration that takes an architecture's name


def load_config(value: str) -> Config:
    """Return the config that a value of --config names.

    FILE.py[:ARGUMENT]: what its get_config(ARGUMENT) returns, a Config or a ConfigDict. gpt,
    finetune:FOLDER: short for configs/gpt.py and configs/finetune.py:FOLDER, in any folder.
    llama3-8b: short for configs/gpt.py:llama3-8b. FILE.yaml. RUN_DIR: the config.yaml in it.
    ValueError if it is none of these, or for a mistake in a file.
    """
    name, _, argument = value.partition(":")
    path = pathlib.Path(name)
    if path.suffix == ".py":
        return _run_file(_existing(path), argument)
    if name in built_in():
        return _run_file(built_in()[name], argument)
    path = pathlib.Path(value)
    if path.suffix in (".yaml", ".yml"):
        return files.load(path)
    if path.is_dir():
        return files.load(path / files.CONFIG_FILE)
    if argument or path.exists() or len(path.parts) != 1:
        file = pathlib.Path(f"{name}.py")
        exists = file.is_file() or (file.parent == _FOLDER and file.stem in built_in())
        hint = f"did you mean --config={file}?" if exists else f"name one such as {EXAMPLES}"
        raise ValueError(
            f"--config={value} is no built-in configuration, architecture, run folder, .yaml or "
            f".py file (working folder {os.getcwd()}): {hint}{hub_command(value)}"
        )
    try:
        return _run_file(built_in()[_OF_ARCHITECTURES], name)
    except ValueError as error:
        best = difflib.get_close_matches(name, built_in(), 1)
        hint = f"no configuration is named {name!r}: did you mean {best[0]}? And " if best else ""
        others = f"other names for --config are {', '.join(built_in())}"
        raise ValueError(f"{hint}{error}; {others}") from error


def built_in() -> dict[str, pathlib.Path]:
    """Return the files of the built-in configurations by name."""
    folder = source_folder("configs")
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def _existing(path):
    """Return a config file, or the built-in one if `path` is configs/NAME.py and not there."""
    if path.is_file():
        return path
    others = [p for folder in {path.parent, pathlib.Path()} for p in folder.glob("*.py")]
    if path.parent == _FOLDER:
        if path.stem in built_in():
            words = f"using the built-in configuration {path.stem}"
            print(f"{path} does not exist in {os.getcwd()}: {words}", file=sys.stderr)
            return built_in()[path.stem]
        others += [_FOLDER / f"{name}.py" for name in built_in()]
    matches = difflib.get_close_matches(path.name, [p.name for p in others], 1)
    same = [path.stem] if path.stem in built_in() else [p for p in others if [p.name] == matches]
    hint = f"did you mean {same[0]}?" if same else "check the path"
    raise ValueError(f"no config file {path} (working folder {os.getcwd()}): {hint}")


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
    try:
        if isinstance(config, Config):
            return files.from_dict(files.to_dict(config))
        if config_dict.is_config_dict(config):
            return config_dict.to_config(config)
        raise ValueError(
            f"get_config() returned {type(config).__name__}: return a maxmeg.config.schema.Config "
            "or an ml_collections.ConfigDict"
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _problem(path, error):
    """Return the line of a config file, the type and the text of an error in it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = f":{lines[-1]}" if lines else ""
    return f"{path}{line}: {type(error).__name__}: {error}"
