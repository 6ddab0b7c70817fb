"""The aiohttp application: routes, and one middleware that refuses what a browser may not send (see
BrowserGuard), asks for the API key and shapes every error as OpenAI does.

In: the parts of the API. Out: an application whose answers all carry x-request-id and
x-baton-request-id, and whose generation answers carry x-baton-placement, errors and streams
included.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton_protocol.errors import BatonError, ErrorRecord, Forbidden, InternalError, InvalidRequest
from baton_protocol.hosts import Hosts
from baton_router.auth import Tenants
from baton_router.errors import RequestFailed
from baton_router.http.connections import ID_HEADER, OWN_ID_HEADER, PLACEMENT_HEADER
from baton_router.http.drain import DrainRoutes
from baton_router.http.generation import (
    TRAIL,
    GenerationRoutes,
)
from baton_router.http.openapi import document
from baton_router.http.pool_routes import PoolRoutes
from baton_router.observability.request_log import RequestLog, client_id
from baton_router.openai.answers import ErrorAnswer
from baton_router.settings import USUAL_PORTS, RouterSettings, plain_origin

READING = frozenset({"GET", "HEAD", "OPTIONS"})
JSON_TYPE = "application/json"
ANY = "*"
SHOWN = 100  # characters of a header in an error
# What a browser shows to a page beside the few headers that it always shows.
EXPOSED = "x-request-id, x-baton-request-id, x-baton-placement, retry-after"
PREFLIGHT = "Access-Control-Request-Method"
PREFLIGHT_S = 600  # for so long a browser need not ask again; none keeps it for over two hours
# What of a preflight is repeated to it: names of methods and headers.
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?: *, *[\w!#$%&'*+.^`|~-]+)*", re.ASCII)


class BrowserGuard:
    """What pages in a browser may do here. A browser lets any page send requests to any address
    that its machine reaches, this router's among them.

    In: a request's method, `Host`, `Origin` and `Content-Type`. Out: 403 for a name that is not
    this router's (see `baton_protocol.hosts`), and for a page of another origin that would change
    something; 400 for a body of a type that a page may send without asking; for pages of origins
    that are allowed (`cors_origins`), the headers by which the browser lets them read an answer.
    Clients that are no browser send no `Origin`.

    Of one router.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._hosts = Hosts(settings.host, settings.allowed_hosts)
        self._any = ANY in settings.cors_origins
        self._origins = {plain_origin(origin) for origin in settings.cors_origins}

    def let_in(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks what a page may send, None to any other request. Raise
        Forbidden."""
        host = request.headers.get("Host", "")
        if not self._hosts.allows(host):
            raise Forbidden(
                f"this router does not answer to the host {host[:SHOWN]!r}; if that is one of its"
                " names, start it with --allowed-hosts",
                code="foreign_host",
            )
        if "Origin" not in request.headers:
            return None
        asks = request.method == "OPTIONS" and PREFLIGHT in request.headers
        if asks or request.method not in READING:
            self._check_origins(request.headers.getall("Origin"), host)
        return _preflight(request) if asks else None

    def open_to(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the browser show an answer to the page that asked, if its origin is allowed."""
        if not self._origins:
            return
        if not self._any:
            response.headers.add("Vary", "Origin")  # also where nobody is allowed: caches mix them
        origin = request.headers.get("Origin")
        if origin is not None and (self._any or origin in self._origins):
            response.headers["Access-Control-Allow-Origin"] = ANY if self._any else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _check_origins(self, origins: list[str], host: str) -> None:
        for origin in origins:
            if not (self._any or origin in self._origins or is_own(origin, host)):
                raise Forbidden(
                    f"a page of {origin[:SHOWN]!r} sent this to {host[:SHOWN]!r}: this router takes"
                    " requests of its own pages, of origins that --cors-origins names, and of"
                    " clients that are no browser",
                    code="foreign_origin",
                )


def check_type(request: web.Request) -> None:
    """Raise InvalidRequest, before the body is read, where a request that changes something has a
    body, or only the type of one, that is not JSON: a page may send text and forms anywhere without
    asking, and JSON only to those that allow it. What has no body needs no type."""
    if request.method in READING:
        return
    told = request.headers.get("Content-Type")
    if told is None and not request.body_exists:
        return
    if told is None or told.partition(";")[0].strip().lower() != JSON_TYPE:
        what = "has no Content-Type" if told is None else f"is of the type {told[:SHOWN]!r}"
        raise InvalidRequest(
            f"the body {what}: bodies are JSON, and say so: 'Content-Type: {JSON_TYPE}'",
            code="unsupported_content_type",
        )


def is_own(origin: str, host: str) -> bool:
    """Whether an `Origin` ("null" and what is no URL are nobody's) names the same host and port as
    `Host`; the port that one of them leaves out is that of the origin's scheme."""
    try:
        page, asked = urlsplit(origin), urlsplit(f"//{host}")
        usual = USUAL_PORTS[page.scheme]
        own = (asked.hostname, asked.port or usual)
        return page.hostname is not None and (page.hostname, page.port or usual) == own
    except (ValueError, KeyError):
        return False


def _preflight(request: web.Request) -> web.Response:
    """The page may send what it asks to: whether it may be here is decided, and its key says what
    for. `open_to` says to whom."""
    headers = {
        "Access-Control-Allow-Methods": request.headers[PREFLIGHT],
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
    }
    headers = {name: told for name, told in headers.items() if _NAMES.fullmatch(told)}
    headers["Access-Control-Max-Age"] = str(PREFLIGHT_S)
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    headers["Vary"] = f"{PREFLIGHT}, Access-Control-Request-Headers"
    return web.Response(status=204, headers=headers)


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
