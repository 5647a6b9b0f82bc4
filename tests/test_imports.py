"""Modules that must import without jax, so that the commands that use them start fast."""

import re
import subprocess
import sys
from pathlib import Path

from test_style import IMPORTED, module_name

REPOSITORY = Path(__file__).parent.parent
WITHOUT_JAX = r"maxmeg\.(config(\..*)?|data\.(indexed|sampling)|planning\.flops)"
WITHOUT_JAX += r"|maxmeg\.pipeline\.(schedule|check)|maxmeg\.models\.(registry|\w+_sizes)"
WITHOUT_JAX += r"|maxmeg\.(__main__|configs\..*)"
IMPORT_WITHOUT_JAX = """
import importlib, sys, traceback
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "flax", "optax"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if "frozen" not in f.filename and f.name != "find_spec"][-1]
        print(f"{frame.filename}:{frame.lineno}: {module} imports {error}, must not")
"""


def import_without_jax(modules: list[str], folder: Path) -> list[str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT_JAX, *modules]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_indexing_and_planning_import_no_jax():
    paths = [path for folder in IMPORTED for path in (REPOSITORY / folder).rglob("*.py")]
    modules = sorted(module_name(str(path.relative_to(REPOSITORY))) for path in paths)
    modules = [module for module in modules if re.fullmatch(WITHOUT_JAX, module)]
    assert {"maxmeg.config.schema", "maxmeg.configs.gpt"} <= set(modules)
    violations = import_without_jax(modules, REPOSITORY)
    assert not violations, "\n" + "\n".join(violations)


def test_a_planted_import_of_jax_is_found(tmp_path: Path):
    (tmp_path / "plain.py").write_text("import json\n")
    (tmp_path / "indirect.py").write_text("import json\nimport direct\n")
    (tmp_path / "direct.py").write_text("import json\n\nimport jax.numpy\n")
    (found,) = import_without_jax(["plain", "indirect"], tmp_path)
    assert found.endswith("direct.py:3: indirect imports jax, must not")
