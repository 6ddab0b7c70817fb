"""The reconcile of one pool: makes its children match the spec and reports its status.

In: the cache and the API. Out: requests to the API, and the time of the next reconcile. It is
level-triggered and does not depend on earlier events, so an operator that is killed at any step is
followed by one that finishes the work. Memory is never the truth.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from baton_operator.api.pool import Installation, Pool, read_pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import PoolStatus, read_operator, read_status
from baton_operator.autoscaling.autoscaler import Autoscaler
from baton_operator.autoscaling.pool_scalers import Scalers
from baton_operator.builders import (
    NodeRevision,
    build_pool,
    revision_of,
)
from baton_operator.controller.applier import Applier
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.controller.ownership import Ownership, Turn
from baton_operator.controller.pool_secret import PoolSecret
from baton_operator.controller.status_writer import StatusWriter
from baton_operator.drain.drainer import Drainer, DrainStep
from baton_operator.kube.client import (
    ApiUnavailable,
)
from baton_operator.kube.objects import Body
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.hosts import shared_hosts
from baton_operator.state.index_reader import IndexAnswer
from baton_operator.state.index_timing import LOOK_S
from baton_operator.state.observed import Observed, Planned, Refusal, Roll
from baton_operator.status.events import held_event
from baton_operator.status.findings.applied import refusal_words
from baton_operator.status.findings.sole_operator import held_words

logger = logging.getLogger(__name__)
# While a pool is not ready, its status can change without an event, or through the index.
UNREADY_AGAIN_S = 30.0
# While nodes drain, each reconcile repeats the drain requests and checks deadlines. If no router
# answers, a reconcile may take 4 s. In a roll-out everything except a node that ends unready causes
# an event.
DRAINING_AGAIN_S = 2.0
HELD_AGAIN_S = 10.0
# Until nodes have reported again after an outage of the API server; usually an event comes first.
SETTLING_AGAIN_S = 2.0


class Incomplete(Exception):
    """The API server refused some children; retry the pool."""


class PoolGone(Exception):
    """The pool is gone, or its name belongs to another pool."""


class PoolParts(msgspec.Struct, frozen=True, kw_only=True):
    """The collaborators of a pool's reconcile."""

    ownership: Ownership
    secret: PoolSecret
    scalers: Scalers
    planner: Autoscaler
    drainer: Drainer
    applier: Applier
    index: IndexPoller
    status: StatusWriter


