"""What pages in a browser may do here. A browser lets any page send requests to any address that
its machine reaches, this router's among them.

In: a request's method, `Host`, `Origin` and `Content-Type`. Out: 403 for a name that is not this
router's (see `baton_protocol.hosts`), and for a page of another origin that would change something;
400 for a body of a type that a page may send without asking; for pages of origins that are allowed
(`cors_origins`), the headers by which the browser lets them read an answer. Clients that are no
browser send no `Origin`.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from aiohttp import web

from baton_protocol.errors import Forbidden, InvalidRequest
from baton_protocol.hosts import Hosts
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
    """Of one router."""

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
