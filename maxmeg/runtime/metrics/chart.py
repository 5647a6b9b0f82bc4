"""Line charts as SVG, for pages in light and dark mode."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from html import escape

from maxmeg.runtime.metrics.progress import quantity

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 36  # margins of the plotted area
_TICKS = 7  # at most about so many
_POINTS = 500  # at most, of a line


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points of one run. faint: a thin line behind the others; dots: points are marked."""

    name: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    faint: bool = False
    dots: bool = False


def chart(
    curves: Sequence[Curve], label: str, number: Callable[[float], str], top: float | None = None
) -> str:
    """An SVG of these curves. label: of the x axis; number: formats values of the y axis.

    top: the largest y that is shown; None: the largest value.
    """
    drawn = [curve for curve in curves if curve.xs]
    right = max((max(curve.xs) for curve in drawn), default=1.0) or 1.0
    values = [y for curve in drawn if not curve.faint for y in curve.ys] or [0.0, 1.0]
    low, high = min(values), max(values) if top is None else top
    space = 0.04 * (high - low) or abs(high) / 10 or 1.0
    low, high = max(low - space, 0.0) if low >= 0 else low - space, high + space

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (WIDTH - _LEFT - _RIGHT) * x / right,
            HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (y - low) / (high - low),
        )

    parts = [_grid(at, ticks(low, high), right, number)]
    parts += [_line(curve, at) for curve in sorted(drawn, key=lambda curve: not curve.faint)]
    text = f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(label)}'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="11" fill="var(--soft)" '
        f'style="display:block;width:100%;height:auto">\n{"".join(parts)}{text}</text>\n</svg>'
    )


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def thinned(values: Sequence[float]) -> Sequence[float]:
    """At most about _POINTS of the values, the last one included."""
    every = max(len(values) // _POINTS, 1)
    return values[::-every][::-1]


def _grid(at, levels: Sequence[float], right: float, number: Callable[[float], str]) -> str:
    (left, _), (end, _) = at(0, levels[0]), at(right, levels[0])
    parts = []
    for level in levels:
        _, y = at(0, level)
        parts.append(
            f'<path d="M{left:.1f} {y:.1f}H{end:.1f}" stroke="var(--line)"/>'
            f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{number(level)}</text>'
        )
    for tick in ticks(0, right):
        x, _ = at(tick, levels[0])
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
            f"{quantity(tick)}</text>"
        )
    return "\n".join(parts)


def _line(curve: Curve, at) -> str:
    highest = _TOP - 1.0  # lines above the top continue along it
    points = [at(x, y) for x, y in zip(thinned(curve.xs), thinned(curve.ys), strict=True)]
    path = " ".join(f"{x:.1f},{max(y, highest):.1f}" for x, y in points)
    look = 'stroke-width="1" opacity=".3"' if curve.faint else 'stroke-width="1.8"'
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{max(y, highest):.1f}" r="3" fill="{curve.colour}">'
        f"<title>{escape(curve.name)}: {value:.4f}</title></circle>"
        for (x, y), value in zip(points, thinned(curve.ys), strict=True)
        if curve.dots and len(points) <= 60
    )
    return (
        f'<polyline points="{path}" fill="none" stroke="{curve.colour}" {look} '
        f'stroke-linejoin="round"><title>{escape(curve.name)}</title></polyline>{marks}\n'
    )
