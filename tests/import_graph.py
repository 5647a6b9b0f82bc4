"""Which files of the repository use which others, found in their text, without importing them.

A file uses what it imports, also inside functions. A test also uses what its strings name: a
module or script that it starts, a command, a configuration ("gpt"), a page ("docs/data.md").
"""

import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from maxmeg.config.commands import COMMANDS

REPOSITORY = Path(__file__).parent.parent
MAPPED = ("configs", "kernels", "launch")  # folders that are packages of maxmeg
LOADS_KERNELS = "maxmeg/ops/"  # by names in strings
WORD = re.compile(r"[\w./-]+")
TEST_FILE = re.compile(r"tests/(.+/)?test_\w+\.py")
LONGEST_STRING = 300  # characters; longer ones are texts, not names


def module_name(path: str) -> str:
    """Return maxmeg.ops.rope for maxmeg/ops/rope.py, and the name of the file alone in tests/."""
    parts = path.removesuffix(".py").split("/")
    if parts[0] == "tests":
        return parts[-1]
    parts = ["maxmeg", *parts] if parts[0] in MAPPED else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(
    path: str, nodes: Iterable[ast.AST], modules: Iterable[str]
) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for each import; `from a import b` imports a.b if that is a module."""
    package = module_name(path).split(".")
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = node.level - path.endswith("__init__.py")
            above = ".".join(package[: len(package) - up]) if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            inside = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in inside]
        else:
            continue
        for name in dict.fromkeys(names):
            yield node.lineno, name


@functools.cache
def syntax(text: str, path: str) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(text, path)))


def words(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the words in the short strings of a file."""
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    texts = (text for text in constants if isinstance(text, str) and len(text) <= LONGEST_STRING)
    return {word.strip("./") for text in texts for word in WORD.findall(text)}


def names(path: str) -> set[str]:
    """Return the words that refer to a file in the strings of a test."""
    file, module = Path(path), module_name(path)
    if file.suffix != ".py":
        return {path, file.name, str(file.parent)}
    commands = {n for n, command in COMMANDS.items() if command.target.split(":")[0] == module}
    mapped = {file.stem} if file.parts[0] in MAPPED else set()
    return {path, file.name, module} | commands | mapped


def users(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return file -> the files that use it. `sources`: path -> text, empty if it is not Python."""
    modules = {module_name(path): path for path in sources if path.endswith(".py")}
    used_by: dict[str, set[str]] = defaultdict(set)
    named_by: dict[str, set[str]] = defaultdict(set)
    for path, text in sources.items():
        if not path.endswith(".py"):
            continue
        nodes = syntax(text, path)
        if Path(path).name == "conftest.py":  # what it imports serves all, and is no news
            continue
        for _, name in imports(path, nodes, modules):
            if name in modules:
                used_by[modules[name]].add(path)
        for word in words(nodes) if path.startswith(("tests/", LOADS_KERNELS)) else ():
            named_by[word].add(path)
    for path in sources:
        by = set().union(*(named_by[name] for name in names(path)))
        loads = {user for user in by if user.startswith(LOADS_KERNELS)}
        used_by[path] |= by - loads | (loads if path.startswith("kernels/") else set())
        if Path(path).name == "conftest.py":
            folder = path.removesuffix("conftest.py")
            used_by[path] |= {other for other in sources if other.startswith(folder)}
    used_by["maxmeg/api.py"].add("maxmeg/__init__.py")  # imports it when a name is first used
    return used_by


def distances(used_by: dict[str, set[str]], changed: Iterable[str]) -> dict[str, int]:
    """Return file -> number of uses between the change and it, if it is reached."""
    reached = dict.fromkeys(changed, 0)
    border = list(reached)
    while border:
        users = [(user, reached[path] + 1) for path in border for user in used_by.get(path, ())]
        border = [user for user, _ in dict(users).items() if user not in reached]
        reached |= {user: distance for user, distance in users if user not in reached}
    return reached


def git(*arguments: str) -> list[str]:
    """Return git's output lines. OSError without git, CalledProcessError if it fails."""
    command = ["git", *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return ended.stdout.splitlines()


def read_sources() -> dict[str, str]:
    """Read the Python files that git tracks or would add; other files have an empty text."""
    paths = git("ls-files", "--cached", "--others", "--exclude-standard")
    files = [path for path in dict.fromkeys(paths) if (REPOSITORY / path).is_file()]
    return {p: (REPOSITORY / p).read_text() if p.endswith(".py") else "" for p in files}


def changed_files(base: str) -> list[str]:
    """Return the files that differ between `base` and the working tree, with untracked ones."""
    (commit,) = git("rev-parse", "--verify", f"{base}^{{commit}}")
    differ = git("diff", "--name-only", commit)
    return differ + git("ls-files", "--others", "--exclude-standard")


def tests_among(reached: dict[str, int]) -> dict[str, int]:
    return {path: d for path, d in reached.items() if TEST_FILE.fullmatch(path)}


def reached_tests(base: str) -> dict[str, int]:
    """Return test file -> distance, for test files that the change since `base` can reach."""
    return tests_among(distances(users(read_sources()), changed_files(base)))
