"""Limits how often a node sends its load when jobs arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SEND_EVERY_S = 0.02


class LoadThrottle:
    """Calls `send` after request_load(), at once but at most every SEND_EVERY_S seconds. Call
    note_sent() for each load, including those from `send`."""

    def __init__(
        self, send: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._clock = clock
        self._sent_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def request_load(self) -> None:
        if self._timer is None:
            wait_s = max(0.0, self._sent_at + SEND_EVERY_S - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send)

    def note_sent(self) -> None:
        self.cancel_timer()
        self._sent_at = self._clock()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
