"""Makes a snapshot of the pool every second while someone looks, and none while nobody does.

In: the sources of snapshots, viewers who join and leave, calls that end. Out: encoded snapshots,
each made once for all viewers of equal rights. A viewer that does not read is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from baton_protocol.errors import Unavailable
from baton_protocol.store import RouterReport
from baton_router.auth import Tenant
from baton_router.live.decisions import DecisionReader
from baton_router.live.records import Viewer
from baton_router.live.series import Look, count_nodes, rates_between
from baton_router.live.snapshot import (
    MOST_ENDED,
    Ending,
    Scene,
    calls_by_tenant,
    make_snapshot,
    may_see,
)
from baton_router.nodes.pool_view import PoolView
from baton_router.requests.context import RequestContext

MOST_VIEWERS = 64
MOST_UNREAD = 5  # snapshots of one viewer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What snapshots are made of. `pool` and `router` are names, `models` those of the served
    models. `running` are the calls that run or wait, the oldest first. `decisions` is None without
    an index."""

    pool: str
    router: str
    view: PoolView
    models: Callable[[], list[str]]
    report: Callable[[], RouterReport]
    running: Callable[[], Iterable[RequestContext]]
    decisions: DecisionReader | None = None


class Subscription:
    """The snapshots for one viewer. `drop` cuts it off."""

    def __init__(self, viewer: Viewer, drop: Callable[[], None]) -> None:
        self.viewer = viewer
        self._drop = drop
        self._unread: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def next(self) -> bytes | None:
        """The next snapshot, as JSON; None: there are no more."""
        return await self._unread.get()

    def put(self, snapshot: bytes) -> None:
        if self._unread.qsize() < MOST_UNREAD:
            self._unread.put_nowait(snapshot)
        else:
            self._drop()

    def end(self) -> None:
        self._unread.put_nowait(None)


@dataclass(slots=True)
class _Audience:
    """Viewers of equal rights. `ended` are the calls since their last snapshot."""

    viewer: Viewer
    subscriptions: set[Subscription] = field(default_factory=set)
    ended: deque[Ending] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    snapshot: bytes = b""


class LiveFeed:
    """The feed of one router; for one event loop."""

    def __init__(
        self, sources: Sources, clock: Callable[[], float], *, every_s: float = 1.0
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._every_s = every_s
        self._audiences: dict[Viewer, _Audience] = {}
        self._errors = 0
        self._last_look: Look | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def viewers(self) -> int:
        return sum(len(audience.subscriptions) for audience in self._audiences.values())

    def note_end(self, context: RequestContext, status: int, now: float) -> None:
        """A call has ended. Costs nothing while nobody looks."""
        if not self._audiences:
            return
        self._errors += context.failure is not None
        ending = Ending(context, status, now)
        for audience in self._audiences.values():
            if may_see(audience.viewer, context):
                audience.ended.append(ending)

    def join(self, tenant: Tenant, drop: Callable[[], None]) -> Subscription:
        """Begin to look; call leave() in the end. Raise Unavailable if too many look, or if the
        router shuts down."""
        if self._closed:
            raise Unavailable("this router is shutting down; look at the pool through another one")
        if self.viewers >= MOST_VIEWERS:
            raise Unavailable(
                f"{MOST_VIEWERS} viewers look at the pool through this router, which is its limit;"
                " close one, or try again later",
                code="too_many_viewers",
            )
        viewer = Viewer(tenant.name, tenant.admin)
        audience = self._audiences.setdefault(viewer, _Audience(viewer))
        subscription = Subscription(viewer, drop)
        audience.subscriptions.add(subscription)
        if audience.snapshot:
            subscription.put(audience.snapshot)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return subscription

    def leave(self, subscription: Subscription) -> None:
        audience = self._audiences.get(subscription.viewer)
        if audience is None:
            return
        audience.subscriptions.discard(subscription)
        if not audience.subscriptions:
            del self._audiences[subscription.viewer]
        if not self._audiences:
            self._rest()

    def close(self) -> None:
        """End all subscriptions, and take no more. Idempotent."""
        self._closed = True
        self._end_subscriptions()

    def _end_subscriptions(self) -> None:
        for audience in self._audiences.values():
            for subscription in audience.subscriptions:
                subscription.end()
        self._audiences.clear()
        self._rest()

    def _rest(self) -> None:
        """Nobody looks any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._last_look = None

    async def _work(self) -> None:
        reader = self._sources.decisions
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_looking())
                if reader is not None:
                    group.create_task(reader.keep_read())
        except Exception:  # our bug: viewers may come back, and the router goes on
            logger.exception("cannot make snapshots of the pool")
            self._end_subscriptions()

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._every_s)

    async def _look(self) -> None:
        """Make a snapshot for each audience; requests go on in between."""
        scene = self._scene()
        for audience in list(self._audiences.values()):
            await asyncio.sleep(0)
            snapshot = make_snapshot(scene, audience.viewer, tuple(audience.ended))
            audience.ended.clear()
            audience.snapshot = msgspec.json.encode(snapshot)
            for subscription in audience.subscriptions:
                subscription.put(audience.snapshot)

    def _scene(self) -> Scene:
        sources, before = self._sources, self._last_look
        nodes = list(sources.view.nodes.values())
        counts = count_nodes(nodes, before.nodes if before is not None else {})
        look = Look(self._clock(), sources.report(), self._errors, counts)
        self._last_look = look
        running = [context for context in sources.running() if context.tenant is not None]
        return Scene(
            at_ms=time.time_ns() // 1_000_000,
            now=look.at,
            pool=sources.pool,
            router=sources.router,
            model=next(iter(sources.models()), None),
            nodes=nodes,
            counts=counts,
            rates=rates_between(before, look),
            running=running,
            by_tenant=calls_by_tenant(running),
            decisions=sources.decisions.latest if sources.decisions is not None else (),
        )
