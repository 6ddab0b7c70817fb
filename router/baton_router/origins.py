"""Refuses what a browser sends for another site's page (cross-site request forgery).

In: a request's method, `Host` and `Origin`. Out: 403 where its method changes something and a page
of another origin sent it. Browsers name that page's origin in `Origin`; other clients send none.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from baton_protocol.errors import Forbidden

READING = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {"http": 80, "https": 443}


@web.middleware
async def own_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raise Forbidden for a request that changes something and comes from a foreign page."""
    if request.method not in READING:
        host = request.headers.get("Host", "")
        for origin in request.headers.getall("Origin", ()):
            if not is_own(origin, host):
                raise Forbidden(
                    f"a page of {origin!r} sent this to {host!r}: this router takes requests of"
                    " its own pages, and of clients that are no browser",
                    code="foreign_origin",
                )
    return await handler(request)


def is_own(origin: str, host: str) -> bool:
    """Whether an `Origin` ("null" and what is no URL are nobody's) names the same host and port as
    `Host`; the port that one of them leaves out is that of the origin's scheme."""
    try:
        page, asked = urlsplit(origin), urlsplit(f"//{host}")
        usual = DEFAULT_PORTS[page.scheme]
        own = (asked.hostname, asked.port or usual)
        return page.hostname is not None and (page.hostname, page.port or usual) == own
    except (ValueError, KeyError):
        return False
