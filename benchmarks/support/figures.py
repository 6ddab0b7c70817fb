"""Statistics that the benchmarks share: medians with ranges, ratios, and verdicts on goals.

Contenders take turns in the same run, so that a slow minute of the machine hits all of them; a
ratio is the median of the ratios per pass. A ratio that misses its goal by less than the scatter of
the passes (the ranges overlap) counts as met, and the text says so.

In: one number per pass. Out: text for the table, and a `Verdict`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """Whether a figure meets its goal, and a text with both."""

    met: bool
    text: str


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median and the range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios per pass."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def at_least(ours: Sequence[float], theirs: Sequence[float], goal: float) -> Verdict:
    """Judge figures where more is better: ours should be at least `goal` times theirs."""
    found = ratio(ours, theirs)
    if found >= goal:
        return Verdict(True, f"{found:5.2f}x  goal {goal:.2f}x met")
    if max(ours) >= goal * min(theirs):
        return Verdict(True, f"{found:5.2f}x  goal {goal:.2f}x equal: ranges overlap")
    return Verdict(False, f"{found:5.2f}x  goal {goal:.2f}x MISSED")


def times_at_most(ours: Sequence[float], theirs: Sequence[float], goal: float) -> Verdict:
    """Where less is better: ours should be `goal` times theirs at most."""
    found = ratio(ours, theirs)
    if found <= goal:
        return Verdict(True, f"{found:5.2f}x  goal {goal:.2f}x met")
    if min(ours) <= goal * max(theirs):
        return Verdict(True, f"{found:5.2f}x  goal {goal:.2f}x equal: ranges overlap")
    return Verdict(False, f"{found:5.2f}x  goal {goal:.2f}x MISSED")


def at_most(values: Sequence[float], limit: float, unit: str, digits: int = 2) -> Verdict:
    """Judge figures where less is better: the median should be below `limit`."""
    met = statistics.median(values) < limit
    return Verdict(met, f"goal < {limit:.{digits}f} {unit} {'met' if met else 'MISSED'}")


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile at `share` (0 to 1), without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rotated(items: Sequence[T], by: int) -> Sequence[T]:
    """Rotate the order of contenders, so that each pass starts with a different one."""
    cut = by % len(items)
    return [*items[cut:], *items[:cut]]


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f} before"


def exit_code(verdicts: Iterable[Verdict], *, quick: bool) -> int:
    """Return 1 if a goal is missed. The quick form has too few passes, and always returns 0."""
    missed = sum(not verdict.met for verdict in verdicts)
    if missed:
        print(f"{missed} goals missed" + (" (quick form: too few passes to tell)" * quick))
    return 1 if missed and not quick else 0
