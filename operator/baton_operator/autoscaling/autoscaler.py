"""Runs the planner for a pool and sets the pool's node counts.

In: a pool, what was observed of it, its index's answer. Out: the pool with the planned replicas,
and the decision for the status. The decision is stored in the pool's status, where the next
operator finds it; memory holds observations, which a new operator collects again. The planner also
runs if the index does not answer: its data becomes stale, and then it keeps the counts and reports
why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.pool import Pool
from baton_operator.api.resources import quantity_bytes
from baton_operator.api.status import AutoscalingStatus, PoolStatus, read_status
from baton_operator.autoscaling import demand, node_metrics
from baton_operator.autoscaling.observed_nodes import StartTimes, observe_nodes
from baton_operator.autoscaling.planner.capability import Learnt, NodeSample
from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, PoolObservation
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.plan import Decision, plan_replicas
from baton_operator.autoscaling.policy import policy_of
from baton_operator.autoscaling.pool_scalers import with_replicas
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.decision_log import DecisionLog
from baton_operator.state.index_reader import IndexAnswer
from baton_operator.state.index_timing import LOOK_S
from baton_operator.state.observed import Observed, ObservedWorkload, Planned
from baton_protocol.store import ROLES, Role

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Observations:
    """`planned` is the last decision, made at `looked_s` for `generation` of the spec."""

    history: demand.ReportHistory = field(default_factory=demand.ReportHistory)
    gauges: node_metrics.Gauges = field(default_factory=dict)
    learnt: Learnt | None = None
    starts: StartTimes = field(default_factory=StartTimes)
    planner_memory: PlannerMemory = field(default_factory=PlannerMemory)
    planned: Planned | None = None
    looked_s: float = 0.0
    generation: int = 0


class Autoscaler:
    """For one pool. `clock` is monotonic, in seconds; `now` is the time of day. `decisions` gets
    each decision that differs from the one before."""

    def __init__(
        self,
        key: PoolKey,
        cache: Cache,
        metrics: Metrics,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        decisions: DecisionLog | None = None,
    ) -> None:
        self._key = key
        self._cache = cache
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._decisions = decisions or DecisionLog()
        self._observations: _Observations | None = None

    def follow(
        self, pool: Pool, revision: str, observed: Observed, answer: IndexAnswer | None
    ) -> tuple[Pool, Planned | None]:
        """`revision` is the current one. The decision is None without autoscaling or while paused.
        Raise SpecError for contradictory bounds."""
        spec = pool.spec.autoscaling
        if spec is None or not spec.is_planned:
            self.forget()
            return pool, None
        status = read_status(self._cache.pool(self._key) or {}) or PoolStatus()
        current = current_replicas(pool, spec, status.autoscaling, observed.workloads)
        if pool.spec.paused:
            return with_replicas(pool, current), None
        seen = self._observations = self._observations or _Observations()
        self._learn(seen, observed, answer)
        planned = seen.planned
        if planned is None or answer is not None or self._is_due(seen, pool):
            policy = policy_of(pool, spec, self._now())
            observation = self._observe_pool(spec, policy, revision, current, observed, seen)
            planned = self._decide(spec, policy, observation, seen)
            seen.generation = pool.generation
        if spec.mode != "auto":
            return pool, planned
        counts: dict[Role, int] = {"prefill": planned.prefill, "decode": planned.decode}
        own = {role: count for role, count in counts.items() if not spec.is_external(role)}
        return with_replicas(pool, own), planned

    def forget(self) -> None:
        """Drop the pool's state and metrics: the planner no longer runs for it."""
        if self._observations is not None:
            self._metrics.undecided(str(self._key))
        self._observations = None

    def _is_due(self, seen: _Observations, pool: Pool) -> bool:
        late = self._clock() - seen.looked_s >= LOOK_S
        return late or seen.generation != pool.generation

    def _learn(self, seen: _Observations, observed: Observed, answer: IndexAnswer | None) -> None:
        """Update history, gauges and learnt speeds. Each ready router pod reports."""
        before = seen.gauges
        starts_s = seen.starts.take_ended(observed.pods)
        samples = [NodeSample(start_s=start_s) for start_s in starts_s]
        if answer is not None:
            at_s = self._clock()
            ready = [
                pod
                for pod in observed.pods
                if pod.component == "router" and pod.ready and not pod.terminating
            ]
            seen.history = demand.add_reports(seen.history, answer.routers, len(ready), at_s)
            seen.gauges = node_metrics.add_reports(before, answer.nodes, at_s)
            samples += node_metrics.samples_between(before, seen.gauges)
        pod_names = {pod.name for pod in observed.pods}
        seen.gauges = {name: gauge for name, gauge in seen.gauges.items() if name in pod_names}
        if seen.learnt is None and (prior := node_metrics.prior_of(seen.gauges)) is not None:
            seen.learnt = Learnt.from_prior(prior)
        if seen.learnt is not None:
            seen.learnt = seen.learnt.with_samples(samples)

    def _observe_pool(
        self,
        spec: AutoscalingSpec,
        policy: AutoscalingPolicy,
        revision: str,
        current: dict[Role, int],
        observed: Observed,
        seen: _Observations,
    ) -> PoolObservation:
        now_s = self._clock()
        rolling = _is_rolling(revision, observed)
        reported_demand = demand.demand_of(
            seen.history,
            now_s,
            policy.percentile,
            # A fast scale-down must not be delayed by a longer window.
            longest_s=min(demand.WINDOW_S, policy.down_stabilization_s),
            asleep=not any(current.values()),
        )
        observation = PoolObservation(
            at_s=now_s,
            nodes=observe_nodes(observed.pods, seen.gauges, current, rolling=rolling, now_s=now_s),
            current_replicas=current,
            demand=reported_demand,
            capability=seen.learnt.capability if seen.learnt is not None else None,
            rolling=rolling,
            routers_hold=not spec.scales_to_zero or _routers_hold(observed),
        )
        return _with_store_reads(observation, spec, seen.gauges)

    def _decide(
        self,
        spec: AutoscalingSpec,
        policy: AutoscalingPolicy,
        observation: PoolObservation,
        seen: _Observations,
    ) -> Planned:
        decision, seen.planner_memory = plan_replicas(observation, policy, seen.planner_memory)
        planned = _planned_of(spec, decision)
        self._metrics.decided(str(self._key), planned.prefill, planned.decode, planned.reason)
        before = seen.planned
        if before is None or not planned.like(before):
            logger.info("pool %s: %s: %s", self._key, planned.reason, planned.message)
            self._decisions.note(planned, self._now())
        seen.planned, seen.looked_s = planned, observation.at_s
        return planned


