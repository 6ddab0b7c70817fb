"""The rate of transfers: bytes per second while at least one of them runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WINDOW_S = 0.1  # a busy period adds a sample to the average at least this often
WEIGHT = 0.25  # weight of the newest sample in the moving average


class Average:
    """An exponential moving average; 0.0 until the first sample. Of two samples that threads add at
    once, one may be lost."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, sample: float) -> None:
        old = self.value or sample
        self.value = old + WEIGHT * (sample - old)


class RateMeter:
    """Measures bytes per second while at least one transfer runs.

    Idle time does not count and the bytes of parallel transfers add up, so the rate is what the
    link gives a busy node. Call begin_transfer() and end_transfer() around each transfer, from any
    thread. `total` counts the same transfers, too.
    """

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

    def begin_transfer(self) -> None:
        if self._total is not None:
            self._total.begin_transfer()
        with self._lock:
            if self._active == 0:
                self._since, self._bytes = self._clock(), 0
            self._active += 1

    def end_transfer(self, count: int) -> None:
        """A transfer of `count` bytes has ended; 0 if it failed."""
        if self._total is not None:
            self._total.end_transfer(count)
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
