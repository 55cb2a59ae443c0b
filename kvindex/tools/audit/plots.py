"""Plots as inline SVG: titled, with their numbers, coloured by classes that the page defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDE, _NARROW, _HEIGHT = 1000, 480, 220  # in pixels of the page, about: text keeps its size
_CHARACTER = 7
_LEFT, _BOTTOM, _TOP = 64, 40, 12


def draw_shares(title: str, parts: Sequence[tuple[str, int, str]]) -> str:
    """Return one bar that is divided into (class, amount, name)."""
    total = sum(amount for _, amount, _ in parts)
    at, body = 0.0, []
    for css, amount, name in parts:
        width = _WIDE * amount / total if total else 0.0
        if width:
            tip = f"<title>{escape(name)}: {amount:,} ({amount / total:.1%})</title>"
            body.append(
                f'<rect class="{css}" x="{at:.1f}" y="0" width="{width:.1f}" height="36">'
                f"{tip}</rect>"
            )
        at += width
    description = "; ".join(f"{name} {amount:,}" for _, amount, name in parts if amount)
    return _svg(title, description, (_WIDE, 36), body)


def draw_bars(
    title: str,
    bars: Sequence[tuple[str, Sequence[int]]],
    classes: Sequence[str],
    *,
    across: str,
    unit: str = "tokens",
    wide: bool = False,
) -> str:
    """Return columns, each of amounts stacked from the bottom up, in the colours of the classes."""
    full = _WIDE if wide else _NARROW
    top = max((sum(amounts) for _, amounts in bars), default=0) or 1
    step = (full - _LEFT) / max(1, len(bars))
    room = _HEIGHT - _BOTTOM - _TOP
    body = _scale(top, unit, full)
    longest = max((len(label) for label, _ in bars), default=1)
    every = math.ceil((longest + 2) * _CHARACTER / step)
    for number, (label, amounts) in enumerate(bars):
        x, y = _LEFT + number * step, float(_HEIGHT - _BOTTOM)
        tip = f"<title>{escape(label)}: {', '.join(f'{a:,}' for a in amounts)}</title>"
        body.append(f"<g>{tip}")
        for css, amount in zip(classes, amounts, strict=True):
            height = room * amount / top
            y -= height
            width = max(0.5, step * 0.86)
            body.append(
                f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"/>'
            )
        body.append("</g>")
        if number % every == 0:
            half = len(label) * _CHARACTER / 2
            middle = max(half, min(x + step * 0.43, full - half))
            body.append(_text(middle, _HEIGHT - _BOTTOM + 16, label))
    body.append(_text((_LEFT + full) / 2, _HEIGHT - 4, across))
    description = "; ".join(f"{label}: {sum(amounts):,}" for label, amounts in bars[:24])
    return _svg(title, description, (full, _HEIGHT), body)


def _svg(title: str, description: str, size: tuple[int, int], body: Sequence[str]) -> str:
    name = "plot-" + title.lower().replace(" ", "-")
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{escape(title)}</title>'
        f'<desc id="{name}d">{escape(description)}</desc>' + "".join(body) + "</svg>"
    )


def _scale(top: int, unit: str, full: int) -> list[str]:
    """Horizontal lines at the bottom, in the middle and at the top, with their amounts."""
    lines = []
    for part in (0.0, 0.5, 1.0):
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * part
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{full}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if part:
            lines.append(_text(_LEFT - 6, y + 4, _short(top * part), anchor="end"))
    lines.append(_text(_LEFT - 6, _HEIGHT - _BOTTOM + 4, unit, anchor="end"))
    return lines


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
