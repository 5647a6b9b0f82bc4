"""The budgets of this code base, checked over the syntax trees of its files.

Each rule is a function from sources (path -> text) to violations (`file:line: what, and the
budget`). All rules run over the repository, and each over planted violations and near misses.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import import_graph
import pytest
from import_graph import module_name, syntax

REPOSITORY = Path(__file__).parent.parent
Sources = dict[str, str]

FILE_LINES = {"": 500, "kernels/": 700, "configs/": 40}  # the longest prefix counts
FILE_LINES |= dict.fromkeys((f"maxmeg/layers/{n}.py" for n in ("mamba", "delta")), 140)
COMMAND_LINES = 120
FUNCTION_LINES = 80
ARGUMENTS = 8
LINE_WIDTH = 100
CORE = ("train", "step", "state", "parallel", "weights", "pipeline", "layers", "models")
CORE += ("objectives", "optim", "eval_step", "reference_step")
CORE_LINES = 10_100
LOOP = {"maxmeg/train.py": "train", "maxmeg/step.py": "train_step"}
LOOP_LINES = 60  # of the two together
WINDOW, DUPLICATED_PERCENT = 12, 2.0

# Each group may import from the groups before it and from itself, without a cycle. A module or a
# folder that is named stands by itself, apart from the folder around it.
DIRECTION = [
    ["config", "pages"],
    ["processes"],
    ["parallel"],
    ["kernels"],
    ["ops"],
    ["distributed", "weights"],
    ["layers"],
    ["pipeline"],
    ["models"],
    ["hf.settings"],
    ["configs"],
    ["objectives"],
    ["optim", "data", "checkpoint", "planning", "runtime"],
    ["state", "checkpoint.disk", "step", "eval_step", "reference_step"],
    ["hf.families", "hf.formats", "hf.matching", "hf.folder"],
    ["program", "planning.compile", "checkpoint.initialize", "checkpoint.resume"],
    ["hf", "inference"],
    ["megatron"],
    ["evals", "posttrain", "retrieval", "server"],
]
COMMANDS = ["train", "doctor", "evaluate", "generate", "preprocess", "convert", "plan"]
COMMANDS += ["chat", "plot", "serve", "retrieve", "__main__"]
GROUPS = [["maxmeg"], *DIRECTION, COMMANDS, ["api"]]
RANK = {name: rank for rank, group in enumerate(GROUPS) for name in group}
# The imports that may point upwards, when a function is called: `import maxmeg`, and a config that
# begins with the weights of a run, need no JAX.
LATER = [("maxmeg/__init__.py", "maxmeg.api"), ("maxmeg/hf/settings.py", "maxmeg.hf.folder")]

PACKAGE = ("maxmeg/", "configs/", "kernels/", "launch/")
IMPORTED = ("maxmeg/", "configs/", "kernels/")  # as maxmeg, maxmeg.configs and maxmeg.kernels
PROGRAMS = (*PACKAGE, "benchmarks/")
READS_ENVIRONMENT = ("launch/", "benchmarks/", "maxmeg/runtime/", "maxmeg/processes/multihost.py")
LEFTOVERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
FORBIDDEN_NAMES = re.compile(r"^(utils?|common|helpers?|misc)$|_v\d+$")
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_CALLS |= {f"builtins.{name}" for name in ("eval", "exec")}
FORBIDDEN_KEYWORDS = {"shell", "allow_pickle"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}
# Reads torch's lists of tensors by an unpickler that runs nothing, in a process of its own.
READS_PICKLES = "maxmeg/hf/formats/torch_child.py"
IMPORTS = re.compile(r"import|lazy|load_module", re.IGNORECASE)
# Loads Pallas kernels when a call needs one: importing them takes seconds.
IMPORTS_KERNELS = "maxmeg/ops/backend.py"
# Imports the command that runs, once its settings are checked: a mistake is answered before JAX is
# imported. tests/config/test_command_line.py follows the names.
IMPORTS_COMMANDS = "maxmeg/__main__.py"
# Names that say nothing of what a value is.
NO_NOUNS = "again ahead apart asked begun beside by found further given gone held how into kept"
NO_NOUNS += " known listed made mine more near needed on own said seen settled shown taken there"
NO_NOUNS += " through used wanted whole written"
NO_NOUN = re.compile(rf"_*({NO_NOUNS.replace(' ', '|')})(_[A-Z0-9]+)?_*")
CLOCKS = re.compile(r"time\.(time|monotonic|perf_counter|process_time|thread_time)(_ns)?\(\)")


def read_sources() -> Sources:
    folders = [REPOSITORY / name for name in (*PROGRAMS, "tests/")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in paths}


def within(sources: Sources, prefixes: tuple[str, ...]) -> Sources:
    return {path: text for path, text in sources.items() if path.startswith(prefixes)}


def walk(sources: Sources, prefixes: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path, text in within(sources, prefixes).items():
        for node in syntax(text, path):
            yield path, node


def imports(sources: Sources) -> Iterator[tuple[str, int, str]]:
    """(file, line, imported module of ours), those inside functions included."""
    sources = within(sources, IMPORTED)
    modules = {module_name(path) for path in sources}
    for path, text in sources.items():
        for line, name in import_graph.imports(path, syntax(text, path), modules):
            if name.split(".")[0] == "maxmeg" and (path, name) not in LATER:
                yield path, line, name


def file_length(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        budget = FILE_LINES[max((p for p in FILE_LINES if path.startswith(p)), key=len)]
        stem = re.fullmatch(r"maxmeg/(\w+)\.py", path)
        if stem and stem[1] in COMMANDS and stem[1] != "train":
            budget = COMMAND_LINES
        lines = len(text.splitlines())
        if lines > budget:
            yield f"{path}:{lines}: {lines} lines, budget {budget}"


def line_width(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > LINE_WIDTH:
                yield f"{path}:{number}: {len(line)} columns, budget {LINE_WIDTH}"


def function_size(sources: Sources) -> Iterator[str]:
    for path, node in walk(sources, PROGRAMS):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        name, arguments = getattr(node, "name", "lambda"), node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
        count = len(named) - (bool(named) and named[0].arg in ("self", "cls"))
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {name} has {lines} lines, budget {FUNCTION_LINES}"
        if count > ARGUMENTS:
            yield f"{path}:{node.lineno}: {name} has {count} arguments, budget {ARGUMENTS}"


def import_direction(sources: Sources) -> Iterator[str]:
    for path in within(sources, IMPORTED):
        if place(module_name(path)) not in RANK:
            yield f"{path}:1: {place(module_name(path))!r} has no place in DIRECTION or COMMANDS"
    for path, line, target in imports(sources):
        source, target_place = place(module_name(path)), place(target)
        if RANK.get(source, 0) < RANK.get(target_place, 0):
            yield f"{path}:{line}: {source} imports {target}, which stands above it"


def place(module: str) -> str:
    """The name that decides a module's rank: the longest in DIRECTION, or the first-level."""
    parts = module.removeprefix("maxmeg.").split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in RANK), parts[0])


