"""Runs: ranges [start, end) of a sequence that hold KV, in ascending order and without overlap.

In: the runs that were cached and those that landed from the store. Out: their unions, cuts and
totals, from which a sequence derives what to compute. The caller chooses the unit (blocks or
tokens). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Run = tuple[int, int]


def check_runs(runs: Sequence[Run], limit: int) -> None:
    """Raise ValueError unless the runs ascend, do not overlap and lie in [0, limit)."""
    least = 0
    for start, end in runs:
        if not least <= start < end <= limit:
            raise ValueError(
                f"blocks landed in runs {list(runs)}; [{start}, {end}) is not a run of the "
                f"{limit} full ones behind block {least}"
            )
        least = end


def merged(runs: Iterable[Run]) -> list[Run]:
    """Join runs that touch or overlap and drop empty ones. `runs` must be ordered by start."""
    found: list[Run] = []
    for start, end in runs:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def within(runs: Iterable[Run], low: int, high: int) -> list[Run]:
    """The parts of the runs inside [low, high)."""
    cut = [(max(start, low), min(end, high)) for start, end in runs]
    return [(start, end) for start, end in cut if start < end]


def total(runs: Iterable[Run]) -> int:
    return sum(end - start for start, end in runs)
