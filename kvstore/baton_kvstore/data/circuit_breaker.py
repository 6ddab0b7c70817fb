"""Whether an instance is worth asking.

A failure opens the circuit: operations fail at once, with the reason, instead of each waiting for
its deadline. One thread at a time probes, after a pause that doubles up to a limit; when it
succeeds the circuit closes. No operation is spent on finding out.

A probe that proves less than an operation closes the circuit on trial: should operations fail all
the same, the next pause is longer than the last, until one of them has worked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Thread-safe. `first_s` and `limit_s` bound the pause between attempts."""

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
        self._succeeded_at = float("-inf")

    @property
    def reason(self) -> str:
        """Why it is open; "" while closed."""
        return self._reason

    @property
    def on_trial(self) -> bool:
        """Closed by a probe, and no operation has worked since."""
        return self._trial

    def fail(self, reason: str, began: float) -> bool:
        """Open, or open for longer, after an attempt that began then (by the clock). False, and no
        effect, if another thread succeeded since: what failed was before that."""
        with self._lock:
            if began < self._succeeded_at:
                return False
            pause = min(self._limit_s, self._first_s * 2.0 ** min(self._failures, 16))
            self._failures += 1
            self._reason = reason
            self._retry_at = self._clock() + pause
            self._probing = self._trial = False
            return True

    def succeed(self, trial: bool = False) -> None:
        with self._lock:
            self._reason = ""
            self._failures = self._failures if trial else 0
            self._probing, self._trial = False, trial
            self._succeeded_at = self._clock()

    def prove(self) -> bool:
        """An operation worked. True if that ended a trial."""
        with self._lock:
            if not self._trial:
                return False
            self._trial, self._failures = False, 0
            return True

    def wait_s(self) -> float | None:
        """Seconds until a probe is due (0.0: now); None if none is wanted from this thread."""
        with self._lock:
            if not self._reason or self._probing:
                return None
            return max(0.0, self._retry_at - self._clock())

    def claim_probe(self) -> bool:
        """True for the one thread that should try to reconnect now, then fail() or succeed()."""
        with self._lock:
            due = bool(self._reason) and not self._probing and self._clock() >= self._retry_at
            if due:
                self._probing = True
            return due
