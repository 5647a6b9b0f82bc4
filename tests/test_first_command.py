"""The command of the README, word for word, in a clone in which nothing was done before."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from test_packaging import FIRST_COMMAND

REPOSITORY = Path(__file__).parent.parent
STEP, LOSS = "40/800", 4.5  # of a line, and the most that its loss may be; it begins with 5.5


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what git keeps, in which an environment `env` has the copy installed.

    As `pip install -e .` installs it, but with the packages of this environment, so that it needs
    no network.
    """
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    patterns = [line.rstrip("/") for line in ignored]
    copytree(REPOSITORY, tmp_path / "clone", ignore=ignore_patterns(".git", *patterns))
    clone = tmp_path / "clone"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / "env"], check=True)
    build = "import setuptools.build_meta as b; b.build_editable('env')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = (clone / "env").glob("*.whl")
    (packages,) = (clone / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))
    return clone


@pytest.mark.each_commit
def test_the_first_command_trains(clone: Path):
    """Until its loss has fallen; then Ctrl-C saves, and it says how to go on."""
    own = ("XLA_FLAGS", "NPROC", "PYTHONPATH", "VIRTUAL_ENV", "SLURM_")  # of tests and of a job
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
    environment["PATH"] = f"{clone / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.Popen(
        FIRST_COMMAND.split(),
        cwd=clone,
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout and run.stderr
    with run:
        printed = []
        for line in run.stdout:
            printed.append(line)
            if line.split()[:1] == [STEP]:
                run.send_signal(signal.SIGINT)
                break
        printed += run.stdout
        said = run.stderr.read()
    text = "".join(printed)
    assert run.returncode == 0, text + said
    assert "params   820,608" in text and "built-in" not in said
    (loss,) = (float(line.split()[2]) for line in printed if line.split()[:1] == [STEP])
    assert loss < LOSS and "the same command resumes" in text, text
    assert list((clone / "runs" / "gpt" / "checkpoints").glob("step_*/manifest.json"))
