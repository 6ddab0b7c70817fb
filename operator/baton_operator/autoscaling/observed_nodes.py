"""The planner's nodes from a pool's pods. Pure.

In: pods as observed, gauges, current replicas. Out: `ObservedNode`s, and the duration of starts. A
terminating pod still holds its GPUs, so it counts as draining. So do a node that was drained by
hand, and a surplus node that is not chosen yet: both will be gone soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton_operator.autoscaling.node_metrics import Gauge, Gauges, kv_capacity, kv_tokens
from baton_operator.autoscaling.planner.inputs import ObservedNode, Phase
from baton_operator.state.observed import ObservedPod
from baton_operator.state.pod_problem import NODE_LOST
from baton_protocol.store import ROLES, Role


def observe_nodes(
    pods: Iterable[ObservedPod],
    gauges: Gauges,
    current_replicas: Mapping[Role, int],
    *,
    rolling: bool,
    now_s: float,
) -> tuple[ObservedNode, ...]:
    """`now_s` is on the clock of the gauges and of `FirstSeen`. During a roll-out there may be more
    nodes than wanted, and none counts as surplus."""
    alive = [pod for pod in pods if pod.component in ROLES and pod.stage != "over"]
    nodes: list[ObservedNode] = []
    for role in ROLES:
        role_nodes = [
            _observe_node(pod, role, gauges.get(pod.name), now_s)
            for pod in alive
            if pod.component == role
        ]
        nodes += role_nodes if rolling else _drain_surplus(role_nodes, current_replicas[role])
    return tuple(nodes)


@dataclass
class StartTimes:
    """Tracks which pods are starting and which have started. A pod that is unready for a moment, or
    whose node is silent, does not start again."""

    _starting: set[str] = field(default_factory=set)
    _started: set[str] = field(default_factory=set)

    def take_ended(self, pods: Iterable[ObservedPod]) -> list[float]:
        """Durations, in seconds, of the starts that have ended since the last call."""
        durations_s = []
        nodes = [pod for pod in pods if pod.component in ROLES]
        for pod in nodes:
            if pod.ready and pod.name in self._starting - self._started:
                durations_s.append(pod.seen.readiness - pod.seen.created)
            if pod.ready or pod.problem == NODE_LOST:
                self._started.add(pod.name)
            else:
                self._starting.add(pod.name)
        names = {pod.name for pod in nodes}
        self._starting &= names
        self._started &= names
        return durations_s


def _observe_node(pod: ObservedPod, role: Role, gauge: Gauge | None, now_s: float) -> ObservedNode:
    node = ObservedNode(
        name=pod.name, role=role, phase=_phase(pod, gauge), since_s=_since_s(pod, gauge, now_s)
    )
    if gauge is None:
        return node
    report, load = gauge.report, gauge.report.load
    return replace(
        node,
        age_s=max(0.0, now_s - gauge.at_s),
        queued_tokens=load.queued_tokens,
        running=load.running,
        waiting=load.waiting,
        kv_tokens=kv_tokens(report),
        kv_capacity=kv_capacity(report),
        busy=gauge.busy,
        asleep=report.wakes,
    )


def _phase(pod: ObservedPod, gauge: Gauge | None) -> Phase:
    if pod.ends or (gauge is not None and gauge.report.drains):
        return Phase.DRAINING
    if pod.ready:
        return Phase.READY
    return Phase.PENDING if pod.stage == "unplaced" else Phase.STARTING


def _since_s(pod: ObservedPod, gauge: Gauge | None, now_s: float) -> float:
    """For a node that slept, since then: the wait for its wake-up says nothing of its speed."""
    if pod.drain_since:
        return now_s - pod.seen.drain
    began_s = pod.seen.readiness if pod.ready else pod.seen.created
    if gauge is not None and gauge.asleep_at_s is not None:
        began_s = max(began_s, gauge.asleep_at_s)
    return now_s - began_s


def _drain_surplus(nodes: Sequence[ObservedNode], replicas: int) -> list[ObservedNode]:
    """Mark the surplus as draining; unready nodes first, as Kubernetes does."""
    staying = [node for node in nodes if node.phase != Phase.DRAINING]
    ranked = sorted(staying, key=lambda node: (node.phase == Phase.READY, node.name))
    surplus = {node.name for node in ranked[: max(0, len(staying) - replicas)]}
    return [replace(node, phase=Phase.DRAINING) if node.name in surplus else node for node in nodes]
