"""The aiohttp application: routes, and one middleware that refuses what a browser may not send (see
`browser_guard`), asks for the API key and shapes every error as OpenAI does.

In: the parts of the API. Out: an application whose answers all carry x-request-id and
x-baton-request-id, and whose generation answers carry x-baton-placement, errors and streams
included.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton_protocol.errors import BatonError, ErrorRecord, InternalError
from baton_router.auth import Tenants
from baton_router.errors import RequestFailed
from baton_router.http.browser_guard import BrowserGuard, check_type
from baton_router.http.drain import DrainRoutes
from baton_router.http.generation import (
    ID_HEADER,
    OWN_ID_HEADER,
    PLACEMENT_HEADER,
    TRAIL,
    GenerationRoutes,
)
from baton_router.http.openapi import document
from baton_router.http.pool_routes import PoolRoutes
from baton_router.observability.request_log import RequestLog, client_id
from baton_router.openai.answers import ErrorAnswer
from baton_router.settings import RouterSettings

GENERATION = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
KEYED = ("/v1/", "/requests/")  # what is below wants an API key, where keys are configured
ADMINS = ("/pool", "/metrics")  # and these an admin's
COMMANDS = "/nodes/"  # what is below changes what nodes do
CLIENT_LEFT = 499
RETRY_AFTER_S = 1
ROUTER_DIGITS = 8
_CODES = {404: "not_found", 405: "method_not_allowed"}

Failure = BatonError | RequestFailed | web.HTTPException
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Api:
    """What an application is made of. `tenants` are those of the keys as last read; `name` is the
    router's: its last digits begin the ids of its requests."""

    name: str
    settings: RouterSettings
    tenants: Tenants
    generation: GenerationRoutes
    pool: PoolRoutes
    clock: Callable[[], float]

    def new_id(self) -> str:
        """Of a call: 32 hex digits, of which the first name its router."""
        return self.name[-ROUTER_DIGITS:] + secrets.token_hex(16 - ROUTER_DIGITS // 2)


def build_app(api: Api, *inner: Middleware) -> web.Application:
    """`inner` run inside the middleware that checks requests and shapes errors."""
    pages = BrowserGuard(api.settings)
    app = web.Application(middlewares=[_shaped(api, pages), *inner])
    app.on_response_prepare.append(_headed(pages))
    bodies, answer_s = api.generation.intake.bodies, api.settings.bounds.drain_answer_s
    drains = DrainRoutes(api.pool.fleet, bodies, api.clock, answer_s)
    described = web.get("/openapi.json", _openapi)
    app.add_routes(
        [*api.generation.routes(), *api.pool.routes(), *drains.routes(), described],
    )
    return app


@cache
def _document() -> bytes:
    return msgspec.json.encode(document())


async def _openapi(request: web.Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


def _headed(pages: BrowserGuard) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def headed(request: web.Request, response: web.StreamResponse) -> None:
        """What the headers of each answer say, as they are sent: which request it is, where that
        went, which pages may read it."""
        trail = request.get(TRAIL)
        if trail is None:
            return  # no request that the application has met: `connections` has named its answer
        headers = response.headers
        headers[ID_HEADER], headers[OWN_ID_HEADER] = trail.shown_id, trail.id
        if trail.endpoint and (placement := trail.placement()) is not None:
            headers[PLACEMENT_HEADER] = placement
        pages.open_to(request, response)

    return headed


def _shaped(api: Api, pages: BrowserGuard) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A browser's preflight asks for no generation.
        endpoint = GENERATION.get(request.path, "") if request.method != "OPTIONS" else ""
        given_id = client_id(request.headers.get(ID_HEADER))
        request[TRAIL] = trail = RequestLog(api.new_id(), api.clock(), endpoint, given_id)
        observers = api.generation.observers
        if endpoint:
            observers.begin(trail, request.headers.get("traceparent", ""))
        code = CLIENT_LEFT
        try:
            response = await _answer(api, pages, request, handler)
            code = response.status if trail.failure is None else trail.failure.status
            return response
        finally:
            if endpoint:
                observers.end(trail, code, api.clock())

    return middleware


async def _answer(
    api: Api, pages: BrowserGuard, request: web.Request, handler: Handler
) -> web.StreamResponse:
    try:
        preflight = pages.let_in(request)
        if preflight is not None:
            return preflight
        authorization = request.headers.get("Authorization")
        if request.path.startswith(KEYED):
            request[TRAIL].tenant = api.tenants.who(authorization)
        elif request.path in ADMINS:
            request[TRAIL].tenant = api.tenants.admin(authorization)
        elif request.path.startswith(COMMANDS):
            request[TRAIL].tenant = api.tenants.commander(authorization, request.remote)
        if request.match_info.http_exception is None:
            check_type(request)
        response = await handler(request)
    except ConnectionError:
        # The client is gone, and aiohttp would log an exception as our failure: it gets a response
        # that it cannot write, and lets that pass.
        if request.transport is not None:
            request.transport.close()
        return web.Response(status=CLIENT_LEFT)
    except (BatonError, RequestFailed, web.HTTPException) as error:
        response = _error_response(request, _record(request, error))
        if isinstance(error, web.HTTPException) and "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except Exception:
        request_id = request[TRAIL].id
        logger.exception(
            "%s %s failed", request.method, request.path, extra={"request": request_id}
        )
        failure = InternalError(f"the router failed; its log says why, under {request_id}")
        response = _error_response(request, failure.record())
    return response


def _record(request: web.Request, error: Failure) -> ErrorRecord:
    if isinstance(error, BatonError):
        return error.record()
    if isinstance(error, RequestFailed):
        return error.error
    route = f"{request.method} {request.path}"
    message = {
        404: f"there is no {route}; see /v1/models, /v1/chat/completions, /v1/completions",
        405: f"{route} is not allowed; allowed: {error.headers.get('Allow', '')}",
    }.get(error.status, f"{route}: {error.reason}")
    return ErrorRecord(
        message=message,
        code=_CODES.get(error.status, "http_error"),
        status=error.status,
        type="invalid_request_error" if error.status < 500 else "server_error",
    )


def _error_response(request: web.Request, error: ErrorRecord) -> web.Response:
    response = web.Response(
        body=msgspec.json.encode(ErrorAnswer.of(error)),
        status=error.status,
        content_type="application/json",
    )
    if error.retryable:
        wait = error.retry_after if error.retry_after is not None else RETRY_AFTER_S
        response.headers["Retry-After"] = f"{max(1, math.ceil(wait))}"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    request[TRAIL].failure = error
    return response
