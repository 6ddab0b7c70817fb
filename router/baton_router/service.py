"""Puts the router together and runs it: parts, life cycle, signals.

In: RouterSettings. Out: a listening server until SIGTERM or SIGINT. The first signal stops
accepting and lets running answers finish up to the deadline; the second ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

from baton_kvstore.errors import StoreError
from baton_kvstore.index import Index
from baton_kvstore.registry import Registry
from baton_protocol.errors import Unavailable
from baton_protocol.link import link_headers
from baton_protocol.store import RouterReport
from baton_router.api import Api
from baton_router.app import build_app
from baton_router.demand import Demand, held_among
from baton_router.discovery import Discovery
from baton_router.dispatch import Dispatcher
from baton_router.errors import StartError
from baton_router.fleet import Fleet
from baton_router.http_log import server_log
from baton_router.links import Link, LinkTable
from baton_router.markers import Markers
from baton_router.metrics import RouterMetrics
from baton_router.models import ModelStore
from baton_router.placement import Policy
from baton_router.places import Places
from baton_router.reporting import Reporting
from baton_router.settings import RouterSettings
from baton_router.tenants import Tenants
from baton_router.view import PoolView
from baton_router.waking import Waking

# After a request is ended by force: time for its error event and its aborts to be written.
FAREWELL_S = 0.5
POLL_S = 0.02

logger = logging.getLogger(__name__)


class Router:
    """One router. `async with` starts it; `port` is the one it listens on."""

    def __init__(self, settings: RouterSettings, rng: random.Random | None = None) -> None:
        settings.check()
        self.settings = settings
        self.port = settings.port
        self._rng = rng or random.Random()
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._reporting: Reporting | None = None

    async def __aenter__(self) -> Router:
        settings, clock = self.settings, time.monotonic
        tenants = Tenants.of_settings(settings)
        self._open_store()
        # One connection per node, however many there are: aiohttp's own limit is 100.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=link_headers(settings.link_token),
        )
        self._models = ModelStore(self._session)
        self.view = PoolView(clock, settings.max_view_chunks)
        self.fleet = Fleet(
            self.view,
            self._models,
            settings.served_model_name,
            patience_s=settings.link_patience_s,
            stall_timeout_s=settings.stall_timeout_s,
            rng=self._rng,
            clock=clock,
        )
        self._markers = Markers(
            self._index, timeout_s=settings.lookup_timeout_ms / 1000, clock=clock
        )
        self._demand = Demand(f"{socket.gethostname()}-{secrets.token_hex(4)}", clock)
        metrics = RouterMetrics(self.view, self._demand)
        self.dispatcher = Dispatcher(
            self.fleet,
            Places(self.view, self._markers, _policy(settings), self._rng),
            metrics,
            # A pool that wakes may have a node, and none yet of the role that a request wants.
            unready_wait_s=max(settings.unready_wait_s, settings.wake_wait_s),
            clock=clock,
        )
        self.fleet.listener = self.dispatcher
        self._waking = Waking(
            self.fleet, self.dispatcher.change, wait_s=settings.wake_wait_s, clock=clock
        )
        metrics.held.set_function(lambda: self.report().held)
        self._table = LinkTable(self._dial)
        self._discovery = Discovery(
            self._table,
            self._registry,
            settings.nodes,
            interval_s=settings.discovery_interval_s,
            forget=self.fleet.forget,
        )
        self.api = Api(
            settings=settings,
            tenants=tenants,
            fleet=self.fleet,
            dispatcher=self.dispatcher,
            waking=self._waking,
            metrics=metrics,
            rng=self._rng,
            clock=clock,
            store_state=self._store_state,
            unreachable=self._table.unreachable,
        )
        try:
            await self._listen()
        except BaseException:
            await self._close()
            raise
        work = [self._discovery.run(), self.fleet.watch()]
        if self._registry is not None:
            self._reporting = Reporting(self._registry, self.report, clock)
            work.append(self._reporting.run())
        self._tasks = [asyncio.create_task(each) for each in work]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Stop accepting; let running answers finish until the deadline, or until `hurry`."""
        self.api.draining = True
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
        deadline = time.monotonic() + self.settings.shutdown_deadline_s
        while self.api.answering and not hurry.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    # --- parts ----------------------------------------------------------------------------------

    def _open_store(self) -> None:
        self._index: Index | None = None
        self._registry: Registry | None = None
        if not self.settings.index_url:
            return
        try:
            self._index = Index(self.settings.index_url, self.settings.pool)
            self._registry = Registry(self.settings.index_url, self.settings.pool)
        except StoreError as error:
            raise StartError(str(error)) from error

    def _dial(self, address: str) -> Link:
        return Link(
            address,
            self._session,
            self.fleet,
            pause_max_s=self.settings.reconnect_max_s,
            rng=self._rng,
        )

    def _store_state(self) -> dict[str, Any]:
        known = (self._markers.up, self._discovery.reachable)
        reachable = None if known == (None, None) else False not in known
        return {"configured": self._index is not None, "reachable": reachable}

    def report(self) -> RouterReport:
        """What clients ask of this router, as of now."""
        flights = self.dispatcher.flights
        held = held_among(flights.values(), self.view)
        return self._demand.report(len(flights) - held, self._waking.held + held)

    async def _listen(self) -> None:
        host, port = self.settings.host, self.settings.port
        self._runner = web.AppRunner(
            build_app(self.api),
            handler_cancellation=True,
            access_log=None,
            logger=server_log(),
            shutdown_timeout=0.1,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port}: {error.strerror or error}"
            ) from error
        self.port = self._runner.addresses[0][1]
        logger.info(
            "router of pool %r listens on http://%s:%d", self.settings.pool, host, self.port
        )

    async def _close(self) -> None:
        await self._end_running()
        if self._runner is not None:
            await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reporting is not None:
            await self._reporting.withdraw()
        await self._table.close()
        await self.fleet.close()
        await self._models.close()
        await self._session.close()
        await self._markers.close()
        for part in (self._index, self._registry):
            if part is not None:
                await part.close()

    async def _end_running(self) -> None:
        """What still runs ends with a retryable error, and its nodes are told."""
        self._waking.end()
        self.dispatcher.on_change()
        error = Unavailable("the router is shutting down; send the request again").record()
        for flight in list(self.dispatcher.flights.values()):
            self.dispatcher.cancel(flight, error)
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline and self._busy():
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        writing = any(not link.idle for link in self._table.links.values())
        return writing or self.api.answering > 0


def _policy(settings: RouterSettings) -> Policy:
    return Policy(
        handoff=settings.handoff,
        min_tokens=settings.handoff_min_tokens,
        slack_ms=settings.handoff_slack_ms,
        slack_share=settings.handoff_slack_share,
        missing_role=settings.missing_role,
    )


async def run(settings: RouterSettings, started: Callable[[str, int], None] | None = None) -> None:
    """Serve until a signal. `started` hears host and port. Raise StartError, InvalidRequest."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    try:
        async with Router(settings) as router:
            if started is not None:
                started(settings.host, router.port)
            await first.wait()
            await router.drain(second)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
