"""Runs the planner for a pool and sets the pool's node counts.

In: a pool, what was observed of it, its index's answer. Out: the pool with the planned replicas,
and the decision for the status. The decision is stored in the pool's status; memory holds
observations, which a new operator collects again. The planner also runs if the index does not
answer: its data becomes stale, and then it keeps the counts and reports why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.pool import Pool
from baton_operator.api.resources import quantity_bytes
from baton_operator.api.status import PoolStatus, read_status
from baton_operator.autoscaling import demand, node_metrics
from baton_operator.autoscaling.desired import desired_now
from baton_operator.autoscaling.node_views import Starts, nodes_of
from baton_operator.autoscaling.planner.capability.learn import (
    Learnt,
    NodeSample,
    begin,
    capability,
    learn,
)
from baton_operator.autoscaling.planner.decision.plan import plan
from baton_operator.autoscaling.planner.memory import Memory
from baton_operator.autoscaling.planner.records import Decision, Policy, Situation
from baton_operator.autoscaling.policy import policy_of
from baton_operator.autoscaling.pool_scalers import with_replicas
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.index_reader import IndexAnswer as Answer
from baton_operator.state.index_timing import LOOK_S
from baton_operator.state.observed import Observed, Planned
from baton_protocol.store import ROLES, Role

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Memory:
    """`planned` is the last decision, made at `looked_s` for `generation` of the spec."""

    history: demand.History = field(default_factory=demand.History)
    gauges: node_metrics.Gauges = field(default_factory=dict)
    learnt: Learnt | None = None
    starts: Starts = field(default_factory=Starts)
    planner: Memory = field(default_factory=Memory)
    planned: Planned | None = None
    looked_s: float = 0.0
    generation: int = 0


class Autoscaler:
    """For one pool. `clock` is monotonic, in seconds; `now` is the time of day."""

    def __init__(
        self,
        key: PoolKey,
        cache: Cache,
        metrics: Metrics,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._key = key
        self._cache = cache
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._memory: _Memory | None = None

    def follow(
        self, pool: Pool, revision: str, observed: Observed, answer: Answer | None
    ) -> tuple[Pool, Planned | None]:
        """`revision` is the current one. The decision is None without autoscaling or while paused.
        Raise SpecError for contradictory bounds."""
        spec = pool.spec.autoscaling
        if spec is None or not spec.is_planned:
            self.forget()
            return pool, None
        status = read_status(self._cache.pool(self._key) or {}) or PoolStatus()
        desired = desired_now(pool, spec, status.autoscaling, observed.workloads)
        if pool.spec.paused:
            return with_replicas(pool, desired), None
        memory = self._memory = self._memory or _Memory()
        self._learn(memory, observed, answer)
        planned = memory.planned
        if planned is None or answer is not None or self._is_due(memory, pool):
            rolling = _rolls(revision, observed)
            planned = self._plan(pool, spec, desired, observed, memory, rolling)
        if spec.mode != "auto":
            return pool, planned
        counts: dict[Role, int] = {"prefill": planned.prefill, "decode": planned.decode}
        own = {role: count for role, count in counts.items() if not spec.is_external(role)}
        return with_replicas(pool, own), planned

    def forget(self) -> None:
        """Drop the pool's state and metrics: the planner no longer runs for it."""
        if self._memory is not None:
            self._metrics.undecided(str(self._key))
        self._memory = None

    def _is_due(self, memory: _Memory, pool: Pool) -> bool:
        late = self._clock() - memory.looked_s >= LOOK_S
        return late or memory.generation != pool.generation

    def _learn(self, memory: _Memory, observed: Observed, answer: Answer | None) -> None:
        """Update history, gauges and learnt speeds. Each ready router pod reports."""
        before = memory.gauges
        found = [NodeSample(start_s=took_s) for took_s in memory.starts.ended(observed.pods)]
        if answer is not None:
            at_s = self._clock()
            ready = [
                pod
                for pod in observed.pods
                if pod.component == "router" and pod.ready and not pod.terminating
            ]
            memory.history = demand.updated(memory.history, answer.routers, len(ready), at_s)
            memory.gauges = node_metrics.updated(before, answer.nodes, at_s)
            found += node_metrics.samples(before, memory.gauges)
        pod_names = {pod.name for pod in observed.pods}
        memory.gauges = {
            name: gauges for name, gauges in memory.gauges.items() if name in pod_names
        }
        if memory.learnt is None and (prior := node_metrics.prior_of(memory.gauges)) is not None:
            memory.learnt = begin(prior)
        if memory.learnt is not None:
            memory.learnt = learn(memory.learnt, found)

    def _plan(
        self,
        pool: Pool,
        spec: AutoscalingSpec,
        desired: dict[Role, int],
        observed: Observed,
        memory: _Memory,
        rolling: bool,
    ) -> Planned:
        policy = policy_of(pool, spec, self._now())
        situation = self._situation(policy, rolling, desired, observed, memory)
        situation = replace(situation, holds=not spec.sleeps or _holds(observed))
        situation = _with_store(situation, spec, memory.gauges)
        decision, memory.planner = plan(situation, policy, memory.planner)
        planned = _planned(spec, decision)
        self._metrics.decided(str(self._key), planned.prefill, planned.decode, planned.reason)
        before = memory.planned
        if before is None or not planned.like(before):
            logger.info("pool %s: %s: %s", self._key, planned.reason, planned.message)
        memory.planned = planned
        memory.looked_s, memory.generation = situation.at_s, pool.generation
        return planned

    def _situation(
        self,
        policy: Policy,
        rolling: bool,
        desired: dict[Role, int],
        observed: Observed,
        memory: _Memory,
    ) -> Situation:
        now_s = self._clock()
        nodes = nodes_of(
            observed.pods,
            memory.gauges,
            desired,
            rolling=rolling,
            now_s=now_s,
        )
        reported_demand = demand.demand_of(
            memory.history,
            now_s,
            policy.percentile,
            # A fast scale-down must not be delayed by a longer window.
            longest_s=min(demand.WINDOW_S, policy.down_stabilisation_s),
            asleep=not any(desired.values()),
        )
        return Situation(
            at_s=now_s,
            nodes=nodes,
            desired=desired,
            demand=reported_demand,
            capability=capability(memory.learnt) if memory.learnt is not None else None,
            rolling=rolling,
        )


