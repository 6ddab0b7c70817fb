"""The user's requests to stop a pool.

In: signals. Out: two events that the supervisor waits for.
"""

from __future__ import annotations

import asyncio
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """The user asks the pool to stop: the first signal sets `requested`, the second `at_once`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Install signal handlers. A shell script starts background jobs with SIGINT ignored, and
        asyncio.run would not change that."""
        for number in SIGNALS:
            loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        if self.requested.is_set():
            self.at_once.set()
        self.requested.set()
