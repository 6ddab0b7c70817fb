"""Where the time of this node's engine goes: to tenants by cause, or nowhere, which is idle.

In: the moments at which the step loop has read a step or has slept. Out: an account per request,
and NodeTime for the pool's books.

Each moment since the start belongs to one row. Time up to the end of a step that computed tokens
belongs to that step, with what the loop did before it in the same iteration: frames, events, the
reports of the step before. All other time is idle: the loop slept, had nothing that could run, or
gave its memory back or took it again. So the rows add up to the time since the start.
"""

from __future__ import annotations

from collections.abc import Callable

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import StepResult
from baton_engine.scheduling.time_account import TimeAccount
from baton_protocol.usage import (
    BUSY_CAUSES,
    MAX_TENANTS,
    OTHER_TENANTS,
    NodeTime,
    TimeRow,
    TimeSpent,
)


class TimeLedger:
    """The time of one engine. `clock` is in seconds; it starts now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._until = clock()
        self._idle = 0.0
        self._tenants: dict[str, TimeAccount] = {}

    def open_account(self, tenant: str) -> TimeAccount:
        """The account of a new request of this tenant."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        return TimeAccount(self._tenants.setdefault(tenant, TimeAccount()))

    def book_idle(self) -> None:
        """Book the time until now as idle."""
        now = self._clock()
        self._idle += now - self._until
        self._until = now

    def book_step(self, engine: EngineCore, result: StepResult, now: float) -> None:
        """Book the time until `now` for the step with this result, or as idle if it computed
        nothing."""
        seconds, self._until = now - self._until, now
        if result.num_tokens:
            engine.book_time(seconds / result.num_tokens)
        else:
            self._idle += seconds

    def report(self) -> NodeTime:
        """All time that is booked. `wall_ms` is measured, not added up."""
        rows = [
            TimeRow(tenant, cause, 1e3 * seconds)
            for tenant, account in self._tenants.items()
            for cause in BUSY_CAUSES
            if (seconds := getattr(account, cause))
        ]
        rows.append(TimeRow("", "idle", 1e3 * self._idle))
        return NodeTime(1e3 * (self._until - self._began), tuple(rows))

    def busy_seconds(self) -> dict[str, float]:
        """The counters of NodeLoad, by their names there without `_total`."""
        return {
            f"{cause}_seconds": round(
                sum(getattr(account, cause) for account in self._tenants.values()), 3
            )
            for cause in BUSY_CAUSES
        }


def time_spent(account: TimeAccount) -> TimeSpent:
    """What a request has cost until now."""
    seconds = (getattr(account, cause) for cause in BUSY_CAUSES)
    return TimeSpent(*(round(1e3 * each, 3) for each in seconds))
