"""Pictures of lines, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

_WIDTH: Final = 720
_HEIGHT: Final = 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 160, 40, 45
_COLOURS: Final = (
    "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
)  # fmt: skip


class Line(NamedTuple):
    """One line, through points (x, y); y is over 0."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, lines: Sequence[Line], x_title: str = "load") -> str:
    """Return an SVG picture of lines over a logarithmic y axis."""
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    chart = _Chart(xs[0], xs[-1], low, high if high > low else 10 * low)
    parts = [_text(_LEFT, 20, title, size=15), *chart.grid(xs, x_title)]
    for number, line in enumerate(lines):
        parts += chart.line(line, _COLOURS[number % len(_COLOURS)], 3 if number == 0 else 1.5)
    parts += _legend([line.name for line in lines])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    font = 'font-family="sans-serif" font-size="12"'
    box = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join([f'{head} {font} role="img">', box, *parts, "</svg>\n"])


class _Chart:
    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self._first, self._last = first, last
        self._low, self._high = low, high

    def x(self, value: float) -> float:
        share = (value - self._first) / ((self._last - self._first) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = math.log(value / self._low) / math.log(self._high / self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self, xs: Sequence[float], x_title: str) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for power in range(round(math.log10(self._low)), round(math.log10(self._high)) + 1):
            y = self.y(10.0**power)
            parts.append(_stroke(f"M{_LEFT} {y:.1f}H{right}", "#ccc", 1))
            parts.append(_text(_LEFT - 6, y + 4, f"{10.0**power:,g}", anchor="end"))
        for x in xs:
            parts.append(_text(self.x(x), bottom + 16, f"×{x:g}", anchor="middle"))
        parts.append(_stroke(f"M{_LEFT} {_TOP}V{bottom}H{right}", "#333", 1))
        parts.append(_text((_LEFT + right) / 2, _HEIGHT - 8, x_title, anchor="middle"))
        return parts

    def line(self, line: Line, colour: str, width: float) -> list[str]:
        places = [(self.x(x), self.y(y)) for x, y in line.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        return [_stroke(path, colour, width), *dots]


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        y = _TOP + 10 + 20 * number
        left = _WIDTH - _RIGHT + 12
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(_stroke(f"M{left} {y}h20", colour, 3 if number == 0 else 1.5))
        parts.append(_text(left + 26, y + 4, name))
    return parts


def _stroke(path: str, colour: str, width: float) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
