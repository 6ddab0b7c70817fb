"""One pool as its conditions see it: what is wanted, what is there.

In: the pool (or none, while its spec is invalid), what was observed, what was last said. Out:
numbers and pods. Without a valid spec the children say what was wanted last.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.api.status import Condition, ModelStatus, PoolStatus
from baton_operator.state.observed import Observed, ObservedPod, ObservedWorkload
from baton_operator.status.conditions import NOT_PREPARED, POD_PROBLEMS, START_OVERDUE, Reason
from baton_protocol.store import NodeReport

# Where no event says why it is not prepared; a volume of a cloud is attached in less.
PREPARING_S = 60.0
_REASONS = {reason.name: reason for reason in POD_PROBLEMS}


class Finding(msgspec.Struct, frozen=True):
    """What a condition is to say."""

    reason: Reason
    message: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """`now` is the time of day, `now_s` the clock of `FirstSeen`. `revision` is the nodes' current
    one, "" while nothing was made."""

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
        """Of the current revision, where they have one, and of data servers that are wanted."""
        return [
            workload
            for workload in self.observed.workloads
            if workload.component in components
            and workload.revision in ("", self.revision)
            and self._is_wanted(workload)
        ]

    def pods(self, *components: str) -> list[ObservedPod]:
        """Of every revision, the current one first; without those that are ending, and without
        data servers that only nodes of an old revision use."""
        found = [
            pod
            for pod in self.observed.pods
            if pod.component in components and not pod.ends and self._is_wanted(pod)
        ]
        return sorted(found, key=lambda pod: (not self.is_current(pod), pod.name))

    def _is_wanted(self, item: ObservedWorkload | ObservedPod) -> bool:
        """Of servers that are not alike, one too many does not stand in for another."""
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
    def may_sleep(self) -> bool:
        scaling = self.pool.spec.autoscaling if self.pool is not None else None
        return scaling is not None and scaling.sleeps

    @property
    def asleep(self) -> bool:
        return self.may_sleep and not self.desired("prefill", "decode")

    def suffices(self, *components: str) -> bool:
        """Each has as many ready pods as it shall have, of whatever revision."""
        return all(self.ready(name) >= self.desired(name) for name in components)

    def reports(self) -> list[NodeReport]:
        """What nodes of the current revision say; nothing where the index was not asked."""
        nodes = self.observed.nodes or ()
        return [report for report in nodes if report.revision == self.revision]

    def said(self, kind: str) -> Condition | None:
        return self.before.condition(kind)

    def trouble(self, pods: Iterable[ObservedPod], *components: str) -> Finding | None:
        """The worst that keeps one of these pods from being ready, or pods of these components
        from being made. A fetch has a progress of its own, and is not overdue."""
        unready = list(pods)
        found = [
            Finding(_REASONS[workload.problem], f"{workload.name}: {workload.message}")
            for workload in self.workloads(*components)
            if workload.problem
        ]
        if any(pod.fetch == "running" for pod in unready):
            found = [each for each in found if each.reason is not START_OVERDUE]
        found += [problem for pod in unready if (problem := self._problem(pod))]
        return min(found, key=lambda item: POD_PROBLEMS.index(item.reason), default=None)

    def _problem(self, pod: ObservedPod) -> Finding | None:
        if pod.problem:
            return Finding(_REASONS[pod.problem], f"{pod.name}: {pod.message}")
        if not pod.unprepared_since:
            return None
        if self.now_s - pod.seen.unprepared < PREPARING_S:
            return None
        return Finding(NOT_PREPARED, f"{pod.name}: volumes, secrets or network are not there yet")


def revision_now(pool: Pool | None, revision: str, observed: Observed, before: PoolStatus) -> str:
    """`revision` is that of the pool's templates. What nothing is made from does not become the
    current revision: nor without the Secret."""
    refused = any(refusal.child.kind == "Secret" for refusal in observed.refusals)
    return before.revision if pool is None or pool.spec.paused or refused else revision
