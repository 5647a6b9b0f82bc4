"""The tables of a plan, for text and pages."""

import dataclasses
from collections.abc import Sequence

from maxmeg.pages.table import Marked, Table
from maxmeg.planning.report import Analytic, Collective, Compiled
from maxmeg.runtime.metrics.progress import quantity

GIB = 2**30
SHORT = 0.1  # seconds; shorter steps are shown in milliseconds
DAY = 86_400  # seconds


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout of a search. settings: values by flag name."""

    settings: dict[str, int | str | bool]
    analytic: Analytic
    compiled: Compiled | None = None

    @property
    def layout(self) -> str:
        """ "tensor 8, pipe 4, recompute full", without what is as always."""
        single_stage = self.settings.get("parallel.pipe") == 1
        words = [
            f"{path.rpartition('.')[2].replace('_', ' ')} {value}"
            for path, value in self.settings.items()
            if value not in (0, 1, "apart", "auto")
            and not (single_stage and path == "parallel.schedule")
        ]
        return ", ".join(words + ["offload"] * bool(self.settings.get("optim.offload")))


def parameters(report: Analytic) -> Table:
    """Numbers of parameters by kind."""
    total = sum(report.parameters.values())
    rows: list[list] = [
        [kind, f"{count:,}", f"{count / max(total, 1):.1%}", count / max(total, 1)]
        for kind, count in report.parameters.items()
    ]
    rows.append(_bold("total", f"{total:,}", "", ""))
    return Table(["kind", "number", "share", ""], rows, "lnsf", tint=0)


def memory(parts: dict[str, int], capacity: int) -> Table:
    """Bytes by purpose, and their sum."""
    total = sum(parts.values())
    rows: list[list] = [
        [name, gib(size), f"{size / max(capacity, 1):.1%}"]
        for name, size in (*parts.items(), ("total", total))
        if size or name == "total"
    ]
    rows[-1] = _bold(*rows[-1])
    return Table(["", "GiB", "of capacity"], rows, "lns", swatches=True)


def remedies(report: Analytic) -> Table:
    """Flags that would make a config fit."""
    rows = [[r.flags, gib(r.total), f"x {r.slowdown:.2f}"] for r in report.remedies]
    return Table(["any one of these makes it fit", "GiB", "step"], rows, "wnn")


def activations(report: Analytic) -> Table:
    """Bytes of activations by recompute mode."""
    largest = max(*report.activations.values(), 1)
    rows = [[mode, gib(size), size / largest] for mode, size in report.activations.items()]
    return Table(["mode", "GiB", ""], rows, "lnf", tint=4)


def step_time(report: Analytic) -> Table:
    """The parts of a step's time."""
    durations, total = times(report), max(report.step_seconds, 1e-12)
    rows: list[list] = [
        [n, durations[n], part / total] for n, part in parts_of_step(report).items()
    ]
    return Table(["", "", ""], [*rows, _bold("step", durations["step"], "")], "lnf")


def traffic(report: Analytic) -> Table:
    """What is communicated, by mesh axis."""
    slowest = max((row.seconds for row in report.traffic), default=0.0) or 1.0
    rows = [
        [
            t.axis,
            t.purpose,
            t.kind,
            f"{t.runs:,}",
            gib(t.volume),
            f"{t.seconds * 1e3:.1f}",
            t.seconds / slowest,
        ]
        for t in report.traffic
    ]
    return Table(["axis", "purpose", "kind", "runs", "GiB sent", "ms", ""], rows, "lwlnnnf", tint=2)


def choices(layouts: Sequence[Choice]) -> Table:
    """The ranked layouts, with the compiler's memory if known; "!": it does not fit."""
    any_compiled = any(choice.compiled for choice in layouts)
    rows = []
    for rank, choice in enumerate(layouts, 1):
        report, compiled = choice.analytic, choice.compiled
        row: list[str | Marked] = [
            f"{rank:2}. {choice.layout}",
            times(report)["step"],
            f"{report.tokens_per_second / report.devices:,.0f}",
            f"{report.mfu:.1%}",
            f"{report.bubble_fraction:.1%}",
            gib(report.total),
        ]
        if compiled:
            size, look = gib(compiled.total), "good" if compiled.fits else "bad"
            row.append(Marked(size + "!" * (not compiled.fits), look))
        rows.append(row + [""] * (any_compiled and not compiled))
    header = ["layout", "step", "tokens/s/GPU", "MFU, estimate", "bubble", "GiB"]
    return Table(header + ["compiled GiB"] * any_compiled, rows, "wnnnnn" + "n" * any_compiled)


