"""Moments as objects of the API say them: RFC 3339, in whole seconds of UTC.

In: what is written there, which somebody may have edited, and the time of day. Out: seconds.
"""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def elapsed_s(since: str, now: datetime) -> float:
    """0 where nothing is written, or no moment, or one to come."""
    try:
        begun = datetime.fromisoformat(since)
    except ValueError:
        return 0.0
    begun = begun if begun.tzinfo is not None else begun.replace(tzinfo=UTC)
    return max(0.0, (now - begun).total_seconds())


def is_fresh(since: str, now: datetime, seconds: float) -> bool:
    """Whether it was said less than so long ago: not where the clock was set back since."""
    if not since:
        return False
    return 0 <= (now - datetime.fromisoformat(since)).total_seconds() < seconds
