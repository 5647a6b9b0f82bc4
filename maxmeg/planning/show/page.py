"""A plan as one self-contained HTML page, for light and dark mode, wide and narrow screens."""

from collections.abc import Iterable, Sequence
from html import escape

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
    times,
    traffic_cells,
    verdict,
)
from maxmeg.planning.show.timeline import timeline_facts, timeline_svg
from maxmeg.runtime.metrics.progress import quantity

COLOURS = ("#4c84e6", "#2fa37c", "#e8a33d", "#c65f8f", "#7d6bd6", "#45a6c4", "#b58863", "#8a94a6")

STYLE = """
:root { color-scheme: light dark; --page: #f4f5f8; --card: #fff; --ink: #1c2430; --soft: #667085;
  --line: #e1e4ea; --track: #e7e9ee; --good: #1b7f5c; --bad: #c0392b }
@media (prefers-color-scheme: dark) { :root { --page: #0e1013; --card: #181b21; --ink: #e8ebf0;
  --soft: #9aa4b2; --line: #2b3038; --track: #2a2f38; --good: #4cc79b; --bad: #ff8574 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 40px }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em }
h2 { font-size: 16px; margin: 0 0 14px }
h3 { font-size: 13px; margin: 20px 0 8px; color: var(--soft); font-weight: 600 }
p { margin: 0 0 12px }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin-top: 16px; min-width: 0 }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
  gap: 0 20px }
.two > div { min-width: 0 } .two > div > section { height: calc(100% - 16px) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 12px 0 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.facts { display: grid; gap: 12px; margin-top: 16px;
  grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)) }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px }
.facts b { display: block; font-size: 21px; font-weight: 600; white-space: nowrap }
.facts span { color: var(--soft); font-size: 13px }
.good { color: var(--good) } .bad { color: var(--bad) } .verdict { font-weight: 600 }
.bar { position: relative; display: flex; height: 30px; border-radius: 5px;
  background: var(--track); overflow: hidden }
.bar i { height: 100%; box-shadow: inset -1px 0 var(--card) }
.bar u { position: absolute; top: 0; bottom: 0; width: 0; border-left: 2px dashed var(--bad) }
.small { height: 8px; min-width: 60px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 14px; line-height: 1.35 }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 12.5px }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top }
tr:last-child td { border-bottom: 0 }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.fill { width: 30%; vertical-align: middle } td.wide { min-width: 210px }
td:not(.wide) { white-space: nowrap }
.flag { display: inline-block; max-width: 100%; word-break: break-all; margin-right: 6px }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px }
.timeline svg { display: block; height: auto; max-width: 100% }
.timeline .tl-page { fill: var(--card) }
section dl { font-size: 13.5px }
footer { margin-top: 20px; color: var(--soft); font-size: 13px }
@media (max-width: 900px) { .timeline svg { max-width: none } }
@media (max-width: 600px) { main { padding: 18px 12px } section { padding: 14px }
  td.fill { display: none } th.fill { display: none } .facts b { font-size: 18px } }
"""


