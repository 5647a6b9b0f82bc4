"""What is installed, and that the README has the commands that the checks run."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import maxmeg

REPOSITORY = Path(__file__).parent.parent
FIRST_COMMAND = "python -m maxmeg.train --config=configs/gpt.py"
FOLDERS = ("maxmeg", "configs", "kernels", "launch")
# Packages that the product was asked to use, and the modules that it imports of them.
ASKED_FOR = {
    **{name: name for name in ("jax", "flax", "optax", "grain", "numpy", "sentencepiece")},
    **{"ml-collections": "ml_collections", "orbax-checkpoint": "orbax"},
    "tensorboardX": "tensorboardX",
}
IMPORT = re.compile(r"^ *(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)
# Endings of files that a wheel holds.
HELD = (".py", ".sbatch", ".json", ".toml", ".html", ".css", ".svg")
TEST_COMMAND = "pip install -e '.[test]' && pytest -n 2"
# Their private or fast-moving interfaces are used: a newer minor version may break a run.
BOUNDED_ABOVE = {"flax", "grain", "jax", "optax"}
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CHECK_VERSIONS = REPOSITORY / ".ci" / "check_versions.py"
SPEC = importlib.util.spec_from_file_location("check_versions", CHECK_VERSIONS)
assert SPEC and SPEC.loader
check_versions = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_versions)


def test_a_wheel_holds_every_module(tmp_path: Path):
    """Built from a copy without isolation: it needs no network and leaves nothing behind."""
    for name in FOLDERS:
        for path in (path for end in HELD for path in (REPOSITORY / name).rglob(f"*{end}")):
            copy = tmp_path / path.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    expected = {str(p.relative_to(tmp_path)) for end in HELD for p in tmp_path.rglob(f"*{end}")}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    (tmp_path / "dist").mkdir()
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    held = {name for name in archive.namelist() if name.endswith(HELD)}
    assert held == {name if name.startswith("maxmeg/") else f"maxmeg/{name}" for name in expected}
    archive.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    for size, steps in (("", 800), (":llama3-8b", 100_000)):
        words = [sys.executable, *FIRST_COMMAND.split()[1:]]
        words[-1] += size
        done = subprocess.run(
            [*words, "--print_config"],
            cwd=tmp_path / "empty",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert yaml.safe_load(done.stdout)["train"]["num_steps"] == steps, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.endswith("using the built-in configuration gpt")


def test_metadata_changelog_and_citation_have_one_version():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert newest, "the first section of CHANGELOG.md is not '## VERSION (DATE)'"
    released = (citation["version"], str(citation["date-released"]))
    assert (maxmeg.__version__, newest[2]) == newest.groups() == released
    assert importlib.metadata.version("maxmeg") == maxmeg.__version__


def test_the_readme_holds_the_commands_to_train_and_to_test():
    text = (REPOSITORY / "README.md").read_text()
    first_block = text.partition("```bash\n")[2].partition("```")[0]
    assert first_block.startswith(f"pip install -e . && {FIRST_COMMAND}\n")
    assert TEST_COMMAND in text
    assert f'TEST_COMMAND = "{TEST_COMMAND}"' in (REPOSITORY / ".ci" / "checks.py").read_text()


def test_the_packages_that_were_asked_for_are_dependencies_that_the_product_imports():
    dependencies = {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert any(text.startswith("jax[cuda12]") for text in extras["cuda12"])
    paths = [path for name in FOLDERS for path in (REPOSITORY / name).rglob("*.py")]
    imported = {a or b for path in paths for a, b in IMPORT.findall(path.read_text())}
    lacking = {name for name, module in ASKED_FOR.items() if module not in imported}
    assert (set(ASKED_FOR) - dependencies, lacking) == (set(), set())


def test_every_requirement_has_bounds():
    project = PYPROJECT["project"]
    lists = [PYPROJECT["build-system"]["requires"], project["dependencies"]]
    lists += project["optional-dependencies"].values()
    every = [Requirement(text) for entries in lists for text in entries]
    others = [requirement for requirement in every if requirement.name != "maxmeg"]
    assert len(others) > 30
    assert [r.name for r in others if check_versions.lower_bound(r) is None] == []
    bounded = {r.name for r in others if "<" in {s.operator for s in r.specifier}}
    assert bounded >= BOUNDED_ABOVE


def test_the_installed_versions_are_within_the_bounds():
    """An installer that satisfies a conflict with a very old version fails here, by name."""
    entries = PYPROJECT["project"]["dependencies"] + ["maxmeg[test]"]
    wanted = list(check_versions.requirements(entries))
    assert {"jax", "s3fs", "pyarrow"} <= {requirement.name for requirement in wanted}
    assert [f"{r}: {p}" for r in wanted if (p := check_versions.problem(r))] == []


@pytest.mark.parametrize(
    ("requirement", "installed", "lowest", "problem"),
    [
        ("s3fs>=2025.9", "0.4.2", False, "s3fs 0.4.2 is outside the bounds"),
        ("s3fs>=2025.9", "2026.9.0", True, "not at its lower bound"),
        ("s3fs>=2025.9", "2025.9.0", True, ""),
        ("jax>=0.10,<0.13", "0.12.0.1", False, ""),
        ("s3fs>=2025.9", None, False, "s3fs is not installed"),
    ],
)
def test_a_version_outside_the_bounds_is_reported(
    requirement, installed, lowest, problem, monkeypatch
):
    monkeypatch.setattr(check_versions, "installed_version", lambda name: installed)
    reported = check_versions.problem(Requirement(requirement), lowest)
    assert problem in reported and bool(problem) == bool(reported)