class Reconciler:
    """Reconciles the pool with this `uid`. Not reentrant."""

    def __init__(
        self,
        key: PoolKey,
        uid: str,
        cache: Cache,
        parts: PoolParts,
        installation: Installation,
    ) -> None:
        self._key = key
        self._uid = uid
        self._cache = cache
        self._parts = parts
        self._installation = installation
        self._stays_away = False  # another operator manages the pool
        self._sharers: set[str] = set()  # pools with the same host name

    async def poll_index(self) -> None:
        """Read the index concurrently with reconciles, until cancelled."""
        await self._parts.index.run()

    def forget_pool(self) -> None:
        """The pool is gone, or this operator stops acting."""
        self._parts.planner.forget()

    async def reconcile(self) -> float | None:
        """Return the seconds until the next reconcile; None if only a change needs one. Raise
        PoolGone, or for a retry Incomplete or ApiError."""
        resource = self._cache.pool(self._key)
        if resource is None or self._cache.pool_uid(self._key) != self._uid:
            raise PoolGone
        turn = await self._take_turn(resource)
        if not turn.acts:
            return turn.again_s
        again_s = await self._manage_pool()
        return turn.again_s if again_s is None else min(again_s, turn.again_s)

    async def _take_turn(self, resource: Body) -> Turn:
        """Find out whether this operator manages the pool, and record the answer in its status."""
        parts = self._parts
        record = read_operator(resource)
        turn = parts.ownership.turn(record, parts.status.now())
        if turn.record is not None:
            await parts.status.write_operator(resource, turn.record)
        if turn.acts:
            self._stays_away = False
            return turn
        assert record is not None, "a pool that nobody manages is taken"
        holder, name = record.name, parts.ownership.name
        if turn.record is not None and turn.record.other != record.other:
            await parts.status.post_event(self._uid, held_event(holder, name))
        elif not self._stays_away:
            logger.warning("pool %s: %s", self._key, held_words(holder, name))
        if not self._stays_away:
            parts.index.stop_reading()
            parts.planner.forget()
        self._stays_away = True
        return turn

    async def _manage_pool(self) -> float | None:
        resource = self._cache.pool(self._key)
        assert resource is not None
        if self._cache.settles(self._key):
            # The pods' state is unknown: do not report, scale, drain or roll out until they settle.
            logger.info(
                "pool %s: waiting for nodes to report after the API server was away", self._key
            )
            return SETTLING_AGAIN_S
        parts = self._parts
        credentials, refusals = await parts.secret.log_in()
        try:
            pool = read_pool(resource, self._installation, credentials)
            if not refusals:
                pool = await parts.scalers.follow(self._key, pool)
            revision = revision_of(pool)
            answer, silent = parts.index.take_answer(), parts.index.silent
            seen = self._observed((), answer, silent=silent)
            pool, planned = parts.planner.follow(pool, revision.name, seen, answer)
        except SpecError as error:
            # Objects from an earlier, valid spec stay as they are.
            generation = resource["metadata"].get("generation", 0)
            await parts.status.write_status(generation, error, "", self._observed((), None))
            return None
        step = None
        if not refusals and not pool.spec.paused:
            seen = msgspec.structs.replace(seen, planned=planned)
            step, refusals = await self._change_children(pool, revision, seen)
        if self._cache.settles(self._key):
            return SETTLING_AGAIN_S  # the API server was away during this reconcile
        observed = self._observed(refusals, answer, silent=silent, step=step, planned=planned)
        status = await parts.status.write_status(pool.generation, pool, revision.name, observed)
        parts.index.schedule_read(pool, observed, status)
        self._tell_sharers(observed)
        if refusals:
            raise _incomplete(refusals)
        again_s = _again_s(observed, status)
        return again_s if planned is None else min(again_s or LOOK_S, LOOK_S)

    def _tell_sharers(self, observed: Observed) -> None:
        """Let the pools with the same host name report it too, and report when it is over."""
        now = {shared.pool for shared in observed.shared_hosts}
        for name in now ^ self._sharers:
            self._cache.wake_pool(PoolKey(*name.split("/")))
        self._sharers = now

    async def _change_children(
        self, pool: Pool, revision: NodeRevision, seen: Observed
    ) -> tuple[DrainStep, tuple[Refusal, ...]]:
        """Decide how many nodes of each revision may exist now, then apply all manifests."""
        parts = self._parts
        if seen.planned is not None and self._is_news(seen.planned):
            # Record the decision before acting on it, so that a successor of a killed operator
            # knows it.
            await parts.status.write_status(pool.generation, pool, revision.name, seen)
        step = await parts.drainer.take_step(self._key, pool, revision, seen)
        refusals = await parts.applier.apply_children(
            build_pool(pool, revision.name, step.replicas), step.lowers
        )
        for event in () if refusals else step.ends:
            await parts.status.post_event(self._uid, event)
        return step, refusals

    def _is_news(self, planned: Planned) -> bool:
        """Whether the counts are to be applied and differ from those in the status."""
        status = read_status(self._cache.pool(self._key) or {})
        written = status.autoscaling if status is not None else None
        counts = (planned.mode, planned.prefill, planned.decode)
        last = written and (written.mode, written.desired_prefill, written.desired_decode)
        return planned.mode == "auto" and counts != last

    def _observed(
        self,
        refusals: tuple[Refusal, ...],
        answer: IndexAnswer | None,
        *,
        silent: bool = False,
        step: DrainStep | None = None,
        planned: Planned | None = None,
    ) -> Observed:
        children = [child for _, child in sorted(self._cache.children(self._key).items())]
        return Observed(
            workloads=tuple(child.workload for child in children if child.workload is not None),
            pods=tuple(child.pod for child in children if child.pod is not None),
            refusals=refusals,
            silent=silent,
            nodes=answer.nodes if answer is not None else None,
            fetches=answer.fetches if answer is not None else None,
            routes=tuple(child.route for child in children if child.route is not None),
            store_problem=self._parts.index.problem,
            shared_hosts=shared_hosts(self._key, self._cache.specs()),
            address=next((child.address for child in children if child.address), ""),
            departures=step.departures if step is not None else (),
            roll=step.roll if step is not None else Roll(),
            planned=planned,
        )


def _again_s(observed: Observed, status: PoolStatus) -> float | None:
    if observed.drains:
        return HELD_AGAIN_S if observed.held else DRAINING_AGAIN_S
    if observed.roll.rolling:
        return HELD_AGAIN_S
    ready = status.condition("Ready")
    return None if ready is not None and ready.status == "True" else UNREADY_AGAIN_S


def _incomplete(refusals: Sequence[Refusal]) -> Exception:
    message = f"{len(refusals)} objects refused; {refusal_words(refusals[0])}"
    failed = all(refusal.code >= 500 for refusal in refusals)
    return ApiUnavailable(message) if failed else Incomplete(message)
