"""Draws requests per second by the number of clients and of routers, as SVG.

In: requests per second of each pass. Out: the text of docs/capacity.svg, with the medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

Rates = Mapping[str, Mapping[int, Sequence[float]]]  # by side and clients
# Of the whole picture, and of each of its two parts.
LEFT, TOP, WIDE, HIGH, LEGEND, GAP, FOOT = 56, 40, 300, 200, 130, 60, 50
COLOURS = ("#0969da", "#54aeff", "#1a7f37", "#9a6700", "#cf222e", "#8250df")
STYLE = """\
svg { --back: #ffffff; --ink: #1f2328; --faint: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  svg { --back: #0d1117; --ink: #e6edf3; --faint: #3d444d }
}
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.grid { stroke: var(--faint) }
.back { fill: var(--back) }
polyline { fill: none; stroke-width: 2 }
"""


def plot(rates: Rates, by_routers: Mapping[int, Sequence[float]], cores: int) -> str:
    by_clients = {
        name: {number: statistics.median(each) for number, each in found.items()}
        for name, found in rates.items()
    }
    routers = {"routers": {n: statistics.median(each) for n, each in by_routers.items()}}
    second = LEFT + WIDE + LEGEND + GAP
    parts = [_text(LEFT, 22, "requests/s by clients, one router")]
    parts += _chart(LEFT, by_clients, "clients", named=True)
    parts += [_text(second, 22, "requests/s by routers, 64 clients")]
    parts += _chart(second, routers, f"routers; they, nodes and clients share {cores} cores")
    width, height = second + WIDE + 20, TOP + HIGH + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        "<title>Requests per second by the number of clients and of routers</title>\n"
        f'<style>\n{STYLE}</style>\n<rect class="back" width="{width}" height="{height}"/>\n'
        + "".join(f"{part}\n" for part in parts)
        + "</svg>\n"
    )


def _chart(
    left: float, lines: Mapping[str, Mapping[int, float]], below: str, *, named: bool = False
) -> list[str]:
    """Numbers of clients or routers stand side by side, at equal distances."""
    steps = list(next(iter(lines.values())))
    top = _round_up(max(rate for line in lines.values() for rate in line.values()))
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + WIDE}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(_text(left - 8, y + 4, f"{share * top:g}", anchor="end"))
    for at, number in enumerate(steps):
        parts.append(_text(_x(left, at, steps), _y(0.0) + 18, str(number), anchor="middle"))
    parts.append(_text(left, _y(0.0) + 38, below))
    for order, (name, line) in enumerate(lines.items()):
        colour = COLOURS[order % len(COLOURS)]
        places = [(_x(left, at, steps), _y(line[n] / top)) for at, n in enumerate(steps)]
        points = " ".join(f"{x:g},{y:g}" for x, y in places)
        parts.append(f'<polyline stroke="{colour}" points="{points}"/>')
        parts += [f'<circle fill="{colour}" cx="{x:g}" cy="{y:g}" r="3"/>' for x, y in places]
        if named:
            y = TOP + 12 + 20 * order
            parts.append(
                f'<rect fill="{colour}" x="{left + WIDE + 12}" y="{y - 9}" width="10" height="10"/>'
            )
            parts.append(_text(left + WIDE + 28, y, name))
    return parts


def _round_up(value: float) -> float:
    """To a multiple of 100."""
    return 100.0 * max(1, -(-value // 100))


def _x(left: float, at: int, steps: Sequence[int]) -> float:
    return round(left + 20 + at * (WIDE - 40) / max(1, len(steps) - 1), 1)


def _y(share: float) -> float:
    return round(TOP + HIGH * (1 - share), 1)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}"{placed}>{escape(text)}</text>'
