"""Draws charts as SVG text: lines and bars, on linear or logarithmic axes, without scripts or foreign style sheets.

Each line and dot has a <title>, each chart an aria-label. Colours are classes (`c0`, `c1` …) that the page defines.
Values that cannot be measurements are left out: not finite, negative, or 0 on a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, inf, log10
from typing import NamedTuple

COLOURS = 14
"""Classes of colour that a page has to define: one for each policy and oracle. Further lines reuse the first ones."""

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 12, 44
LEAST, MOST = 1e-12, 1e15  # values outside are no measurements; comparisons with NaN are false
CHARACTER_WIDTH = 8.5  # of a label, in the page's 13 px and in a wide font
TICKS = 4  # ticks on a linear axis, about


class ChartLine(NamedTuple):
    """One line: its points in the order in which they are joined."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False


class Bar(NamedTuple):
    name: str
    value: float
    colour: int = 0
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label, its scale, and how values are written on it."""

    label: str
    log: bool = False
    written: Callable[[float], str] = lambda value: f"{value:g}"


class Scale:
    """Maps values to coordinates in [start, end], and chooses the values that get a tick."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float) -> None:
        self._log = axis.log
        self._start, self._end = start, end
        known = [value for value in values if self.shows(value)] or [1.0]
        self.ticks = log_ticks(min(known), max(known)) if axis.log else linear_ticks(0.0, max(known))
        self._low, self._high = self._of(self.ticks[0]), self._of(self.ticks[-1])

    def shows(self, value: float) -> bool:
        return (LEAST if self._log else 0.0) <= value <= MOST

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._start + share * (self._end - self._start)

    def _of(self, value: float) -> float:
        return log10(value) if self._log else value


def linear_ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers from `low` to at least `high`."""
    raw = (high - low) / TICKS or 1.0
    unit = 10.0 ** floor(log10(raw))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
    return [low + step * number for number in range(ceil((high - low) / step * 0.999) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten around the values; only the powers if these would be more than nine."""
    first, last = floor(log10(low)), ceil(log10(high))
    found = [10.0**power * factor for power in range(first, last + 1) for factor in (1, 2, 5)]
    inside = [value for value in found if low / 2.5 <= value <= high * 2.5]
    if len(inside) > 9:
        inside = [10.0**power for power in range(first, last + 1)]
    return inside if len(inside) > 1 else [low, 10 * low]


def line_chart(title: str, series: Sequence[ChartLine], x: Axis, y: Axis) -> str:
    """Draw lines in one pair of axes; a line of up to 12 points also gets a dot at each."""
    across = Scale([point[0] for each in series for point in each.points], x, LEFT, WIDTH - RIGHT)
    up = Scale([point[1] for each in series for point in each.points], y, HEIGHT - BOTTOM, TOP)
    parts = [frame(x, y, across, up)]
    for each in series:
        points = [(a, b) for a, b in each.points if across.shows(a) and up.shows(b)]
        places = [(across(a), up(b)) for a, b in points]
        if points:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            dash = " dash" if each.dashed else ""
            name = escape(each.name)
            parts.append(f'<path class="line c{each.colour % COLOURS}{dash}" d="{path}"><title>{name}</title></path>')
            if len(points) <= 12:
                parts += [dot(point, each, here) for point, here in zip(points, places, strict=True)]
    return svg(title, parts, HEIGHT)


def dot(point: tuple[float, float], series: ChartLine, here: tuple[float, float]) -> str:
    states = escape(f"{series.name}: {point[0]:g}, {point[1]:g}")
    place = f'cx="{here[0]:.1f}" cy="{here[1]:.1f}"'
    return f'<circle class="dot c{series.colour % COLOURS}" {place} r="3"><title>{states}</title></circle>'


def bar_chart(title: str, bars: Sequence[Bar], x: Axis) -> str:
    """Draw horizontal bars, one below the other, each with its name and value."""
    row, left = 24, 150
    height = TOP + row * len(bars) + BOTTOM
    across = Scale([bar.value for bar in bars], x, left, WIDTH - RIGHT - 60)
    parts = [*ticks_below(x, across, height), text((left + WIDTH) / 2, height - 6, x.label, "middle")]
    for number, bar in enumerate(bars):
        top = TOP + row * number
        wide = max(0.0, across(bar.value) - left) if across.shows(bar.value) else 0.0
        faint = " faint" if bar.faint else ""
        parts.append(text(left - 8, top + 16, bar.name, "end"))
        parts.append(
            f'<rect class="bar c{bar.colour % COLOURS}{faint}" '
            f'x="{left}" y="{top + 4}" width="{wide:.1f}" height="16"/>'
        )
        parts.append(text(left + wide + 6, top + 16, x.written(bar.value), "start"))
    return svg(title, parts, height)


def frame(x: Axis, y: Axis, across: Scale, up: Scale) -> str:
    """Draw the grid, the ticks and the labels of a line chart."""
    parts = []
    for tick in up.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        parts.append(text(LEFT - 6, up(tick) + 4, y.written(tick), "end"))
    parts += ticks_below(x, across, HEIGHT)
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 6, x.label, "middle"))
    place = f"translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"
    parts.append(f'<text class="label" transform="{place}" text-anchor="middle">{escape(y.label)}</text>')
    return "".join(parts)


def ticks_below(x: Axis, across: Scale, height: float) -> Iterator[str]:
    """Where its label would touch the one before, a tick has none."""
    free_from = -inf
    for tick in across.ticks:
        at, half = across(tick), (len(x.written(tick)) + 1) * CHARACTER_WIDTH / 2
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        if at - half >= free_from:
            yield text(at, height - BOTTOM + 16, x.written(tick), "middle")
            free_from = at + half


def text(x: float, y: float, states: str, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(states)}</text>'


def svg(title: str, parts: Sequence[str], height: float) -> str:
    inside = "".join(parts)
    return f'<svg role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {WIDTH} {height}">{inside}</svg>'
