"""Writes one call's server-sent events to its client.

In: the bytes of events. Out: an HTTP response that starts with the first event. An error before
that is an HTTP status; an error after it is an event. After a timeout without tokens the caller
sends a sign of life, because clients and proxies close silent connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from baton_protocol.errors import ErrorRecord
from baton_router.http.media_types import EVENTS_TYPE
from baton_router.openai.dialect import Dialect

STREAM_HEADERS = {
    "Content-Type": f"{EVENTS_TYPE}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tell proxies not to buffer tokens
}


class _Stream(web.StreamResponse):
    """Sends the headers and the first event in one write."""

    _send_headers_immediately = False


class EventStream:
    """The stream of one call. Call keep_alive() after `keepalive_s` seconds without an event.
    `error_event` makes the last event of a stream that fails; `waiting` is a sign of life.
    `request` is None if no client reads it."""

    def __init__(
        self,
        request: web.Request | None,
        keepalive_s: float,
        dialect: Dialect,
    ) -> None:
        self.error_event: Callable[[ErrorRecord], bytes] = dialect.error_event
        self.waiting = dialect.waiting
        self.keepalive_s = keepalive_s
        self._headers: dict[str, str] = {}
        self._committed = False
        self._request = request
        self._response: web.StreamResponse | None = None
        # The connection of a response in chunks, on which push_event() writes.
        self._transport: asyncio.Transport | None = None

    @property
    def begun(self) -> bool:
        """Whether the answer is a stream, so that an error must be an event."""
        return self._committed or self._response is not None

    def commit(self, headers: dict[str, str]) -> None:
        """The answer is a stream: the first event takes these headers along."""
        self._headers, self._committed = headers, True

    async def write_event(self, data: bytes) -> None:
        """Write an event. Empty data only starts the response."""
        response = self._response or await self._begin()
        await response.write(data)

    async def keep_alive(self) -> None:
        await self.write_event(self.waiting)

    @property
    def flows(self) -> bool:
        """True if the stream has begun and the system has taken all data: push_event() may be used.
        Otherwise use write_event(), which waits for the client."""
        transport = self._transport
        return (
            transport is not None
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
        )

    def push_event(self, data: bytes) -> None:
        """Write at once; only while `flows` is True."""
        assert self._transport is not None
        if data:  # an empty chunk would end the stream
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def push_if_flowing(self, data: bytes) -> bool:
        """Write at once if the system takes it; otherwise return False."""
        if not self.flows:
            return False
        self.push_event(data)
        return True

    async def end_with_error(self, error: ErrorRecord) -> web.StreamResponse:
        """Write the error as the last event."""
        await self.write_event(self.error_event(error))
        return await self.end_stream()

    async def end_stream(self, data: bytes = b"") -> web.StreamResponse:
        """Write `data` and the end of the stream in one write."""
        response = self._response or await self._begin()
        await response.write_eof(data)
        return response

    def abort_connection(self) -> None:
        """Close the connection and drop what the client has not read."""
        if self._request is not None and self._request.transport is not None:
            self._request.transport.abort()

    async def _begin(self) -> web.StreamResponse:
        assert self._request is not None, "a stream that begins has a client"
        response = _Stream(headers=STREAM_HEADERS | self._headers)
        await response.prepare(self._request)
        self._response = response
        if response.headers.get("Transfer-Encoding") == "chunked":
            self._transport = self._request.transport
        return response


class LastingStream(EventStream):
    """A stream that outlives its client: what is written after the client has left is dropped.

    Its comments have no empty line after them. Clients such as OpenAI's take an empty line for the
    end of an event as soon as an event had an id."""

    def __init__(self, request: web.Request, keepalive_s: float, dialect: Dialect) -> None:
        super().__init__(request, keepalive_s, dialect)
        self.waiting = b": waiting\n"
        self.left = False

    async def write_event(self, data: bytes) -> None:
        if not self.left:
            with self._noting_departure():
                await super().write_event(data)

    async def end_stream(self, data: bytes = b"") -> web.StreamResponse:
        if not self.left:
            with self._noting_departure():
                return await super().end_stream(data)
        return self._response or web.Response()

    @contextmanager
    def _noting_departure(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError:
            self.left, self._transport = True, None  # it flows no more


class UnreadStream(EventStream):
    """A stream that no client reads: what is written is dropped."""

    def __init__(self, keepalive_s: float, dialect: Dialect) -> None:
        super().__init__(None, keepalive_s, dialect)

    async def write_event(self, data: bytes) -> None:
        return

    async def end_stream(self, data: bytes = b"") -> web.StreamResponse:
        return web.Response()
