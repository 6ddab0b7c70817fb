"""Moments as objects of the API say them: RFC 3339, in whole seconds of UTC.

In: what is written there, which somebody may have edited, and the time of day. Out: seconds.
"""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_fresh(since: str, now: datetime, seconds: float) -> bool:
    """Whether it was said less than so long ago: not where the clock was set back since, nor where
    an operator with a clock ahead of this one said it. It spares writes, nothing waits for it."""
    if not since:
        return False
    return 0 <= (now - datetime.fromisoformat(since)).total_seconds() < seconds
