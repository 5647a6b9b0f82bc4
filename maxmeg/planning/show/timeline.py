"""A pipeline schedule as an SVG image and as text.

The x axis is time. The active lanes of a tick lie side by side, with widths in proportion to their
time (forward, gradients of inputs and gradients of weights count as equal), because all stages wait
for each other at the end of every tick.
"""

import dataclasses
import textwrap
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from maxmeg.pipeline.schedule import Lane, Table, bubble, live, runs

TITLES = {
    "one_f_one_b": "1F1B",
    "zero_bubble": "Zero bubble",
    "forward_only": "Forward only",
}
# For each lane: the colour of a single chunk, then those of the first and last of several chunks.
COLOURS = {
    "forward": ("#4c84e6", "#9cbdf7", "#2a56b0"),
    "backward": ("#2fa37c", "#8fd6bb", "#1b7355"),
    "weight": ("#e8a33d", "#f6d08f", "#b9770f"),
}
STYLE = """
.tl { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }
.tl-page { fill: #ffffff }
.tl-idle { fill: #e7e9ee }
.tl-ink { fill: #1c2430 }
.tl-soft { fill: #667085 }
.tl-line { stroke: #98a2b3; stroke-width: 1; fill: none }
@media (prefers-color-scheme: dark) {
  .tl-page { fill: #14171c }
  .tl-idle { fill: #2a2f38 }
  .tl-ink { fill: #e8ebf0 }
  .tl-soft { fill: #9aa4b2 }
  .tl-line { stroke: #5b6472 }
}
"""
CHART, LEFT, TOP = 1120, 72, 92  # pixels: intended width; margins
WIDEST_UNIT = 24
MOST_UNITS, CLEAR_UNITS = 720, 300  # longer timelines omit ticks in the middle, down to CLEAR_UNITS
SMALLEST_TEXT = 6.5
CHARACTER = 0.62  # width of a digit, in font sizes


def timeline_facts(table: Table) -> list[tuple[str, str]]:
    """(name, text) of the schedule: ticks, bubble, live activations."""
    idle, kept = bubble(table), live(table)
    on = ", ".join(f"{count} {name}" for name, count in idle.ticks.items())
    terms = [f"{part:.4g} {name}" for part, name in zip(idle.lost, "FBW", strict=True) if part]
    lost = " + ".join(terms) or "nothing"
    facts = [
        ("schedule", f"{title(table)}, {table.ticks} ticks: {on}"),
        (
            "bubble",
            f"{bubble(table).fraction:.1%} over the ideal where F = B = W; idle per stage: {lost}",
        ),
    ]
    if any(kept):
        each = " ".join(str(count) for count in kept)
        unit = "microbatches" if table.chunks == 1 else "chunks of microbatches"
        facts.append(("in flight", f"at most {each} {unit} on stages 0 to {table.stages - 1}"))
    if table.deferred:
        facts.append(
            ("deferred", f"at most {table.deferred} weight-gradient passes wait per stage")
        )
    return facts


def timeline_text(table: Table) -> str:
    """The facts for a terminal."""
    facts = timeline_facts(table)
    width = max(len(name) for name, _ in facts) + 2
    wrapped = (
        textwrap.wrap(f"{name:{width}}{text}", 96, subsequent_indent=" " * width)
        for name, text in facts
    )
    return "\n".join(line for lines in wrapped for line in lines)


def title(table: Table) -> str:
    """ "Interleaved 1F1B: 4 stages x 2 chunks, 16 microbatches"."""
    name = TITLES.get(table.name, table.name)
    name = f"Interleaved {name}" if table.name == "one_f_one_b" and table.chunks > 1 else name
    chunks = f" x {table.chunks} chunks" if table.chunks > 1 else ""
    return f"{name}: {table.stages} stages{chunks}, {table.microbatches} microbatches"


