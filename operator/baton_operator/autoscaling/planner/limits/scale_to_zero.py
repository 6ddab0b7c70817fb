"""Scale to zero, and wake-up.

In: the situation, the current bounds. Out: the reason to have no nodes; None if the pool should be
awake. A pool scales to zero after the idle time in its spec, both roles at once, and only if
reports show that nothing runs and that routers hold the next request. Without reports it stays at
zero. One held request wakes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_operator.autoscaling.planner.limits.schedule import Range
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Demand, Policy, Reason, Situation
from baton_protocol.store import ROLES, Role


def reason_for_zero(
    situation: Situation,
    policy: Policy,
    bounds: Mapping[Role, Range],
    fleets: Mapping[Role, RoleCounts],
) -> tuple[Reason, str] | None:
    after = policy.scale_to_zero_after_s
    if after is None or any(bounds[role].keeps_awake for role in ROLES):
        return None
    demand = situation.demand
    fresh = demand is not None and demand.age_s <= policy.stale_after_s
    if all(fleet.desired == 0 for fleet in fleets.values()):
        return _asleep(demand if fresh else None, after)
    if demand is None or not fresh or situation.rolling or not situation.holds:
        return None
    if not _quiet(demand, fleets):
        return None
    if demand.idle_s is None or demand.idle_s < after:
        return None
    return Reason.IDLE, f"no request for {demand.idle_s:.0f} s, over {after:g} s"


def _asleep(demand: Demand | None, after: float) -> tuple[Reason, str] | None:
    if demand is None:
        return (
            Reason.DEMAND_UNKNOWN,
            "the pool is scaled to zero, and no router has reported its load",
        )
    idle = (demand.idle_s is None and not demand.requests) or (
        demand.idle_s is not None and demand.idle_s >= after
    )
    if demand.held or not idle:
        return None
    return Reason.ASLEEP, "the pool is scaled to zero until a request arrives"


def _quiet(demand: Demand, fleets: Mapping[Role, RoleCounts]) -> bool:
    """Whether routers and nodes report that nothing waits and nothing runs."""
    if demand.held != 0:
        return False
    if demand.live_requests is not None:
        return demand.live_requests == 0
    gauges = [
        fleets[role].total(gauge)
        for role in ROLES
        for gauge in (lambda node: node.running, lambda node: node.waiting)
    ]
    return all(gauge == 0 for gauge in gauges)