def plan_html(plan: Plan) -> str:
    """The page; it has only the parts that the plan has."""
    title = f"{plan.name} on {plan.hardware}" if plan.hardware else plan.name
    parts = [_header(plan, title)]
    if plan.analytic:
        parts += [_facts(plan.analytic), _memory(plan.analytic), _parameters(plan.analytic)]
    if plan.table:
        parts.append(_section("Pipeline", _timeline(plan)))
    if plan.analytic and plan.analytic.traffic:
        parts.append(_section("Communication of a step, from formulas", _traffic(plan.analytic)))
    if plan.compiled:
        parts.append(_section("Compiled for these GPUs", _compiled(plan.compiled)))
    if plan.choices:
        parts.append(_section("Layouts, best first", _choices(plan.choices)))
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
<footer>Bytes are of one device; 1 GiB = 2<sup>30</sup> bytes. Times come from formulas and
datasheets, the compiled part from the compiler; nothing ran.</footer>
</main>
</body>
</html>
"""


def _header(plan: Plan, title: str) -> str:
    return f"<h1>{escape(title)}</h1>\n{_list(plan.settings.items())}"


def _facts(report: Analytic) -> str:
    facts = [
        ("parameters", quantity(sum(report.parameters.values()))),
        ("memory of a device", f"{gib(report.total)} GiB"),
        ("step", times(report)["step"]),
        ("tokens per second", quantity(report.tokens_per_second)),
        ("MFU, upper bound", f"{report.mfu:.1%}"),
        ("bubble over ideal", f"{report.bubble_fraction:.1%}"),
    ]
    shown = (f"<div><span>{escape(name)}</span><b>{value}</b></div>" for name, value in facts)
    return f'<div class="facts">{"".join(shown)}</div>'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _memory(report: Analytic) -> str:
    parts = {name: size for name, size in report.memory.items() if size}
    left = _legend(parts, report.capacity)
    largest = max(*report.activations.values(), 1)
    rows = [
        [escape(mode), gib(size), _small(size / largest, COLOURS[4])]
        for mode, size in report.activations.items()
    ]
    right = "<h3>Activations by recompute mode</h3>" + _table(["mode", "GiB", ""], rows, "lnf")
    content = _verdict(report) + _remedies(report)
    content += _bar(parts, report.capacity) + _beside(left, right)
    return _section("Memory of a device, from formulas", content)


def _remedies(report: Analytic) -> str:
    if not report.remedies:
        return ""
    rows = [[escape(r.flags), gib(r.total), f"x {r.slowdown:.2f}"] for r in report.remedies]
    return _table(["fits with any one of", "GiB", "step"], rows, "wnn")


def _verdict(report: Analytic | Compiled) -> str:
    kind = "good" if report.fits else "bad"
    return f'<p class="verdict {kind}">{escape(verdict(report))}</p>'


def _bar(parts: dict[str, int], capacity: int) -> str:
    """All parts in a row, as long as their sum or the capacity; a line marks the capacity."""
    total = sum(parts.values())
    whole = max(total, capacity, 1)
    cells = "".join(
        f'<i style="width:{100 * size / whole:.3f}%;background:{_colour(index)}" '
        f'title="{escape(name)} {gib(size)} GiB"></i>'
        for index, (name, size) in enumerate(parts.items())
    )
    limit = f'<u style="left:{100 * capacity / whole:.3f}%"></u>' if total > capacity else ""
    label = f"{gib(total)} of {gib(capacity)} GiB"
    return f'<div class="bar" role="img" aria-label="{label}">{cells}{limit}</div>'


def _legend(parts: dict[str, int], capacity: int) -> str:
    total = sum(parts.values())
    rows = [
        [_swatch(_colour(index)) + escape(name), gib(size), f"{size / max(capacity, 1):.1%}"]
        for index, (name, size) in enumerate(parts.items())
    ]
    rows.append(["<b>all</b>", f"<b>{gib(total)}</b>", f"<b>{total / max(capacity, 1):.1%}</b>"])
    return "<h3>Parts</h3>" + _table(["", "GiB", "of capacity"], rows, "lnn")


def _parameters(report: Analytic) -> str:
    total = max(sum(report.parameters.values()), 1)
    rows = [
        [escape(name), f"{count:,}", f"{count / total:.1%}", _small(count / total, COLOURS[0])]
        for name, count in report.parameters.items()
    ]
    rows.append(["<b>all</b>", f"<b>{total:,}</b>", "", ""])
    step = max(report.step_seconds, 1e-12)
    shown = times(report)
    time_rows = [
        [escape(name), shown[name], _small(seconds / step, colour)]
        for (name, seconds), colour in zip(parts_of_step(report).items(), COLOURS, strict=False)
    ]
    time_rows.append(["<b>step</b>", f"<b>{shown['step']}</b>", ""])
    left = _section("Parameters", _table(["kind", "number", "share", ""], rows, "lnnf"))
    right = _section("Time of a step, from formulas", _table(["", "", ""], time_rows, "lnf"))
    return _beside(left, right)


def _timeline(plan: Plan) -> str:
    assert plan.table is not None
    return f'<div class="scroll timeline">{timeline_svg(plan.table)}</div>' + _list(
        timeline_facts(plan.table)
    )


def _traffic(report: Analytic) -> str:
    slowest = max((row.seconds for row in report.traffic), default=0.0) or 1.0
    rows = [
        [
            *(escape(cell) for cell in (row.axis, *traffic_cells(row))),
            _small(row.seconds / slowest, COLOURS[2]),
        ]
        for row in report.traffic
    ]
    header = ["axis", *TRAFFIC_HEADER, ""]
    return _table(header, rows, "lwlnnnf")


def _compiled(report: Compiled) -> str:
    memory = compiled_memory(report)
    facts = [
        ("lowered in", f"{report.lower_seconds:.1f} s"),
        ("compiled in", f"{report.compile_seconds:.1f} s"),
        ("matrix products", f"{report.flops:.3e} FLOPs of a device and step"),
    ]
    right = "<h3>Program</h3>" + _list(facts)
    if report.kernels:
        rows = [[f"<code>{escape(name)}</code>", f"{n:,}"] for name, n in report.kernels.items()]
        right += "<h3>Custom kernels</h3>" + _table(["target", "runs"], rows, "ln")
    content = [
        _verdict(report),
        _bar(memory, report.capacity),
        _beside(_legend(memory, report.capacity), right),
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
        content += ["<h3>Collectives of a step</h3>", _table(header, rows, "lllnnnn")]
    return "\n".join(content)


def _choices(choices: Sequence[Choice]) -> str:
    rows = []
    for rank, choice in enumerate(choices, 1):
        compiled = choice.compiled
        kind = "good" if compiled and compiled.fits else "bad"
        shown = f'<span class="{kind}">{gib(compiled.total)}</span>' if compiled else ""
        rows.append([str(rank), escape(choice.layout), *choice_cells(choice.analytic), shown])
    header = ["", "layout", *CHOICE_HEADER, "compiled GiB"]
    return _table(header, rows, "nwnnnnnn")


def _list(facts: Iterable[tuple[str, str]]) -> str:
    rows = []
    for name, text in facts:
        shown = escape(text)
        if text.startswith("--"):  # lines break between flags only
            shown = " ".join(f'<span class="flag">{word}</span>' for word in shown.split(" "))
        rows.append(f"<dt>{escape(name)}</dt><dd>{shown}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kinds: str) -> str:
    """kinds: a letter per column: l text, w long text, n number, f a bar of the remaining width."""
    classes = {"l": "", "w": ' class="wide"', "n": ' class="num"', "f": ' class="fill"'}
    names = [classes[kind] for kind in kinds]
    titles = [f"<th{name}>{text}</th>" for name, text in zip(names, header, strict=True)]
    head = f"<tr>{''.join(titles)}</tr>\n" if any(header) else ""
    lines = [
        "<tr>"
        + "".join(f"<td{n}>{cell}</td>" for n, cell in zip(names, row, strict=True))
        + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return f'<div class="scroll"><table>{head}{body}\n</table></div>'


def _small(part: float, colour: str) -> str:
    width = f"width:{100 * min(part, 1):.2f}%"
    return f'<div class="bar small"><i style="{width};background:{colour}"></i></div>'


def _beside(left: str, right: str) -> str:
    """Two columns, or one below the other on a narrow page."""
    return f'<div class="two"><div>{left}</div><div>{right}</div></div>'


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'
