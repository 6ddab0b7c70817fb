"""One call's server-sent events on their way to the client, and the end of a client that reads them
too slowly, not at all, or for too long.

In: bytes of events. Out: an HTTP response that begins with the first of them, so that what goes
wrong before is an HTTP status that clients understand, and after it an event with the error. A
client that leaves too much unread gets an error behind what it has still to read, and its requests
end on all nodes; a client that reads nothing of that is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from baton_protocol.errors import ErrorRecord, SlowClient
from baton_router.openai.answers import ErrorAnswer, event

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect tokens
}
# Beyond what kernel and transport buffer, which is some MB. A token that waits takes about 0.3 kB.
UNREAD_TOKENS = 4096
UNREAD_PER_CHOICE = 64  # all choices of a call come at once
WAITING = b": waiting\n\n"  # a comment: SSE clients skip it


class _Stream(web.StreamResponse):
    """Headers and the first event are one write."""

    _send_headers_immediately = False


class EventStream:
    """A stream without a token for `keepalive_s` is to be told that it WAITs: clients and proxies
    give up connections that say nothing."""

    def __init__(self, request: web.Request, keepalive_s: float) -> None:
        self.keepalive_s = keepalive_s
        self._request = request
        self._response: web.StreamResponse | None = None
        self._chunked = False

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def write(self, data: bytes) -> None:
        """Also nothing: then it only begins."""
        response = self._response or await self._begin()
        await response.write(data)

    async def keep_alive(self) -> None:
        await self.write(WAITING)

    @property
    def flows(self) -> bool:
        """The stream has begun, and the system has taken all that was written: push() may follow.
        Else write() waits for the client."""
        transport = self._request.transport
        return (
            self._chunked
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def push(self, data: bytes) -> None:
        """Write at once, while the stream `flows`."""
        assert self._request.transport is not None
        if data:  # an empty chunk is the end
            self._request.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def fail(self, error: ErrorRecord) -> web.StreamResponse:
        """The last event; there is no [DONE] after it."""
        await self.write(event(ErrorAnswer.of(error)))
        return await self.end()

    async def end(self, data: bytes = b"") -> web.StreamResponse:
        """`data` and the stream's end are one write."""
        response = self._response or await self._begin()
        await response.write_eof(data)
        return response

    def abort(self) -> None:
        """Close the connection, and leave unsent what its client does not read."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _begin(self) -> web.StreamResponse:
        response = _Stream(headers=STREAM_HEADERS)
        await response.prepare(self._request)
        self._response = response
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        return response


class SlowClientGuard:
    """Of one call, which ends with an error that `fail` gets; `events` None: it is answered in one
    piece, and nothing waits for its client. `note` gets the error of a stream, which may be cut off
    before the client reads it. `cut_off_s`: from the error to the cut."""

    def __init__(
        self,
        fail: Callable[[ErrorRecord], None],
        events: EventStream | None,
        note: Callable[[ErrorRecord], None],
        cut_off_s: float,
    ) -> None:
        self._fail = fail
        self._events = events
        self._note = note
        self._cut_off_s = cut_off_s
        self._cut: asyncio.TimerHandle | None = None

    def most(self, choices: int) -> int | None:
        """Tokens that may be unread, of an answer with so many choices."""
        if self._events is None:
            return None
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
            self._note(error)
            self._cut = loop.call_later(self._cut_off_s, self._events.abort)

    def done(self) -> None:
        """The handler is: it waits for its client no more."""
        if self._cut is not None:
            self._cut.cancel()
