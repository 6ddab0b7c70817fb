"""What the benchmarks have in common: medians with their ranges, ratios, and whether a goal is met.

Contenders take turns in the same run, so a slow minute of the machine hits all of them: a ratio is
the median of the passes' own ratios. A ratio that misses its goal by less than the passes scatter
(the ranges overlap) counts as equal, and is called so.

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
    """`value` beside its goal, in words."""

    met: bool
    text: str


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the passes' ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def at_least(ours: Sequence[float], theirs: Sequence[float], goal: float) -> Verdict:
    """Where more is better: ours should be `goal` times theirs."""
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
    """Where less is better: the median should be under `limit`."""
    met = statistics.median(values) < limit
    return Verdict(met, f"goal < {limit:.{digits}f} {unit} {'met' if met else 'MISSED'}")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rotated(items: Sequence[T], by: int) -> Sequence[T]:
    """Another one goes first in each pass."""
    cut = by % len(items)
    return [*items[cut:], *items[:cut]]


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f} before"


def exit_code(verdicts: Iterable[Verdict], *, quick: bool) -> int:
    """1 where a goal is missed; too few passes to say so in the quick form."""
    missed = sum(not verdict.met for verdict in verdicts)
    if missed:
        print(f"{missed} goals missed" + (" (quick form: too few passes to tell)" * quick))
    return 1 if missed and not quick else 0
