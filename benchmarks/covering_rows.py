"""Choose the tests that run at each commit, whatever their turn, so that a commit's tests execute
nearly all lines and branches that all rows of all tables execute.

    pytest --every-row --cov --cov-branch --cov-context=test     # see benchmarks/NOTES.md
    python benchmarks/covering_rows.py DATA --points=0.4

Writes tests/each_commit.json. It takes the test that adds most per CPU-second, until ten commits
miss on average at most so many percent of the lines and branches.
"""

import argparse
import json
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RECORD = REPOSITORY / "tests" / "each_commit.json"
UNMEASURED = 0.03  # CPU-seconds of a test that seconds.json does not name
OVERHEAD = 0.05  # CPU-seconds that a further test costs at least


def executed(path: str) -> dict[str, int]:
    """Return a bit set of executed lines and branches for each test; "" is code outside of tests.

    A branch is a jump from a line that has several possible next lines. Reads the SQLite tables of
    coverage's data file; coverage documents their schema.
    """
    database = sqlite3.connect(path)
    contexts = dict(database.execute("select id, context from context"))
    arcs = database.execute("select file_id, context_id, fromno, tono from arc").fetchall()
    ends = defaultdict(set)
    for file, _, begin, end in arcs:
        ends[file, begin].add(end)
    bits: dict[tuple, int] = {}
    found = defaultdict(set)
    for file, context, begin, end in arcs:
        test = contexts[context].rpartition("|")[0]
        for unit in ((file, end), (file, begin, end))[: 1 + (len(ends[file, begin]) > 1)]:
            found[test].add(bits.setdefault(unit, len(bits)))
    return {test: sum(1 << bit for bit in numbers) for test, numbers in found.items()}


def selected(draw: int) -> list[str]:
    """Return the tests of a plain run at a commit."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", f"--draw={draw}"]
    lines = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [line for line in lines.stdout.splitlines() if "::" in line]


def union(executes: dict[str, int], tests: Iterable[str]) -> int:
    result = executes.get("", 0)
    for test in tests:
        result |= executes.get(test, 0)
    return result


def choose(executes: dict[str, int], runs: list[list[str]], points: float) -> list[str]:
    """Return the tests to add to each of these runs."""
    record = json.loads((REPOSITORY / "tests" / "seconds.json").read_text())
    tests = executes.keys() & set().union(*runs)
    seconds = {test: record.get(test.split("[")[0], UNMEASURED) for test in sorted(tests)}
    times = {test: sum(test not in run for run in map(set, runs)) for test in seconds}
    whole, chosen = union(executes, executes), []
    missing = [whole & ~union(executes, run) for run in runs]

    def gain(test: str) -> float:
        gained = sum((executes[test] & bits).bit_count() for bits in missing)
        return gained / (seconds[test] * times[test] + OVERHEAD * len(runs))

    most = points / 100 * whole.bit_count() * len(runs)
    while sum(bits.bit_count() for bits in missing) > most:
        best = max(seconds, key=gain)
        chosen.append(best)
        missing[:] = (bits & ~executes[best] for bits in missing)
    return sorted(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("coverage")
    parser.add_argument("--points", type=float, default=0.4)
    options = parser.parse_args()
    RECORD.write_text("[]\n")
    runs = [selected(draw) for draw in range(10)]
    chosen = choose(executed(options.coverage), runs, options.points)
    RECORD.write_text(json.dumps(chosen, indent=0) + "\n")
    print(f"{len(chosen)} tests -> {RECORD}")


if __name__ == "__main__":
    main()