def import_cycles(sources: Sources) -> Iterator[str]:
    edges: dict[str, dict[str, str]] = {}
    for path, line, target in imports(sources):
        edges.setdefault(module_name(path), {}).setdefault(target, f"{path}:{line}")
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> Iterator[str]:
        for target, where in edges.get(module, {}).items():
            if target in trail:
                cycle = [*trail[trail.index(target) :], target]
                yield f"{where}: import cycle {' > '.join(cycle)}, budget 0"
            elif target not in done:
                yield from visit(target, [*trail, target])
        done.add(module)

    for module in list(edges):
        if module not in done:
            yield from visit(module, [module])


def imports_by_string(sources: Sources) -> Iterator[str]:
    for path, node in walk(sources, IMPORTED):
        if not isinstance(node, ast.Call) or path == IMPORTS_KERNELS:
            continue
        called = ast.unparse(node.func).split(".")[-1]
        named = [ast.unparse(argument).lstrip("f") for argument in node.args]
        if IMPORTS.search(called) and any(name.startswith("'maxmeg.") for name in named):
            yield f"{path}:{node.lineno}: {ast.unparse(node)} imports by a string: use import"
    text = sources.get(IMPORTS_COMMANDS, "")
    if text.count("import_module(") > 1:
        yield f"{IMPORTS_COMMANDS}: {text.count('import_module(')} imports by a string, budget 1"


