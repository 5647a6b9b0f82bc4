"""What is installed, and that the README's first screen is what the checks run."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
FIRST_SCREEN = 50  # lines
TRAIN_COMMAND = "pip install -e . && python -m maxmeg.train --config=configs/gpt.py"
TEST_COMMAND = "pip install -e '.[test]' && pytest -n 2"


def test_kernels_are_installed_from_their_own_folder():
    program = "import maxmeg.kernels as k, maxmeg as m; print(k.__path__[0]); print(m.__path__[0])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kernels, package = map(Path, done.stdout.splitlines())
    assert kernels.samefile(REPOSITORY / "kernels")
    assert package.samefile(REPOSITORY / "maxmeg")


def test_a_wheel_holds_every_module(tmp_path: Path):
    """Built from a copy without isolation: it needs no network and leaves nothing behind."""
    for name in ("maxmeg", "kernels"):
        for path in (REPOSITORY / name).rglob("*.py"):
            copy = tmp_path / path.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    expected = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    (tmp_path / "dist").mkdir()
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert held == {
        name.replace("kernels/", "maxmeg/kernels/", 1) if name.startswith("kernels/") else name
        for name in expected
    }


def test_the_extras_exist():
    extras = importlib.metadata.metadata("maxmeg").get_all("Provides-Extra") or []
    assert {"cuda12", "cuda13", "test", "dev", "wandb", "oracle"} <= set(extras)


def test_the_first_screen_of_the_readme_holds_the_two_commands():
    screen = (REPOSITORY / "README.md").read_text().splitlines()[:FIRST_SCREEN]
    for command in (TRAIN_COMMAND, TEST_COMMAND):
        assert any(command in line for line in screen), f"not in the first screen: {command}"


def test_the_checks_run_the_readme_command():
    assert f'test_command="{TEST_COMMAND}"' in (REPOSITORY / ".ci" / "run").read_text()
