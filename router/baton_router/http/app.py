"""The aiohttp application: routes, and a middleware that applies browser rules (see BrowserGuard),
checks the API key, and formats every error as OpenAI does.

In: the parts of the API. Out: an application whose answers all carry x-request-id and
x-baton-request-id, and whose generation answers carry x-baton-placement, including errors and
streams, and x-baton-exact once their nodes are known.
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
from baton_router.http.connections import (
    COMMANDS,
    EXACT_HEADER,
    ID_HEADER,
    OWN_ID_HEADER,
    PLACEMENT_HEADER,
)
from baton_router.http.drain import DrainRoutes
from baton_router.http.generation import GenerationRoutes
from baton_router.http.observers import CONTEXT
from baton_router.http.openapi import document
from baton_router.http.pool_routes import PoolRoutes
from baton_router.openai.answers import ErrorAnswer
from baton_router.requests.context import RequestContext, valid_client_id
from baton_router.settings import USUAL_PORTS, RouterSettings, plain_origin

READING = frozenset({"GET", "HEAD", "OPTIONS"})
JSON_TYPE = "application/json"
ANY = "*"
SHOWN = 100  # characters of a header in an error
# Headers that a browser shows to a page, beside the few that it always shows.
EXPOSED = "x-request-id, x-baton-request-id, x-baton-placement, x-baton-exact, retry-after"
PREFLIGHT = "Access-Control-Request-Method"
PREFLIGHT_S = 600  # a browser may cache the answer; none does for over 2 h
# Names of methods and headers in a preflight; only these are repeated in the answer.
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?: *, *[\w!#$%&'*+.^`|~-]+)*", re.ASCII)


class BrowserGuard:
    """Rules for pages in a browser. A browser lets any page send requests to any address that its
    machine reaches, including this router.

    In: a request's method, `Host`, `Origin` and `Content-Type`. Out: 403 if `Host` is not a name of
    this router (see `baton_protocol.hosts`), or if a page of another origin tries to change
    something. 400 for a body type that a page may send without a preflight. Pages of `cors_origins`
    get the headers that let them read an answer. Clients other than browsers send no `Origin`.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._hosts = Hosts(settings.host, settings.allowed_hosts)
        self._any = ANY in settings.cors_origins
        self._origins = {plain_origin(origin) for origin in settings.cors_origins}

    def check(self, request: web.Request) -> web.Response | None:
        """The answer to a CORS preflight, or None for any other request. Raise Forbidden."""
        host = request.headers.get("Host", "")
        if not self._hosts.allows(host):
            raise Forbidden(
                f"this router does not serve the host {host[:SHOWN]!r}; if this is one of its "
                "names, start it with --allowed-hosts",
                code="foreign_host",
            )
        if "Origin" not in request.headers:
            return None
        is_preflight = request.method == "OPTIONS" and PREFLIGHT in request.headers
        if is_preflight or request.method not in READING:
            self._check_origins(request.headers.getall("Origin"), host)
        return _preflight(request) if is_preflight else None

    def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that let a page of an allowed origin read the answer."""
        if not self._origins:
            return
        if not self._any:
            response.headers.add("Vary", "Origin")  # for other origins too: caches mix answers
        origin = request.headers.get("Origin")
        if origin is not None and (self._any or origin in self._origins):
            response.headers["Access-Control-Allow-Origin"] = ANY if self._any else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _check_origins(self, origins: list[str], host: str) -> None:
        for origin in origins:
            if not (self._any or origin in self._origins or is_own(origin, host)):
                raise Forbidden(
                    f"a page of {origin[:SHOWN]!r} sent this request to {host[:SHOWN]!r}; this "
                    "router accepts requests from its own pages, from origins named by "
                    "--cors-origins, and from clients other than browsers",
                    code="foreign_origin",
                )


def check_type(request: web.Request) -> None:
    """Refuse a body that is not JSON, before it is read, for requests that change something. A page
    may send text and forms to any site without a preflight, but JSON only where it is allowed.
    Without a body and a Content-Type there is nothing to check. Raise InvalidRequest."""
    if request.method in READING:
        return
    content_type = request.headers.get("Content-Type")
    if content_type is None and not request.body_exists:
        return
    if content_type is None or content_type.partition(";")[0].strip().lower() != JSON_TYPE:
        problem = (
            "has no Content-Type"
            if content_type is None
            else f"is of type {content_type[:SHOWN]!r}"
        )
        raise InvalidRequest(
            f"the body {problem}; send JSON with 'Content-Type: {JSON_TYPE}'",
            code="unsupported_content_type",
        )


def is_own(origin: str, host: str) -> bool:
    """Whether `Origin` names the host and port of `Host`; a missing port is the default of the
    origin's scheme. False for "null" and anything else that is not a URL."""
    try:
        page, target = urlsplit(origin), urlsplit(f"//{host}")
        default_port = USUAL_PORTS[page.scheme]
        own = (target.hostname, target.port or default_port)
        return page.hostname is not None and (page.hostname, page.port or default_port) == own
    except (ValueError, KeyError):
        return False


