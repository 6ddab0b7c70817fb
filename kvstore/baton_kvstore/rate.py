"""Bytes per second while at least one transfer runs, as a moving average.

Idle time does not count and parallel transfers count together: it is what the link gives a node
that has work, which is what placement wants to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WINDOW_S = 0.1  # a busy stretch is folded in at least this often
WEIGHT = 0.25  # of the newest stretch


class RateMeter:
    """begin() and end(bytes) around each transfer, from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._bytes = 0
        self._rate = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._active == 0:
                self._since, self._bytes = self._clock(), 0
            self._active += 1

    def end(self, count: int) -> None:
        """`count` is 0 for a transfer that failed."""
        with self._lock:
            self._active -= 1
            self._bytes += count
            now = self._clock()
            if self._bytes and (self._active == 0 or now - self._since >= WINDOW_S):
                rate = self._bytes / max(1e-6, now - self._since)
                old = self._rate or rate
                self._rate = old + WEIGHT * (rate - old)
                self._since, self._bytes = now, 0

    @property
    def bytes_per_s(self) -> float:
        """0.0 until something was measured."""
        return self._rate
