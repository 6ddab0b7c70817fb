"""A percentile from a histogram of latencies. Pure.

In: counts per bucket as in a RouterReport, the share. Out: seconds, or None if nothing was counted.
Times are assumed to be spread evenly within a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.store import LATENCY_BOUNDS_S


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Linear interpolation. Times beyond all bounds count as the last bound."""
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
