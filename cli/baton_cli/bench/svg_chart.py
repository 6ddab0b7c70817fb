"""Draws a line chart as SVG text, without a plotting library.

In: a title, names of the axes, and points of one or several lines. Out: an SVG document. Both axes
begin at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 180, 40, 50  # margins; the legend is in the right one
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
TICKS = 5


@dataclass(frozen=True)
class Spot:
    """A point of a line. `marked` points have a filled dot, others a hollow one; None: no dot."""

    x: float
    y: float
    marked: bool | None = None


def line_chart(
    title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[Spot]], note: str = ""
) -> str:
    spots = [spot for line in lines.values() for spot in line]
    x_most = _round_up(max((spot.x for spot in spots), default=1.0))
    y_most = _round_up(max((spot.y for spot in spots), default=1.0))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + across * x / x_most, HEIGHT - BOTTOM - up * y / y_most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name, anchor="middle"),
        _text(LEFT, TOP - 5, y_name),
        _text(WIDTH - RIGHT + 15, HEIGHT - BOTTOM, note),
    ]
    for number in range(TICKS + 1):
        x, y = x_most * number / TICKS, y_most * number / TICKS
        (at, floor), (edge, height) = place(x, 0), place(0, y)
        parts.append(_text(at, floor + 18, f"{x:.4g}", anchor="middle"))
        parts.append(_text(edge - 8, height + 4, f"{y:.4g}", anchor="end"))
        parts.append(
            f'<line x1="{edge:.1f}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}"'
            ' stroke="#ddd"/>'
        )
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(spot.x, spot.y) for spot in line))
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
        for spot in line:
            if spot.marked is not None:
                x, y = place(spot.x, spot.y)
                fill = color if spot.marked else "white"
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{color}" fill="{fill}"/>'
                )
        parts.append(_text(WIDTH - RIGHT + 15, TOP + 18 * number, name, color=color))
    return "\n".join([*parts, "</svg>", ""])


def _round_up(value: float) -> float:
    """The next number with one digit, or with 1.5 or 2.5 before zeros."""
    if value <= 0:
        return 1.0
    unit: float = 10 ** math.floor(math.log10(value))
    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(step * unit for step in steps if step * unit >= value * (1 - 1e-9))


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, color: str = "#333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">'
        f"{escape(words)}</text>"
    )
