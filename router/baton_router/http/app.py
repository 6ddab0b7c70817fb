"""The aiohttp application: routes, and a middleware that applies browser rules (see BrowserGuard),
checks the API key, and formats every error as its client expects.

In: the parts of the API. Out: an application whose answers all carry x-request-id and
x-baton-request-id, and whose generation answers carry x-baton-placement, including errors and
streams, and x-baton-exact once their nodes are known.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton_protocol.errors import BatonError, ErrorRecord
from baton_protocol.usage import USAGE_PATH
from baton_router.auth import Tenants
from baton_router.batches.files import Files
from baton_router.batches.journal import Journal
from baton_router.errors import RequestFailed, StartError, error_record, router_failed
from baton_router.http.batch_routes import BatchRoutes
from baton_router.http.browser_guard import BrowserGuard, check_type
from baton_router.http.cors import Cors, is_preflight
from baton_router.http.dialects import DIALECTS, client_dialect
from baton_router.http.drain import DrainRoutes
from baton_router.http.file_routes import FileRoutes
from baton_router.http.generation import GenerationRoutes
from baton_router.http.headers import (
    EXACT_HEADER,
    ID_HEADER,
    KEY_HEADER,
    OWN_ID_HEADER,
    PLACEMENT_HEADER,
)
from baton_router.http.json_response import json_response
from baton_router.http.live_routes import LIVE_PATH, LiveRoutes
from baton_router.http.load_header import FORMAT_HEADER, LOAD_HEADER, is_known_format, load_text
from baton_router.http.media_types import JSON_TYPE
from baton_router.http.node_sleep import SleepRoutes
from baton_router.http.observers import CLIENT_LEFT, CONTEXT
from baton_router.http.openapi import document
from baton_router.http.page_routes import PageRoutes
from baton_router.http.plain_path import COMMANDS
from baton_router.http.pool_routes import PoolRoutes
from baton_router.http.prefix_cache import RESET_PATH, PrefixCacheRoutes
from baton_router.http.prefixes import PREFIXES_PATH, PrefixRoutes
from baton_router.http.responses import ResponseRoutes
from baton_router.http.token_routes import DETOKENIZE, TOKENIZE, TOKENIZER_INFO, TokenRoutes
from baton_router.http.usage import UsageRoutes
from baton_router.nodes.node_calls import NodeCalls
from baton_router.nodes.pin_keeper import PinKeeper
from baton_router.nodes.prefix_pins import PrefixPins
from baton_router.openai.answers import ErrorAnswer
from baton_router.page.asset_table import read_assets
from baton_router.requests.context import RequestContext, valid_client_id
from baton_router.settings import RouterSettings

# What begins so needs an API key, if keys are configured.
KEYED = ("/v1/", "/requests/", TOKENIZE, DETOKENIZE, TOKENIZER_INFO, *DIALECTS)
ADMINS = ("/pool", "/load", "/metrics")  # these need an admin's key
VIEWERS = (LIVE_PATH, USAGE_PATH)  # a tenant sees its own, an admin all
NODE_ADMINS = (COMMANDS, f"{RESET_PATH}/", f"{PREFIXES_PATH}/")  # these change what nodes do
THIS_MACHINE = "localhost"  # the address of all clients of a unix socket
RETRY_AFTER_S = 1
ROUTER_DIGITS = 8
_CODES = {404: "not_found", 405: "method_not_allowed"}

Failure = BatonError | RequestFailed | web.HTTPException
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Api:
    """The parts of an application. `tenants` belong to the keys as last read. `name` is the
    router's; its last digits begin the ids of its requests. `files` and `journal` are None without
    a store for them."""

    name: str
    settings: RouterSettings
    tenants: Tenants
    generation: GenerationRoutes
    pool: PoolRoutes
    pins: PrefixPins
    keeper: PinKeeper
    responses: ResponseRoutes
    usage: UsageRoutes
    files: Files | None
    journal: Journal | None
    node_calls: NodeCalls
    clock: Callable[[], float]

    def new_id(self) -> str:
        """A new request id: 32 hex digits, of which the first identify the router."""
        return self.name[-ROUTER_DIGITS:] + secrets.token_hex(16 - ROUTER_DIGITS // 2)


def build_app(api: Api) -> web.Application:
    cors = Cors(api.settings.cors_origins)
    guard = BrowserGuard(api.settings, cors)
    app = web.Application(middlewares=[_outer_middleware(api, guard, cors)])
    app.on_response_prepare.append(_header_signal(cors, api.generation.observers.vllm.load))
    bodies, answer_s = api.generation.intake.bodies, api.settings.tunables.drain_answer_s
    drains = DrainRoutes(api.pool.fleet, bodies, api.clock, answer_s)
    prefixes = PrefixRoutes(api.pins, api.keeper, api.generation, lambda: api.tenants)
    tokens = TokenRoutes(
        settings=api.settings,
        offers=api.generation.fleet.offers,
        bodies=bodies,
        rng=api.generation.rng,
        clock=api.clock,
    )
    live = LiveRoutes(
        api.generation.observers.live,
        lambda request: api.tenants.viewer(_authorization(request)),
    )
    sleeps = SleepRoutes(api.pool.fleet, api.node_calls, bodies)
    files = FileRoutes(api.files, api.settings)
    batches = BatchRoutes(api.files, api.journal, bodies)
    app.add_routes(
        [
            *(*api.generation.routes(), *api.pool.routes(), *drains.routes(), *sleeps.routes()),
            *(*PrefixCacheRoutes(api.pool.fleet).routes(), *prefixes.routes()),
            *(*tokens.routes(), *api.responses.routes(), *files.routes(), *batches.routes()),
            *live.routes(),
            *api.usage.routes(),
            web.get("/openapi.json", _openapi_handler(api.settings.root_path)),
        ],
    )
    _check_root_path(api.settings.root_path, app)
    if api.settings.page:
        app.add_routes(PageRoutes(read_assets(), api.settings.root_path).routes())
    return app


def _check_root_path(root_path: str, app: web.Application) -> None:
    """Raise StartError if a route's own path begins with the root path, so that a request would
    not tell which is meant."""
    for resource in app.router.resources():
        if root_path and resource.canonical.startswith(f"{root_path}/"):
            raise StartError(
                f"--root-path {root_path}: the route {resource.canonical} begins so; choose "
                "another path"
            )


@cache
def _document(root_path: str) -> bytes:
    return msgspec.json.encode(document(root_path=root_path))


def _openapi_handler(root_path: str) -> Handler:
    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=_document(root_path), content_type=JSON_TYPE)

    return openapi


def _header_signal(
    cors: Cors, load: Callable[[], Mapping[str, float]]
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers of every answer just before it is sent: ids, placement, exactness,
        load, CORS."""
        context = request.get(CONTEXT)
        if context is None:
            return  # not from the application; `connections` set its headers
        headers = response.headers
        headers[ID_HEADER], headers[OWN_ID_HEADER] = context.shown_id, context.id
        spoken = client_dialect(request.path, request.headers)
        if spoken is not None and spoken.id_header:
            headers[spoken.id_header] = context.shown_id
        if context.dialect and (placement := context.placement_header()) is not None:
            headers[PLACEMENT_HEADER] = placement
        if (exact := context.exact()) is not None:
            headers[EXACT_HEADER] = exact
        wanted = request.headers.get(FORMAT_HEADER, "")
        # Without a tenant the request has no valid key.
        if context.dialect and context.tenant is not None and is_known_format(wanted):
            headers[LOAD_HEADER] = load_text(wanted, load())
        cors.add_headers(request, response)

    return add_headers


