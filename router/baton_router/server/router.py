"""Composes the router and runs it: parts, life cycle, signals.

In: RouterSettings. Out: a listening server until SIGTERM or SIGINT. The first signal stops
accepting and lets running answers finish until the deadline. The second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType

import aiohttp

from baton_kvstore.errors import StoreError
from baton_kvstore.index.decisions import Decisions
from baton_kvstore.index.leases import Leases
from baton_kvstore.index.markers import Index
from baton_kvstore.index.pins import Pins
from baton_kvstore.index.rate_limits import Budgets as SharedBudgets
from baton_kvstore.index.registry import Registry
from baton_kvstore.index.responses import ResponseLimits, Responses
from baton_kvstore.index.resume_log import ResumeLog
from baton_protocol.errors import Unavailable
from baton_protocol.garbage import keep_objects
from baton_protocol.link import is_loopback, link_headers
from baton_protocol.store import RouterReport
from baton_protocol.traces import Sink
from baton_router.admission.admission import Admission
from baton_router.admission.budgets import TenantBudgets
from baton_router.admission.cold_start import ColdStart
from baton_router.admission.tenant_limits import LimitsByTenant, read_limits
from baton_router.auth import Tenant, Tenants
from baton_router.batches.files import FileLimits, Files
from baton_router.batches.journal import Journal
from baton_router.batches.keeper import BatchKeeper
from baton_router.batches.open_store import open_store
from baton_router.batches.run import BatchWorkshop
from baton_router.errors import ListenError, StartError
from baton_router.http.app import ROUTER_DIGITS, Api, build_app
from baton_router.http.batch_lines import BatchLines
from baton_router.http.body_limits import BodyLimits
from baton_router.http.connections import ConnectionSettings, HttpServer
from baton_router.http.generation import GenerationRoutes, Intake
from baton_router.http.malloc import keep_little_memory
from baton_router.http.observers import Observers
from baton_router.http.pool_routes import PoolRoutes
from baton_router.http.responses import ResponseRoutes
from baton_router.http.resumes import Resumes
from baton_router.live.decisions import DecisionReader
from baton_router.live.feed import LiveFeed, Sources
from baton_router.metrics.admission_metrics import AdmissionMetrics
from baton_router.metrics.batch_metrics import BatchMetrics
from baton_router.metrics.demand import DemandCounter
from baton_router.metrics.load_report import LoadReporter
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.metrics.vllm_names import VllmNames
from baton_router.nodes.discovery import Discovery
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.link import NodeLink
from baton_router.nodes.link_table import LinkTable
from baton_router.nodes.marker_lookup import MarkerLookup
from baton_router.nodes.model_store import ModelStore
from baton_router.nodes.node_calls import NodeCalls
from baton_router.nodes.pin_keeper import PinKeeper
from baton_router.nodes.pool_sleep import PoolSleep, SleepRule
from baton_router.nodes.pool_view import PoolView
from baton_router.nodes.prefix_pins import PrefixPins
from baton_router.observability.explanation import ExplanationHistory
from baton_router.observability.tracing import Tracing
from baton_router.placement.policy import PlacementPolicy
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.in_flight import count_held
from baton_router.requests.placer import Placer
from baton_router.requests.resume_writer import ResumeWriter
from baton_router.responses.kept import KeptResponses
from baton_router.server.reload import FileReloader
from baton_router.settings import RouterSettings

# Seconds after ending requests by force, for writing their errors and aborts.
FAREWELL_S = 0.5
POLL_S = 0.02
REASONS = ("unreadable", "too_large", "artifact")
# Long, because a slow index still keeps budgets better than each router alone.
BUDGETS_TIMEOUT_S = 0.25
DISCOVERY_INTERVAL_S = 1.0  # between two listings of the registry
MAX_VIEW_CHUNKS = 1_000_000  # of all nodes' caches, in the index of prefixes
# A thread with a large body yields to the event loop after this many seconds. Python's default is
# 5 ms, for each step of the loop.
SWITCH_S = 0.0005

logger = logging.getLogger(__name__)


class Router:
    """One router. `async with` starts it; `port` is the one it listens on."""

    def __init__(
        self,
        settings: RouterSettings,
        rng: random.Random | None = None,
        spans: Sink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings.check()
        self.settings = settings
        self.port = settings.port
        self._rng = rng or random.Random()
        self._spans = spans
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._server: HttpServer | None = None
        self._reporting: LoadReporter | None = None

    async def __aenter__(self) -> Router:
        self._warn_if_open()
        reload = FileReloader(
            (self.settings.api_keys, self.settings.tenants),
            self._read_tenants,
            self.settings.tunables.reload_every_s,
        )
        tenants, limits = _tenants(self.settings)
        self._name = f"{socket.gethostname()}-{secrets.token_hex(ROUTER_DIGITS // 2)}"
        self._open_store()
        self._open_pool()
        self._make_api(tenants, limits)
        work = [
            *(self._discovery.keep_links(), self.fleet.watch_engines(), reload.watch_files()),
            *(self._pool_sleep.watch_pool(), self.api.keeper.keep_pinned()),
        ]
        if self._resume_writer is not None:
            work.append(self._resume_writer.keep_renewed())
        if self._registry is not None:
            self._reporting = LoadReporter(
                self._registry,
                self.report,
                self._clock,
                every_s=self.settings.tunables.report_every_s,
                ttl_s=self.settings.tunables.report_ttl_s,
            )
            work.append(self._reporting.send_reports())
        if self._batches is not None:
            work.append(self._batches.keep_running())
        self._tasks = [asyncio.create_task(loop) for loop in work]
        try:
            await self._listen()
        except BaseException:
            await self._close()
            raise
        return self

    def _warn_if_open(self) -> None:
        """Warn about a router without keys on a public address."""
        settings = self.settings
        if settings.api_keys or settings.uds or is_loopback(settings.host):
            return
        logger.warning(
            "this router listens on %s without API keys, so anyone who reaches it can use the "
            "models; give it a file of keys (--api-keys), or restrict access",
            settings.host or "all addresses",
        )

    def _open_pool(self) -> None:
        """Make the view of the nodes, and the links to them."""
        settings, clock = self.settings, self._clock
        # One connection per node, however many there are: aiohttp's default limit is 100.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=link_headers(settings.link_token, secrets.token_hex(16)),
        )
        self._models = ModelStore(self._session, settings.tunables.max_artifact_bytes)
        self.view = PoolView(clock, MAX_VIEW_CHUNKS)
        self.fleet = Fleet(self.view, self._models, settings, self._rng, clock)
        self._table = LinkTable(self._dial)
        self._discovery = Discovery(
            self._table,
            self._registry,
            settings.nodes,
            interval_s=DISCOVERY_INTERVAL_S,
            forget=self.fleet.forget_link,
        )
        self._markers = MarkerLookup(
            self._index, timeout_s=settings.tunables.lookup_timeout_ms / 1000, clock=clock
        )

    def _make_api(self, tenants: Tenants, limits: LimitsByTenant) -> None:
        """Make the stages that a call passes, on top of the pool."""
        settings, clock = self.settings, self._clock
        name = self._name
        self._demand = DemandCounter(name, clock)
        metrics = RouterMetrics(self.view, self._demand)
        metrics.count_refused_input(lambda: self.fleet.kv_events.dropped, self._refused)
        metrics.grammars(lambda: self._models.grammar_counts)
        metrics.conflicts.set_function(lambda: len(self._table.conflicts()))
        metrics.held.set_function(lambda: self.report().held)
        self.dispatcher = self.fleet.listener = Dispatcher(
            self.fleet,
            Placer(self.view, self._markers, _policy(settings), self._rng),
            metrics,
            # A pool that scales up may have a node, but not yet one of the role a request needs.
            unready_wait_s=max(settings.unready_wait_s, settings.wake_wait_s),
            refused_s=settings.tunables.refused_s,
            clock=clock,
        )
        self._node_calls = NodeCalls(self.fleet, self._session)
        self._pool_sleep = PoolSleep(
            self.fleet,
            self._node_calls,
            lambda: self.api.generation.answering > 0,
            SleepRule(
                after_s=settings.sleep_after_s,
                level=settings.sleep_level,
                retry_s=settings.tunables.retry_sleep_s,
            ),
            clock,
        )
        self._cold_start = ColdStart(
            *(self.fleet, self.dispatcher.next_change, self._pool_sleep),
            wait_s=settings.hold_s,
            clock=clock,
        )
        admission_metrics = AdmissionMetrics(metrics.registry)
        self.admission = Admission(
            settings, self.view, TenantBudgets(self._budgets, clock), admission_metrics, clock
        )
        self.admission.use_limits(tenants, limits)
        explanations = ExplanationHistory(settings.explain_requests, clock)
        observers = Observers(
            metrics=metrics,
            vllm=VllmNames(
                *(self.view, self._demand, metrics.registry),
                names=self.fleet.offers.names,
                held=lambda: self.report().held,
            ),
            refused=admission_metrics.rejected,
            explanations=explanations,
            tracing=Tracing(self._spans, clock),
            live=self._make_feed(explanations),
        )
        generation = GenerationRoutes(
            settings=settings,
            fleet=self.fleet,
            dispatcher=self.dispatcher,
            intake=Intake(
                bodies=BodyLimits(settings), cold_start=self._cold_start, admission=self.admission
            ),
            observers=observers,
            resumes=Resumes(self._resume_writer, metrics, settings.max_resume_s),
            rng=self._rng,
            clock=clock,
        )
        pool = PoolRoutes(
            name=name,
            settings=settings,
            fleet=self.fleet,
            links=self._table,
            store_reachable=self._store_reachable,
            generation=generation,
            observers=observers,
        )
        pins = PrefixPins(self.view, self.fleet.send_frame, self._salt_of, clock=clock)
        self.api = Api(
            name=name,
            settings=settings,
            tenants=tenants,
            generation=generation,
            pool=pool,
            pins=pins,
            keeper=PinKeeper(pins, self._pins),
            responses=ResponseRoutes(
                KeptResponses(self._responses, settings.response_bytes // 2),
                generation,
                lambda: self.api.new_id(),
            ),
            files=self._files,
            journal=self._journal,
            node_calls=self._node_calls,
            clock=clock,
        )
        self._batches = self._make_keeper(BatchMetrics(metrics.registry))

    def _make_feed(self, explanations: ExplanationHistory) -> LiveFeed:
        """What the live page shows of the pool."""
        decisions = self._decisions
        sources = Sources(
            pool=self.settings.pool,
            router=self._name,
            view=self.view,
            models=self.fleet.offers.names,
            report=self.report,
            running=lambda: explanations.running,
            decisions=None if decisions is None else DecisionReader(decisions, self._clock),
        )
        every_s = self.settings.tunables.snapshot_every_s
        return LiveFeed(sources, self._clock, every_s=every_s)

    def _make_keeper(self, metrics: BatchMetrics) -> BatchKeeper | None:
        """What runs the batches of the pool; None without a store for them."""
        if self._files is None or self._journal is None:
            return None

        def tenant_of(name: str) -> Tenant | None:
            return self.api.tenants.named(name)

        shop = BatchWorkshop(
            files=self._files,
            journal=self._journal,
            lines=BatchLines(self.api.generation, self.api.new_id, tenant_of, metrics.answered),
            longest_line=self.settings.max_body_bytes,
            most_lines=self.settings.max_batch_lines,
            now=time.time,
            ended=metrics.ended,
        )
        keeper = BatchKeeper(shop, self._leases, lambda name: tenant_of(name) is not None)
        metrics.watch(lambda: keeper.open, lambda: keeper.running)
        return keeper

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Stop accepting; let running answers finish until the deadline, or until `hurry`."""
        self.api.generation.draining = True
        self.api.generation.observers.live.close()
        if self._server is not None:
            await self._server.stop_listening()
        deadline = self._clock() + self.settings.drain_timeout_s
        while self.api.generation.answering and not hurry.is_set() and self._clock() < deadline:
            await asyncio.sleep(POLL_S)

    def _salt_of(self, tenant: str) -> str | None:
        """The salt of a tenant's blocks; "" is what all share. None for an unknown tenant."""
        if not tenant:
            return ""
        known = self.api.tenants.named(tenant)
        return None if known is None else known.salt

    def _read_tenants(self) -> None:
        """Read keys and limits again. Raise StartError without a change if a file is unusable."""
        self.api.tenants, limits = _tenants(self.settings)
        self.admission.use_limits(self.api.tenants, limits)

    # --- parts ----------------------------------------------------------------------------------

    def _open_store(self) -> None:
        self._index: Index | None = None
        self._registry: Registry | None = None
        self._budgets: SharedBudgets | None = None
        self._pins: Pins | None = None
        self._resume_writer: ResumeWriter | None = None
        self._responses: Responses | None = None
        self._leases: Leases | None = None
        self._decisions: Decisions | None = None
        self._open_files()
        if not self.settings.index_url:
            return
        try:
            self._index = Index(self.settings.index_url, self.settings.pool)
            self._registry = Registry(self.settings.index_url, self.settings.pool)
            self._pins = Pins(self.settings.index_url, self.settings.pool)
            log = ResumeLog(self.settings.index_url, self.settings.pool)
            self._resume_writer = ResumeWriter(log, self._clock)
            if self.settings.response_ttl_s:
                self._responses = Responses(
                    self.settings.index_url,
                    self.settings.pool,
                    ResponseLimits(
                        ttl_s=self.settings.response_ttl_s,
                        tenant_bytes=self.settings.response_bytes // 2,
                        all_bytes=self.settings.response_bytes,
                    ),
                )
            self._decisions = Decisions(self.settings.index_url, self.settings.pool)
            self._leases = Leases(self.settings.index_url, self.settings.pool, self._name)
            self._budgets = SharedBudgets(
                self.settings.index_url,
                self.settings.pool,
                timeout_s=BUDGETS_TIMEOUT_S,
            )
        except StoreError as error:
            raise StartError(str(error)) from error

    def _open_files(self) -> None:
        """Open the store of files and batches, if there is one."""
        self._files: Files | None = None
        self._journal: Journal | None = None
        settings = self.settings
        if settings.file_store:
            store = open_store(settings.file_store)
            limits = FileLimits(
                file_bytes=settings.max_file_bytes,
                tenant_bytes=settings.max_tenant_file_bytes,
                tenant_files=settings.max_tenant_files,
                ttl_s=settings.file_ttl_s,
            )
            self._files = Files(store, limits, time.time)
            self._journal = Journal(store, time.time)

    def _dial(self, address: str) -> NodeLink:
        return NodeLink(
            address,
            self._session,
            self.fleet,
            pause_max_s=self.settings.tunables.reconnect_max_s,
            rng=self._rng,
            clock=self._clock,
            tunables=self.settings.tunables,
        )

    def _store_reachable(self) -> bool | None:
        """Whether the index answers lookups and polls; None before it was asked."""
        answers = (self._markers.up, self._discovery.reachable)
        return None if answers == (None, None) else False not in answers

    def _refused(self) -> dict[str, int]:
        """Refused frames, artifacts and registry reports of nodes, by reason."""
        registry = self._registry.refused if self._registry is not None else 0
        return {reason: self.fleet.refused[reason] for reason in REASONS} | {"registry": registry}

    def report(self) -> RouterReport:
        """The router's current load report: what clients ask of it."""
        in_flight = self.dispatcher.in_flight
        held = count_held(in_flight.values(), self.view)
        waiting = self._cold_start.held_calls + self.admission.waiting_prompts + held
        return self._demand.report(len(in_flight) - held, waiting)

    async def _listen(self) -> None:
        settings = self.settings
        server = HttpServer(
            build_app(self.api),
            ConnectionSettings(
                header_timeout_s=self.settings.header_timeout_s,
                idle_timeout_s=self.settings.idle_timeout_s,
                new_id=self.api.new_id,
                root_path=self.settings.root_path,
            ),
        )
        await server.setup()
        self._server = server
        try:
            if settings.uds:
                await server.listen_unix(settings.uds)
            else:
                self.port = await server.listen(settings.host, settings.port)
        except OSError as error:
            raise ListenError(settings.listens, error) from error
        address = settings.listens if settings.uds else f"http://{settings.host}:{self.port}"
        logger.info("router of pool %r listens on %s", settings.pool, address)

    async def _close(self) -> None:
        self.api.generation.observers.live.close()
        if self._batches is not None:
            await self._batches.close()
        await self._end_running()
        await self.api.generation.detached.cancel_all()
        await self.api.responses.shut_down()
        if self._server is not None:
            await self._server.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reporting is not None:
            await self._reporting.withdraw_report()
        await self._table.close_links()
        await self.fleet.cancel_work()
        await self._models.cancel_builds()
        await self._session.close()
        await self._markers.cancel_lookups()
        await self.admission.shut_down()
        for part in (
            *(self._index, self._registry, self._budgets, self._pins, self._leases),
            *(self._resume_writer, self._decisions),
        ):
            if part is not None:
                await part.close()

    async def _end_running(self) -> None:
        """End running requests with a retryable error, and abort them on their nodes."""
        self._cold_start.refuse_held()
        self.admission.refuse_waiting()
        self.dispatcher.on_change()
        error = Unavailable("the router is shutting down; send the request again").record()
        for request in list(self.dispatcher.in_flight.values()):
            self.dispatcher.cancel_request(request, error)
        deadline = self._clock() + FAREWELL_S
        while self._clock() < deadline and self._busy():
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        writing = any(not link.idle for link in self._table.links.values())
        return writing or self.api.generation.answering > 0


def _tenants(settings: RouterSettings) -> tuple[Tenants, LimitsByTenant]:
    tenants, limits = Tenants.of_settings(settings), read_limits(settings.tenants)
    for name in sorted(limits.names - tenants.names):
        logger.warning("--tenants %s names %r, which has no API key", settings.tenants, name)
    return tenants, limits


def _policy(settings: RouterSettings) -> PlacementPolicy:
    return PlacementPolicy(
        handoff=settings.handoff,
        min_tokens=settings.handoff_min_tokens,
        missing_role=settings.missing_role,
        ranking=settings.placement,
    )


async def run(
    settings: RouterSettings,
    started: Callable[[str, int], None] | None = None,
    spans: Sink | None = None,
) -> None:
    """Serve until a signal. `started` is called with host and port. Raise StartError,
    InvalidRequest."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    keep_little_memory()
    sys.setswitchinterval(SWITCH_S)
    try:
        async with Router(settings, spans=spans) as router:
            keep_objects()
            if started is not None:
                started(settings.host, router.port)
            await first.wait()
            await router.drain(second)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
