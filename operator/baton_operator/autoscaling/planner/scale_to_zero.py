"""Scale to zero, and wake-up; and sleep, which needs no decision.

In: the observation, the current bounds. Out: the reason to have no nodes; None if the pool should
have some. A pool scales to zero after the idle time in its spec, both roles at once, and only if
reports show that nothing runs and that routers hold the next request. Without reports it stays at
zero. One held request wakes it. Routers let the engines of an idle pool sleep, and wake them.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    Demand,
    PoolObservation,
    ReplicaRange,
    RoleNodes,
)
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_protocol.store import ROLES, Role


def reason_for_zero(
    observation: PoolObservation,
    policy: AutoscalingPolicy,
    ranges: Mapping[Role, ReplicaRange],
    nodes: Mapping[Role, RoleNodes],
) -> tuple[ScalingReason, str] | None:
    after_s = policy.scale_to_zero_after_s
    if after_s is None or any(ranges[role].keeps_awake for role in ROLES):
        return None
    demand = observation.demand
    fresh = demand is not None and demand.age_s <= policy.stale_after_s
    if all(role_nodes.current_replicas == 0 for role_nodes in nodes.values()):
        return _stay_at_zero(demand if fresh else None, after_s)
    if demand is None or not fresh or observation.rolling or not observation.routers_hold:
        return None
    if not _is_quiet(demand, nodes):
        return None
    if demand.idle_s is None or demand.idle_s < after_s:
        return None
    return ScalingReason.IDLE, f"no request for {demand.idle_s:.0f} s, over {after_s:g} s"


def why_asleep(demand: Demand | None, nodes: Mapping[Role, RoleNodes]) -> str | None:
    """For how long a pool was idle whose engines all sleep; None if one is awake. The nodes count
    like any others: they are awake within seconds."""
    ready = [node for role_nodes in nodes.values() for node in role_nodes.ready]
    silent = any(role_nodes.silent for role_nodes in nodes.values())
    if silent or not ready or not all(node.asleep for node in ready):
        return None
    if demand is None or demand.idle_s is None:
        return "asleep"
    return f"idle for {demand.idle_s:.0f} s: asleep"


def _stay_at_zero(demand: Demand | None, after_s: float) -> tuple[ScalingReason, str] | None:
    if demand is None:
        return (
            ScalingReason.DEMAND_UNKNOWN,
            "the pool is scaled to zero, and no router has reported its load",
        )
    idle = (demand.idle_s is None and not demand.requests) or (
        demand.idle_s is not None and demand.idle_s >= after_s
    )
    if demand.held or not idle:
        return None
    return ScalingReason.ASLEEP, "the pool is scaled to zero until a request arrives"


def _is_quiet(demand: Demand, nodes: Mapping[Role, RoleNodes]) -> bool:
    """Whether routers and nodes report that nothing waits and nothing runs."""
    if demand.held != 0:
        return False
    if demand.live_requests is not None:
        return demand.live_requests == 0
    totals = [
        nodes[role].total(gauge)
        for role in ROLES
        for gauge in (lambda node: node.running, lambda node: node.waiting)
    ]
    return all(total == 0 for total in totals)
