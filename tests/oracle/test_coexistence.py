"""Importing transformers beside this repository."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_transformers_imports_with_the_repository_as_working_directory():
    """It probes for a package named `kernels`, which the folder of that name must not be."""
    program = "from transformers import GPT2Config, GPT2LMHeadModel; import maxmeg.kernels"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
