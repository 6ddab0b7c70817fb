"""Times as a status holds them: RFC 3339 in UTC, in whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age_s(since: str, now: datetime) -> float:
    """Seconds from `since` to `now`; negative if it is in the future."""
    return (now - datetime.fromisoformat(since)).total_seconds()


def is_fresh(since: str, now: datetime, seconds: float) -> bool:
    """Whether `since` is less than `seconds` before `now`. False if it is in the future, because a
    clock was set back or another operator's clock is ahead. It only saves writes."""
    return bool(since) and 0 <= age_s(since, now) < seconds
