"""When something is due: at one moment at most, the earliest that was asked for.

In: marks by watch events, by time, by failures. Out: `wait` returns at that moment. What was marked
ten times is due once, and once more if it was marked since it was taken.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import suppress

# A change of a pool is a burst of events; a pause as short as this makes one reconcile of it.
SETTLE_S = 0.05
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Schedule:
    """One event loop's. `jitter` gives numbers from 0 up to 1."""

    def __init__(
        self, clock: Callable[[], float], jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._at = math.inf
        self._not_before = -math.inf
        self._failures = 0
        self._moved = asyncio.Event()

    @property
    def due_s(self) -> float:
        """In how many seconds it is due; 0 where it is."""
        return max(0.0, self._at - self._clock())

    def add(self, after_s: float = SETTLE_S) -> None:
        at = max(self._clock() + after_s, self._not_before)
        if at < self._at:
            self._at = at
            self._moved.set()

    async def wait(self) -> None:
        """Return when it is due. Whoever then deals with it calls `take`, and `done` or `failed`
        in the end."""
        while (left_s := self.due_s) > 0:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._moved.wait()

    def take(self) -> None:
        """It is dealt with now: marks from here on are for another time."""
        self._at = math.inf

    def done(self) -> None:
        """The next failure is the first."""
        self._failures, self._not_before = 0, -math.inf

    def failed(self, least_s: float = 0.0, most_s: float = LONGEST_RETRY_S) -> float:
        """It is to be tried again; returns in how many seconds: twice as long each time, up to
        `most_s`, but never less than `least_s`, whatever marks come before."""
        delay_s = min(most_s, FIRST_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        # Up to a quarter less, so that those that failed together do not come back together.
        delay_s = max(least_s, delay_s * (1 - self._jitter() / 4))
        if least_s > 0:
            self._not_before = self._clock() + least_s
            if self._at < self._not_before:
                self._at = self._not_before
        self.add(delay_s)
        return delay_s
