"""Modules that must import without jax, so that the commands that use them start fast."""

import re
import subprocess
import sys
from pathlib import Path

from test_style import IMPORTED, module_name

REPOSITORY = Path(__file__).parent.parent
WITHOUT_JAX = r"maxmeg\.(config(\..*)?|__main__|configs\..*|data\.corpus\.indexed"
WITHOUT_JAX += r"|data\.samples\.sampling|pipeline\.schedule)"
IMPORT_WITHOUT_JAX = """
import importlib, sys
sys.modules |= dict.fromkeys(("jax", "flax", "optax"))  # an import of these fails
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_indexing_and_planning_import_no_jax():
    paths = [path for folder in IMPORTED for path in (REPOSITORY / folder).rglob("*.py")]
    modules = sorted(module_name(str(path.relative_to(REPOSITORY))) for path in paths)
    modules = [module for module in modules if re.fullmatch(WITHOUT_JAX, module)]
    assert {"maxmeg.config.schema", "maxmeg.configs.gpt"} <= set(modules)
    command = [sys.executable, "-c", IMPORT_WITHOUT_JAX, *modules]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
