"""The GPU benchmark runs on a CPU in its tiny form, and needs few packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCHMARK = REPOSITORY / "benchmarks" / "gpu.py"
ABSENT = ["beartype", "grain", "matplotlib", "ml_collections", "sentencepiece", "tensorboardX"]
ABSENT += ["tiktoken", "tokenizers", "wandb", "zstandard"]
MODULES = ["maxmeg.config.schema", "maxmeg.models.registry", "maxmeg.ops.attention"]
MODULES += ["maxmeg.optim.build", "maxmeg.planning.flops", "maxmeg.planning.hardware"]
MODULES += ["maxmeg.parallel.placement", "maxmeg.state", "maxmeg.step"]

# absl and rich come with optax and flax, but this package's own modules must not ask for them.
IMPORT = """
import importlib, sys
absent, indirect, modules = (names.split(",") for names in sys.argv[1:])
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top, frame = name.split(".")[0], sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        ours = frame.f_globals.get("__name__", "").startswith("maxmeg")
        if top in absent or (ours and top in indirect):
            raise ModuleNotFoundError(f"{top} is absent")
sys.meta_path.insert(0, Refuse())
for module in modules:
    importlib.import_module(module)
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def import_without(modules: list[str], folder: str = str(REPOSITORY)):
    return run("-c", IMPORT, ",".join(ABSENT), "absl,rich", ",".join(modules), PYTHONPATH=folder)


def test_what_the_benchmark_imports_needs_few_packages():
    done = import_without(MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "refused"),
    [("import grain", "grain"), ("def f():\n    import rich\nf()", "rich"), ("import optax", "")],
)
def test_a_planted_import_is_found(tmp_path: Path, text: str, refused: str):
    (tmp_path / "maxmeg_planted.py").write_text(text)
    done = import_without(["maxmeg_planted"], str(tmp_path))
    assert (f"{refused} is absent" in done.stderr) if refused else done.returncode == 0


@pytest.mark.slow
def test_quick_run_on_a_cpu(tmp_path: Path):
    done = run(str(BENCHMARK), "--quick", f"--results={tmp_path}", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    rows = {(row["part"], row["item"]): row for row in json.loads(path.read_text())["rows"]}
    parts = {part for part, _ in rows}
    assert parts == {"context", "agreement", "train", "attention", "split"}
    assert rows["train", "tiny"]["ok"] and rows["train", "tiny"]["compiles"] == 1
    assert all(row["ok"] for (part, _), row in rows.items() if part == "agreement")
    assert "| train | tiny |" in done.stdout


def test_a_failing_part_and_no_time_are_recorded(tmp_path: Path):
    program = (
        "import sys, runpy; sys.argv = sys.argv[1:]; "
        "gpu = runpy.run_path(sys.argv[0]); "
        "names = gpu['PARTS']; "
        "names['context'] = lambda size: iter([('bad', lambda: 1 / 0), ('good', dict)]); "
        "gpu['run_parts'](['context'], True, 60); "
        "gpu['run_parts'](['context'], True, -1)"
    )
    done = run("-c", program, str(BENCHMARK), JAX_PLATFORMS="cpu")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    rows = [row for row in rows if "part" in row]
    assert "ZeroDivisionError" in rows[0]["error"] and "error" not in rows[1]
    assert all("skipped" in row for row in rows[2:]) and len(rows) == 4
