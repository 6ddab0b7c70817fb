"""Ends a call whose client reads its stream too slowly, or not at all, or for too long.

In: that too much is unread, or that the call's time is up. Out: its requests end on all nodes, with
an error that stands behind what was still to be read; a client that reads nothing of it is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton_protocol.errors import ErrorRecord, SlowClient
from baton_router.http.sse import EventStream
from baton_router.observability.request_log import RequestLog
from baton_router.requests.in_flight import Prepared

# Beyond what kernel and transport buffer, which is some MB. A token that waits takes about 0.3 kB.
UNREAD_TOKENS = 4096
UNREAD_PER_CHOICE = 64  # all choices of a call come at once


class SlowClientGuard:
    """Of one call, which ends with an error that `fail` is told; `events` None: it is answered in
    one piece, and nothing waits for its client. `cut_off_s`: from the error to the cut."""

    def __init__(
        self,
        fail: Callable[[ErrorRecord], None],
        events: EventStream | None,
        trail: RequestLog,
        cut_off_s: float,
    ) -> None:
        self._fail = fail
        self._events = events
        self._trail = trail
        self._cut_off_s = cut_off_s
        self._cut: asyncio.TimerHandle | None = None

    def most(self, prepared: Sequence[Prepared]) -> int | None:
        """Tokens that may be unread."""
        if self._events is None:
            return None
        choices = sum(item.request.params.n for item in prepared)
        return UNREAD_TOKENS + UNREAD_PER_CHOICE * choices

    def overflow(self) -> None:
        """Called in the middle of what the dispatcher does for a request, so it acts later."""
        error = SlowClient(
            "the stream was not read: more tokens wait than the router keeps; read faster, or ask"
            " for an answer in one piece"
        )
        asyncio.get_running_loop().call_soon(self.end, error.record())

    def end(self, error: ErrorRecord) -> None:
        self._fail(error)
        if self._events is not None and self._cut is None:
            loop = asyncio.get_running_loop()
            self._trail.failure = error  # it may be cut off before it is told
            self._cut = loop.call_later(self._cut_off_s, self._events.abort)

    def done(self) -> None:
        """The handler is: it waits for its client no more."""
        if self._cut is not None:
            self._cut.cancel()
