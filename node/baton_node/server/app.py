"""The node's HTTP server: an aiohttp process without torch beside the engine process.

    GET /link                WebSocket for routers (frames of baton_protocol.link)
    GET /artifacts/{digest}  the model's tokenizer, config and template files
    GET /health              200 while this process runs, even before the engine is ready
    GET /ready               200 if the node accepts jobs, otherwise 503
    GET /metrics             Prometheus metrics

If the node has a link token, the first two require it (401 without). A node on a loopback address
accepts only the names of its machine in the Host header (403 otherwise).

In: NodeSettings, a role. Out: a node that serves until SIGTERM or SIGINT, then drains, unregisters
and ends. A second signal ends it immediately. Raises SetupError or its subclass EngineLost.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler

from baton_kvstore.errors import StoreMisconfigured
from baton_kvstore.index.registry import Registry
from baton_kvstore.settings import StoreSettings
from baton_node.artifacts import load_artifacts, load_tokenizer
from baton_node.errors import EngineLost, SetupError
from baton_node.ipc.engine_process import start_engine
from baton_node.server.heartbeat import beat, leave
from baton_node.server.identity import (
    Identity,
    address_of,
    digests_of,
    model_made,
    new_epoch,
)
from baton_node.server.links import RouterLink
from baton_node.server.metrics import NodeMetrics
from baton_node.server.node import Node
from baton_node.server.role import NodeRole
from baton_node.server.spans import NodeSpans
from baton_node.server.transfer_summary import chunk_line
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
from baton_protocol.traces import Sink
from baton_protocol.wire import WireError

logger = logging.getLogger(__name__)
T = TypeVar("T")
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
        self._settings = settings
        self._epoch = epoch
        digests = digests_of(artifacts)
        self._by_digest = {digests[name]: data for name, data in artifacts.items()}
        self.metrics = NodeMetrics(NodeId(settings.node), self._figures)
        self.service: Node | None = None
        hostname = urlsplit(settings.address).hostname
        names = (hostname,) if hostname is not None and is_loopback(settings.host) else ()
        self._hosts = Hosts(settings.host, names)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._for_us])
        app.router.add_get(LINK_PATH, self.link)
        app.router.add_get(ARTIFACTS_PATH + "{digest}", self.artifact)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.is_ready)
        app.router.add_get("/metrics", self.metrics_page)
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
        about = self._about()
        return web.json_response(about, status=200 if about["state"] == "ready" else 503)

    async def metrics_page(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=self.metrics.page(), headers=headers)

    def _figures(self) -> Load:
        if self.service is None:
            return Load(self._epoch, "starting", Speeds(), NodeLoad())
        return self.service.load

    def _admit(self, request: web.Request) -> None:
        """Raise 401 unless the request has the link token, if the node has one."""
        token = self._settings.link_token
        if token and not has_token(request.headers.get("Authorization", ""), token):
            raise web.HTTPUnauthorized(
                headers={"WWW-Authenticate": "Bearer"},
                text="this node requires its pool's link token (--link-token)\n",
            )

    async def artifact(self, request: web.Request) -> web.Response:
        self._admit(request)
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
        self._admit(request)
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
        service.connected(link)
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
            service.disconnected(link)
            link.lose()
            await writer
        return socket


async def run_node(
    settings: NodeSettings, role: NodeRole, engine_module: str, spans: Sink | None = None
) -> None:
    """Run the node until a signal ends it.

    `engine_module` is the main module of the engine process. `spans` receives the spans of traced
    requests. Raise SetupError if the node cannot start, and EngineLost if its engine ends.
    """
    ending = asyncio.Event()
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        if ending.is_set() and task is not None:
            task.cancel()
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    try:
        await _serve(settings, role, engine_module, ending, spans)
    except asyncio.CancelledError:
        if not ending.is_set():
            raise
        logger.warning("a second signal ended the node at once")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve(
    settings: NodeSettings,
    role: NodeRole,
    engine_module: str,
    ending: asyncio.Event,
    sink: Sink | None,
) -> None:
    if settings.role != role.name:
        raise SetupError(f"settings are for a {settings.role} node; this is a {role.name} node")
    _check_store(settings)
    artifacts = load_artifacts(settings)
    tokenizer = load_tokenizer(artifacts)
    epoch = new_epoch()
    server = NodeServer(settings, epoch, artifacts)
    _warn_if_open(settings)
    async with AsyncExitStack() as stack:
        site, port = await _listen(server, settings, stack)
        starting = _background(stack, start_engine(settings, epoch, engine_module))
        if not await _unless(ending, starting):
            return
        engine, ready = starting.result()
        stack.push_async_callback(engine.stop)
        address = address_of(settings, port)
        digests, made = digests_of(artifacts), model_made(settings)
        identity = Identity(settings, epoch, ready, address, digests, made)
        spans = NodeSpans(sink, NodeId(settings.node)) if sink is not None else None
        service = Node(identity, engine, tokenizer, role, server.metrics, spans)
        server.service = service
        stack.callback(service.lose_links)
        following = _background(stack, service.follow_engine())
        if settings.index_url:
            logger.info("%s", chunk_line(ready.layout))
            _register(settings, service, stack)
        logger.info("%s is ready at %s", settings.node, address)
        if not await _unless(ending, following):
            draining = _background(stack, service.drain())
            await asyncio.wait((draining, following), return_when=asyncio.FIRST_COMPLETED)
        # First stop listening and close the links: routers notice by their links that the node is
        # gone, and must not be able to reconnect.
        await site.stop()
        await service.close_links()
        if following.done():
            try:
                following.result()
            except EngineLost as error:
                raise EngineLost(await engine.describe_end()) from error


def _warn_if_open(settings: NodeSettings) -> None:
    if not settings.link_token and not is_loopback(settings.host):
        logger.warning(
            "%s listens on %s without a link token, so anyone who reaches it can run requests, "
            "drain it and read its tokenizer; give it and its routers one (--link-token)",
            *(settings.node, settings.host or "all addresses"),
        )


def _check_store(settings: NodeSettings) -> None:
    if not settings.index_url:
        return
    try:
        StoreSettings(
            index_url=settings.index_url, data_urls=settings.data_urls, pool=settings.pool
        ).check()
    except StoreMisconfigured as error:
        raise SetupError(str(error)) from error


async def _listen(
    server: NodeServer, settings: NodeSettings, stack: AsyncExitStack
) -> tuple[web.TCPSite, int]:
    """Start to listen, and return the site and its port. Raise SetupError if that fails. It runs
    before the model is loaded, so that a port in use is reported at once."""
    runner = server.runner()
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, settings.host, settings.port)
    where = f"{settings.host}:{settings.port}"
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SetupError(f"{where} is in use; choose another --port") from error
        raise SetupError(f"cannot listen on {where}: {error.strerror or error}") from error
    return site, runner.addresses[0][1]


def _register(settings: NodeSettings, service: Node, stack: AsyncExitStack) -> None:
    """Keep the node registered until the stack ends, then unregister it. The stack unwinds in
    reverse, so the heartbeat ends first and cannot register the node again."""
    registry = Registry(settings.index_url, settings.pool)
    stack.push_async_callback(registry.close)
    stack.push_async_callback(leave, registry, NodeId(settings.node), service.epoch)
    _background(stack, beat(registry, service.report))


def _background(stack: AsyncExitStack, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run `work` as a task that is cancelled when the stack ends. The stack ignores the task's
    result and errors: the caller must wait for the task to get them."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # mark it as retrieved, or asyncio logs it

    stack.push_async_callback(end)
    return task


async def _unless(ending: asyncio.Event, work: asyncio.Task[T]) -> bool:
    """Wait for `work` or for `ending`. Return True if `work` is done."""
    waiting = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait((waiting, work), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        waiting.cancel()
