"""The aiohttp server under the application: what its parser refuses is told as OpenAI's errors too.

In: bytes that are no request that the router takes. Out: an error that repeats none of them, and no
log line above debug: what is in a header may be a key, and anybody could fill the log.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from baton_protocol.errors import ErrorRecord, InternalError, openai_body

# What aiohttp takes: of a request line, of one header, and how many headers.
MAX_LINE = 8190
MAX_HEADERS = 128
# What a client did wrong. Its own message holds the line that was wrong.
_CLIENTS = (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError)

logger = logging.getLogger(__name__)


class ShapedRunner(web.AppRunner):
    """An AppRunner whose connections are ShapedHandlers."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _ShapedServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )


class _ShapedServer(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _ShapedHandler(self, loop=self._loop, **self._kwargs)


class _ShapedHandler(web.RequestHandler):
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
        error = _record(status, exc)
        response = web.Response(
            body=msgspec.json.encode(openai_body(error)),
            status=error.status,
            content_type="application/json",
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, _CLIENTS):
            logger.debug("what a client sent is no HTTP: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


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
