"""A plan as one self-contained HTML page, for light and dark mode, wide and narrow screens."""

from collections.abc import Sequence
from html import escape

from maxmeg.pages import (
    COLOURS,
    beside,
    cards,
    colour,
    definitions,
    document,
    section,
    small_bar,
    swatch,
    table,
)
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
    speeds,
    times,
    traffic_cells,
    verdict,
)
from maxmeg.planning.show.timeline import timeline_facts, timeline_svg
from maxmeg.runtime.metrics.progress import quantity


def plan_html(plan: Plan) -> str:
    """The page; it has only the parts that the plan has."""
    title = f"{plan.name} on {plan.hardware}" if plan.hardware else plan.name
    parts = [_header(plan, title)]
    if plan.analytic:
        parts += [_facts(plan.analytic), _memory(plan.analytic), _parameters(plan.analytic)]
    if plan.choices:
        parts.append(section("Layouts, best first", _choices(plan.choices)))
    if plan.table:
        parts.append(section("Pipeline", _timeline(plan)))
    if plan.analytic and plan.analytic.traffic:
        parts.append(section("Communication per step, estimated", _traffic(plan.analytic)))
    if plan.compiled:
        parts.append(section("Compiled for these GPUs", _compiled(plan.compiled)))
    body = "\n".join(parts)
    command = f"<br>Made by <code>{escape(plan.command)}</code>" if plan.command else ""
    notes = f"""Bytes are per GPU; 1 GiB = 2<sup>30</sup> bytes. Estimates come from formulas and
datasheets, the compiled part from the compiler; nothing was run.{command}"""
    return document(title, body, notes)


def _header(plan: Plan, title: str) -> str:
    return f"<h1>{escape(title)}</h1>\n{definitions(plan.settings.items())}"


def _facts(report: Analytic) -> str:
    facts = [
        ("parameters", quantity(sum(report.parameters.values()))),
        ("memory per GPU", f"{gib(report.total)} GiB"),
        ("step", times(report)["step"]),
        *list(speeds(report).items())[1:],
        ("bubble over ideal", f"{report.bubble_fraction:.1%}"),
    ]
    return cards(facts)


def _memory(report: Analytic) -> str:
    parts = {name: size for name, size in report.memory.items() if size}
    left = _legend(parts, report.capacity)
    largest = max(*report.activations.values(), 1)
    rows = [
        [escape(mode), gib(size), small_bar(size / largest, COLOURS[4])]
        for mode, size in report.activations.items()
    ]
    right = "<h3>Activations by recompute mode</h3>" + table(["mode", "GiB", ""], rows, "lnf")
    content = _verdict(report) + _remedies(report)
    content += _bar(parts, report.capacity) + beside(left, right)
    return section("Memory per GPU, estimated", content)


def _remedies(report: Analytic) -> str:
    if not report.remedies:
        return ""
    rows = [[escape(r.flags), gib(r.total), f"x {r.slowdown:.2f}"] for r in report.remedies]
    return table(["any one of these makes it fit", "GiB", "step"], rows, "wnn")


def _verdict(report: Analytic | Compiled) -> str:
    kind = "good" if report.fits else "bad"
    return f'<p class="verdict {kind}">{escape(verdict(report))}</p>'


def _bar(parts: dict[str, int], capacity: int) -> str:
    """All parts in a row, as long as their sum or the capacity; a line marks the capacity."""
    total = sum(parts.values())
    whole = max(total, capacity, 1)
    cells = "".join(
        f'<i style="width:{100 * size / whole:.3f}%;background:{colour(index)}" '
        f'title="{escape(name)} {gib(size)} GiB"></i>'
        for index, (name, size) in enumerate(parts.items())
    )
    limit = f'<u style="left:{100 * capacity / whole:.3f}%"></u>' if total > capacity else ""
    label = f"{gib(total)} of {gib(capacity)} GiB"
    return f'<div class="bar" role="img" aria-label="{label}">{cells}{limit}</div>'


