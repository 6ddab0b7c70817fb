"""How much may be written behind: a token bucket, and the rules that close it.

In: what the data plane measures. Out: yes or no for each chunk; what is refused is skipped for
good, so nothing waits here. Pure but for its clock; one thread asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.1  # of the measured put rate, where no rate is given
UNMEASURED_BYTES_PER_S = float(8 << 20)  # taken for that rate until a put has measured it
BURST_S = 1.0  # what an idle time saves up


class TokenBucket:
    """Bytes at a rate that may change. A chunk is let through while anything is left, and what it
    takes too much is waited for afterwards: so any size passes, and the rate holds on average."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._level = 0.0
        self._at = clock()

    def take(self, size: int, bytes_per_s: float) -> bool:
        now = self._clock()
        filled = self._level + (now - self._at) * bytes_per_s
        self._level, self._at = min(filled, bytes_per_s * BURST_S), now
        if self._level <= 0.0:
            return False
        self._level -= size
        return True


class WriteBehindBudget:
    """`bytes_per_s`: None is a share of what puts reach, 0 is off."""

    def __init__(
        self, bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = bytes_per_s
        self._bucket = TokenBucket(clock)

    def take(self, size: int, *, put_bytes_per_s: float, fullest: float, others: bool) -> bool:
        """Whether `size` bytes may go now. `fullest` is the used share of the fullest server's
        memory; `others` says that somebody waits for puts, or that a server takes none."""
        if others or fullest > 0.5:
            return False
        rate = self._given
        if rate is None:
            # Who let nothing through before the first put might wait for it for ever.
            rate = SHARE * (put_bytes_per_s or UNMEASURED_BYTES_PER_S)
        return self._bucket.take(size, rate)
