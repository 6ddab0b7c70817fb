"""What transfers reach, as moving averages.

RateMeter   bytes per second while at least one transfer runs. Idle time does not count and parallel
            transfers count together: it is what the link gives a node that has work, which is what
            placement wants to know
Average     of single measurements, as round trips are
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WINDOW_S = 0.1  # a busy stretch is folded in at least this often
WEIGHT = 0.25  # of the newest stretch


class Average:
    """0.0 until something was added. Of two that are added at once one may be lost."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, sample: float) -> None:
        old = self.value or sample
        self.value = old + WEIGHT * (sample - old)


class RateMeter:
    """begin() and end(bytes) around each transfer, from any thread. What it counts, `total` counts
    too."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, total: RateMeter | None = None
    ) -> None:
        self._clock = clock
        self._total = total
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._bytes = 0
        self._rate = Average()

    def begin(self) -> None:
        if self._total is not None:
            self._total.begin()
        with self._lock:
            if self._active == 0:
                self._since, self._bytes = self._clock(), 0
            self._active += 1

    def end(self, count: int) -> None:
        """`count` is 0 for a transfer that failed."""
        if self._total is not None:
            self._total.end(count)
        with self._lock:
            self._active -= 1
            self._bytes += count
            now = self._clock()
            if self._bytes and (self._active == 0 or now - self._since >= WINDOW_S):
                self._rate.add(self._bytes / max(1e-6, now - self._since))
                self._since, self._bytes = now, 0

    @property
    def bytes_per_s(self) -> float:
        """0.0 until something was measured."""
        return self._rate.value