def _legend(parts: dict[str, int], capacity: int) -> str:
    total = sum(parts.values())
    rows = [
        [swatch(colour(index)) + escape(name), gib(size), f"{size / max(capacity, 1):.1%}"]
        for index, (name, size) in enumerate(parts.items())
    ]
    rows.append(["<b>total</b>", f"<b>{gib(total)}</b>", f"<b>{total / max(capacity, 1):.1%}</b>"])
    return "<h3>Parts</h3>" + table(["", "GiB", "of capacity"], rows, "lnn")


def _parameters(report: Analytic) -> str:
    total = max(sum(report.parameters.values()), 1)
    rows = [
        [escape(name), f"{count:,}", f"{count / total:.1%}", small_bar(count / total, COLOURS[0])]
        for name, count in report.parameters.items()
    ]
    rows.append(["<b>total</b>", f"<b>{total:,}</b>", "", ""])
    step = max(report.step_seconds, 1e-12)
    shown = times(report)
    time_rows = [
        [escape(name), shown[name], small_bar(seconds / step, tint)]
        for (name, seconds), tint in zip(parts_of_step(report).items(), COLOURS, strict=False)
    ]
    time_rows.append(["<b>step</b>", f"<b>{shown['step']}</b>", ""])
    left = section("Parameters", table(["kind", "number", "share", ""], rows, "lnnf"))
    right = section("Step time, estimated", table(["", "", ""], time_rows, "lnf"))
    return beside(left, right)


def _timeline(plan: Plan) -> str:
    assert plan.table is not None
    hint = '<p class="hint">The timeline scrolls sideways.</p>'
    picture = f'<div class="scroll timeline">{timeline_svg(plan.table)}</div>'
    return picture + hint + definitions(timeline_facts(plan.table))


def _traffic(report: Analytic) -> str:
    slowest = max((row.seconds for row in report.traffic), default=0.0) or 1.0
    rows = [
        [
            *(escape(cell) for cell in (row.axis, *traffic_cells(row))),
            small_bar(row.seconds / slowest, COLOURS[2]),
        ]
        for row in report.traffic
    ]
    header = ["axis", *TRAFFIC_HEADER, ""]
    return table(header, rows, "lwlnnnf")


def _compiled(report: Compiled) -> str:
    memory = compiled_memory(report)
    facts = [
        ("lowered in", f"{report.lower_seconds:.1f} s"),
        ("compiled in", f"{report.compile_seconds:.1f} s"),
        ("matrix products", f"{report.flops:.3e} FLOPs per GPU and step"),
    ]
    right = "<h3>Program</h3>" + definitions(facts)
    if report.kernels:
        rows = [[f"<code>{escape(name)}</code>", f"{n:,}"] for name, n in report.kernels.items()]
        right += "<h3>Custom kernels</h3>" + table(["target", "runs"], rows, "ln")
    content = [
        _verdict(report),
        _bar(memory, report.capacity),
        beside(_legend(memory, report.capacity), right),
    ]
    if report.collectives:
        rows = [
            [
                escape(" + ".join(row.axes) or "-"),
                escape(row.kind),
                ("yes" if row.asynchronous else '<span class="bad">no</span>')
                + ", if needed" * row.unbounded,
                *collective_cells(row),
            ]
            for row in merged(report.collectives)
        ]
        header = ["axes", "kind", "asynchronous", "instructions", "runs", "exposed", "GiB"]
        content += ["<h3>Collectives per step</h3>", table(header, rows, "lllnnnn")]
    return "\n".join(content)


def _choices(choices: Sequence[Choice]) -> str:
    any_compiled = any(choice.compiled for choice in choices)
    rows = []
    for rank, choice in enumerate(choices, 1):
        compiled = choice.compiled
        kind = "good" if compiled and compiled.fits else "bad"
        shown = f'<span class="{kind}">{gib(compiled.total)}</span>' if compiled else ""
        cells = [str(rank), escape(choice.layout), *choice_cells(choice.analytic)]
        rows.append(cells + [shown] * any_compiled)
    header = ["", "layout", *CHOICE_HEADER] + ["compiled GiB"] * any_compiled
    return table(header, rows, "nwnnnnn" + "n" * any_compiled)