def timeline_svg(table: Table) -> str:
    """The schedule as an SVG document: ticks x stages, coloured by lane, grey if idle."""
    picture = _Picture(table)
    kept = live(table)
    note = f"bubble {bubble(table).fraction:.1%} over the ideal where F = B = W"
    if any(kept):
        shown = ", ".join(map(str, kept)) if len(kept) <= 16 else f"{max(kept)} to {min(kept)}"
        note += f" · microbatches in flight on stages 0 to {table.stages - 1}: {shown}"
    width, height = picture.width, picture.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tl" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label={quoteattr(title(table))}>'
    )
    parts = [
        head,
        f"<title>{escape(title(table))}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="tl-page" width="{width}" height="{height}"/>',
        _text(LEFT, 26, title(table), "tl-ink", 16, weight=600),
        _text(LEFT, 46, note, "tl-soft", 12),
        *picture.rows(),
        *picture.phases(),
        *picture.axis(),
        *picture.cells(),
        *picture.legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclasses.dataclass(frozen=True)
class _Column:
    """A lane of a tick, with start and stop in units of time."""

    lane: str
    tick: int
    start: float
    stop: float


class _Picture:
    """The positions of all elements, and the elements as SVG."""

    def __init__(self, table: Table):
        self.table = table
        self.lanes = table.lanes()
        self.on = {name: np.any(lane.active, axis=1) for name, lane in self.lanes.items()}
        self.gap = 0.0
        self.ticks, self.hidden = self._shown_ticks()
        self.columns = self._columns()
        self.units = self.columns[-1].stop
        self.unit = min(WIDEST_UNIT, CHART / self.units)
        self.row = min(30.0, max(8.0, 480 / table.stages))
        self.bottom = TOP + self.row * table.stages
        self.width = max(round(LEFT + self.units * self.unit + 24), 660)
        self.height = round(self.bottom + 74)

    def _cost(self, name: str) -> int:
        return 2 if name == "backward" and self.table.weight is None else 1

    def _shown_ticks(self) -> tuple[list[int], int]:
        """(ticks to show, number of omitted ticks in the middle)."""
        cost = sum(self._cost(name) * self.on[name] for name in self.lanes)
        every, table = range(self.table.ticks), self.table
        if int(np.sum(cost)) <= MOST_UNITS:
            return list(every), 0
        ends = 2 * table.stages * (2 * table.chunks + 3)  # units of warm-up and cool-down
        kept = min(MOST_UNITS, max(CLEAR_UNITS, ends))
        half = int(np.searchsorted(np.cumsum(cost), kept / 2))
        half = max(1, min(half, (table.ticks - 1) // 2))
        self.gap = kept / 50
        return [*every[:half], *every[-half:]], table.ticks - 2 * half

    def _columns(self) -> list[_Column]:
        columns, at = [], 0.0
        for previous, tick in zip([-1, *self.ticks], self.ticks, strict=False):
            at += self.gap if tick != previous + 1 else 0.0  # the gap for the omitted ticks
            for name in self.lanes:
                if self.on[name][tick]:
                    columns.append(_Column(name, tick, at, at := at + self._cost(name)))
        return columns

    def x(self, units: float) -> float:
        return LEFT + units * self.unit

    def y(self, stage: int) -> float:
        return TOP + stage * self.row

    def rows(self) -> list[str]:
        """A grey band for each stage, below the cells."""
        size, width = min(12.0, self.row * 0.9), self.units * self.unit
        every = max(1, round(14 / self.row))
        parts = []
        for stage in range(self.table.stages):
            parts.append(
                f'<rect class="tl-idle" x="{LEFT}" y="{self.y(stage) + 1:.2f}" '
                f'width="{width:.2f}" height="{self.row - 2:.2f}"/>'
            )
            if stage % every == 0:
                middle = self.y(stage) + self.row / 2 + size * 0.36
                parts.append(_text(LEFT - 10, middle, f"stage {stage}", "tl-soft", size, "end"))
        if self.hidden:
            parts += self._gap()
        return parts

    def _gap(self) -> list[str]:
        """A gap with the number of omitted ticks."""
        last = next(
            column
            for column, after in zip(self.columns, self.columns[1:], strict=False)
            if after.tick > column.tick + 1
        )
        left, width = self.x(last.stop), self.gap * self.unit
        middle = f"{left + width / 2:.2f} {(TOP + self.bottom) / 2:.2f}"
        label = _text(0, 4, f"{self.hidden} ticks more", "tl-soft", 12, "middle")
        return [
            f'<rect class="tl-page" x="{left:.2f}" y="{TOP}" width="{width:.2f}" '
            f'height="{self.bottom - TOP:.2f}"/>',
            f'<g transform="translate({middle}) rotate(-90)">{label}</g>',
        ]

    def phases(self) -> list[str]:
        """Brackets above the rows: the executor's runs of ticks with the same lanes."""
        spans: list[list] = []
        for start, stop, names in runs(self.table):
            on = [name for name in names if name in self.lanes]
            inside = [column for column in self.columns if start <= column.tick < stop]
            if not inside:
                continue
            if spans and spans[-1][0] == on:
                spans[-1][2] = inside[-1].stop
            else:
                spans.append([on, inside[0].start, inside[-1].stop])
        parts, y = [], TOP - 10
        for on, start, stop in spans:
            left, right = self.x(start) + 1, self.x(stop) - 1
            parts.append(f'<path class="tl-line" d="M{left:.2f} {y + 5}V{y}H{right:.2f}V{y + 5}"/>')
            shown = next(
                (
                    label
                    for label in (" + ".join(on), " ".join(name[0].upper() for name in on))
                    if 11 * 0.56 * len(label) < right - left
                ),
                "",
            )
            if shown:
                parts.append(_text((left + right) / 2, y - 6, shown, "tl-soft", 11, "middle"))
        return parts

    def axis(self) -> list[str]:
        """Tick numbers below the rows, as dense as is readable."""
        starts = {column.tick: self.x(column.start) for column in reversed(self.columns)}
        for step in (scale * digit for scale in (1, 10, 100, 1000, 10**9) for digit in (1, 2, 5)):
            ticks = [tick for tick in self.ticks if tick % step == 0]
            gaps = np.diff([starts[tick] for tick in ticks])
            if len(gaps) == 0 or gaps.min() >= 24:
                break
        parts, y = [], self.bottom + 6
        for tick in ticks:
            parts.append(f'<path class="tl-line" d="M{starts[tick]:.2f} {y - 4:.2f}v4"/>')
            parts.append(_text(starts[tick], y + 11, str(tick), "tl-soft", 10, "middle"))
        return [*parts, _text(LEFT - 10, y + 11, "tick", "tl-soft", 10, "end")]

    def cells(self) -> list[str]:
        parts = []
        for name, lane in self.lanes.items():
            columns = [column for column in self.columns if column.lane == name]
            for chunk in range(self.table.chunks):
                parts += self._cells_of(lane, columns, chunk, shade(name, chunk, self.table.chunks))
        return parts

    def _cells_of(self, lane: Lane, columns: list[_Column], chunk: int, fill: str) -> list[str]:
        """One path with all boxes of a colour, and microbatch numbers if they fit."""
        gap = 1.0 if self.unit >= 5 else 0.0 if self.unit < 2 else 0.4
        width = self._cost(columns[0].lane) * self.unit - gap
        digits = len(str(self.table.microbatches - 1))
        size = min(12.0, self.row * 0.5, (width - 1) / (CHARACTER * digits))
        boxes, numbers = [], []
        for column in columns:
            x = self.x(column.start)
            for stage in np.flatnonzero(lane.chunk[column.tick] == chunk).tolist():
                y = self.y(stage) + 1
                boxes.append(f"M{x:.2f} {y:.2f}h{width:.2f}v{self.row - 2:.2f}h{-width:.2f}z")
                if size >= SMALLEST_TEXT:
                    middle = f'x="{x + width / 2:.2f}" y="{y - 1 + self.row / 2 + size * 0.36:.2f}"'
                    numbers.append(f"<text {middle}>{lane.microbatch[column.tick, stage]}</text>")
        parts = [f'<path fill="{fill}" d="{"".join(boxes)}"/>']
        if numbers:
            ink = "#ffffff" if _luminance(fill) < 0.36 else "#14213a"
            group = f'<g fill="{ink}" font-size="{size:.2f}" text-anchor="middle">'
            parts += [group, "".join(numbers), "</g>"]
        return parts

    def legend(self) -> list[str]:
        backward = "gradients of inputs" if self.table.weight else "backward"
        names = {"forward": "forward", "backward": backward, "weight": "gradients of weights"}
        chunks = self.table.chunks
        entries = [
            ([f'fill="{shade(name, chunk, chunks)}"' for chunk in range(chunks)], names[name])
            for name in self.lanes
        ]
        entries.append((['class="tl-idle"'], "idle"))
        x, y, parts = float(LEFT), self.bottom + 42, []
        for fills, name in entries:
            for fill in fills:
                parts.append(f'<rect {fill} x="{x:.1f}" y="{y}" width="14" height="14" rx="2"/>')
                x += 16
            parts.append(_text(x + 4, y + 11.5, name, "tl-ink", 12))
            x += 4 + 12 * 0.56 * len(name) + 24
        if chunks > 1:
            parts.append(
                _text(x, y + 11.5, f"light to dark: chunks 0 to {chunks - 1}", "tl-soft", 12)
            )
        return parts


def shade(lane: str, chunk: int, chunks: int) -> str:
    """The colour of a lane, darker for each further chunk."""
    single, light, dark = COLOURS[lane]
    if chunks == 1:
        return single
    mixed = (_rgb(light) * (chunks - 1 - chunk) + _rgb(dark) * chunk) / (chunks - 1)
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], float)


def _luminance(colour: str) -> float:
    linear = (_rgb(colour) / 255) ** 2.2
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _text(
    x: float, y: float, text: str, kind: str, size: float, anchor: str = "start", weight: int = 400
) -> str:
    style = f'font-size="{size:.4g}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" {style}>{escape(text)}</text>'
