"""Parts of self-contained HTML pages, for light and dark mode, wide and narrow screens."""

from collections.abc import Iterable, Sequence
from html import escape

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
.hint { display: none; color: var(--soft); font-size: 13px; margin: 6px 0 0 }
code, pre { font-size: 13px; overflow-wrap: anywhere }
pre { white-space: pre-wrap; margin: 0 }
h1, h2, .verdict { overflow-wrap: anywhere }
@media (max-width: 900px) { .timeline svg { max-width: none } .hint { display: block } }
@media (max-width: 600px) { main { padding: 18px 12px } section { padding: 14px }
  td.fill { display: none } th.fill { display: none } .facts b { font-size: 18px }
  .stack tr:first-child { display: none }
  .stack tr { display: flex; flex-wrap: wrap; gap: 0 16px; padding: 6px 0;
    border-bottom: 1px solid var(--line) }
  .stack td { border: 0; padding: 1px 0; text-align: left }
  .stack td.wide { flex-basis: 100%; order: -1 }
  .stack td.num::before { content: attr(data-name) " "; color: var(--soft) } }
"""


def document(title: str, body: str, notes: str = "") -> str:
    """A whole page. body, notes (in its footer): HTML."""
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
<footer>{notes}</footer>
</main>
</body>
</html>
"""


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """A row of (name, number) cards."""
    cells = (f"<div><span>{escape(name)}</span><b>{value}</b></div>" for name, value in facts)
    return f'<div class="facts">{"".join(cells)}</div>'


def section(title: str, content: str) -> str:
    """A card with a heading. content: HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    """A list of (name, text)."""
    rows = []
    for name, text in facts:
        markup = escape(text)
        if text.startswith("--"):  # lines break between flags only
            markup = " ".join(f'<span class="flag">{word}</span>' for word in markup.split(" "))
        rows.append(f"<dt>{escape(name)}</dt><dd>{markup}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kinds: str) -> str:
    """kinds: a letter per column: l text, w long text, n number, f a bar of the remaining width.

    On narrow screens a table with long text becomes a list of rows, each number with its name.
    """
    classes = {"l": "", "w": ' class="wide"', "n": ' class="num"', "f": ' class="fill"'}
    names = [classes[kind] for kind in kinds]
    titles = [f"<th{name}>{text}</th>" for name, text in zip(names, header, strict=True)]
    head = f"<tr>{''.join(titles)}</tr>\n" if any(header) else ""
    stacked = "w" in kinds
    labels = [
        f'{name} data-name="{escape(text)}"' if stacked else name
        for name, text in zip(names, header, strict=True)
    ]
    lines = [
        "<tr>"
        + "".join(f"<td{n}>{cell}</td>" for n, cell in zip(labels, row, strict=True))
        + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    kind = ' class="stack"' if stacked else ""
    return f'<div class="scroll"><table{kind}>{head}{body}\n</table></div>'


def small_bar(part: float, colour: str) -> str:
    """A bar of which `part` (0 to 1) is coloured."""
    width = f"width:{100 * min(part, 1):.2f}%"
    return f'<div class="bar small"><i style="{width};background:{colour}"></i></div>'


def beside(left: str, right: str) -> str:
    """Two columns, or one below the other on a narrow page."""
    return f'<div class="two"><div>{left}</div><div>{right}</div></div>'


def colour(index: int) -> str:
    """The colour of the part with this number."""
    return COLOURS[index % len(COLOURS)]


def swatch(colour: str) -> str:
    """A small square of this colour, for legends."""
    return f'<span class="swatch" style="background:{colour}"></span>'