def _preflight(request: web.Request) -> web.Response:
    """Allow what the page asks to send. The origin was checked before, and the API key decides
    later. `open_to` adds the allowed origin."""
    headers = {
        "Access-Control-Allow-Methods": request.headers[PREFLIGHT],
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
    }
    headers = {name: value for name, value in headers.items() if _NAMES.fullmatch(value)}
    headers["Access-Control-Max-Age"] = str(PREFLIGHT_S)
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    headers["Vary"] = f"{PREFLIGHT}, Access-Control-Request-Headers"
    return web.Response(status=204, headers=headers)


GENERATION = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
KEYED = ("/v1/", "/requests/")  # these paths need an API key, if keys are configured
ADMINS = ("/pool", "/metrics")  # these need an admin's key
CLIENT_LEFT = 499
RETRY_AFTER_S = 1
ROUTER_DIGITS = 8
_CODES = {404: "not_found", 405: "method_not_allowed"}

Failure = BatonError | RequestFailed | web.HTTPException
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Api:
    """The parts of an application. `tenants` belong to the keys as last read. `name` is the
    router's; its last digits begin the ids of its requests."""

    name: str
    settings: RouterSettings
    tenants: Tenants
    generation: GenerationRoutes
    pool: PoolRoutes
    clock: Callable[[], float]

    def new_id(self) -> str:
        """A new request id: 32 hex digits, of which the first identify the router."""
        return self.name[-ROUTER_DIGITS:] + secrets.token_hex(16 - ROUTER_DIGITS // 2)


def build_app(api: Api, *inner: Middleware) -> web.Application:
    """The application. `inner` middlewares run inside the one that checks and formats errors."""
    guard = BrowserGuard(api.settings)
    app = web.Application(middlewares=[_outer_middleware(api, guard), *inner])
    app.on_response_prepare.append(_header_signal(guard))
    bodies, answer_s = api.generation.intake.bodies, api.settings.tunables.drain_answer_s
    drains = DrainRoutes(api.pool.fleet, bodies, api.clock, answer_s)
    openapi = web.get("/openapi.json", _openapi)
    app.add_routes(
        [*api.generation.routes(), *api.pool.routes(), *drains.routes(), openapi],
    )
    return app


@cache
def _document() -> bytes:
    return msgspec.json.encode(document())


async def _openapi(request: web.Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


def _header_signal(
    guard: BrowserGuard,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers of every answer just before it is sent: ids, placement, exactness,
        CORS."""
        context = request.get(CONTEXT)
        if context is None:
            return  # not from the application; `connections` set its headers
        headers = response.headers
        headers[ID_HEADER], headers[OWN_ID_HEADER] = context.shown_id, context.id
        if context.endpoint and (placement := context.placement_header()) is not None:
            headers[PLACEMENT_HEADER] = placement
        if (exact := context.exact()) is not None:
            headers[EXACT_HEADER] = exact
        guard.add_cors_headers(request, response)

    return add_headers


def _outer_middleware(api: Api, guard: BrowserGuard) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A CORS preflight on a generation path is not a generation request.
        endpoint = GENERATION.get(request.path, "") if request.method != "OPTIONS" else ""
        given_id = valid_client_id(request.headers.get(ID_HEADER))
        request[CONTEXT] = context = RequestContext(api.new_id(), api.clock(), endpoint, given_id)
        observers = api.generation.observers
        if endpoint:
            observers.begin_call(context, request.headers.get("traceparent", ""))
        code = CLIENT_LEFT
        try:
            response = await _answer(api, guard, request, handler)
            code = response.status if context.failure is None else context.failure.status
            return response
        finally:
            if endpoint:
                observers.end_call(context, code, api.clock())

    return middleware


async def _answer(
    api: Api, guard: BrowserGuard, request: web.Request, handler: Handler
) -> web.StreamResponse:
    try:
        preflight = guard.check(request)
        if preflight is not None:
            return preflight
        authorization = request.headers.get("Authorization")
        if request.path.startswith(KEYED):
            request[CONTEXT].tenant = api.tenants.tenant_of(authorization)
        elif request.path in ADMINS:
            request[CONTEXT].tenant = api.tenants.admin(authorization)
        elif request.path.startswith(COMMANDS):
            request[CONTEXT].tenant = api.tenants.node_admin(authorization, request.remote)
        if request.match_info.http_exception is None:
            check_type(request)
        response = await handler(request)
    except ConnectionError:
        # The client is gone. Return a response that cannot be written; otherwise aiohttp would log
        # an exception as the router's failure.
        if request.transport is not None:
            request.transport.close()
        return web.Response(status=CLIENT_LEFT)
    except (BatonError, RequestFailed, web.HTTPException) as error:
        response = _error_response(request, _record(request, error))
        if isinstance(error, web.HTTPException) and "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except Exception:
        request_id = request[CONTEXT].id
        logger.exception(
            "%s %s failed", request.method, request.path, extra={"request": request_id}
        )
        failure = InternalError(
            f"the router failed; its log has the cause under request {request_id}"
        )
        response = _error_response(request, failure.record())
    return response


def _record(request: web.Request, error: Failure) -> ErrorRecord:
    if isinstance(error, BatonError):
        return error.record()
    if isinstance(error, RequestFailed):
        return error.error
    route = f"{request.method} {request.path}"
    message = {
        404: (
            f"the route {route} does not exist; see /v1/models, /v1/chat/completions, "
            "/v1/completions"
        ),
        405: f"{route} is not allowed; allowed methods: {error.headers.get('Allow', '')}",
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
    request[CONTEXT].failure = error
    return response
