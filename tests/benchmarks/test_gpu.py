"""The GPU benchmark runs on a CPU in its tiny form, and needs few packages."""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCHMARK = REPOSITORY / "benchmarks" / "gpu.py"
sys.path.append(str(BENCHMARK.parent))  # as Python does for the script that it runs
PATHS = os.pathsep.join((str(REPOSITORY), str(BENCHMARK.parent)))
ABSENT = ["beartype", "grain", "matplotlib", "sentencepiece", "tensorboardX"]
ABSENT += ["tiktoken", "tokenizers", "wandb", "zstandard"]
PLANTED = {"grain": "import grain", "rich": "def f():\n    import rich\nf()"}
MODULES = ["maxmeg.config.schema", "maxmeg.config.architectures", "maxmeg.ops.attention.call"]
MODULES += ["maxmeg.optim.build", "maxmeg.planning.cost.flops", "maxmeg.planning.hardware"]
MODULES += ["maxmeg.data.placement", "maxmeg.state", "maxmeg.step", "maxmeg.layers.moe"]
MODULES += ["maxmeg.checkpoint.initialize", "maxmeg.inference.engine"]
MODULES += [
    "maxmeg.ops.cross_entropy.call",
    "maxmeg.ops.decode_attention.call",
    "maxmeg.ops.experts.grouped_matmul",
]
MODULES += ["maxmeg.kernels.attention", "maxmeg.kernels.attention_triton", "maxmeg.kernels.matmul"]
MODULES += ["maxmeg.kernels.decode_attention", "maxmeg.kernels.grouped_matmul"]
MODULES += ["maxmeg.ops.chunk_scan", "maxmeg.kernels.chunk_scan", "maxmeg.kernels.delta_scan"]
MODULES += ["maxmeg.kernels.linear_cross_entropy", "maxmeg.kernels.fp8_blockwise"]

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
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(module, error)
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": PATHS, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_benchmark_imports_few_packages(tmp_path: Path):
    """Modules that import what they must not are planted, and named."""
    for name, text in PLANTED.items():
        (tmp_path / f"maxmeg_{name}.py").write_text(text)
    paths = os.pathsep.join((str(REPOSITORY), str(tmp_path)))
    modules = ",".join([*(f"maxmeg_{name}" for name in PLANTED), *MODULES])
    done = run("-c", IMPORT, ",".join(ABSENT), "absl,rich", modules, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"maxmeg_{name} {name} is absent" for name in PLANTED]


def rows_of(text: str) -> list[dict]:
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if "part" in row]


def test_a_failing_item_and_no_time_are_recorded(monkeypatch, capsys):
    gpu = runpy.run_path(str(BENCHMARK))
    items = gpu["Part"](lambda size: iter([("bad", lambda: 1 / 0), ("good", dict)]), 9)
    monkeypatch.setitem(gpu["PARTS"], "context", items)
    for seconds in (60, -1):
        gpu["run_parts"](["context"], gpu["Sizes"](), seconds)
    rows = rows_of(capsys.readouterr().out)
    assert "ZeroDivisionError" in rows[0]["error"] and "error" not in rows[1]
    assert all("skipped" in row for row in rows[2:]) and len(rows) == 4


WRONG_KERNEL = """
import runpy, sys
import numpy as np
gpu = runpy.run_path(sys.argv[1])
size = gpu["prepare"](True, ())
checks = sys.modules["gpu_parts.checks"]
attention = checks.OPS["attention"]
def wrong(name, value):
    def change(*given):
        return {key: x + value for key, x in run(*given).items()}
    cases, chosen, expected, run = attention(name)
    return cases, chosen, expected, change
for value in (0.0, 1.0, np.nan):
    checks.OPS["attention"] = lambda name: wrong(name, value)
    gpu["run_parts"](["check-triton"], size, 60)
"""


@pytest.mark.slow
def test_a_wrong_kernel_is_named_with_its_error_also_when_it_gives_nan():
    done = run("-c", WRONG_KERNEL, str(BENCHMARK), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [row["ok"] for row in rows] == [True, False, False]
    assert not rows[0]["wrong"] and all(": dq" in str(row["wrong"]) for row in rows[1:])


ROW = {"part": "check-loss", "item": "loss mosaic"}


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (ROW | {"ok": True}, None),
        (ROW | {"ok": False}, 1),
        (ROW | {"error": "ended after 60 s"}, 1),
        (ROW | {"skipped": "out of time"}, 1),
        (ROW | {"part": "loss", "skipped": "out of time"}, None),
        (ROW | {"part": "train", "ok": False}, 1),
    ],
)
def test_the_exit_code_says_whether_all_is_right(row: dict, code, monkeypatch):
    main = runpy.run_path(str(BENCHMARK))["main"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick"])
    monkeypatch.setitem(main.__globals__, "measure", lambda names, given: [ROW, row])
    if code is None:
        main()
        return
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


def test_an_item_that_failed_its_check_is_not_timed():
    gpu = runpy.run_path(str(BENCHMARK))
    rows = [
        {"part": "check-attention", "item": "attention mosaic", "error": "ended after 60 s"},
        {"part": "check-loss", "item": "loss mosaic", "ok": False},
        {"part": "attention", "item": "L2048", "error": "x"},
    ]
    assert gpu["broken"](rows) == ["attention:mosaic"]
    full = dataclasses.replace(gpu["Sizes"](), skipped=tuple(gpu["broken"](rows)))
    assert full.backends("attention", ("cudnn", "mosaic", "xla")) == ["cudnn", "xla"]
    assert full.backends("loss", ("mosaic", "xla")) == ["mosaic", "xla"]


def test_a_hang_ends_and_leaves_a_row(tmp_path: Path, monkeypatch):
    """The item that never came to an end is named; those before it keep their rows."""
    gpu = runpy.run_path(str(BENCHMARK))
    script = tmp_path / "hangs.py"
    script.write_text(
        "import json, time\n"
        "print(json.dumps({'begins': 'loss', 'item': 'a'}))\n"
        "print(json.dumps({'part': 'loss', 'item': 'a', 'x': 1.0}))\n"
        "print(json.dumps({'begins': 'loss', 'item': 'b'}), flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setitem(gpu["child"].__globals__, "__file__", str(script))
    rows = gpu["child"](["loss"], False, [], -13.0)
    assert rows[0] == {"part": "loss", "item": "a", "x": 1.0}
    assert rows[1]["item"] == "b" and "ended after 2 s" in rows[1]["error"]


def test_the_table_goes_between_the_readmes_marks(tmp_path: Path):
    gpu = runpy.run_path(str(BENCHMARK))
    first, last = gpu["MARKS"]
    path = tmp_path / "README.md"
    path.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    gpu["write_readme"](path, "new")
    assert path.read_text() == f"before\n{first}\nnew\n{last}\nafter\n"
    path.write_text("no marks")
    with pytest.raises(ValueError, match="needs each of"):
        gpu["write_readme"](path, "new")
    assert all((REPOSITORY / "README.md").read_text().count(mark) == 1 for mark in (first, last))
