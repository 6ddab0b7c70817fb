"""The operator as a process: wires everything together and runs until SIGTERM.

In: settings. Out: pools whose objects match their specs. One life is one run of kopf with its own
cache and tasks. An early end of any part (a watch that kopf gives up, a lost lease, a bug) ends the
whole life, and the next one starts: no state in memory is worth keeping.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Collection, Coroutine, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import kopf

from baton_operator.api.status import read_status
from baton_operator.autoscaling.autoscaler import Autoscaler
from baton_operator.autoscaling.pool_scalers import Scalers
from baton_operator.controller.applier import Applier
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.controller.ownership import Ownership
from baton_operator.controller.pool_secret import PoolSecret
from baton_operator.controller.pool_task import PoolTasks
from baton_operator.controller.reconcile import PoolParts, Reconciler
from baton_operator.controller.settings import OperatorSettings
from baton_operator.controller.status_writer import StatusWriter
from baton_operator.drain.drainer import Drainer
from baton_operator.drain.routers import Routers
from baton_operator.kube.client import TIMEOUT_S, UNANSWERED, Api, Verb
from baton_operator.kube.connection import load
from baton_operator.kube.lease import Lease
from baton_operator.logs import tame_kopf
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.decision_log import DecisionLog
from baton_operator.state.index_reader import IndexReader
from baton_operator.state.lookups import Lookups
from baton_operator.state.resync import Resync
from baton_operator.state.watch import watch_registry, watch_settings
from baton_operator.status.pod_events import PodEvents

logger = logging.getLogger(__name__)

# Age in seconds above which the liveness probe reports a reconcile or a watch as stuck.
STUCK_S = 600.0
STOP_S = 4.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
STEADY_LIFE_S = 300.0


class Stuck(Exception):
    """Raised in a liveness probe: Kubernetes should restart this process."""


class EndedByItself(Exception):
    """The watches ended although nobody asked the operator to stop."""


class LeaseLost(Exception):
    """The lease is lost: another replica may act now."""


async def serve(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT. Raise ConnectionFailed if there is no login, OSError if a port
    is in use."""
    await load()
    tame_kopf()
    metrics = Metrics()
    close = metrics.serve(settings.host, settings.metrics_port) if settings.metrics_port else None
    stop = asyncio.Event()
    try:
        await _run_lives(settings, metrics, stop)
    finally:
        if close is not None:
            close()


async def _run_lives(settings: OperatorSettings, metrics: Metrics, stop: asyncio.Event) -> None:
    pause = FIRST_PAUSE_S
    while not stop.is_set():
        begun = time.monotonic()
        try:
            await _Life(settings, metrics, stop).run()
        except Exception:
            logger.exception("restarting the operator in %g s", pause)
        if time.monotonic() - begun > STEADY_LIFE_S:
            pause = FIRST_PAUSE_S
        try:
            async with asyncio.timeout(pause):
                await stop.wait()
        except TimeoutError:
            pause = min(LONGEST_PAUSE_S, pause * 2)


