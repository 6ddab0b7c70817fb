"""GET / and GET /page/{name}: the files of the live page.

They hold no data of the pool, so they need no key. In: the table of files. Out: their bytes, with
headers that keep the page from loading or sending anything elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from baton_protocol.errors import NotFound
from baton_router.errors import StartError
from baton_router.page.asset_table import INDEX, Asset

PAGE_PATH = "/page/{name}"
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time: a newer router has newer files
    "Vary": "Accept-Encoding",
}
SHOWN = 100  # characters of an unknown name in an error


class PageRoutes:
    """`root_path` is the path under which a proxy passes requests on; "" without one."""

    def __init__(self, assets: Mapping[str, Asset], root_path: str) -> None:
        """Raise StartError if the page is missing."""
        if INDEX not in assets:
            raise StartError(
                f"the live page's {INDEX} is missing from this installation; install Baton again,"
                " or start with --no-page"
            )
        self._assets = assets
        self._root_path = root_path

    def routes(self) -> list[web.RouteDef]:
        routes = [web.get("/", self.index), web.get(PAGE_PATH, self.file)]
        if self._root_path:
            routes.append(web.get(self._root_path, self.folder))
        return routes

    async def index(self, request: web.Request) -> web.Response:
        return self._answer(request, self._assets[INDEX])

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        asset = self._assets.get(name)
        if asset is None:
            raise NotFound(f"the live page has no file {name[:SHOWN]!r}; open it at /")
        return self._answer(request, asset)

    async def folder(self, request: web.Request) -> web.Response:
        """The root path without a slash at its end: from there, the page's links, which are
        relative, would leave it."""
        return web.Response(
            status=307, headers={"Location": f"{self._root_path.rpartition('/')[2]}/"}
        )

    def _answer(self, request: web.Request, asset: Asset) -> web.Response:
        headers = HEADERS | {"ETag": asset.etag}
        if asset.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        body = asset.plain
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = asset.compressed, "gzip"
        return web.Response(body=body, headers=headers | {"Content-Type": asset.content_type})
