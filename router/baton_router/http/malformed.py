"""The aiohttp server under the application: what its parser refuses is told as OpenAI's errors too,
and a connection whose headers do not come in time is closed.

In: bytes that are no request that the router takes. Out: an error that repeats none of them, with
the headers of every other answer, and no log line above debug: what is in a header may be a key,
and anybody could fill the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from baton_protocol.errors import ErrorRecord, InternalError
from baton_router.http.handlers import ID_HEADER, OWN_ID_HEADER, PLACEMENT_HEADER
from baton_router.observability.request_log import refused
from baton_router.openai.answers import ErrorAnswer

# What aiohttp takes: of a request line, of one header, and how many headers.
MAX_LINE = 8190
MAX_HEADERS = 128
# What a client did wrong. Its own message holds the line that was wrong.
_CLIENTS = (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError)

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


class ErrorShapingRunner(web.AppRunner):
    """An AppRunner of ShapedHandlers. Headers have `header_timeout_s` to come; `new_id` names what
    is no request."""

    def __init__(
        self,
        app: web.Application,
        header_timeout_s: float,
        new_id: Callable[[], str],
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self._header_timeout_s = header_timeout_s
        self._new_id = new_id

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _ShapedServer(server, self._header_timeout_s, self._new_id)


class _ShapedServer(web.Server):
    def __init__(
        self, server: web.Server, header_timeout_s: float, new_id: Callable[[], str]
    ) -> None:
        self.new_id = new_id
        super().__init__(
            self._expected(server.request_handler),
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )
        self._header_timeout_s = header_timeout_s

    def _expected(self, handler: _Handler) -> _Handler:
        """aiohttp answers an unknown `Expect` before any middleware runs."""

        async def expected(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await handler(request)
            except web.HTTPExpectationFailed:
                told = "the router knows no other Expect than 100-continue; leave the header out"
                return _answer(_refusal(told, 417, code="http_error"), self.new_id())

        return expected

    def __call__(self) -> web.RequestHandler:
        return _ShapedHandler(self, self._header_timeout_s, loop=self._loop, **self._kwargs)


class _ShapedHandler(web.RequestHandler):
    """aiohttp itself closes a connection that is idle for too long, and waits for half a request as
    for none."""

    __slots__ = ("_header_timeout_s", "_headers_due", "_new_id")

    def __init__(self, manager: _ShapedServer, header_timeout_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._header_timeout_s = header_timeout_s
        self._new_id = manager.new_id
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._have_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._have_headers()
            if isinstance(self._messages[-1][0], _ErrInfo):
                self._end_body()
        elif data and self._waiter is not None and self._headers_due is None:
            self._await_headers()

    def _end_body(self) -> None:
        """What came is no HTTP. aiohttp answers that once the request before it is answered, and
        leaves that waiting for its body where what is wrong is in the body. Then the body fails,
        and the connection ends with the answer to it."""
        content: Any = None
        if len(self._messages) > 1:
            content = self._messages[-2][1]
        elif self._current_request is not None:
            content = self._current_request.content
        if content is not None and not content.is_eof() and content.exception() is None:
            self._messages.pop()
            content.set_exception(web.RequestPayloadError("it does not come in chunks of HTTP/1.1"))
            self.close()

    def _await_headers(self) -> None:
        self._headers_due = self._loop.call_later(self._header_timeout_s, self.force_close)

    def _have_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        logger.debug("no request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = _answer(_record(status, exc), self._new_id())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, _CLIENTS):
            logger.debug("what a client sent is no HTTP: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


def _answer(error: ErrorRecord, request_id: str) -> web.Response:
    """The answer to what no handler sees. Which route it was for is not known: it has the headers
    that any of them may have."""
    return web.Response(
        body=msgspec.json.encode(ErrorAnswer.of(error)),
        status=error.status,
        content_type="application/json",
        headers={
            ID_HEADER: request_id,
            OWN_ID_HEADER: request_id,
            PLACEMENT_HEADER: refused(error),
        },
    )


def _record(status: int, exc: BaseException | None) -> ErrorRecord:
    if status >= 500:
        return InternalError("the router failed before it knew the request").record()
    told = "this is no request of HTTP/1.1 that the router can read"
    if isinstance(exc, LineTooLong):
        told = f"the request line or a header is longer than {MAX_LINE} bytes; make it shorter"
        return _refusal(told, 431, code="headers_too_large")
    return _refusal(told, 400, code="malformed_request")


def _refusal(message: str, status: int, *, code: str) -> ErrorRecord:
    return ErrorRecord(message, code, status=status, type="invalid_request_error")
