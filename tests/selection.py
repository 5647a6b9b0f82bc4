"""Which tests a run of pytest takes, and in which order: a plugin of pytest.

The plain run, `pytest -n 2`, takes every test but the slow ones. What costs much takes turns: of a
table (a parametrized test) TABLE_SECONDS at each commit, and no test more than CASE_SECONDS on
average, but all cases within ROUNDS commits. Costs are CPU-seconds, measured by `pytest --record`
and kept in seconds.json. A test marked `each_commit` runs at each, or a row of it; so do the cases
in each_commit.json, which execute what no others do (benchmarks/covering_rows.py).

`--affected` takes every case of the files that a change can reach, and no others. `--in-turns`
takes all cases, slow ones too, and `--left` those that the plain run leaves out at this commit;
`--seconds` ends it in time: the first half of the time goes to tests that the change can reach,
then comes the tenth of all tests that is this commit's, then the other tenths. What was not started
is counted as left for later.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from zlib import crc32

import pytest
from import_graph import git, reached_tests

RECORD = Path(__file__).parent / "seconds.json"
EACH_COMMIT = Path(__file__).parent / "each_commit.json"
LEAST_RECORDED = 0.1  # CPU-seconds of a case
TABLE_SECONDS = 0.3  # CPU-seconds of a table at each commit, but at least a row
CASE_SECONDS = 0.8  # CPU-seconds of a case at each commit, on average
ROUNDS = 10  # commits within which every case runs
CHUNK = 60  # CPU-seconds of slow cases of a file that belong to one commit
UNRECORDED = 3.0  # CPU-seconds of a slow case that nobody measured
OF_AFFECTED = 0.5  # of the time, for tests that the change can reach
AFFECTED, DRAWN = 0, 1  # phases; later ones are the tenths of other commits


PHASE = pytest.StashKey[int]()


@dataclasses.dataclass
class Run:
    """The decisions of the controlling process, which it sends to its workers.

    draw: number of the commit, which decides rows; None: all rows. reached: test file -> its
    distance from the change. affected_seconds: CPU-seconds for the tests of these files; those that
    do not fit wait for their turn like others. until: Unix time after which no case starts, of
    these files and of others.
    """

    draw: int | None = None
    in_turns: bool = False
    left: bool = False
    reached: dict[str, int] | None = None
    affected_seconds: float = math.inf
    until: tuple[float, float] | None = None


RUN = pytest.StashKey[Run]()
COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "which tests run")
    draw = "number that decides which rows of tables run; default: the number of commits"
    group.addoption("--draw", type=int, metavar="N", help=draw)
    group.addoption(
        "--every-row", action="store_true", help="all rows of tables, whatever they cost"
    )
    text = "only files that the change since the commit BASE can reach (HEAD: uncommitted changes)"
    group.addoption("--affected", nargs="?", const="HEAD", metavar="BASE", help=text)
    text = "slow tests too, in an order that brings every case first within a few commits"
    group.addoption("--in-turns", action="store_true", help=text)
    text = "--in-turns, without what a plain run takes at this commit"
    group.addoption("--left", action="store_true", help=text)
    text = "with --in-turns: tests that the change since BASE can reach come first"
    group.addoption("--since", metavar="BASE", help=text)
    group.addoption("--seconds", type=float, metavar="S", help="start no test after S seconds")
    group.addoption("--counts", metavar="FILE", help="write how many tests ran and were left")
    group.addoption("--record", action="store_true", help="write CPU-seconds into seconds.json")
    group.addoption("--selected", help="for workers: what the controlling process decided")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist: in the order of the selection
        config.option.loadscopereorder = False
    config.addinivalue_line("markers", "each_commit: it, or a row of it, runs at each commit")
    config.stash[RUN] = run = decide(config)
    config.pluginmanager.register(Clock(config, run))


def number_of_commits() -> int:
    """Return the number of commits, or 0 without git or a repository."""
    try:
        return int(git("rev-list", "--count", "HEAD")[0])
    except (OSError, subprocess.CalledProcessError):
        return 0


def decide(config: pytest.Config) -> Run:
    """Read the options. Workers of pytest-xdist read the decision of the controlling process."""
    option = config.option
    if option.selected:
        return Run(**json.loads(option.selected))
    names_tests = config.args_source == config.ArgsSource.ARGS
    in_turns = option.in_turns or option.left
    draw = option.draw
    all_rows = option.every_row or option.affected or (names_tests and not in_turns)
    if draw is None and not all_rows:
        draw = number_of_commits()
    base = option.affected or option.since
    try:
        reached = reached_tests(base) if base else None
    except (OSError, subprocess.CalledProcessError):
        raise pytest.UsageError(f"--affected needs git, and {base!r} to be a commit") from None
    until, affected_seconds = None, math.inf
    if option.seconds is not None:
        now = time.time()
        share = OF_AFFECTED if option.since else 1
        until = (now + share * option.seconds, now + option.seconds)
        affected_seconds = share * option.seconds * (getattr(option, "numprocesses", None) or 1)
    if in_turns:
        option.markexpr = ""
    run = Run(draw, in_turns, option.left, reached, affected_seconds, until)
    option.selected = json.dumps(dataclasses.asdict(run))
    return run


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "gpu"))


def table(item: pytest.Item) -> str:
    """Return tests/FILE.py::FUNCTION, without the parameters of the case."""
    return item.nodeid.split("[")[0]


def file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def recorded() -> dict[str, float]:
    """Return test function -> CPU-seconds of one case. Empty if nothing was recorded."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def groups(rows: int, seconds: float, each_commit: bool = False) -> int:
    """Return the number of groups of a table's rows; each commit runs one group.

    Groups may be empty unless `each_commit`: a row of 2 CPU-seconds runs at each third commit.
    """
    fit = max(1, int(TABLE_SECONDS / seconds)) if seconds else rows
    commits = 1 if each_commit else max(1, math.ceil(seconds / CASE_SECONDS))  # of a row
    return min(ROUNDS, -(-rows // fit) * commits)


def plain(
    items: list[pytest.Item],
    draw: int,
    seconds: dict[str, float],
    always: frozenset[str] = frozenset(),
) -> list[pytest.Item]:
    """Return the cases that a plain run takes at the commit `draw`, and those in `always`."""
    tables = defaultdict(list)
    for item in items:
        if not is_slow(item):
            tables[table(item)].append(item)
    taken = {item for item in items if item.nodeid in always}
    for name, rows in tables.items():
        marked = rows[0].get_closest_marker("each_commit") is not None
        number = groups(len(rows), seconds.get(name, 0), marked)
        turn = draw + crc32(name.encode())
        taken |= {row for i, row in enumerate(rows) if (turn + i) % number == 0}
    return [item for item in items if item in taken]


def estimate(item: pytest.Item, seconds: dict[str, float]) -> float:
    """Return the CPU-seconds of a case."""
    return seconds.get(table(item), UNRECORDED if is_slow(item) else LEAST_RECORDED)


def phases(
    items: list[pytest.Item],
    draw: int,
    seconds: dict[str, float],
    reached: dict[str, int],
    affected_seconds: float = math.inf,
) -> dict[pytest.Item, tuple[int, int]]:
    """Return case -> (phase, distance from the change). Cases run in this order.

    Of the cases that the change can reach, the nearest come first that fit into `affected_seconds`.
    About CHUNK CPU-seconds of a file's cases belong to the same commit, so that they share imports,
    fixtures and compiled programs.
    """
    order = {}
    spent: dict[str, float] = defaultdict(float)
    for item in items:
        turn = crc32(file(item).encode()) + int(spent[file(item)] / CHUNK)
        spent[file(item)] += estimate(item, seconds)
        order[item] = (DRAWN + (turn - draw) % ROUNDS, 0)
    near = [item for item in items if file(item) in reached]
    for item in sorted(near, key=lambda item: reached[file(item)]):
        affected_seconds -= estimate(item, seconds)
        if affected_seconds >= 0:
            order[item] = (AFFECTED, reached[file(item)])
    return order


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what does not run, and sort the others: by turns, or by cost."""
    run, seconds, chosen = config.stash[RUN], recorded(), set(items)
    if run.draw is not None:
        always = json.loads(EACH_COMMIT.read_text()) if EACH_COMMIT.exists() else ()
        taken = set(plain(items, run.draw, seconds, frozenset(always)))
        chosen = {item for item in items if is_slow(item) or (item in taken) != run.left}
    if run.in_turns and not run.left:
        chosen = set(items)
    if run.reached is not None and not run.in_turns:
        chosen = {item for item in chosen if file(item) in run.reached}
    kept = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    if run.in_turns:
        order = phases(kept, run.draw or 0, seconds, run.reached or {}, run.affected_seconds)
        for item, (phase, _) in order.items():
            item.stash[PHASE] = phase
    else:
        cost: dict[str, float] = defaultdict(float)
        for item in kept:
            cost[file(item)] += seconds.get(table(item), 0)
        reached = run.reached or {}
        order = {item: (reached.get(file(item), 0), -cost[file(item)]) for item in kept}
    items[:] = sorted(kept, key=order.__getitem__)


@pytest.fixture
def counts(pytestconfig: pytest.Config) -> dict[str, int]:
    """The counts of this run. A test that repeats a crashed process itself adds to `repeated`."""
    return pytestconfig.stash[COUNTS]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With `-n`, tests of a file that follow each other stay in one process: they share what they
    compile."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.crashes: Counter[str] = Counter()

        def _split_scope(self, nodeid: str) -> str:
            return self.scopes[nodeid]

        @functools.cached_property
        def scopes(self) -> dict[str, str]:
            files = itertools.groupby(self.collection, key=lambda nodeid: nodeid.split("::")[0])
            return {node: f"{file} {i}" for i, (file, nodes) in enumerate(files) for node in nodes}

        def remove_node(self, node) -> str | None:
            """Return the test in which a worker crashed; the first time, queue it again."""
            units = [unit for unit in self.assigned_work[node].values() if not all(unit.values())]
            crashed = next((name for name, done in units[0].items() if not done)) if units else None
            if crashed:
                self.crashes[crashed] += 1
                units[0][crashed] = self.crashes[crashed] > 1
            super().remove_node(node)
            return crashed

        def _reschedule(self, node) -> None:
            """A worker starts a test once it knows the next one or the end. One that replaces a
            crashed worker may get a single test, and xdist lets it wait for ever."""
            super()._reschedule(node)
            pending = self._pending_of(self.assigned_work[node])
            while self.workqueue and pending < 2 and not node.shutting_down:
                self._assign_work_unit(node)
                pending = self._pending_of(self.assigned_work[node])
            for other in self.nodes if not self.workqueue else ():
                if not other.shutting_down:
                    other.shutdown()

    return Scheduling(config, log)


class Clock:
    """Skip cases for which no time is left, measure the others, and count both."""

    def __init__(self, config: pytest.Config, run: Run):
        self.config, self.run = config, run
        self.seconds = recorded()
        self.counts = config.stash[COUNTS] = {"ran": 0, "left": 0, "repeated": 0}
        self.spent: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if self.run.until is None:
            return None
        until = self.run.until[item.stash.get(PHASE, DRAWN) != AFFECTED]
        if time.time() + estimate(item, self.seconds) < until:
            return None
        self.counts["left"] += 1
        # The case before kept its module's fixtures for this one, which ends here.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        start = sum(os.times()[:4])
        self.counts["ran"] += 1
        try:
            return (yield)
        finally:
            self.spent[table(item)].append(sum(os.times()[:4]) - start)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """Add the counts of a worker of pytest-xdist that has ended."""
        output = getattr(node, "workeroutput", {})
        for name, number in output.get("counts", {}).items():
            self.counts[name] += number
        for name, spent in output.get("spent", {}).items():
            self.spent[name] += spent

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report, sched) -> None:
        """Report the first crash in a test as skipped: another worker repeats the test."""
        if sched.crashes[crashitem] == 1:
            self.counts["repeated"] += 1
            report.outcome = "skipped"
            report.longrepr = (crashitem.split("::")[0], 0, f"repeated: {report.longrepr}")

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput |= {"counts": self.counts, "spent": dict(self.spent)}
            return
        if self.config.option.record:
            write_record(self.spent, self.config.rootpath)
        if self.config.option.counts:
            Path(self.config.option.counts).write_text(json.dumps(self.counts))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.counts["left"] or self.counts["repeated"]:
            left, repeated = self.counts["left"], self.counts["repeated"]
            terminalreporter.write_line(f"{left} left for later, {repeated} repeated after a crash")


def write_record(spent: dict[str, list[float]], root: Path) -> None:
    """Add this run's means to the record, and remove tests whose files no longer exist."""
    seconds = recorded()
    for name, values in spent.items():
        seconds[name] = round(sum(values) / len(values), 2)
    kept = {
        name: value
        for name, value in sorted(seconds.items())
        if value >= LEAST_RECORDED and (root / name.split("::")[0]).exists()
    }
    RECORD.write_text(json.dumps(kept, indent=0) + "\n")
