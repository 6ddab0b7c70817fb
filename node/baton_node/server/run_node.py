"""The life of a node's server process: start, serve, drain, end.

In: NodeSettings, a role. Out: a node that serves until SIGTERM or SIGINT, then drains, unregisters
and ends. A second signal ends it immediately. A node that gets other weights drains, too, and goes
on as another engine. Raises SetupError or its subclass EngineLost.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from baton_kvstore.errors import StoreMisconfigured
from baton_kvstore.index.registry import Registry
from baton_kvstore.index.usage import UsageBooks, UsageWriter
from baton_kvstore.settings import StoreSettings
from baton_node.artifacts import ModelFiles
from baton_node.errors import EngineLost, SetupError
from baton_node.ipc.engine_process import start_engine
from baton_node.server.admin import WeightsUpdate
from baton_node.server.app import NodeServer, logger
from baton_node.server.draining import ENDS
from baton_node.server.heartbeat import beat, leave
from baton_node.server.identity import (
    Identity,
    address_of,
    digests_of,
    model_made,
    new_epoch,
)
from baton_node.server.node import Node
from baton_node.server.role import NodeRole
from baton_node.server.spans import NodeSpans
from baton_node.server.transfer_summary import chunk_line
from baton_node.settings import NodeSettings
from baton_protocol.garbage import keep_objects
from baton_protocol.ids import NodeId
from baton_protocol.link import (
    is_loopback,
)
from baton_protocol.traces import Sink

T = TypeVar("T")
TAKES_WEIGHTS = "the node takes other weights"
BOOKS_EVERY_S = 0.5  # a node that is killed loses what it has not written


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
    files = ModelFiles.load(settings)
    server = NodeServer(settings, new_epoch(), files.artifacts)
    _warn_if_open(settings)
    spans = NodeSpans(sink, NodeId(settings.node)) if sink is not None else None
    async with AsyncExitStack() as stack:
        site, port = await _listen(server, settings, stack)
        keep_objects()
        life = _Life(server, site, port, role, engine_module, ending, spans)
        update = await life.run_engine(files)
        while update is not None:
            update = await life.replace_engine(update)


@dataclass(frozen=True, slots=True)
class _Life:
    """What stays the same while one engine follows another."""

    server: NodeServer
    site: web.TCPSite
    port: int
    role: NodeRole
    engine_module: str
    ending: asyncio.Event
    spans: NodeSpans | None

    async def replace_engine(self, update: WeightsUpdate) -> WeightsUpdate | None:
        """Run another engine, or the one before if that cannot be started."""
        old = self.server.settings
        try:
            return await self.run_engine(ModelFiles.load(update.settings), update.done)
        except SetupError as error:
            if update.done.done():
                raise
            logger.error("the engine cannot be replaced, so the old one starts again: %s", error)
            update.done.set_exception(error)
            return await self.run_engine(ModelFiles.load(old))

    async def run_engine(
        self, files: ModelFiles, started: asyncio.Future[None] | None = None
    ) -> WeightsUpdate | None:
        """Start an engine and serve until the process ends, or until an operator asks for other
        weights. `started` gets its result when the engine is ready."""
        server, epoch = self.server, new_epoch()
        settings, artifacts = files.settings, files.artifacts
        async with AsyncExitStack() as stack:
            starting = _background(stack, start_engine(settings, epoch, self.engine_module))
            if not await _unless(self.ending, starting):
                return None
            engine, ready = starting.result()
            stack.push_async_callback(engine.stop)
            server.use(settings, epoch, artifacts)
            address = address_of(settings, self.port)
            digests, made = digests_of(artifacts), model_made(settings)
            identity = Identity(settings, epoch, ready, address, digests, made)
            service = Node(identity, engine, files.tokenizer, self.role, server.metrics, self.spans)
            server.service = service
            stack.callback(service.lose_links)
            following = _background(stack, service.follow_engine())
            if settings.index_url:
                logger.info("%s", chunk_line(ready.info.layout))
                _register(settings, service, stack)
            logger.info("%s is ready at %s", settings.node, address)
            if started is not None and not started.done():
                started.set_result(None)
            updating = _background(stack, server.next_update())
            await _unless(self.ending, following, updating)
            if not following.done():
                reason = TAKES_WEIGHTS if updating.done() else ENDS
                draining = _background(stack, service.drain(reason))
                await asyncio.wait((draining, following), return_when=asyncio.FIRST_COMPLETED)
            # First stop listening and close the links: routers notice by their links that the node
            # is gone, and must not be able to reconnect.
            update = None if self.ending.is_set() or following.done() else updating.result()
            server.service = None
            if update is None:
                await self.site.stop()
            await service.close_links()
            if following.done():
                try:
                    following.result()
                except EngineLost as error:
                    raise EngineLost(await engine.describe_end()) from error
            return update


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
            raise SetupError(
                f"{where} is in use (`baton doctor --port {settings.port}` says by which process);"
                " choose another --port"
            ) from error
        raise SetupError(f"cannot listen on {where}: {error.strerror or error}") from error
    return site, runner.addresses[0][1]


def _register(settings: NodeSettings, service: Node, stack: AsyncExitStack) -> None:
    """Keep the node registered and its books written until the stack ends, then unregister it and
    write the rest. The stack unwinds in reverse, so the heartbeat ends first and cannot register
    the node again."""
    books = UsageBooks(settings.index_url, settings.pool)
    stack.push_async_callback(books.close)
    writer = UsageWriter(books, f"{settings.node}:{service.epoch}", service.usage)
    stack.push_async_callback(writer.write_last)
    _background(stack, writer.keep_written(BOOKS_EVERY_S))
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


async def _unless(ending: asyncio.Event, *works: asyncio.Task[Any]) -> bool:
    """Wait for one of `works` or for `ending`. Return True if one of `works` is done."""
    waiting = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait((waiting, *works), return_when=asyncio.FIRST_COMPLETED)
        return any(work.done() for work in works)
    finally:
        waiting.cancel()
