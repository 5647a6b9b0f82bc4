"""A pipeline schedule as an SVG image.

The x axis is time. The active lanes of a tick lie side by side, with widths in proportion to their
time (forward, gradients of inputs and gradients of weights count as equal), because all stages wait
for each other at the end of every tick.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from maxmeg.pages.chart import CHARACTER, Scale, legend
from maxmeg.pages.templates import SERIES, render
from maxmeg.pipeline.schedule import Table, bubble, live, runs
from maxmeg.planning.show.text import schedule_title

# For each lane: the colour of a single chunk, then those of the first and last of several chunks.
COLOURS = {
    "forward": (SERIES[0], "#9cbdf7", "#2a56b0"),
    "backward": (SERIES[1], "#8fd6bb", "#1b7355"),
    "weight": (SERIES[2], "#f6d08f", "#b9770f"),
}
CHART, LEFT, TOP = 1120, 72, 92  # pixels: intended width; margins
NARROWEST = 660
WIDEST_UNIT = 24
MOST_UNITS, CLEAR_UNITS = 720, 300  # longer timelines omit ticks in the middle, down to CLEAR_UNITS
SMALLEST_TEXT = 6.5
DIGIT = 0.62  # width of a digit, in font sizes


def timeline_svg(table: Table) -> str:
    """The schedule as an SVG document: ticks x stages, coloured by lane, grey if idle."""
    return render("timeline.svg", timeline=Timeline(table), standalone=True)


@dataclasses.dataclass(frozen=True)
class Column:
    """A lane of a tick, with start and stop in units of time."""

    lane: str
    tick: int
    start: float
    stop: float


class Timeline:
    """What timeline.svg draws: texts, and their places in pixels."""

    left, top = LEFT, TOP

    def __init__(self, table: Table):
        self.table, self.title = table, schedule_title(table)
        self.note = f"bubble {bubble(table).fraction:.1%} over the ideal where F = B = W"
        in_flight = live(table)
        if any(in_flight):
            counts = ", ".join(map(str, in_flight))
            if len(in_flight) > 16:
                counts = f"{max(in_flight)} to {min(in_flight)}"
            self.note += f" · microbatches in flight on stages 0 to {table.stages - 1}: {counts}"
        self.lanes = table.lanes()
        self.active = {name: np.any(lane.active, axis=1) for name, lane in self.lanes.items()}
        self.gap, self.hidden = (0.0, 0.0), 0  # edges in units of time, and number of omitted ticks
        self.columns = self._columns()
        units = self.columns[-1].stop
        self.unit = min(WIDEST_UNIT, CHART / units)
        self.right = LEFT + units * self.unit
        self.x = Scale(0, units, LEFT, self.right)
        self.row = min(30.0, max(8.0, 480 / table.stages))
        self.bottom = TOP + self.row * table.stages
        self.y = Scale(0, table.stages, TOP, self.bottom)
        self.width = max(round(self.right + 24), NARROWEST)
        self.legend = legend(self._legend(), LEFT, self.width, self.bottom + 42)
        self.height = round(self.bottom + 74)

    def _cost(self, name: str) -> int:
        return 2 if name == "backward" and self.table.weight is None else 1

    def _columns(self) -> list[Column]:
        """Columns of all ticks, or of the first and last ones."""
        cost = sum(self._cost(name) * self.active[name] for name in self.lanes)
        table, ticks, gap = self.table, list(range(self.table.ticks)), 0.0
        if int(np.sum(cost)) > MOST_UNITS:
            ends = 2 * table.stages * (2 * table.chunks + 3)  # units of warm-up and cool-down
            units = min(MOST_UNITS, max(CLEAR_UNITS, ends))
            half = int(np.searchsorted(np.cumsum(cost), units / 2))
            half = max(1, min(half, (table.ticks - 1) // 2))
            ticks, gap = [*ticks[:half], *ticks[-half:]], units / 50
            self.hidden = table.ticks - 2 * half
        columns, at = [], 0.0
        for previous, tick in zip([-1, *ticks], ticks, strict=False):
            if tick != previous + 1:
                self.gap = (at, at := at + gap)
            for name in self.lanes:
                if self.active[name][tick]:
                    columns.append(Column(name, tick, at, at := at + self._cost(name)))
        return columns

    @property
    def phases(self) -> list[tuple[float, float, str]]:
        """(left, right, name) of the executor's runs of ticks with the same lanes."""
        spans: list[list] = []
        for start, stop, names in runs(self.table):
            lanes = [name for name in names if name in self.lanes]
            inside = [column for column in self.columns if start <= column.tick < stop]
            if inside and spans and spans[-1][0] == lanes:
                spans[-1][2] = inside[-1].stop
            elif inside:
                spans.append([lanes, inside[0].start, inside[-1].stop])
        phases = []
        for lanes, start, stop in spans:
            left, right = self.x(start) + 1, self.x(stop) - 1
            texts = (" + ".join(lanes), " ".join(name[0].upper() for name in lanes))
            fitting = (text for text in texts if 11 * CHARACTER * len(text) < right - left)
            phases.append((left, right, next(fitting, "")))
        return phases

    @property
    def ticks(self) -> list[tuple[float, int]]:
        """(x, number) of ticks, as dense as is readable."""
        starts = {column.tick: self.x(column.start) for column in reversed(self.columns)}
        for step in (scale * digit for scale in (1, 10, 100, 1000, 10**9) for digit in (1, 2, 5)):
            ticks = sorted((x, tick) for tick, x in starts.items() if tick % step == 0)
            if all(after - x >= 24 for (x, _), (after, _) in itertools.pairwise(ticks)):
                break
        return ticks

    @property
    def cells(self) -> Iterator[tuple]:
        """(fill, SVG path of the boxes, ink, font size, (x, y, microbatch) of each box) of a lane's
        chunks; no font size: the numbers do not fit."""
        gap = 1.0 if self.unit >= 5 else 0.0 if self.unit < 2 else 0.4
        height, digits = self.row - 2, len(str(self.table.microbatches - 1))
        for (name, lane), chunk in itertools.product(self.lanes.items(), range(self.table.chunks)):
            width = self._cost(name) * self.unit - gap
            size = min(12.0, self.row * 0.5, (width - 1) / (DIGIT * digits))
            boxes, numbers = [], []
            for column in (column for column in self.columns if column.lane == name):
                x = self.x(column.start)
                for stage in np.flatnonzero(lane.chunk[column.tick] == chunk).tolist():
                    y = self.y(stage) + 1
                    boxes.append(f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z")
                    number = int(lane.microbatch[column.tick, stage])
                    numbers.append((x + width / 2, y + height / 2, number))
            fill = shade(name, chunk, self.table.chunks)
            ink = "#ffffff" if _luminance(fill) < 0.36 else "#14213a"
            yield fill, "".join(boxes), ink, size if size >= SMALLEST_TEXT else None, numbers

    def _legend(self) -> list[tuple[str, list[str]]]:
        backward = "gradients of inputs" if self.table.weight else "backward"
        names = {"forward": "forward", "backward": backward, "weight": "gradients of weights"}
        chunks = self.table.chunks
        entries = [
            (names[name], [shade(name, chunk, chunks) for chunk in range(chunks)])
            for name in self.lanes
        ]
        note = [(f"light to dark: chunks 0 to {chunks - 1}", [])] if chunks > 1 else []
        return [*entries, ("idle", ["track"]), *note]


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
