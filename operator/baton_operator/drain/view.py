"""What a drain is decided from: one pool at one moment, and the nodes of each Deployment.

In: what was observed, and how many replicas each Deployment shall have. Out: records.
"""

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
from baton_operator.state.cache import CachedChild, PoolKey, pods_of
from baton_operator.state.observed import Observed, ObservedPod
from baton_protocol.store import Kind, Role, kind_of


class DrainView(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pool at one moment, `now` by the time of day and `now_s` by the clock of `FirstSeen`.
    `unasked`: why nobody says what nodes have to lose, "" while the answer is on its way. `kinds`:
    of the nodes of `revision`, the current one; `unheard` are ready ones that have said none."""

    key: PoolKey
    pool: Pool
    revision: str
    children: Mapping[ChildKey, CachedChild]
    reports: Reports | None
    unasked: str
    routers: tuple[str, ...]
    now: datetime
    now_s: float
    kinds: frozenset[Kind]
    unheard: tuple[str, ...]


class DeploymentNodes(msgspec.Struct, frozen=True, kw_only=True):
    """One Deployment's; `pods` are those that Kubernetes counts. `replaced_by` names the current
    revision where they are of an older one."""

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
        """For what it is to go for now: one too many may have become an old one, and back."""
        return bool(pod.drain_since) and bool(pod.replaced_by) == bool(self.replaced_by)


def look_at(
    key: PoolKey,
    pool: Pool,
    revision: str,
    children: Mapping[ChildKey, CachedChild],
    observed: Observed,
    now: datetime,
    now_s: float,
) -> DrainView:
    told = observed.nodes
    names = {report.node for report in told or ()}
    return DrainView(
        key=key,
        pool=pool,
        revision=revision,
        children=children,
        reports={report.node: report for report in told} if told is not None else None,
        unasked=_unasked(pool, observed),
        routers=tuple(
            pod.address
            for pod in observed.pods
            if pod.component == "router" and pod.ready and not pod.terminating and pod.address
        ),
        now=now,
        now_s=now_s,
        kinds=frozenset(kind_of(report) for report in told or () if report.revision == revision),
        unheard=tuple(
            pod.name
            for pod in observed.pods
            if pod.revision == revision and pod.ready and pod.name not in names
        ),
    )


def current_nodes(look: DrainView, role: Role, replicas: int) -> DeploymentNodes | None:
    """Of the role's Deployment that is to have so many; None where none is to go."""
    for child in look.children.values():
        made = child.workload is not None and child.owner == look.pool.uid
        if made and (child.component, child.revision) == (role, look.revision):
            return _nodes(look, child, role, replicas)
    return None


def old_nodes(look: DrainView, goal: OldGoal) -> DeploymentNodes | None:
    """None where there is nothing to do."""
    return _nodes(look, goal.child, goal.role, goal.replicas, look.revision)


def leave_for(
    look: DrainView, nodes: DeploymentNodes, pod: ObservedPod, going: Collection[str]
) -> LeaveTerms:
    """Where another node can go on with them, a new one or an old one that is not among `going`,
    requests move after as long as in a scale-down."""
    if not nodes.replaced_by:
        return LeaveTerms()
    told = look.pool.spec.rollout.max_drain_seconds
    longest_s = told or look.pool.spec.router.request_s
    known = look.reports or {}
    stay = [one.name for one in nodes.pods if one.ready and one.name not in going]
    takers = look.kinds | {kind_of(known[name]) for name in stay if name in known}
    if pod.name in known and kind_of(known[pod.name]) in takers:
        return LeaveTerms(min(DRAIN_S, longest_s), nodes.replaced_by)
    return LeaveTerms(longest_s, nodes.replaced_by)


def _nodes(
    look: DrainView, child: CachedChild, role: Role, wanted: int, new: str = ""
) -> DeploymentNodes | None:
    if child.workload is None:
        return None
    pods = tuple(pod for pod in pods_of(look.children, role, child.revision) if not pod.terminating)
    current = child.workload.desired
    if current <= wanted and not any(pod.drain_since for pod in pods):
        return None
    return DeploymentNodes(
        role=role, child=child, current=current, wanted=wanted, pods=pods, replaced_by=new
    )


def _unasked(pool: Pool, observed: Observed) -> str:
    index = any(pod.component == "kv-index" and pod.ready for pod in observed.pods)
    if pool.spec.kv_store.owned is not None and not index:
        return "no index is ready"
    return "the index does not answer the operator" if observed.silent else ""
