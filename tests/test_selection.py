"""Which tests run: by turns, by what a change can reach, and until the time is over."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from zlib import crc32

import import_graph
import pytest
import selection

REPOSITORY = Path(__file__).parent.parent
CI_SECONDS, CORES = 700, 2  # of CI's time, for the tenth of all long tests


class Case:
    """What the selection needs of a pytest.Item."""

    def __init__(self, nodeid: str, slow: bool = False):
        self.nodeid, self.marks = nodeid, {"slow"} if slow else set()

    def get_closest_marker(self, name: str) -> bool | None:
        return name in self.marks or None


def table(rows: int, file: str = "tests/test_a.py", slow: bool = False) -> list[Case]:
    return [Case(f"{file}::test_x[{i}]", slow) for i in range(rows)]


@pytest.mark.parametrize(
    ("rows", "seconds", "expected"),
    [(9, 0, 1), (9, 0.01, 1), (9, 0.12, 5), (9, 0.25, 9), (3, 1.0, 6), (99, 7.0, 10), (1, 2.1, 3)],
)
def test_dear_tables_are_cut_into_groups(rows: int, seconds: float, expected: int):
    assert selection.groups(rows, seconds) == expected


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.8), (2, 0.3), (7, 0.1), (25, 0.8), (4, 0.0)])
def test_every_commit_runs_some_rows_and_ten_commits_all(rows: int, seconds: float):
    cases, name = table(rows), "tests/test_a.py::test_x"
    runs = [selection.plain(cases, draw, {name: seconds}) for draw in range(40, 50)]
    assert all(runs) and {row for run in runs for row in run} == set(cases)
    most = max(selection.TABLE_SECONDS, seconds * -(-rows // selection.ROUNDS))
    assert all(len(run) * seconds <= most for run in runs)


def test_dear_cases_run_at_some_commits_unless_they_are_for_each():
    (dear,), name = table(1), "tests/test_a.py::test_x"
    runs = [selection.plain([dear], draw, {name: 2.3}) for draw in range(40, 50)]
    assert 3 <= sum(map(len, runs)) <= 4
    absent = next(draw for draw, run in enumerate(runs, 40) if not run)
    assert selection.plain([dear], absent, {name: 2.3}, frozenset([dear.nodeid])) == [dear]
    dear.marks = {"each_commit"}
    assert selection.plain([dear], absent, {name: 2.3}) == [dear]


def test_cases_for_each_commit_exist():
    for case in json.loads(selection.EACH_COMMIT.read_text()):
        path, _, name = case.partition("::")
        assert f"def {name.split('[')[0]}(" in (REPOSITORY / path).read_text(), case


def test_every_slow_case_comes_first_within_ten_commits():
    cases = [c for i in range(40) for c in table(9, f"tests/test_{i}.py", slow=True)]
    first = Counter()
    for draw in range(100, 110):
        order = selection.phases(cases, draw, {}, {})
        first.update(c for c, (phase, _) in order.items() if phase == selection.DRAWN)
    assert set(first.values()) == {1} and first.keys() == set(cases)


def test_what_the_change_reaches_comes_before_the_others_and_the_nearest_first():
    near, far, other = (table(1, f"tests/test_{n}.py", slow=True)[0] for n in "abc")
    reached = {"tests/test_a.py": 1, "tests/test_b.py": 4}
    order = selection.phases([far, other, near], 3, {}, reached)
    assert sorted(order, key=order.__getitem__) == [near, far, other]
    few = selection.phases([far, other, near], 3, {}, reached, selection.UNRECORDED)
    assert few[near][0] == selection.AFFECTED < few[far][0]  # one case fits: the other in its turn


TESTS = '''
import os, pytest

@pytest.fixture(scope="module", autouse=True)
def shared():
    yield

@pytest.mark.parametrize("i", range(6))
def test_table(i): pass

def test_crash():
    """Its process ends the first time."""
    mark = os.environ.get("CRASH")
    if mark and not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)

@pytest.mark.slow
@pytest.mark.parametrize("i", range(3))
def test_slow(i): pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of tests with the plugin, without JAX."""
    for name in ("selection.py", "import_graph.py"):
        (tmp_path / name).write_text((REPOSITORY / "tests" / name).read_text())
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["selection"]')
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "test_one.py").write_text("def test_after_the_few():\n    pass\n")
    record = {"test_few.py::test_table": 0.12, "test_few.py::test_slow": 5.0}
    (tmp_path / "seconds.json").write_text(json.dumps(record))
    ini = "[pytest]\naddopts = -m 'not slow and not gpu'\ntestpaths = .\nmarkers = slow\n gpu\n"
    (tmp_path / "pytest.ini").write_text(ini)
    return tmp_path


