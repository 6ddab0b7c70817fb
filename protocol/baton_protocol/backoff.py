"""Pauses before the restarts of a process that ends again and again.

In: each end, and each sign that the process works. Out: the seconds to wait before its next start.
"""

from __future__ import annotations


class Backoff:
    """Seconds to wait before a restart: doubles each time, and resets once the process has worked.
    A process that worked before it died was most likely killed, so it restarts soon."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_pause_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(self._longest_s, 2 * pause_s)
        return pause_s

    def reset(self) -> None:
        self._next_s = self._first_s
