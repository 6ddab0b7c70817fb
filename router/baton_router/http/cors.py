"""Cross-origin resource sharing: what a browser lets pages of other origins do with this router.

In: the allowed origins; a page's request. Out: the answer to its preflight, and the headers that
let the page read an answer. `browser_guard` refuses what no page may send.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web

from baton_router.settings import plain_origin

ANY = "*"
# Headers that a browser shows to a page, beside the few that it always shows.
EXPOSED = (
    "x-request-id, request-id, x-baton-request-id, x-baton-placement, x-baton-exact,"
    " x-baton-resume, retry-after"
)
PREFLIGHT = "Access-Control-Request-Method"
PREFLIGHT_S = 600  # a browser may cache the answer; none does for over 2 h
# Names of methods and headers in a preflight; only these are repeated in the answer.
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?: *, *[\w!#$%&'*+.^`|~-]+)*", re.ASCII)


class Cors:
    """The origins whose pages may use the router; "*" stands for all."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = {plain_origin(origin) for origin in origins}
        self._any = ANY in origins

    def allows(self, origin: str) -> bool:
        return self._any or origin in self._origins

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that let a page of an allowed origin read the answer."""
        if not self._origins:
            return
        if not self._any:
            response.headers.add("Vary", "Origin")  # for other origins too: caches mix answers
        origin = request.headers.get("Origin")
        if origin is not None and self.allows(origin):
            response.headers["Access-Control-Allow-Origin"] = ANY if self._any else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def preflight_answer(self, request: web.Request) -> web.Response:
        """Allow what the page asks to send. The origin was checked before, and the API key decides
        later. `add_headers` adds the allowed origin."""
        headers = {
            "Access-Control-Allow-Methods": request.headers[PREFLIGHT],
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", ""
            ),
        }
        headers = {name: value for name, value in headers.items() if _NAMES.fullmatch(value)}
        headers["Access-Control-Max-Age"] = str(PREFLIGHT_S)
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        headers["Vary"] = f"{PREFLIGHT}, Access-Control-Request-Headers"
        return web.Response(status=204, headers=headers)


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks, before a page's request, what the page may send."""
    asks = request.method == "OPTIONS" and PREFLIGHT in request.headers
    return asks and "Origin" in request.headers
