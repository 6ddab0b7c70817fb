"""Rules for pages in a browser. A browser lets any page send requests to any address that its
machine reaches, including this router.

In: a request's method, `Host`, `Origin` and `Content-Type`. Out: 403 if `Host` is not a name of
this router (see `baton_protocol.hosts`), or if a page of another origin tries to change something;
400 for a body type that a page may send without a preflight. Pages of allowed origins (see `cors`)
may change something. Clients other than browsers send no `Origin`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web

from baton_protocol.errors import Forbidden, InvalidRequest
from baton_protocol.hosts import Hosts
from baton_router.http.cors import Cors, is_preflight
from baton_router.http.file_routes import FILES_PATH
from baton_router.http.media_types import FORM_TYPE, JSON_TYPE
from baton_router.settings import USUAL_PORTS, RouterSettings

READING = frozenset({"GET", "HEAD", "OPTIONS"})
SHOWN = 100  # characters of a header in an error


class BrowserGuard:
    """Refuses requests for a foreign host, and those that a foreign page sends."""

    def __init__(self, settings: RouterSettings, cors: Cors) -> None:
        # Browsers reach no unix socket, and the router cannot know the names of a proxy before it.
        self._hosts = Hosts("" if settings.uds else settings.host, settings.allowed_hosts)
        self._cors = cors

    def check(self, request: web.Request) -> None:
        """Raise Forbidden for a request or a preflight that must not be answered."""
        host = request.headers.get("Host", "")
        if not self._hosts.allows(host):
            raise Forbidden(
                f"this router does not serve the host {host[:SHOWN]!r}; if this is one of its "
                "names, start it with --allowed-hosts",
                code="foreign_host",
            )
        if is_preflight(request) or request.method not in READING:
            self._check_origins(request.headers.getall("Origin", []), host)

    def _check_origins(self, origins: list[str], host: str) -> None:
        for origin in origins:
            if not (self._cors.allows(origin) or is_own(origin, host)):
                raise Forbidden(
                    f"a page of {origin[:SHOWN]!r} sent this request to {host[:SHOWN]!r}; this "
                    "router accepts requests from its own pages, from origins named by "
                    "--cors-origins, and from clients other than browsers",
                    code="foreign_origin",
                )


def check_type(request: web.Request) -> None:
    """Refuse a body that is not JSON, before it is read, for requests that change something. A page
    may send text and forms to any site without a preflight, but JSON only where it is allowed.
    Uploads are forms: there only the check of origins keeps foreign pages out. Without a body and a
    Content-Type there is nothing to check. Raise InvalidRequest."""
    if request.method in READING:
        return
    content_type = request.headers.get("Content-Type")
    if content_type is None and not request.body_exists:
        return
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type == FORM_TYPE and request.path == FILES_PATH:
        return
    if media_type != JSON_TYPE:
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
