"""The limit of write-behind: a token bucket, and conditions that stop it.

The data plane asks once per chunk; a refused chunk is skipped for good, so nothing waits here. Not
thread-safe. No I/O except the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.1  # share of the measured put rate that write-behind may use if no rate is configured
UNMEASURED_BYTES_PER_S = float(8 << 20)  # the assumed put rate until a put has measured it
BURST_S = 1.0  # the bucket's capacity, in seconds at its rate


class TokenBucket:
    """A token bucket in bytes whose rate may change.

    A chunk passes if the level is above 0, and may take the level below 0. So a chunk of any size
    passes, and the rate holds on average.
    """

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
    """Decides which chunks write-behind may put. `bytes_per_s` is its rate: None means a share of
    the measured put rate, 0 turns it off."""

    def __init__(
        self, bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = bytes_per_s
        self._bucket = TokenBucket(clock)

    def take(self, size: int, *, put_bytes_per_s: float, fullest: float, others: bool) -> bool:
        """Return whether `size` bytes may be put now; True takes them from the bucket.

        `put_bytes_per_s` is the measured put rate, 0.0 if not measured. `fullest` is the used share
        of memory on the fullest server. `others` is True if other puts are queued or a server
        accepts none; then nothing passes.
        """
        if others or fullest > 0.5:
            return False
        rate = self._given
        if rate is None:
            # Before the first put let some through: there may be no other puts that measure it.
            rate = SHARE * (put_bytes_per_s or UNMEASURED_BYTES_PER_S)
        return self._bucket.take(size, rate)
