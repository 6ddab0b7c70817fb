"""The tables of figures that plots show: one in README.md, others in docs/figures.md.

In: these two documents. Out: the cells of the tables, and the numbers in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
README, FIGURES = ROOT / "README.md", ROOT / "docs" / "figures.md"
# By the name of the plot: the document, and the heading above the table.
TABLES = {
    "ratios": (README, "## Figures"),
    "drafts": (FIGURES, "## Drafts: several tokens a step"),
    "autoscaling": (FIGURES, "## Autoscaling"),
}
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
FACTOR = re.compile(r"([\d.]+)x")
NUMBER = re.compile(r"\d[\d.]*")
# A figure in one of these units is the better, the smaller it is.
COSTS = {"ms", "s", "GPU-hours"}

Rows = list[list[str]]


class Ratio(NamedTuple):
    """The factor by which a figure is better than the rival's; below 1 it is worse. A range if
    several were measured."""

    figure: str
    rival: str
    low: float
    high: float


class Drafts(NamedTuple):
    """Tokens per second as multiples of those without drafts; None where nothing was measured."""

    work: str
    speeds: list[float | None]


class Scaling(NamedTuple):
    """Of Baton and of the HPA: the share of requests within their targets, in %; GPU-hours."""

    load: str
    within: tuple[float, float]
    hours: tuple[float, float]


def tables() -> Mapping[str, Rows]:
    """The rows of each table, its head included."""
    return {name: _rows(*place) for name, place in TABLES.items()}


def ratios(rows: Rows) -> list[Ratio]:
    """Of the rows with a rival. A rival with a figure of its own is Baton under another load."""
    found = []
    for figure, _, ours, rival, ratio, _ in rows[1:]:
        factors = [float(one) for one in FACTOR.findall(ratio)]
        if not factors or ":" in rival:
            continue
        if COSTS & set(ours.split()):
            factors = [1 / one for one in factors]
        found.append(Ratio(figure, rival, min(factors), max(factors)))
    return found


def drafts(rows: Rows) -> list[Drafts]:
    return [
        Drafts(f"{work}, {requests}", [_factor(cell) for cell in speeds])
        for work, requests, _, *speeds, _ in rows[1:]
    ]


def autoscaling(rows: Rows) -> list[Scaling]:
    found = []
    for load, ours, hpa in rows[1:]:
        (within, hours), (hpa_within, hpa_hours) = (
            [float(one) for one in NUMBER.findall(cell)] for cell in (ours, hpa)
        )
        found.append(Scaling(load, (within, hpa_within), (hours, hpa_hours)))
    return found


def _rows(document: Path, heading: str) -> Rows:
    """The cells of the first table under this heading, without its line of dashes."""
    _, found, text = document.read_text().partition(f"\n{heading}\n")
    assert found, f"{document.name} has no heading {heading!r}; name the new one in TABLES"
    lines = dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    table = list(takewhile(lambda line: line.startswith("|"), lines))
    return [
        [LINK.sub(r"\1", cell.strip()) for cell in line.strip("|").split("|")]
        for line in (table[0], *table[2:])
    ]


def _factor(cell: str) -> float | None:
    found = FACTOR.match(cell)
    return float(found[1]) if found else None
