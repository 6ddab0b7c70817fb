"""What a drain decision needs to know of a pool and of each of its Deployments. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.drain.marks import LeaveTerms
from baton_operator.drain.victims import Reports
from baton_operator.kube.kinds import ChildKey
from baton_operator.names import DRAIN_S
from baton_operator.rollout.goal import OldGoal
from baton_operator.state.cache import PoolKey
from baton_operator.state.child import CachedChild, pods_of
from baton_operator.state.observed import Observed, ObservedPod
from baton_protocol.store import Kind, Role, kind_of


class DrainView(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a drain decision for one pool at one moment.

    `now` is the time of day, `now_s` the clock of `FirstSeen`. `unreachable`: why the nodes'
    reports are unavailable, "" while the index is being read. `kinds`: those of the nodes of the
    current `revision`. `unreported`: its ready nodes that have not reported yet.
    """

    key: PoolKey
    pool: Pool
    revision: str
    children: Mapping[ChildKey, CachedChild]
    reports: Reports | None
    unreachable: str
    routers: tuple[str, ...]
    now: datetime
    now_s: float
    kinds: frozenset[Kind]
    unreported: tuple[str, ...]


class DeploymentNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of one Deployment; `pods` are those that Kubernetes counts. `replaced_by` names the
    current revision if these nodes are of an older one."""

    role: Role
    child: CachedChild
    current: int
    wanted: int
    pods: tuple[ObservedPod, ...]
    replaced_by: str = ""

    @property
    def title(self) -> str:
        return f"{self.role} of revision {self.child.revision}" if self.replaced_by else self.role

    def is_marked(self, pod: ObservedPod) -> bool:
        """Whether the pod is marked for the current purpose. A surplus node may have become one of
        an older revision, and vice versa."""
        return bool(pod.drain_since) and bool(pod.replaced_by) == bool(self.replaced_by)


def view_of(
    key: PoolKey,
    pool: Pool,
    revision: str,
    children: Mapping[ChildKey, CachedChild],
    observed: Observed,
    now: datetime,
    now_s: float,
) -> DrainView:
    reports = observed.nodes
    reported = {report.node for report in reports or ()}
    return DrainView(
        key=key,
        pool=pool,
        revision=revision,
        children=children,
        reports={report.node: report for report in reports} if reports is not None else None,
        unreachable=_why_unreachable(pool, observed),
        routers=tuple(
            pod.address
            for pod in observed.pods
            if pod.component == "router" and pod.ready and not pod.terminating and pod.address
        ),
        now=now,
        now_s=now_s,
        kinds=frozenset(kind_of(report) for report in reports or () if report.revision == revision),
        unreported=tuple(
            pod.name
            for pod in observed.pods
            if pod.revision == revision and pod.ready and pod.name not in reported
        ),
    )


def current_nodes(view: DrainView, role: Role, replicas: int) -> DeploymentNodes | None:
    """The nodes of the role's current Deployment, which should have `replicas`. None if no node
    has to go."""
    for child in view.children.values():
        made = child.workload is not None and child.owner == view.pool.uid
        if made and (child.component, child.revision) == (role, view.revision):
            return _nodes(view, child, role, replicas)
    return None


def old_nodes(view: DrainView, goal: OldGoal) -> DeploymentNodes | None:
    """The nodes of an older Deployment; None if there is nothing to do."""
    return _nodes(view, goal.child, goal.role, goal.replicas, view.revision)


def leave_for(
    view: DrainView, nodes: DeploymentNodes, pod: ObservedPod, going: Collection[str]
) -> LeaveTerms:
    """The terms for one leaving node. If a node with interchangeable KV stays (a new one, or an old
    one that is not in `going`), requests move to it after the same time as in a scale-down."""
    if not nodes.replaced_by:
        return LeaveTerms()
    limit_s = view.pool.spec.rollout.max_drain_seconds
    longest_s = limit_s or view.pool.spec.router.request_s
    reports = view.reports or {}
    stay = [other.name for other in nodes.pods if other.ready and other.name not in going]
    takers = view.kinds | {kind_of(reports[name]) for name in stay if name in reports}
    if pod.name in reports and kind_of(reports[pod.name]) in takers:
        return LeaveTerms(min(DRAIN_S, longest_s), nodes.replaced_by)
    return LeaveTerms(longest_s, nodes.replaced_by)


def _nodes(
    view: DrainView, child: CachedChild, role: Role, wanted: int, new: str = ""
) -> DeploymentNodes | None:
    if child.workload is None:
        return None
    pods = tuple(pod for pod in pods_of(view.children, role, child.revision) if not pod.terminating)
    current = child.workload.desired
    if current <= wanted and not any(pod.drain_since for pod in pods):
        return None
    return DeploymentNodes(
        role=role, child=child, current=current, wanted=wanted, pods=pods, replaced_by=new
    )


def _why_unreachable(pool: Pool, observed: Observed) -> str:
    index = any(pod.component == "kv-index" and pod.ready for pod in observed.pods)
    if pool.spec.kv_store.owned is not None and not index:
        return "no index is ready"
    return "the operator cannot reach the index" if observed.silent else ""