def current_replicas(
    pool: Pool,
    spec: AutoscalingSpec,
    written: AutoscalingStatus | None,
    workloads: Sequence[ObservedWorkload],
) -> dict[Role, int]:
    """The replicas before the planner's next decision: those of the last decision in the pool's
    status, or of the Deployments if there is none. For a role that an external autoscaler scales,
    and in mode advise, the pool's `replicas`. `spec` is the pool's own."""
    own = {role: pool.spec.role(role).replicas for role in ROLES}
    if spec.mode != "auto":
        return own
    if written is not None and written.mode == "auto":
        current = {"prefill": written.desired_prefill, "decode": written.desired_decode}
    else:
        current = {role: _deployed(role, workloads, own[role]) for role in ROLES}
    return {role: own[role] if spec.is_external(role) else current[role] for role in ROLES}


def _deployed(role: Role, workloads: Sequence[ObservedWorkload], otherwise: int) -> int:
    counts = [workload.desired for workload in workloads if workload.component == role]
    return sum(counts) if counts else otherwise


def _with_store_reads(
    observation: PoolObservation, spec: AutoscalingSpec, gauges: node_metrics.Gauges
) -> PoolObservation:
    """Add the store's read limit from the spec and the measured reads."""
    reported_demand, capability = observation.demand, observation.capability
    read_limit = spec.store_read_per_second
    if reported_demand is None or capability is None or read_limit is None:
        return observation
    return replace(
        observation,
        demand=replace(reported_demand, store_read_bytes=node_metrics.sum_store_reads(gauges)),
        capability=replace(capability, store_read_limit=float(quantity_bytes(read_limit))),
    )


def _is_rolling(revision: str, observed: Observed) -> bool:
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


def _routers_hold(observed: Observed) -> bool:
    """Whether ready routers hold requests while there is no node. Routers from before the spec
    allowed scale-to-zero do not, and no longer serve once their Deployment has rolled."""
    routers = (router for router in observed.workloads if router.component == "router")
    return any(router.holds and router.rolled and router.ready for router in routers)


def _planned_of(spec: AutoscalingSpec, decision: Decision) -> Planned:
    assert spec.mode != "external", "mode external has no planner"
    return Planned(
        mode=spec.mode,
        prefill=decision.prefill,
        decode=decision.decode,
        reason=str(decision.reason),
        message=decision.message,
        numbers=", ".join(f"{name} {value:g}" for name, value in decision.numbers.items()),
    )
