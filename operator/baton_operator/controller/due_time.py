"""When some repeated work is due next: at the earliest of all requested times.

In: requests from watch events, timers and failures. Out: `wait_until_due` returns at that time.
Many requests before `begin` are one run; a request after `begin` causes one more.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import suppress

# One change of a pool is a burst of events; this pause merges them into one reconcile.
SETTLE_S = 0.05
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class DueTime:
    """For one event loop. `jitter` returns numbers in [0, 1)."""

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
        """Seconds until it is due; 0 if it is due now."""
        return max(0.0, self._at - self._clock())

    def request(self, after_s: float = SETTLE_S) -> None:
        at = max(self._clock() + after_s, self._not_before)
        if at < self._at:
            self._at = at
            self._moved.set()

    async def wait_until_due(self) -> None:
        """Return when it is due. The caller then calls `begin`, does the work, and calls
        `succeed` or `fail`."""
        while (left_s := self.due_s) > 0:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._moved.wait()

    def begin(self) -> None:
        """The work starts now: later requests are for the next run."""
        self._at = math.inf

    def succeed(self) -> None:
        """The work succeeded: reset the backoff."""
        self._failures, self._not_before = 0, -math.inf

    def fail(self, least_s: float = 0.0, most_s: float = LONGEST_RETRY_S) -> float:
        """The work failed: schedule a retry and return its delay in seconds. The delay doubles with
        each failure up to `most_s`. No request can make it due earlier than in `least_s`."""
        delay_s = min(most_s, FIRST_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        # Jitter of up to a quarter, so that pools that failed together do not retry together.
        delay_s = max(least_s, delay_s * (1 - self._jitter() / 4))
        if least_s > 0:
            self._not_before = self._clock() + least_s
            if self._at < self._not_before:
                self._at = self._not_before
        self.request(delay_s)
        return delay_s