def _with_store(
    situation: Situation, spec: AutoscalingSpec, seen: node_metrics.Gauges
) -> Situation:
    """Add the store's read limit from the spec and the measured reads."""
    reported_demand, capability, read_limit = (
        situation.demand,
        situation.capability,
        spec.store_read_per_second,
    )
    if reported_demand is None or capability is None or read_limit is None:
        return situation
    return replace(
        situation,
        demand=replace(reported_demand, store_read_bytes=node_metrics.store_read(seen)),
        capability=replace(capability, store_read_limit=float(quantity_bytes(read_limit))),
    )


def _rolls(revision: str, observed: Observed) -> bool:
    """Whether nodes of an older revision exist or would be created again."""
    revisions = {
        workload.revision
        for workload in observed.workloads
        if workload.component in ROLES and workload.desired
    }
    pod_revisions = {
        pod.revision for pod in observed.pods if pod.component in ROLES and pod.stage != "over"
    }
    return bool((revisions | pod_revisions) - {revision})


def _holds(observed: Observed) -> bool:
    """Whether ready routers hold requests while there is no node. Routers from before the spec
    allowed scale-to-zero do not, and no longer serve once their Deployment has rolled."""
    routers = (router for router in observed.workloads if router.component == "router")
    return any(router.holds and router.rolled and router.ready for router in routers)


def _planned(spec: AutoscalingSpec, decision: Decision) -> Planned:
    assert spec.mode != "external", "mode external has no planner"
    return Planned(
        mode=spec.mode,
        prefill=decision.prefill,
        decode=decision.decode,
        reason=str(decision.reason),
        message=decision.message,
        numbers=", ".join(f"{name} {value:g}" for name, value in decision.numbers.items()),
    )
