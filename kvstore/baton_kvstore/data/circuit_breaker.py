"""CircuitBreaker: refuses operations after a failure, until a probe succeeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """A circuit breaker with exponential backoff.

    A failure opens the circuit: operations fail at once with its reason, instead of each waiting
    for its deadline. One thread at a time probes, after a pause that starts at `first_s` and
    doubles up to `limit_s` seconds. If the probe succeeds, the circuit closes. No operation has to
    fail to find out.

    A probe that proves less than an operation closes the circuit on trial: if operations still
    fail, the pause continues to grow, until one of them has succeeded. Thread-safe.
    """

    def __init__(
        self, first_s: float, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._reason = ""
        self._failures = 0
        self._retry_at = 0.0
        self._probing = False
        self._trial = False
        self._succeeded_at = self._failed_at = float("-inf")

    @property
    def reason(self) -> str:
        """Why it is open; "" while closed."""
        return self._reason

    @property
    def on_trial(self) -> bool:
        """Whether a probe has closed it on trial and no operation has succeeded since."""
        return self._trial

    def fail(self, reason: str, began: float) -> bool:
        """Open the circuit, or extend its pause, after a failed attempt that started at `began` (by
        the clock). Return False, without effect, if another thread has succeeded since then."""
        with self._lock:
            if began < self._succeeded_at:
                return False
            pause = min(self._limit_s, self._first_s * 2.0 ** min(self._failures, 16))
            self._failures += 1
            self._reason = reason
            self._failed_at = self._clock()
            self._retry_at = self._failed_at + pause
            self._probing = self._trial = False
            return True

    def succeed(self, began: float, trial: bool = False) -> None:
        """Close the circuit after an attempt that started at `began`; with `trial` keep the backoff
        until prove(). No effect if another thread has failed since then: an answer from before the
        server went down may come late."""
        with self._lock:
            if began < self._failed_at:
                return
            self._reason = ""
            self._failures = self._failures if trial else 0
            self._probing, self._trial = False, trial
            self._succeeded_at = self._clock()

    def prove(self) -> bool:
        """An operation succeeded. Return True if that ended a trial."""
        with self._lock:
            if not self._trial:
                return False
            self._trial, self._failures = False, 0
            return True

    def wait_s(self) -> float | None:
        """Seconds until a probe is due (0.0: now); None if the circuit is closed or another thread
        probes."""
        with self._lock:
            if not self._reason or self._probing:
                return None
            return max(0.0, self._retry_at - self._clock())

    def claim_probe(self) -> bool:
        """Return True to the one thread that should probe now and then call fail() or succeed()."""
        with self._lock:
            due = bool(self._reason) and not self._probing and self._clock() >= self._retry_at
            if due:
                self._probing = True
            return due
