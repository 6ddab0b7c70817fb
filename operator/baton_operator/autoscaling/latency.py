"""A percentile of times of which only the counts between bounds are known. Pure.

In: counts as in a RouterReport, the share. Out: seconds, or None where nothing was counted. Within
two bounds times are taken to lie evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.store import LATENCY_BOUNDS_S


def percentile(counts: Sequence[int], share: float) -> float | None:
    """What lies beyond all bounds counts as the last of them."""
    left = share * sum(counts)
    if left <= 0.0:
        return None
    low = 0.0
    for high, count in zip(LATENCY_BOUNDS_S, counts, strict=False):
        if count and left <= count:
            return low + (high - low) * left / count
        left -= count
        low = high
    return low
