"""Do the tests find faults? Change single lines of the package, and run tests that execute them.

    coverage run -m pytest ...     # with contexts: see benchmarks/NOTES.md
    python benchmarks/mutants.py draw COVERAGE mutants.json --seed=0 --count=100 [--same-as COMMIT]
    python benchmarks/mutants.py run COVERAGE mutants.json results.json --seconds=90
    python benchmarks/mutants.py affected COVERAGE mutants.json

`draw` chooses lines that tests execute, and of each one change: another operator or constant, two
exchanged arguments, a statement that is left out; with --same-as only in files that are equal at
COMMIT, so that the tests of both commits can be compared. `run` makes one change after the other in
this clone, runs tests that execute the line, the cheapest first, and restores the file. A mutant is
killed if a test fails. The clone must be the one that its Python imports. `affected` counts for how
many changes `pytest --affected` would take a file with a test that executes the line.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))
import import_graph  # noqa: E402

FOLDERS = ("maxmeg/", "kernels/")
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
TESTS = 150  # of a mutant, at most
TIMEOUT = 300  # seconds of a mutant's tests; one that hangs is killed


def text_of(source: str, node: ast.AST) -> str:
    return ast.get_source_segment(source, node) or ""


def changes(source: str, node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (kind of change, node to replace, its new text) for one node."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = text_of(source, node.left), text_of(source, node.right)
        yield "operator", node, f"({left}) {OPERATORS[type(node.op)]} ({right})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        left, right = text_of(source, node.left), text_of(source, node.comparators[0])
        yield "operator", node, f"({left}) {OPERATORS[type(node.ops[0])]} ({right})"
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        word = "or" if isinstance(node.op, ast.And) else "and"
        yield "operator", node, f" {word} ".join(f"({text_of(source, v)})" for v in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "operator", node, f"({text_of(source, node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        new = not value if isinstance(value, bool) else value + 1 if value in (0, 1) else value * 2
        yield "constant", node, repr(new)
    elif isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        if not any(isinstance(each, ast.Starred) for each in (first, second)):
            start, end = text_of(source, first), text_of(source, second)
            yield "argument", (first, second), f"{end}, {start}"
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Raise | ast.Return):
        value = getattr(node, "value", None)
        if not (isinstance(node, ast.Expr) and isinstance(value, ast.Constant)):  # a docstring
            new = (
                f"{text_of(source, node.targets[0])} = None"
                if isinstance(node, ast.Assign)
                else "pass"
            )
            yield "statement", node, new


def replaced(source: str, target, new: str) -> str:
    """The source with a node, or what is from one to another, replaced."""
    first, last = target if isinstance(target, tuple) else (target, target)
    lines = source.splitlines(keepends=True)
    start = len("".join(lines[: first.lineno - 1])) + len(
        lines[first.lineno - 1].encode()[: first.col_offset].decode()
    )
    end = len("".join(lines[: last.end_lineno - 1])) + len(
        lines[last.end_lineno - 1].encode()[: last.end_col_offset].decode()
    )
    return source[:start] + new + source[end:]


def mutants_of(path: str, line: int) -> list[dict]:
    """Return every possible change of the code that starts in this line."""
    source = (REPOSITORY / path).read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if getattr(node, "lineno", None) != line or getattr(node, "annotation", None):
            continue
        for kind, target, new in changes(source, node):
            changed = replaced(source, target, new)
            if changed != source and is_code(changed):
                found.append(
                    {"path": path, "line": line, "kind": kind, "new": new, "source": changed}
                )
    return found


def is_code(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def executed(data: coverage.CoverageData) -> dict[str, dict[int, list[str]]]:
    """Return path -> line -> tests that execute it, without lines that only imports execute."""
    lines = {}
    for file in data.measured_files():
        path = file.removeprefix(f"{REPOSITORY}/")
        if path.startswith(FOLDERS):
            contexts = data.contexts_by_lineno(file)
            tests = {n: sorted({test_of(c) for c in cs if c}) for n, cs in contexts.items()}
            lines[path] = {number: names for number, names in tests.items() if names}
    return lines


def test_of(context: str) -> str:
    """The test of a context TEST|run; names of tests may have a | of their own."""
    return context.rpartition("|")[0]


def draw(
    data: coverage.CoverageData, seed: int, count: int, excluded: frozenset[str] = frozenset()
) -> list[dict]:
    """Draw `count` executed lines outside `excluded`, each at most once, and one change of each."""
    rng = random.Random(seed)
    places = sorted(
        (path, line)
        for path, lines in executed(data).items()
        if path not in excluded
        for line in lines
    )
    rng.shuffle(places)
    chosen = []
    for path, line in places:
        if found := mutants_of(path, line):
            chosen.append(rng.choice(found))
            if len(chosen) == count:
                break
    return chosen


def tests_of(lines: dict, mutant: dict, seconds: dict[str, float], limit: float) -> list[str]:
    """The cheapest tests that execute the line, within `limit` CPU-seconds."""
    names = lines.get(mutant["path"], {}).get(mutant["line"], [])
    cost = {name: seconds.get(name.split("[")[0], 0.05) for name in names}
    chosen, spent = [], 0.0
    for name in sorted(names, key=lambda name: (cost[name], name)):
        if len(chosen) < TESTS and spent + cost[name] <= limit:
            chosen.append(name)
            spent += cost[name]
    return chosen


def print_affected(lines: dict, mutants: list[dict]) -> None:
    """Print, for each change, how many files of tests it reaches, and how many of these execute the
    line."""
    users, found = import_graph.users(import_graph.read_sources()), 0
    for mutant in mutants:
        reached = import_graph.tests_among(import_graph.distances(users, [mutant["path"]]))
        files = {name.split("::")[0] for name in lines[mutant["path"]][mutant["line"]]}
        found += bool(files & reached.keys())
        place = f"{mutant['path']}:{mutant['line']}"
        print(f"{place:50} reaches {len(reached):3}, {len(files & reached.keys())} execute it")
    print(found, "of", len(mutants), "found")


def killed(mutant: dict, tests: list[str]) -> str:
    """The first test that fails with the mutant; "" if all pass, "timeout" if they hang."""
    path = REPOSITORY / mutant["path"]
    original = path.read_text()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    try:
        path.write_text(mutant["source"])
        ended = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_text(original)
    if ended.returncode == 0:
        return ""
    if "not found: " in ended.stdout + ended.stderr:
        raise ValueError(f"tests of the coverage data are not in this clone: {ended.stderr[-500:]}")
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit code {ended.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["draw", "run", "affected"])
    parser.add_argument("coverage")
    parser.add_argument("mutants")
    parser.add_argument("results", nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--same-as", metavar="COMMIT")
    parser.add_argument("--seconds", type=float, default=90, help="CPU-seconds of a mutant's tests")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants; default: all")
    options = parser.parse_args()
    data = coverage.CoverageData(options.coverage)
    data.read()
    if options.action == "draw":
        changed = (
            import_graph.git("diff", "--name-only", options.same_as) if options.same_as else ()
        )
        mutants = draw(data, options.seed, options.count, frozenset(changed))
        Path(options.mutants).write_text(json.dumps(mutants, indent=1))
        return
    if options.action == "affected":
        print_affected(executed(data), json.loads(Path(options.mutants).read_text()))
        return
    seconds = json.loads((REPOSITORY / "tests" / "seconds.json").read_text())
    lines, results = executed(data), {}
    mutants = json.loads(Path(options.mutants).read_text())
    for i in options.only or range(len(mutants)):
        mutant = mutants[i]
        tests = tests_of(lines, mutant, seconds, options.seconds)
        by = killed(mutant, tests) if tests else ""
        place = f"{mutant['path']}:{mutant['line']} {mutant['kind']} {mutant['new'][:60]!r}"
        results[i] = {"place": place, "tests": len(tests), "by": by}
        print(f"{i:3} {'killed' if by else 'SURVIVED':8} {len(tests):4} {place} {by}", flush=True)
        Path(options.results).write_text(json.dumps(results, indent=1))
    print(sum(bool(r["by"]) for r in results.values()), "of", len(results), "killed")


if __name__ == "__main__":
    main()
