"""GET /pool/events: snapshots of the pool, one per second, as server-sent events.

In: the feed. Out: a stream that ends when the router shuts down, or when the viewer's key is
no longer valid or gives other rights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from baton_protocol.errors import BatonError
from baton_router.auth import Tenant
from baton_router.http.event_stream import STREAM_HEADERS
from baton_router.http.observers import CONTEXT
from baton_router.live.feed import LiveFeed

LIVE_PATH = "/pool/events"


@dataclass(frozen=True, slots=True)
class LiveRoutes:
    """`viewer_of` gives the tenant of a request by the keys as last read; it raises BatonError."""

    feed: LiveFeed
    viewer_of: Callable[[web.Request], Tenant]

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LIVE_PATH, self.events, allow_head=False)]

    async def events(self, request: web.Request) -> web.StreamResponse:
        tenant, transport = request[CONTEXT].tenant, request.transport
        assert tenant is not None, "the middleware sets the tenant"
        if transport is None:
            raise ConnectionResetError("the client is gone")
        subscription = self.feed.join(tenant, transport.abort)
        try:
            response = web.StreamResponse(headers=STREAM_HEADERS)
            await response.prepare(request)
            while (snapshot := await subscription.next()) is not None:
                if not self._still_is(tenant, request):
                    break
                await response.write(b"event: snapshot\ndata: %b\n\n" % snapshot)
            await response.write_eof()
            return response
        finally:
            self.feed.leave(subscription)

    def _still_is(self, tenant: Tenant, request: web.Request) -> bool:
        try:
            return self.viewer_of(request) == tenant
        except BatonError:
            return False
