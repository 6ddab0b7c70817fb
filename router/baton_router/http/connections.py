"""The connections below the application: errors of aiohttp's parser get OpenAI's format, and a
connection whose headers take too long is closed.

In: bytes that are not a request the router accepts. Out: an error that repeats none of these bytes,
with the usual headers. Nothing is logged above DEBUG, because a header may hold a key and anybody
could fill the log. The code uses only aiohttp's public classes and methods, so it does not see
bytes that break the framing of a body in progress: the body's own timeout ends that.
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
from baton_router.http.headers import ID_HEADER, OWN_ID_HEADER, PLACEMENT_HEADER
from baton_router.http.media_types import JSON_TYPE
from baton_router.http.plain_path import with_plain_path
from baton_router.http.unix_socket import UnixSocket
from baton_router.openai.answers import ErrorAnswer
from baton_router.requests.context import refusal_line

# Limits for aiohttp: bytes of a request line or of a header, and the number of headers.
MAX_LINE = 8190
MAX_HEADERS = 128
SHUTDOWN_S = 0.1  # seconds for connections that still write at shutdown
BACKLOG = 128  # connections that wait to be accepted
# Errors of the client. Their messages contain the offending line, so they are not logged.
_CLIENT_ERRORS = (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Timeouts for headers and for idle connections, in seconds. `new_id` makes an id for the
    answer to bytes that are not a request. `root_path` is left out of the paths of requests."""

    header_timeout_s: float
    idle_timeout_s: float
    new_id: Callable[[], str]
    root_path: str = ""


class HttpServer:
    """Serves an application on the addresses that it listens on."""

    def __init__(self, app: web.Application, settings: ConnectionSettings) -> None:
        self._app = web.AppRunner(app)  # starts and ends the application; it has no site
        self._settings = settings
        self._listeners: list[asyncio.Server] = []
        self._unix: UnixSocket | None = None
        self._server: _Server
        self.runner: web.ServerRunner

    async def setup(self) -> None:
        await self._app.setup()
        assert self._app.server is not None
        self._server = _Server(self._app.server, self._settings)
        self.runner = web.ServerRunner(self._server, shutdown_timeout=SHUTDOWN_S)
        await self.runner.setup()

    async def listen(self, host: str, port: int) -> int:
        """Listen on a TCP port, and return it. Raise OSError."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self._server, host, port, backlog=BACKLOG)
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen on a unix socket. Raise OSError."""
        self._unix = UnixSocket(path)
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_unix_server(self._server, sock=self._unix.listener, backlog=BACKLOG)
        )

    async def stop_listening(self) -> None:
        """Accept no more connections. Accepted ones continue. Idempotent."""
        if self._unix is not None:
            self._unix.remove()
        listeners, self._listeners = self._listeners, []
        loop = asyncio.get_running_loop()
        for listener in listeners:
            for accepting in listener.sockets:
                loop.remove_reader(accepting.fileno())
        # asyncio starts to read from an accepted connection one pass of the loop later. If the
        # listener is closed by then, the connection stays open and nobody reads from it.
        await asyncio.sleep(0)
        for listener in listeners:
            listener.close()

    async def cleanup(self) -> None:
        await self.stop_listening()
        await self.runner.cleanup()
        await self._app.cleanup()


class _Server(web.Server):
    def __init__(self, app: web.Server, settings: ConnectionSettings) -> None:
        self.settings = settings
        super().__init__(
            self._tracked(app.request_handler),
            request_factory=lambda message, *rest: app.request_factory(
                with_plain_path(message, settings.root_path), *rest
            ),
            handler_cancellation=True,
        )

    def _tracked(self, handler: Handler) -> Handler:
        async def track(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            connection.begin_request()
            try:
                return await handler(request)
            except web.HTTPExpectationFailed:
                # aiohttp answers an unknown `Expect` before any middleware runs.
                message = "the router supports no Expect but 100-continue; leave it out"
                return self.error_response(_refusal(message, 417, code="http_error"))
            finally:
                connection.end_request()

        return track

    def error_response(self, error: ErrorRecord) -> web.Response:
        """The answer to an error outside any handler. As the route is unknown, it carries the
        headers of every kind of answer."""
        request_id = self.settings.new_id()
        return web.Response(
            body=msgspec.json.encode(ErrorAnswer.of(error)),
            status=error.status,
            content_type=JSON_TYPE,
            headers={
                ID_HEADER: request_id,
                OWN_ID_HEADER: request_id,
                PLACEMENT_HEADER: refusal_line(error),
            },
        )

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self.settings, asyncio.get_running_loop())


class _Connection(web.RequestHandler):
    """Closes a connection whose headers take too long. aiohttp alone would treat a half-sent
    request like an idle connection."""

    __slots__ = ("_answering", "_headers_since", "_headers_timer", "_server", "_settings")

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
        self._headers_since: float | None = None  # when it began to wait for a request's headers
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._answering and self._headers_since is None:
            self._await_headers()
        super().data_received(data)

    def begin_request(self) -> None:
        self._answering, self._headers_since = True, None

    def end_request(self) -> None:
        self._answering = False

    def _await_headers(self) -> None:
        """Close the connection unless a request begins in time. One timer serves many requests: a
        timer of its own is a noticeable part of what a short request costs."""
        loop = asyncio.get_running_loop()
        self._headers_since = loop.time()
        if self._headers_timer is None:
            due = self._headers_since + self._settings.header_timeout_s
            self._headers_timer = loop.call_at(due, self._check_headers)

    def _check_headers(self) -> None:
        self._headers_timer = None
        if self._headers_since is None:
            return
        loop = asyncio.get_running_loop()
        due = self._headers_since + self._settings.header_timeout_s
        if loop.time() < due:
            self._headers_timer = loop.call_at(due, self._check_headers)
        else:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self._headers_since = None
        logger.debug("a client sent an invalid request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has already begun")
        response = self._server.error_response(_record(status, exc))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, _CLIENT_ERRORS):
            logger.debug("a client sent bytes that are not HTTP: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


def _record(status: int, exc: BaseException | None) -> ErrorRecord:
    if status >= 500:
        return InternalError("the router failed before it could read the request").record()
    if isinstance(exc, LineTooLong):
        message = f"the request line or a header is longer than {MAX_LINE} bytes; shorten it"
        return _refusal(message, 431, code="headers_too_large")
    message = "this is not an HTTP/1.1 request that the router can read"
    return _refusal(message, 400, code="malformed_request")


def _refusal(message: str, status: int, *, code: str) -> ErrorRecord:
    return ErrorRecord(message, code, status=status, type="invalid_request_error")
