"""A pool's desired and observed state, as its conditions need them. Pure.

In: the pool, what was observed, the previous status. Out: numbers, pods, and the worst problem of
some pods. A `Finding` is what a condition says: its reason and its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.status import Condition, ModelStatus, PoolStatus
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_operator.state.observed import Observed, ObservedPod, ObservedWorkload
from baton_operator.status.condition_kinds import ConditionReason
from baton_operator.status.conditions import NOT_PREPARED, POD_PROBLEMS, START_OVERDUE
from baton_operator.status.flag_fields import field_of
from baton_protocol.store import NodeReport

# Seconds after which a pod counts as NotPrepared if no event says why. Attaching a cloud volume
# takes less.
PREPARING_S = 60.0
_REASONS = {reason.name: reason for reason in POD_PROBLEMS}


class Finding(msgspec.Struct, frozen=True):
    """Reason and message of a condition."""

    reason: ConditionReason
    message: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's desired and observed state, as its conditions need them.

    In: the pool (None while its spec is invalid), what was observed, the previous status. Out:
    numbers and pods. Without a valid spec the Deployments give the desired numbers.

    `now` is the time of day, `now_s` the clock of `FirstSeen`. `revision` is the current one of the
    nodes, "" before the first one was built.
    """

    pool: Pool | None
    observed: Observed
    before: PoolStatus
    now: datetime
    now_s: float
    revision: str
    model: ModelStatus = ModelStatus()

    def desired(self, *components: str) -> int:
        return sum(self._desired(component) for component in components)

    def _desired(self, component: str) -> int:
        if self.pool is None:
            return sum(workload.desired for workload in self.workloads(component))
        spec, managed = self.pool.spec, self.pool.spec.kv_store.owned
        wanted = {
            "prefill": spec.prefill.replicas,
            "decode": spec.decode.replicas,
            "router": spec.router.replicas,
            "kv-index": 1 if managed else 0,
            "kv-data": managed.data_instances if managed else 0,
        }
        return wanted[component]

    def workloads(self, *components: str) -> list[ObservedWorkload]:
        """Workloads of the current revision (if they have one), without surplus data servers."""
        return [
            workload
            for workload in self.observed.workloads
            if workload.component in components
            and workload.revision in ("", self.revision)
            and self._is_wanted(workload)
        ]

    def pods(self, *components: str) -> list[ObservedPod]:
        """Pods of every revision, the current one first; without ending pods, and without data
        servers that only nodes of an old revision use."""
        pods = [
            pod
            for pod in self.observed.pods
            if pod.component in components and not pod.ends and self._is_wanted(pod)
        ]
        return sorted(pods, key=lambda pod: (not self.is_current(pod), pod.name))

    def _is_wanted(self, item: ObservedWorkload | ObservedPod) -> bool:
        """Whether the spec wants this data server. A surplus one cannot replace another."""
        if self.pool is None or not item.instance:
            return True
        managed = self.pool.spec.kv_store.owned
        return managed is None or item.instance in managed.instances

    def is_current(self, pod: ObservedPod) -> bool:
        return pod.revision in ("", self.revision)

    def ready(self, *components: str) -> int:
        return sum(pod.ready for pod in self.pods(*components))

    def unready(self, *components: str) -> list[ObservedPod]:
        return [pod for pod in self.pods(*components) if not pod.ready]

    @property
    def scales_to_zero(self) -> bool:
        scaling = self.pool.spec.autoscaling if self.pool is not None else None
        return scaling is not None and scaling.scales_to_zero

    @property
    def is_at_zero(self) -> bool:
        return self.scales_to_zero and not self.desired("prefill", "decode")

    @property
    def nodes_sleep(self) -> bool:
        """Whether the engines of all nodes sleep, as the planner saw last."""
        planned = self.observed.planned
        return planned is not None and planned.reason == ScalingReason.NODES_ASLEEP

    def suffices(self, *components: str) -> bool:
        """Whether each component has its desired number of ready pods, of any revision."""
        return all(self.ready(name) >= self.desired(name) for name in components)

    def reports(self) -> list[NodeReport]:
        """Reports of the current revision's nodes; empty if the index was not read."""
        nodes = self.observed.nodes or ()
        return [report for report in nodes if report.revision == self.revision]

    def last_condition(self, kind: str) -> Condition | None:
        return self.before.condition(kind)

    def trouble(self, pods: Iterable[ObservedPod], *components: str) -> Finding | None:
        """The worst problem that keeps one of these pods from being ready, or pods of these
        components from being created. A pod that fetches its model is never StartOverdue: the fetch
        has its own progress."""
        unready = list(pods)
        findings = [
            Finding(_REASONS[workload.problem], f"{workload.name}: {workload.message}")
            for workload in self.workloads(*components)
            if workload.problem
        ]
        if any(pod.fetch == "running" for pod in unready):
            findings = [finding for finding in findings if finding.reason is not START_OVERDUE]
        findings += [problem for pod in unready if (problem := self._problem(pod))]
        return min(findings, key=lambda item: POD_PROBLEMS.index(item.reason), default=None)

    def _problem(self, pod: ObservedPod) -> Finding | None:
        if pod.problem:
            field = field_of(pod.message, pod.component, self.pool) if self.pool else ""
            hint = f"; see {field}" if field else ""
            return Finding(_REASONS[pod.problem], f"{pod.name}: {pod.message}{hint}")
        if not pod.unprepared_since:
            return None
        if self.now_s - pod.seen.unprepared < PREPARING_S:
            return None
        return Finding(NOT_PREPARED, f"{pod.name}: its volumes, secrets or network are not ready")


def revision_now(pool: Pool | None, revision: str, observed: Observed, before: PoolStatus) -> str:
    """The pool's current revision. `revision` is that of the templates; it becomes current only if
    it is applied, so not while the pool is paused or its Secret is refused."""
    refused = any(refusal.child.kind == "Secret" for refusal in observed.refusals)
    return before.revision if pool is None or pool.spec.paused or refused else revision


def count_words(ready: int, wanted: int) -> str:
    return f"{ready} of {wanted} ready"


def add_counts(finding: Finding, ready: int, wanted: int) -> Finding:
    parts = [count_words(ready, wanted), finding.message]
    return Finding(finding.reason, "; ".join(part for part in parts if part))
