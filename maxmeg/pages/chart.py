"""Line charts, and the scales and legends of all drawings; the template is chart.svg."""

import dataclasses
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 480, 274  # without the legend
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 12, 40  # margins of the plotted area
CHARACTER = 0.58  # mean width of a character, in font sizes
_TICKS = 7  # at most about so many
_POINTS = 500  # at most, of a line
_NAME = 50  # characters of a name in a legend
_SUFFIXES = ("", "k", "M", "B", "T")


@dataclasses.dataclass(frozen=True)
class Scale:
    """A linear map from values in [low, high] to pixels from start to stop."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.stop - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """(pixel, text) of a few round numbers."""
        values = ticks(self.low, self.high)
        return list(zip(map(self, values), tick_texts(values), strict=True))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points of one run. faint: a thin line behind the others; dots: few points are marked."""

    name: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    faint: bool = False
    dots: bool = False


class Chart:
    """Curves placed in a drawing.

    label: of the x axis. top: the largest y that is shown; None: the largest value. Curves above
    it continue along the upper edge.
    """

    left, right, bottom, width = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, WIDTH

    def __init__(self, title: str, label: str, curves: Sequence[Curve], top: float | None = None):
        self.title, self.label = title, label
        drawn = [curve for curve in curves if curve.xs]
        values = [y for curve in drawn if not curve.faint for y in curve.ys] or [0.0, 1.0]
        low, high = min(values), max(values) if top is None else top
        spread = max(high - low, 2e-3 * abs(high)) or 1.0
        space = 0.54 * spread - 0.5 * (high - low)
        low = max(low - space, 0.0) if low >= 0 else low - space
        end = max((max(curve.xs) for curve in drawn), default=1.0) or 1.0
        self.x = Scale(0, end, self.left, self.right)
        self.y = Scale(low, high + space, self.bottom, TOP)
        self.lines = [(c, self._points(c)) for c in sorted(drawn, key=lambda c: not c.faint)]
        named = {curve.name: [curve.colour] for curve in drawn}
        entries = list(named.items()) if len(named) > 1 else []
        self.legend = legend(entries, self.left, self.right, HEIGHT + 8)
        self.height = max((y + 22 for *_, y in self.legend), default=HEIGHT)

    def _points(self, curve: Curve) -> list[tuple[float, float, float]]:
        """(x, y, value) of the points of a curve that are drawn."""
        pairs = zip(thinned(curve.xs), thinned(curve.ys), strict=True)
        return [(self.x(x), max(self.y(y), TOP - 1.0), y) for x, y in pairs]


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Ticks in one unit, with the digits that tell them apart: 0.996M and 1.000M, or 2.5e-4."""
    largest, step = max(map(abs, values)), values[1] - values[0]
    power, suffix = 0, ""
    if largest >= 1e4:
        power = min(math.floor(math.log10(largest)) // 3, len(_SUFFIXES) - 1)
        power, suffix = 3 * power, _SUFFIXES[power]
    elif largest < 1e-2:
        power = math.floor(math.log10(largest))
        suffix = f"e{power}"
    digits = max(-math.floor(math.log10(step) - power + 1e-9), 0)
    return [f"{v / 10.0**power:,.{digits}f}{suffix}" if v else "0" for v in values]


def thinned(values: Sequence[float]) -> Sequence[float]:
    """At most about _POINTS of the values, the last one included."""
    every = max(len(values) // _POINTS, 1)
    return values[::-every][::-1]


def legend(
    entries: Sequence[tuple[str, list[str]]], left: float, right: float, top: float
) -> list[tuple[str, list[str], float, float]]:
    """(name, colours, x, y) of each (name, colours), in as many rows as they need. Of a long name,
    such as a path, the end is shown."""
    placed, x, y = [], left, top
    for name, colours in entries:
        name = name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
        width = 16 * len(colours) + 4 + 12 * CHARACTER * len(name)
        if x > left and x + width > right:
            x, y = left, y + 20
        placed.append((name, colours, x, y))
        x += width + 20
    return placed
