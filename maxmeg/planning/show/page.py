"""A plan as one self-contained HTML page."""

from collections.abc import Sequence

from maxmeg.pages.templates import Marked, Table, render
from maxmeg.pipeline.schedule import Table as Schedule
from maxmeg.planning.report import Analytic, Compiled
from maxmeg.planning.show.text import (
    CHOICE_HEADER,
    TRAFFIC_HEADER,
    Choice,
    Plan,
    choice_cells,
    collective_cells,
    compiled_memory,
    gib,
    merged,
    parts_of_step,
    schedule_facts,
    speeds,
    times,
    traffic_cells,
    verdict,
)
from maxmeg.planning.show.timeline import Timeline
from maxmeg.runtime.metrics.progress import quantity


def plan_html(plan: Plan) -> str:
    """The page; it has only the parts that the plan has."""
    return render(
        "plan.html",
        title=f"{plan.name} on {plan.hardware}" if plan.hardware else plan.name,
        command=plan.command,
        plan=plan,
        gib=gib,
        verdict=verdict,
        choices=_choices(plan.choices),
        **(_analytic(plan.analytic) if plan.analytic else {}),
        **(_pipeline(plan.table) if plan.table else {}),
        **(_compiled(plan.compiled) if plan.compiled else {}),
    )


def _analytic(report: Analytic) -> dict:
    memory = {name: size for name, size in report.memory.items() if size}
    largest = max(*report.activations.values(), 1)
    activations = [[mode, gib(size), size / largest] for mode, size in report.activations.items()]
    number, durations = sum(report.parameters.values()), times(report)
    parameters: list[list] = [
        [name, f"{count:,}", f"{count / max(number, 1):.1%}", count / max(number, 1)]
        for name, count in report.parameters.items()
    ]
    seconds: list[list] = [
        [name, durations[name], part / max(report.step_seconds, 1e-12)]
        for name, part in parts_of_step(report).items()
    ]
    slowest = max((row.seconds for row in report.traffic), default=0.0) or 1.0
    traffic = [[row.axis, *traffic_cells(row), row.seconds / slowest] for row in report.traffic]
    remedies = [[r.flags, gib(r.total), f"x {r.slowdown:.2f}"] for r in report.remedies]
    return {
        "facts": [
            ("parameters", quantity(number)),
            ("memory per GPU", f"{gib(report.total)} GiB"),
            ("step", durations["step"]),
            *list(speeds(report).items())[1:],
            ("bubble over ideal", f"{report.bubble_fraction:.1%}"),
        ],
        "remedies": Table(["any one of these makes it fit", "GiB", "step"], remedies, "wnn"),
        "estimated": memory,
        "estimated_parts": _parts(memory, report.capacity),
        "activations": Table(["mode", "GiB", ""], activations, "lnf", tint=4),
        "parameters": Table(
            ["kind", "number", "share", ""],
            [*parameters, _bold("total", f"{number:,}", "", "")],
            "lnnf",
            tint=0,
        ),
        "step": Table([""] * 3, [*seconds, _bold("step", durations["step"], "")], "lnf"),
        "traffic": Table(["axis", *TRAFFIC_HEADER, ""], traffic, "lwlnnnf", tint=2),
    }


def _pipeline(table: Schedule) -> dict:
    return {"timeline": Timeline(table), "standalone": False, "schedule": schedule_facts(table)}


def _compiled(report: Compiled) -> dict:
    memory = compiled_memory(report)
    kernels = [[Marked(name, "code"), f"{runs:,}"] for name, runs in report.kernels.items()]
    collectives = []
    for row in merged(report.collectives):
        text = ("yes" if row.asynchronous else "no") + ", if needed" * row.unbounded
        overlaps = Marked(text, "" if row.asynchronous else "bad")
        collectives.append(
            [" + ".join(row.axes) or "-", row.kind, overlaps, *collective_cells(row)]
        )
    header = ["axes", "kind", "asynchronous", "instructions", "runs", "exposed", "GiB"]
    return {
        "compiled": memory,
        "compiled_parts": _parts(memory, report.capacity),
        "program": [
            ("lowered in", f"{report.lower_seconds:.1f} s"),
            ("compiled in", f"{report.compile_seconds:.1f} s"),
            ("matrix products", f"{report.flops:.3e} FLOPs per GPU and step"),
        ],
        "kernels": Table(["target", "runs"], kernels, "ln"),
        "collectives": Table(header, collectives, "lllnnnn"),
    }


def _parts(memory: dict[str, int], capacity: int) -> Table:
    """Bytes by purpose, in the colours of the bar above, and their sum."""
    capacity, total = max(capacity, 1), sum(memory.values())
    rows: list[list] = [[n, gib(size), f"{size / capacity:.1%}"] for n, size in memory.items()]
    rows.append(_bold("total", gib(total), f"{total / capacity:.1%}"))
    return Table(["", "GiB", "of capacity"], rows, "lnn", swatches=True)


def _choices(choices: Sequence[Choice]) -> Table:
    any_compiled = any(choice.compiled for choice in choices)
    rows = []
    for rank, choice in enumerate(choices, 1):
        report = choice.compiled
        memory = report and Marked(gib(report.total), "good" if report.fits else "bad")
        cells = [str(rank), choice.layout, *choice_cells(choice.analytic)]
        rows.append(cells + [memory or ""] * any_compiled)
    header = ["", "layout", *CHOICE_HEADER] + ["compiled GiB"] * any_compiled
    return Table(header, rows, "nwnnnnn" + "n" * any_compiled)


def _bold(*cells: str) -> list[Marked]:
    return [Marked(cell, "bold") for cell in cells]
