"""Runs: ranges [start, end) of a sequence that hold KV, in ascending order and without overlap.

In: the runs that were cached and those that landed from the store. Out: their unions, cuts and
totals, from which a sequence derives what to compute. The caller chooses the unit (spans of
block_size tokens, or tokens). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton_protocol.layout import KVLayout

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


def merge_runs(runs: Iterable[Run]) -> list[Run]:
    """Join runs that touch or overlap and drop empty ones. `runs` must be ordered by start."""
    union: list[Run] = []
    for start, end in runs:
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif start < end:
            union.append((start, end))
    return union


def within(runs: Iterable[Run], low: int, high: int) -> list[Run]:
    """The parts of the runs inside [low, high)."""
    cut = [(max(start, low), min(end, high)) for start, end in runs]
    return [(start, end) for start, end in cut if start < end]


def total(runs: Iterable[Run]) -> int:
    return sum(end - start for start, end in runs)


def spans_of(runs: Iterable[Run]) -> set[int]:
    return {span for start, end in runs for span in range(start, end)}


def reusable(
    full: Sequence[Run], windowed: Sequence[Run], first: int, layout: KVLayout
) -> list[Run]:
    """The spans whose KV can be used as it is, if the tokens from `first` on are computed.

    `full` are runs of spans with KV in the groups without a window, `windowed` with KV in those
    with a window. A span without KV in `full` is computed. A span without KV in `windowed` is
    computed only if a token that is computed later sees it, or if `first` is in it. Such a span in
    turn sees earlier ones. So go back from the last span: `seen` is the first token that the tokens
    computed from here on see. It moves back with each computed span.
    """
    in_full, in_windowed = spans_of(full), spans_of(windowed)
    size, runs = layout.block_size, list[Run]()
    seen = layout.window_start(first)
    for span in reversed(range(-(-first // size))):
        if span in in_full and (span in in_windowed or (span + 1) * size <= seen):
            runs.append((span, span + 1))
        else:
            seen = layout.window_start(span * size)
    return merge_runs(reversed(runs))