def run(folder: Path, *arguments: str, **environ: str) -> tuple[dict[str, int], str]:
    """(counts, output)"""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--counts=counts"]
    settings = {"PYTHONPATH": str(REPOSITORY), "PYTEST_ADDOPTS": ""} | environ
    settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command += ["-p", "xdist", *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "counts").read_text()), ended.stdout


def test_plain_and_left_are_all_cases_once(folder: Path):
    (plain, first), (left, second) = (run(folder, "-n2", "--draw=4", *a) for a in ([], ["--left"]))
    assert plain["ran"] == 2 + 2 and left["ran"] == 4 + 3
    ran = {word for text in (first, second) for word in text.split() if "::" in word}
    assert len(ran) == 11
    assert run(folder, "test_few.py")[0]["ran"] == 6 + 1  # named files have all rows


def test_the_clock_counts_what_it_leaves(folder: Path):
    draw = crc32(b"test_few.py") % selection.ROUNDS  # test_one.py comes later
    counts, output = run(folder, "-n1", "--in-turns", "--seconds=4", f"--draw={draw}")
    assert counts == {"ran": 8, "left": 3, "repeated": 0}
    assert "3 left for later" in output


def test_a_test_whose_process_crashes_is_repeated_once(folder: Path):
    counts, output = run(folder, "-n2", "--every-row", CRASH=str(folder / "crashed"))
    assert counts["repeated"] == 1 and "1 repeated after a crash" in output
    assert "8 passed, 1 skipped" in output


def test_seconds_are_recorded(folder: Path):
    (folder / "test_few.py").write_text("def test_long():\n    sum(range(10**7))\n")
    run(folder, "--record")
    assert json.loads((folder / "seconds.json").read_text())["test_few.py::test_long"] >= 0.1


SOURCES = {
    "maxmeg/__init__.py": "",
    "maxmeg/a.py": "",
    "maxmeg/b.py": "def f():\n    from maxmeg import a",
    "maxmeg/train.py": "from . import b",
    "kernels/k.py": "",
    "maxmeg/ops/c.py": "kernel_module('k')",
    "configs/gpt.py": "",
    "docs/page.md": "",
    "tests/conftest.py": "import maxmeg.a",
    "tests/tool.py": "import maxmeg.a",
    "tests/ops/test_tool.py": "import tool",
    "tests/test_b.py": "import maxmeg.b",
    "tests/test_command.py": "run('maxmeg train')",
    "tests/test_page.py": "read('docs/page.md')",
    "tests/test_config.py": "run('--config=gpt')",
    "tests/test_kernel.py": "import maxmeg.ops.c",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("maxmeg/a.py", {"ops/test_tool": 2, "test_b": 2, "test_command": 3}),
        ("maxmeg/train.py", {"test_command": 1}),
        ("kernels/k.py", {"test_kernel": 2}),
        ("docs/page.md", {"test_page": 1}),
        ("configs/gpt.py", {"test_config": 1}),
        ("tests/test_b.py", {"test_b": 0}),
    ],
)
def test_a_change_reaches_those_that_import_or_name_it(changed: str, expected: dict[str, int]):
    reached = import_graph.distances(import_graph.users(SOURCES), [changed])
    found = import_graph.tests_among(reached)
    assert {p.removeprefix("tests/").removesuffix(".py"): d for p, d in found.items()} == expected


def test_conftest_reaches_all_tests():
    reached = import_graph.distances(import_graph.users(SOURCES), ["tests/conftest.py"])
    assert {path for path in SOURCES if "test_" in path} <= reached.keys()


@pytest.mark.slow
def test_the_tenth_of_a_commit_fits_the_clock_of_ci():
    """By the recorded seconds; else cases could wait for more than ten commits."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--left", "--draw=0"]
    ignored = [f"--ignore=tests/{name}" for name in ("kernels", "absent", "oracle", "serving")]
    listed = subprocess.run(
        [*command, *ignored],
        cwd=REPOSITORY,
        env=os.environ | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    cases = [Case(line, slow=True) for line in listed.stdout.splitlines() if "::" in line]
    seconds, tenths = selection.recorded(), Counter()
    for each, (phase, _) in selection.phases(cases, 0, seconds, {}).items():
        name = selection.table(each)
        tenths[phase] += seconds.get(name, selection.UNRECORDED)
    assert len(cases) > 500 and max(tenths.values()) < CI_SECONDS * CORES, tenths
