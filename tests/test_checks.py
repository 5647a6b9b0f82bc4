"""The script that checks a commit, .ci/run: its clock, its table and what it says of bad input."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("checks", REPOSITORY / ".ci" / "checks.py")
assert SPEC and SPEC.loader
checks = importlib.util.module_from_spec(SPEC)
sys.modules["checks"] = checks  # dataclasses look it up
SPEC.loader.exec_module(checks)


@pytest.fixture
def few(tmp_path: Path):
    """Checks with a clock of three seconds and an environment without packages."""
    (tmp_path / "main" / "bin").mkdir(parents=True)
    return checks.Checks(tmp_path, checks.Clock(3), draw=7)


def test_parts_run_whatever_the_others_say_and_fail_by_name(few):
    assert few.run("first", "main", "echo {draw}; exit 3") is False
    counts = '{{"ran": 5, "left": 2, "repeated": 1}}'
    assert few.run("second", "main", f"echo '{counts}' > {{folder}}/second.json") is True
    few.run_beside("third", "main", "echo $0; false")
    few.wait("third")
    assert [row.result for row in few.rows] == ["failed", "passed", "failed"]
    assert few.failures() == ["first: failed", "third: failed"]
    head, *lines = few.table().splitlines()
    assert head.split() == ["part", "seconds", "ran", "left", "repeated", "result"]
    assert lines[1].split()[0] == "second" and lines[1].split()[2:] == ["5", "2", "1", "passed"]


def test_a_part_that_hangs_is_ended_with_its_children_and_named(few, tmp_path: Path):
    few.clock = checks.Clock(1)
    few.run("endless", "main", f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    assert few.failures() == ["endless: hung: ended by the clock"]
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    end = time.monotonic() + 10
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.1)


def test_more_than_three_repeats_fail(few):
    few.rows = [checks.Row("a", "passed", counts={"repeated": 2}) for _ in range(2)]
    assert few.failures() == ["4 tests crashed and passed when repeated, at most 3"]
    few.rows.pop()
    assert few.failures() == []


def test_every_part_has_its_turn():
    turns = {checks.TOGETHER.get(i, i) for i in range(len(checks.PARTS))}
    assert turns == set(range(checks.TURNS))


def test_time_is_kept_free_and_no_clock_needs_none(few):
    few.clock = checks.Clock(1000)
    seconds = float(checks.clocked(few, "pytest", kept_free=300).partition("--seconds=")[2])
    assert seconds == pytest.approx(1000 - 300 - checks.ENDING, abs=5)
    few.clock = checks.Clock(0)
    assert checks.clocked(few, "pytest", kept_free=300) == "pytest"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAXMEG_CI_SECONDS", "40m", "MAXMEG_CI_SECONDS='40m' is not a whole number of at least 0"),
        ("MAXMEG_CI_SECONDS", "-1", "MAXMEG_CI_SECONDS='-1' is not a whole number"),
        ("MAXMEG_CI_DRAW", "", "MAXMEG_CI_DRAW='' is not a whole number"),
        ("MAXMEG_CI_BASE", "nowhere", "MAXMEG_CI_BASE='nowhere' is no commit"),
    ],
)
def test_wrong_variables_are_errors(monkeypatch, capsys, name: str, value: str, message: str):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        checks.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_settings_that_the_processor_lacks_are_not_used(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: "flags : sse avx avx2")
    able = [checks.can_run(settings) for settings in checks.SETTINGS]
    assert able == ["SkylakeX" not in str(settings) for settings in checks.SETTINGS]


def test_an_old_python_is_reported(tmp_path: Path):
    """And ruff runs, if it can be installed: not here."""
    for name in ("bash", "dirname", "mktemp", "rm"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    old = tmp_path / "python3"
    old.write_text(
        '#!/bin/bash\ncase "$*" in *sys.exit*) exit 1;; esac\necho "python3 $*"; exit 1\n'
    )
    old.chmod(0o755)
    ended = subprocess.run(
        [REPOSITORY / ".ci" / "run"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1 and "no Python 3.11 or newer was found" in ended.stderr
    assert "python3 -m venv" in ended.stdout


def test_without_git_nothing_is_known_of_the_change(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("MAXMEG_CI_BASE", raising=False)
    assert checks.base_commit() == "" and checks.git("rev-list", "--count", "HEAD") == ""