def core_size(sources: Sources) -> Iterator[str]:
    core = tuple(f"maxmeg/{name}{end}" for name in CORE for end in ("/", ".py"))
    lines = sum(len(text.splitlines()) for text in within(sources, core).values())
    if lines > CORE_LINES:
        yield f"{', '.join(CORE)}: {lines} lines together, budget {CORE_LINES}"


def loop_size(sources: Sources) -> Iterator[str]:
    lines = 0
    for path, node in walk(sources, tuple(LOOP)):
        if isinstance(node, ast.FunctionDef) and node.name == LOOP[path]:
            lines += (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > LOOP_LINES:
        yield f"the training loop and the step: {lines} lines together, budget {LOOP_LINES}"


def duplication(sources: Sources) -> Iterator[str]:
    seen: dict[bytes, str] = {}
    total, copies = 0, []
    for path, text in within(sources, PROGRAMS).items():
        stripped = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
        lines = [(number, line) for number, line in stripped if line]
        total += len(lines)
        copied: dict[int, str] = {}
        for start in range(len(lines) - WINDOW + 1):
            window = lines[start : start + WINDOW]
            digest = hashlib.sha256("\n".join(line for _, line in window).encode()).digest()
            first = seen.setdefault(digest, f"{path}:{window[0][0]}")
            if first != f"{path}:{window[0][0]}":
                copied |= {number: f"{path}:{number}: as {first}" for number, _ in window}
        copies += list(copied.values())
    percent = 100 * len(copies) / max(total, 1)
    if percent > DUPLICATED_PERCENT:
        yield f"{percent:.1f} % of lines are duplicated, budget {DUPLICATED_PERCENT} %"
        yield from copies[::WINDOW]


def forbidden_code(sources: Sources) -> Iterator[str]:
    for path, node in walk(sources, PROGRAMS):
        found: list[str] = []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in FORBIDDEN_CALLS else []
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in FORBIDDEN_KEYWORDS and not off:
                    found.append(f"{keyword.arg}=")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            allowed = {"pickle"} if path == READS_PICKLES else set()
            forbidden = FORBIDDEN_MODULES - allowed
            found += [name for name in names if name.split(".")[0] in forbidden]
        for name in found:
            yield f"{path}:{node.lineno}: {name} is forbidden: it can run what a file holds"


def environment(sources: Sources) -> Iterator[str]:
    for path, node in walk(sources, PACKAGE):
        variables = ("environ", "environb", "getenv", "putenv")
        direct = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"
        found = direct and node.attr in variables
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found = any(alias.name in variables for alias in node.names)
        if found and not path.startswith(READS_ENVIRONMENT):
            yield f"{path}:{node.lineno}: uses the environment, only {READS_ENVIRONMENT} may"


def leftovers(sources: Sources) -> Iterator[str]:
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            if match := LEFTOVERS.search(line):
                yield f"{path}:{number}: {match[0]} left behind, budget 0"


def file_names(sources: Sources) -> Iterator[str]:
    for path in sources:
        for part in path.removesuffix(".py").split("/"):
            if FORBIDDEN_NAMES.search(part):
                yield f"{path}:1: {part!r} says nothing of what is inside: name it by its subject"


def noun_names(sources: Sources) -> Iterator[str]:
    for path, node in walk(sources, PACKAGE):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        for field in ("id", "attr") if is_stored else ("name", "asname", "arg"):
            name = "" if isinstance(node, ast.keyword) else getattr(node, field, None) or ""
            if NO_NOUN.fullmatch(name):
                yield f"{path}:{getattr(node, 'lineno', 0)}: {name} is no noun: name what it is"


def config_docstrings(sources: Sources) -> Iterator[str]:
    for path, text in within(sources, ("configs/",)).items():
        tree = ast.parse(text)
        if not (ast.get_docstring(tree) or "").strip():
            yield f"{path}:1: no docstring: give command, expected time and expected result"
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if "get_config" not in functions and not path.endswith("__init__.py"):
            yield f"{path}:1: no get_config()"


def fields_by_order(sources: Sources) -> Iterator[str]:
    """Settings and specs gain fields with every feature: unpacked values would shift silently."""
    classes = {
        node.name
        for _, node in walk(sources, PROGRAMS)
        if isinstance(node, ast.ClassDef)
        and node.name.endswith(("Config", "Spec"))
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    for path, node in walk(sources, PROGRAMS):
        if isinstance(node, ast.Call) and any(isinstance(a, ast.Starred) for a in node.args):
            called = ast.unparse(node.func).split(".")[-1]
            if called in classes:
                yield f"{path}:{node.lineno}: {called} gets unpacked values: name its fields"


def elapsed_time(sources: Sources) -> Iterator[str]:
    compared = (each for each in walk(sources, ("tests/",)) if isinstance(each[1], ast.Compare))
    for path, comparison in compared:
        for node in ast.walk(comparison):
            difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
            if difference and CLOCKS.match(ast.unparse(node.left)):
                yield f"{path}:{node.lineno}: a test measures time: do it in benchmarks/"


RULES: list[Callable[[Sources], Iterator[str]]] = [
    file_length,
    line_width,
    function_size,
    import_direction,
    import_cycles,
    imports_by_string,
    core_size,
    loop_size,
    duplication,
    forbidden_code,
    environment,
    leftovers,
    file_names,
    noun_names,
    config_docstrings,
    fields_by_order,
    elapsed_time,
]


@pytest.fixture(scope="module")
def repository() -> Sources:
    return read_sources()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps(rule: Callable[[Sources], Iterator[str]], repository: Sources):
    assert len(repository) > 10
    violations = list(rule(repository))
    assert not violations, "\n" + "\n".join(violations)


def test_a_change_of_any_module_reaches_a_test(repository: Sources):
    """What `pytest --affected` follows."""
    used_by = import_graph.users(repository)
    for path in within(repository, PACKAGE):
        reached = import_graph.distances(used_by, [path])
        assert any("/test_" in other for other in reached), path


def lines(count: int) -> str:
    return "\n".join(f"x{n} = {n}" for n in range(count))


def function(arguments: str = "", body: int = 1) -> str:
    return f"def f({arguments}):\n" + "    pass\n" * body


LEFT = "TO" + "DO"
LOOP_OF_62 = {path: f"def {name}():" + "\n  1" * 30 for path, name in LOOP.items()}
SPEC = "@dataclasses.dataclass(frozen=True)\nclass ASpec:\n    x: int\n\n\n"
TIMED = "time.process_time() - start < 1"
CONFIG = '"""Doc."""\ndef get_config():\n    pass\n'
PLANTED = [
    (file_length, {"maxmeg/ops/a.py": lines(501)}, "a.py:501: 501 lines, budget 500"),
    (file_length, {"kernels/a.py": lines(701)}, "budget 700"),
    (file_length, {"maxmeg/plan.py": lines(121)}, "budget 120"),
    (file_length, {"configs/a.py": lines(41)}, "budget 40"),
    (file_length, {"tests/a.py": lines(501)}, "budget 500"),
    (line_width, {"tests/a.py": "\n" + "x" * 101}, "a.py:2: 101 columns, budget 100"),
    (function_size, {"maxmeg/a.py": function(body=80)}, "a.py:1: f has 81 lines, budget 80"),
    (function_size, {"maxmeg/a.py": function("a,b,c,d,e,/,f,g,*,h,i")}, "f has 9 arguments"),
    (function_size, {"maxmeg/a.py": function("a,b,c,d,e,f,g,*h,**i")}, "f has 9 arguments"),
    (function_size, {"launch/a.py": "g = lambda a,b,c,d,e,f,g,h,i: 0"}, "lambda has 9"),
    (
        import_direction,
        {"maxmeg/ops/a.py": "def f():\n    from maxmeg.layers import b", "maxmeg/layers/b.py": ""},
        "ops/a.py:2: ops imports maxmeg.layers.b, which stands above it",
    ),
    (import_direction, {"maxmeg/config/a.py": "import maxmeg.step"}, "config imports maxmeg.step"),
    (import_direction, {"maxmeg/config/a.py": "from ..ops import x"}, "imports maxmeg.ops"),
    (import_direction, {"kernels/a.py": "import maxmeg.ops.b"}, "kernels imports maxmeg.ops.b"),
    (import_direction, {"configs/a.py": "import maxmeg.optim"}, "configs imports maxmeg.optim"),
    (import_direction, {"maxmeg/__init__.py": "import maxmeg.config"}, "maxmeg imports"),
    (import_direction, {"maxmeg/hf/a.py": "import maxmeg.train"}, "hf imports maxmeg.train"),
    (import_direction, {"maxmeg/magic/a.py": ""}, "'magic' has no place"),
    (
        import_direction,
        {"maxmeg/planning/a.py": "from . import compile", "maxmeg/planning/compile.py": ""},
        "planning imports maxmeg.planning.compile, which stands above it",
    ),
    (
        import_cycles,
        {"maxmeg/ops/a.py": "from . import b", "maxmeg/ops/b.py": "def f():\n    from . import a"},
        "import cycle maxmeg.ops.a > maxmeg.ops.b > maxmeg.ops.a",
    ),
    (import_cycles, {"maxmeg/ops/a.py": "import maxmeg.ops.a"}, "import cycle"),
    (
        imports_by_string,
        {"maxmeg/ops/a.py": 'b = Lazy("maxmeg.ops.b")\nimportlib.import_module(f"maxmeg.{c}")'},
        "ops/a.py:2: importlib.import_module(f'maxmeg.{c}') imports by a string",
    ),
    (imports_by_string, {IMPORTS_COMMANDS: "import_module(a)\nimport_module(b)"}, "budget 1"),
    (
        core_size,
        {"maxmeg/step.py": "x", "maxmeg/layers/a.py": lines(CORE_LINES)},
        f"{CORE_LINES + 1} lines",
    ),
    (loop_size, LOOP_OF_62, "62 lines together, budget 60"),
    (duplication, {"maxmeg/a.py": lines(12), "maxmeg/b.py": lines(12)}, "50.0 % of lines"),
    (forbidden_code, {"maxmeg/a.py": "x = 1\neval('x')"}, "a.py:2: eval is forbidden"),
    (forbidden_code, {"launch/a.py": "exec('x')"}, "exec"),
    (forbidden_code, {"maxmeg/a.py": "import pickle as json"}, "pickle"),
    (forbidden_code, {"maxmeg/a.py": "from dill import loads"}, "dill"),
    (forbidden_code, {READS_PICKLES: "import dill"}, "dill"),
    (forbidden_code, {"maxmeg/a.py": "yaml.load(f, Loader)"}, "yaml.load"),
    (forbidden_code, {"maxmeg/a.py": "run('ls', shell=True)"}, "shell="),
    (forbidden_code, {"maxmeg/a.py": "np.load(f, allow_pickle=flag)"}, "allow_pickle="),
    (environment, {"maxmeg/ops/a.py": "import os\nos.environ['A']"}, "ops/a.py:2: uses the env"),
    (environment, {"configs/a.py": "os.getenv('A')"}, "uses the environment"),
    (environment, {"maxmeg/a.py": "from os import environ as e"}, "uses the environment"),
    (leftovers, {"tests/a.py": f"x = 1  # {LEFT}: more"}, "a.py:1: " + LEFT),
    (file_names, {"maxmeg/ops/utils.py": ""}, "'utils' says nothing"),
    (file_names, {"maxmeg/helpers/a.py": ""}, "'helpers'"),
    (file_names, {"kernels/attention_v2.py": ""}, "'attention_v2'"),
    (noun_names, {"maxmeg/a.py": "x = 1\n_known_BLD, y = f()"}, "a.py:2: _known_BLD is no noun"),
    (noun_names, {"kernels/a.py": "def shown(x, *, own): ..."}, "own is no noun"),
    (noun_names, {"launch/a.py": "import a as found\nself.kept = 1"}, "kept is no noun"),
    (config_docstrings, {"configs/a.py": "def get_config():\n    pass"}, "no docstring"),
    (config_docstrings, {"configs/a.py": '"""Doc."""'}, "no get_config()"),
    (
        fields_by_order,
        {"maxmeg/a.py": SPEC, "kernels/b.py": "import a\n\na.ASpec(1, *sizes, x=2)"},
        "kernels/b.py:3: ASpec gets unpacked values",
    ),
    (elapsed_time, {"tests/a.py": "assert time.time() - start < 5"}, "a.py:1: a test measures"),
    (elapsed_time, {"tests/a.py": "n / (time.process_time() - start) > 9"}, "a test measures"),
]
NEAR_MISSES = [
    (file_length, {"maxmeg/ops/a.py": lines(500), "kernels/a.py": lines(700)}),
    (file_length, {"maxmeg/plan.py": lines(120), "maxmeg/train.py": lines(200)}),
    (line_width, {"maxmeg/a.py": "x" * 100}),
    (function_size, {"maxmeg/a.py": function("self,a,b,c,d,e,f,g,h", 79)}),
    (import_direction, {"maxmeg/step.py": "import maxmeg.state, jax", "maxmeg/state.py": ""}),
    (import_direction, {"maxmeg/ops/a.py": "from maxmeg.kernels import x"}),
    (
        import_cycles,
        {
            "maxmeg/ops/__init__.py": "from maxmeg.ops.a import f",
            "maxmeg/ops/a.py": "from maxmeg.ops import b",
            "maxmeg/ops/b.py": "",
        },
    ),
    (imports_by_string, {"maxmeg/ops/a.py": 'import_module(name)\nprint("maxmeg.ops")'}),
    (imports_by_string, {IMPORTS_COMMANDS: "import_module(a)"}),
    (core_size, {"maxmeg/train.py": lines(CORE_LINES), "maxmeg/ops/a.py": lines(9)}),
    (loop_size, {"maxmeg/train.py": function(body=70), "maxmeg/step.py": function(body=70)}),
    (duplication, {"maxmeg/a.py": lines(11), "maxmeg/b.py": lines(11)}),
    (forbidden_code, {"maxmeg/a.py": "model.eval()\nrun('ls', shell=False)\nyaml.safe_load(f)"}),
    (forbidden_code, {READS_PICKLES: "import pickle"}),
    (environment, {"maxmeg/runtime/a.py": "os.environ", "maxmeg/a.py": "x.environ"}),
    (leftovers, {"maxmeg/a.py": f"x = '{LEFT.lower()}'\nMY_{LEFT}S = 1"}),
    (file_names, {"maxmeg/ops/commonly_used.py": "", "maxmeg/config/v.py": ""}),
    (noun_names, {"maxmeg/a.py": "is_known = f(own=x.found)", "tests/a.py": "kept = 1"}),
    (config_docstrings, {"configs/a.py": CONFIG, "configs/__init__.py": "'Runs'"}),
    (fields_by_order, {"maxmeg/a.py": SPEC + "ASpec(1, **sizes)\nPartitionSpec(*names)"}),
    (elapsed_time, {"tests/a.py": "assert time.monotonic() < end", "benchmarks/a.py": TIMED}),
    (elapsed_time, {"tests/a.py": "os.utime(path, (time.time() - 9, 0))"}),
]


@pytest.mark.parametrize(("rule", "sources", "message"), PLANTED)
def test_planted_violation_is_found(rule, sources: Sources, message: str):
    assert message in "\n".join(rule(sources))


@pytest.mark.parametrize(("rule", "sources"), NEAR_MISSES)
def test_near_miss_passes(rule, sources: Sources):
    assert list(rule(sources)) == []


def test_every_rule_has_planted_violations():
    assert {rule for rule, *_ in PLANTED} == {rule for rule, _ in NEAR_MISSES} == set(RULES)