class _Life:
    def __init__(self, settings: OperatorSettings, metrics: Metrics, stop: asyncio.Event) -> None:
        self._settings = settings
        self._metrics = metrics
        self._stop = stop

    async def run(self) -> None:
        """Return on a stop signal. Raise the error that ended this life early."""
        clock = time.monotonic
        cache = Cache(lambda key: tasks.wake_pool(key), clock)

        def count_request(verb: Verb, code: str) -> None:
            self._metrics.count_request(verb, code)
            if code == UNANSWERED:
                cache.note_unanswered()

        api = Api(await load(), count_request, TIMEOUT_S)
        lookups, routers = Lookups(), Routers()

        def make_reconciler(key: PoolKey) -> Reconciler | None:
            uid = cache.pool_uid(key)
            if not uid:
                return None
            wake = partial(tasks.wake_pool, key)
            decisions = DecisionLog()
            reader = IndexReader(
                clock,
                networks=self._settings.index_networks,
                lookups=lookups,
                decisions=decisions,
            )
            events = PodEvents(key, api, clock, wake)
            status = StatusWriter(key, api, cache, events, _now, self._settings.identity)
            secret = PoolSecret(key, uid, api, clock)
            parts = PoolParts(
                ownership=Ownership(self._settings.full_name, clock),
                secret=secret,
                scalers=Scalers(api, cache),
                planner=Autoscaler(key, cache, self._metrics, clock, _now, decisions),
                drainer=Drainer(api, cache, routers, status.post_event, _now),
                applier=Applier(key, uid, api, cache, secret, self._metrics),
                index=IndexPoller(key, api, reader, wake, clock),
                status=status,
            )
            return Reconciler(key, uid, cache, parts, self._settings.installation)

        tasks = PoolTasks(make_reconciler, self._settings.workers, self._metrics, clock)
        resync = Resync(api, cache, tasks.wake_pool, self._settings.namespaces, clock)
        self._metrics.observe(tasks.depth, cache.unseen_s, lambda: _ready_states(cache))
        probes = {
            "reconcile_s": lambda: _check_age("a reconcile", tasks.longest_s()),
            "watch_lag_s": lambda: _check_age("a watch", cache.unseen_s()),
        }
        registry = watch_registry(cache, resync.mark_listed, probes)
        try:
            acting = self._act_on_pools(api, resync, cache, tasks)
            kopf_settings = watch_settings(self._settings.namespaces, cache.note_unanswered)
            await self._until_stopped(registry, kopf_settings, acting, resync.run())
        finally:
            lookups.close()
            await routers.close()
            await api.close()

    async def _until_stopped(
        self,
        registry: kopf.OperatorRegistry,
        kopf_settings: kopf.OperatorSettings,
        *parts: Coroutine[Any, Any, None],
    ) -> None:
        ours = [asyncio.create_task(part) for part in parts]
        stopping = asyncio.create_task(self._stop.wait())
        stop_kopf = asyncio.Event()
        # kopf cancels every task that it does not know as older than itself when it ends.
        older_tasks = asyncio.all_tasks()
        roots = await self._spawn_kopf(registry, kopf_settings, stop_kopf)
        watching = asyncio.create_task(kopf.run_tasks(roots, ignored=older_tasks))
        try:
            await asyncio.wait({*ours, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ours, stopping):
                task.cancel()
            await asyncio.wait({*ours, stopping})
            stop_kopf.set()
            await asyncio.wait({watching}, timeout=STOP_S)
            watching.cancel()
            await asyncio.wait({watching}, timeout=STOP_S)
        # kopf first: if it fails, our tasks are cancelled as a consequence.
        for task in (watching, *ours):
            if task.done() and not task.cancelled():
                task.result()
        if not self._stop.is_set():
            raise EndedByItself("the watches ended")

    async def _spawn_kopf(
        self,
        registry: kopf.OperatorRegistry,
        kopf_settings: kopf.OperatorSettings,
        stop: asyncio.Event,
    ) -> Collection[asyncio.Task[Any]]:
        settings = self._settings
        health = f"http://{settings.host}:{settings.health_port}/healthz"
        # kopf's default identity needs a user name, and a container's user ID has none. kopf does
        # not export the type.
        identity: Any = settings.identity
        roots = await kopf.spawn_tasks(
            registry=registry,
            settings=kopf_settings,
            identity=identity,
            namespaces=settings.namespaces,
            clusterwide=not settings.namespaces,
            standalone=True,
            liveness_endpoint=health if settings.health_port else None,
            stop_flag=stop,
        )
        # kopf handles the signals now and would end while reconciles still write.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        return roots

    async def _act_on_pools(self, api: Api, resync: Resync, cache: Cache, tasks: PoolTasks) -> None:
        """Reconcile pools, with leader election only while this replica leads."""
        await resync.wait_for_cache()
        if not self._settings.leader_elect:
            await self._reconcile_pools(cache, tasks)
            return
        namespace = self._settings.installation.namespace
        place = (namespace, self._settings.name)
        lease = Lease(api, place, self._settings.identity, time.monotonic, _now)
        await lease.acquire_lease()
        working = asyncio.create_task(self._reconcile_pools(cache, tasks))
        keeping = asyncio.create_task(lease.renew_until_lost())
        try:
            ended, _ = await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, keeping):
                task.cancel()
            await asyncio.wait({working, keeping})
            await lease.release_lease()
        if working in ended:
            working.result()
        raise LeaseLost("this replica no longer holds the lease, or cannot renew it")

    async def _reconcile_pools(self, cache: Cache, tasks: PoolTasks) -> None:
        self._metrics.set_leading(True)
        try:
            await tasks.run(cache.pools())
        finally:
            self._metrics.set_leading(False)


def _check_age(what: str, age_s: float) -> float:
    if age_s > STUCK_S:
        raise Stuck(f"{what} has been stuck for {age_s:.0f} s")
    return round(age_s, 3)


def _ready_states(cache: Cache) -> Iterator[str]:
    for key in cache.pools():
        status = read_status(cache.pool(key) or {})
        ready = status.condition("Ready") if status is not None else None
        yield ready.status if ready is not None else "Unknown"


def _now() -> datetime:
    return datetime.now(UTC)
