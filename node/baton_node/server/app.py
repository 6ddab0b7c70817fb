"""The node's HTTP server: an aiohttp process without torch beside the engine process.

    GET /link                WebSocket for routers (frames of baton_protocol.link)
    GET /artifacts/{digest}  the model's tokenizer, config and template files
    GET /health              200 while this process runs, even before the engine is ready
    GET /ready               200 if the node accepts jobs, or would wake up for one; else 503
    GET /metrics             Prometheus metrics; ?names=vllm: the load under vLLM's names
    GET /usage               where the engine's time went, by tenant, for routers without an index
    POST /profile            a profile of the next steps; /start_profile, /stop_profile (`profiles`)
    POST /sleep, /wake_up    give the engine's memory back, and take it again (see `admin`)
    GET /is_sleeping
    POST /update_weights     serve another version of the model

If the node has a link token, all but /health, /ready and /metrics require it (401 without). A node
on a loopback address accepts only the names of its machine in the Host header (403 otherwise).

In: NodeSettings, the model's files, the running Node. Out: answers; frames for and from routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec
from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler

from baton_node.server.admin import AdminRoutes, WeightsUpdate
from baton_node.server.gpu_usage import gpu_reader
from baton_node.server.identity import (
    digests_of,
)
from baton_node.server.links import RouterLink
from baton_node.server.metrics import NodeMetrics
from baton_node.server.node import Node
from baton_node.settings import NodeSettings
from baton_protocol.hosts import Hosts
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import (
    ARTIFACTS_PATH,
    LINK_PATH,
    MAX_FRAME_BYTES,
    ROUTER_HEADER,
    Load,
    has_token,
    is_loopback,
    to_node_codec,
)
from baton_protocol.store import NodeLoad, Speeds
from baton_protocol.usage import USAGE_PATH
from baton_protocol.vllm_metrics import metric_names
from baton_protocol.wire import WireError

logger = logging.getLogger(__name__)
# aiohttp sends a ping after PING_S seconds of silence, and closes the link if no answer comes
# within half of that. A router blocks for 1 s while it parses a body of 16 MB.
PING_S = 6.0
SHUTDOWN_S = 2.0
# Seconds until a connection without a complete request is closed. Longer than a usual scrape
# interval, so that Prometheus can reuse its connection.
IDLE_S = 75.0


class NodeServer:
    """The routes and their handlers. `service` is None until the engine is ready."""

    def __init__(
        self, settings: NodeSettings, epoch: Epoch, artifacts: Mapping[str, bytes]
    ) -> None:
        self.use(settings, epoch, artifacts)
        self._admin = AdminRoutes(self)
        self.metrics = NodeMetrics(
            *(NodeId(settings.node), self._figures, gpu_reader(settings.device)),
            model=lambda: self._settings.model_name(),
            block_size=settings.block_size,
        )
        self.service: Node | None = None
        hostname = urlsplit(settings.address).hostname
        names = (hostname,) if hostname is not None and is_loopback(settings.host) else ()
        self._hosts = Hosts(settings.host, names)

    def use(self, settings: NodeSettings, epoch: Epoch, artifacts: Mapping[str, bytes]) -> None:
        """Serve these files from now on, for a new engine."""
        self._settings = settings
        self._epoch = epoch
        digests = digests_of(artifacts)
        self._by_digest = {digests[name]: data for name, data in artifacts.items()}

    @property
    def settings(self) -> NodeSettings:
        return self._settings

    async def next_update(self) -> WeightsUpdate:
        """Wait until an operator asks for other weights."""
        return await self._admin.updates.get()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._for_us])
        app.router.add_get(LINK_PATH, self.link)
        app.router.add_get(ARTIFACTS_PATH + "{digest}", self.artifact)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.is_ready)
        app.router.add_get("/metrics", self.metrics_page)
        app.router.add_get(USAGE_PATH, self.usage)
        app.router.add_routes(self._admin.routes())
        return app

    def runner(self, idle_s: float = IDLE_S) -> web.AppRunner:
        return web.AppRunner(
            self.app(), access_log=None, shutdown_timeout=SHUTDOWN_S, keepalive_timeout=idle_s
        )

    def _about(self) -> dict[str, object]:
        service = self.service
        return {
            "node": self._settings.node,
            "role": self._settings.role,
            "epoch": self._epoch,
            "state": service.state if service is not None else "starting",
            "requests": service.requests if service is not None else 0,
        }

    @web.middleware
    async def _for_us(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests with a foreign Host header: with DNS rebinding, a page in a browser can
        reach a loopback address under its own name."""
        if not self._hosts.allows(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text="this node answers only requests to its machine's names\n")
        return await handler(request)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response(self._about())

    async def is_ready(self, request: web.Request) -> web.Response:
        service = self.service
        serves = service is not None and (service.state == "ready" or service.load.wakes)
        return web.json_response(self._about(), status=200 if serves else 503)

    async def metrics_page(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        try:
            names = metric_names(request.query.getall("names", []))
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        page = self.metrics.vllm_page if names == "vllm" else self.metrics.page
        return web.Response(body=page(), headers=headers)

    async def usage(self, request: web.Request) -> web.Response:
        self.admit(request)
        if self.service is None:
            raise web.HTTPServiceUnavailable(text="the engine is not ready\n")
        body = msgspec.json.encode(self.service.usage())
        return web.Response(body=body, content_type="application/json")

    def _figures(self) -> Load:
        if self.service is None:
            return Load(self._epoch, "starting", Speeds(), NodeLoad())
        return self.service.load

    def admit(self, request: web.Request) -> None:
        """Raise 401 unless the request has the link token, if the node has one."""
        token = self._settings.link_token
        if token and not has_token(request.headers.get("Authorization", ""), token):
            raise web.HTTPUnauthorized(
                headers={"WWW-Authenticate": "Bearer"},
                text="this node requires its pool's link token (--link-token)\n",
            )

    async def artifact(self, request: web.Request) -> web.Response:
        self.admit(request)
        data = self._by_digest.get(request.match_info["digest"])
        if data is None:
            raise web.HTTPNotFound(
                text="no artifact has this digest; the hello frame lists the digests\n"
            )
        return web.Response(body=data, content_type="application/octet-stream")

    async def link(self, request: web.Request) -> web.StreamResponse:
        """Serve one router's link. Handle its frames in order; send ours through the link's
        queue."""
        if "Origin" in request.headers:  # a browser lets any page open a WebSocket to any host
            raise web.HTTPForbidden(text="links are for routers, not for browser pages\n")
        self.admit(request)
        service = self.service
        if service is None:
            raise web.HTTPServiceUnavailable(text="the engine is not ready\n")
        socket = web.WebSocketResponse(
            heartbeat=PING_S, max_msg_size=MAX_FRAME_BYTES, compress=False
        )
        await socket.prepare(request)
        link = RouterLink(socket, str(request.remote), request.headers.get(ROUTER_HEADER, ""))
        codec = to_node_codec()
        writer = asyncio.create_task(link.write())
        service.add_link(link)
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    if message.type is WSMsgType.ERROR:  # for example a frame that is too large
                        logger.error("router %s: %s", link.peer, message.data)
                    break
                service.handle_router_frame(link, codec.decode(message.data))
        except WireError as error:
            logger.error("router %s: %s", link.peer, error)
        except ConnectionError as error:  # a pong to a router that has disconnected
            logger.info("router %s: %s", link.peer, error)
        finally:
            service.remove_link(link)
            link.lose()
            await writer
        return socket
