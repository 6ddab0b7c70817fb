"""The connections under the application: what aiohttp's parser refuses is answered with OpenAI's
errors too, and a connection whose headers do not come in time is closed.

In: bytes that are no request that the router takes. Out: an error that repeats none of them, with
the headers of every other answer, and no log line above debug: what is in a header may be a key,
and anybody could fill the log. Only aiohttp's public classes and methods are used. So bytes that
break the framing of a body under way are not seen here: that body ends by its own time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from baton_protocol.errors import ErrorRecord, InternalError
from baton_router.http.generation import ID_HEADER, OWN_ID_HEADER, PLACEMENT_HEADER
from baton_router.observability.request_log import refused
from baton_router.openai.answers import ErrorAnswer

# What aiohttp takes: of a request line, of one header, and how many headers.
MAX_LINE = 8190
MAX_HEADERS = 128
SHUTDOWN_S = 0.1  # for connections that still write when the router ends
# What a client did wrong. Its own message holds the line that was wrong.
_CLIENT_ERRORS = (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Headers have `header_timeout_s` to come, and a connection may be idle for `idle_timeout_s`;
    `new_id` names what is no request."""

    header_timeout_s: float
    idle_timeout_s: float
    new_id: Callable[[], str]


class HttpServer:
    """Serves an application on sites of its `runner`."""

    def __init__(self, app: web.Application, settings: ConnectionSettings) -> None:
        self._app = web.AppRunner(app)  # starts and ends the application; it has no site
        self._settings = settings
        self.runner: web.ServerRunner

    async def setup(self) -> None:
        await self._app.setup()
        assert self._app.server is not None
        server = _Server(self._app.server, self._settings)
        self.runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
        await self.runner.setup()

    async def cleanup(self) -> None:
        await self.runner.cleanup()
        await self._app.cleanup()


class _Server(web.Server):
    def __init__(self, app: web.Server, settings: ConnectionSettings) -> None:
        self.settings = settings
        super().__init__(
            self._handled(app.request_handler),
            request_factory=app.request_factory,
            handler_cancellation=True,
        )

    def _handled(self, handler: Handler) -> Handler:
        async def handled(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            connection.begin_request()
            try:
                return await handler(request)
            except web.HTTPExpectationFailed:
                # aiohttp answers an unknown `Expect` before any middleware runs.
                message = "the router knows no other Expect than 100-continue; leave it out"
                return self.error_response(_refusal(message, 417, code="http_error"))
            finally:
                connection.end_request()

        return handled

    def error_response(self, error: ErrorRecord) -> web.Response:
        """The answer to what no handler sees. Which route it was for is not known: it has the
        headers that any of them may have."""
        request_id = self.settings.new_id()
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

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self.settings, asyncio.get_running_loop())


class _Connection(web.RequestHandler):
    """aiohttp itself closes a connection that is idle for too long, and waits for half a request as
    for none."""

    __slots__ = ("_answering", "_headers_due", "_server", "_settings")

    def __init__(
        self, server: _Server, settings: ConnectionSettings, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes it as "no access log"
            keepalive_timeout=settings.idle_timeout_s,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
        )
        self._server = server
        self._settings = settings
        self._answering = False
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._have_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._answering and self._headers_due is None:
            self._await_headers()
        super().data_received(data)

    def begin_request(self) -> None:
        self._answering = True
        self._have_headers()

    def end_request(self) -> None:
        self._answering = False

    def _await_headers(self) -> None:
        loop, delay_s = asyncio.get_running_loop(), self._settings.header_timeout_s
        self._headers_due = loop.call_later(delay_s, self.force_close)

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
        self._have_headers()
        logger.debug("no request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = self._server.error_response(_record(status, exc))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, _CLIENT_ERRORS):
            logger.debug("what a client sent is no HTTP: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


def _record(status: int, exc: BaseException | None) -> ErrorRecord:
    if status >= 500:
        return InternalError("the router failed before it knew the request").record()
    if isinstance(exc, LineTooLong):
        message = f"the request line or a header is longer than {MAX_LINE} bytes; make it shorter"
        return _refusal(message, 431, code="headers_too_large")
    message = "this is no request of HTTP/1.1 that the router can read"
    return _refusal(message, 400, code="malformed_request")


def _refusal(message: str, status: int, *, code: str) -> ErrorRecord:
    return ErrorRecord(message, code, status=status, type="invalid_request_error")