def kernels(report: Compiled) -> Table:
    """The program's custom kernels."""
    rows = [[Marked(name, "code"), f"{runs:,}"] for name, runs in report.kernels.items()]
    return Table(["target", "runs"], rows, "ln")


def collectives(report: Compiled) -> Table:
    """The program's collectives, those of one kind in a row."""
    rows = []
    for row in merged(report.collectives):
        word = ("async" if row.asynchronous else "sync") + ", if needed" * row.unbounded
        overlap = Marked(word, "" if row.asynchronous else "bad")
        counts = [f"{count:,}" for count in (row.instructions, row.runs, row.exposed)]
        rows.append([" + ".join(row.axes) or "-", row.kind, overlap, *counts, gib(row.volume)])
    header = ["axes", "kind", "", "instructions", "runs", "exposed", "GiB"]
    return Table(header, rows, "lllnnnn")


def merged(collectives: Sequence[Collective]) -> list[Collective]:
    """One row per kind, axes, asynchrony and boundedness, whatever the number of runs."""
    rows: dict[tuple, Collective] = {}
    for new in collectives:
        key = (new.axes, new.kind, new.asynchronous, new.unbounded)
        counts = ("instructions", "runs", "volume", "exposed")
        old = rows.get(key, dataclasses.replace(new, **dict.fromkeys(counts, 0)))
        sums = {name: getattr(old, name) + getattr(new, name) for name in counts}
        rows[key] = dataclasses.replace(new, **sums)
    return list(rows.values())


def parts_of_step(report: Analytic) -> dict[str, float]:
    """Seconds of a step: compute, bubble, exposed communication and transfers to host memory."""
    busy = report.compute_seconds + report.communication_seconds + report.offload_seconds
    parts = {
        "compute": report.compute_seconds,
        "bubble": max(report.step_seconds - busy, 0.0),
        "communication, exposed": report.communication_seconds,
    }
    host = {"host memory, exposed": report.offload_seconds} if report.host_memory else {}
    return parts | host


def times(report: Analytic) -> dict[str, str]:
    """The parts of a step and their sum, all in seconds or all in milliseconds."""
    parts = parts_of_step(report) | {"step": report.step_seconds}
    scale, unit = (1, "s") if report.step_seconds >= SHORT else (1000, "ms")
    return {name: f"{scale * seconds:,.3f} {unit}" for name, seconds in parts.items()}


def speeds(report: Analytic) -> dict[str, str]:
    """Return the estimated speed in the units in which speeds are published."""
    days = 1e12 / report.tokens_per_second / DAY
    return {
        "tokens per second": quantity(report.tokens_per_second),
        "tokens/s per GPU": f"{report.tokens_per_second / report.devices:,.0f}",
        "TFLOP/s per GPU": f"{report.flops / report.step_seconds / report.devices / 1e12:.0f}",
        "MFU, estimate": f"{report.mfu:.1%}",
        "days for 1T tokens": f"{days:,.1f}",
    }


def compiled_memory(report: Compiled) -> dict[str, int]:
    """Bytes per device by the compiler's count."""
    parts = {
        "state and batch": report.arguments,
        "temporaries": report.temporaries,
        "other outputs": report.outputs_not_aliased,
    }
    return {name: size for name, size in parts.items() if size}


def gib(size: float) -> str:
    """Bytes as GiB with two decimals."""
    amount = size / GIB
    return "<0.01" if 0 < amount < 0.005 else f"{amount:,.2f}"


def _bold(*cells: str) -> list[Marked]:
    return [Marked(cell, "bold") for cell in cells]