def _outer_middleware(api: Api, guard: BrowserGuard, cors: Cors) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A CORS preflight on a generation path is not a generation request.
        dialect = DIALECTS.get(request.path) if request.method != "OPTIONS" else None
        given_id = valid_client_id(request.headers.get(ID_HEADER))
        request[CONTEXT] = context = RequestContext(api.new_id(), api.clock(), dialect, given_id)
        observers = api.generation.observers
        if dialect is not None:
            observers.begin_call(context, request.headers.get("traceparent", ""))
        code = CLIENT_LEFT
        try:
            response = await _answer(api, guard, cors, request, handler)
            code = response.status if context.failure is None else context.failure.status
            return response
        finally:
            if dialect is not None:
                observers.end_call(context, code, api.clock())

    return middleware


async def _answer(
    api: Api, guard: BrowserGuard, cors: Cors, request: web.Request, handler: Handler
) -> web.StreamResponse:
    try:
        guard.check(request)
        if is_preflight(request):
            return cors.preflight_answer(request)
        authorization = _authorization(request)
        if request.path.startswith(KEYED):
            request[CONTEXT].tenant = api.tenants.tenant_of(authorization)
        elif request.path in ADMINS:
            request[CONTEXT].tenant = api.tenants.admin(authorization)
        elif request.path in VIEWERS:
            request[CONTEXT].tenant = api.tenants.viewer(authorization)
        elif f"{request.path}/".startswith(NODE_ADMINS):
            peer = THIS_MACHINE if api.settings.uds else request.remote
            request[CONTEXT].tenant = api.tenants.node_admin(authorization, peer)
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
        response = _error_response(request, router_failed(request_id))
    return response


def _authorization(request: web.Request) -> str | None:
    """The `Authorization` header, or what it would be for a key in the header of Anthropic's
    clients."""
    key = request.headers.get(KEY_HEADER)
    return request.headers.get("Authorization") or (key and f"Bearer {key}")


def _record(request: web.Request, error: Failure) -> ErrorRecord:
    if not isinstance(error, web.HTTPException):
        return error_record(error)
    route = f"{request.method} {request.path}"
    message = {
        404: (
            f"the route {route} does not exist; see /v1/models, /v1/chat/completions, "
            "/v1/completions, /v1/messages"
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
    dialect = client_dialect(request.path, request.headers)
    answer = (
        ErrorAnswer.of(error)
        if dialect is None
        else dialect.error_body(error, request[CONTEXT].shown_id)
    )
    response = json_response(answer, error.status)
    if error.retryable:
        wait = error.retry_after if error.retry_after is not None else RETRY_AFTER_S
        response.headers["Retry-After"] = f"{max(1, math.ceil(wait))}"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    request[CONTEXT].failure = error
    return response
