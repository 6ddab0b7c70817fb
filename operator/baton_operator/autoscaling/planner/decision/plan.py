"""How many nodes a pool should have: the rules in their order.

In: the state of the pool (Situation), what its owner wants (Policy), the memory of earlier calls
(Memory). Out: the Decision and the Memory for the next call. The caller applies the decision or
only shows it, depending on the mode.

    bounds         current bounds, with schedules                        limits.schedule
    scale to zero  whether the pool sleeps                               limits.scale_to_zero
    need           per role, from demand and a node's capability         demand.need
    correction     a missed target adds a node; store reads may limit    demand.measured
    stabilization  up to the minimum, down to the maximum of a window    limits.stabilization
    limits         bounds, then ratio and GPU budget for both roles      limits.bounds, replica_fit
    rate           the part to apply now: rates, drains, roll-outs, and  limits.scaling_rate,
                   whether the remaining nodes suffice                   limits.consolidation

All else equal, more demand never gives a role fewer nodes. The exceptions are a budget or ratio
that both roles share, a store at its read limit, and a trend, which a single higher sample may end.
"""

from __future__ import annotations

from collections.abc import Callable

from baton_operator.autoscaling.planner.decision.messages import at_zero, decision, numbers
from baton_operator.autoscaling.planner.demand.forecast import LOOKBACK_S, live_of, outlook
from baton_operator.autoscaling.planner.demand.measured import corrected, reading_bound
from baton_operator.autoscaling.planner.demand.need import Course, PlannerView, needed, why_unknown
from baton_operator.autoscaling.planner.limits.bounds import Courses, allowed, clamped
from baton_operator.autoscaling.planner.limits.scale_to_zero import reason_for_zero
from baton_operator.autoscaling.planner.limits.scaling_rate import stepped
from baton_operator.autoscaling.planner.limits.schedule import Range, ranges
from baton_operator.autoscaling.planner.limits.stabilization import stabilised
from baton_operator.autoscaling.planner.memory import DemandSample, Memory, WantedNodes
from baton_operator.autoscaling.planner.node_counts import RoleCounts, fleet_of
from baton_operator.autoscaling.planner.records import Decision, Policy, Situation
from baton_protocol.store import ROLES, Role

__all__ = ["Memory", "plan"]

MISS_WINDOWS = 4.0  # scale-down windows for which a missed target is remembered


def plan(situation: Situation, policy: Policy, memory: Memory) -> tuple[Decision, Memory]:
    """The count for both roles, and why. Pure and idempotent for the same time."""
    at_s = situation.at_s
    bounds = ranges(policy, situation.minute_of_week)
    fleets = {role: fleet_of(role, situation, policy.stale_after_s) for role in ROLES}
    memory = memory.at(at_s, _keep_s(policy))
    view, memory = _planner_view(situation, policy, fleets, memory)
    to_zero = reason_for_zero(situation, policy, bounds, fleets)
    if to_zero is not None:
        memory = memory.with_needed(WantedNodes(at_s=at_s, prefill=0, decode=0))
        return at_zero(to_zero, fleets, numbers((), fleets, view, policy, bounds)), memory
    courses, memory = _needs(view, policy, fleets, bounds, memory, at_s)
    courses = _each(courses, lambda course: stabilised(course, memory, policy, at_s))
    courses = _each(courses, lambda course: clamped(course, bounds[course.role]))
    courses = allowed(courses, bounds, policy, memory, at_s)
    courses = stepped(courses, fleets, bounds, view, policy, memory, situation.rolling)
    return decision(courses, fleets, view, policy, bounds), memory


def _keep_s(policy: Policy) -> float:
    return max(MISS_WINDOWS * policy.down_stabilisation_s, policy.up_stabilisation_s, LOOKBACK_S)


def _planner_view(
    situation: Situation, policy: Policy, fleets: dict[Role, RoleCounts], memory: Memory
) -> tuple[PlannerView, Memory]:
    unknown = why_unknown(situation, policy)
    demand, capability = situation.demand, situation.capability
    if unknown is not None or demand is None or capability is None:
        return PlannerView(unknown=unknown), memory
    memory = memory.with_seen(
        DemandSample(
            at_s=round(situation.at_s - demand.age_s, 3),
            requests=demand.requests,
            prompt=demand.uncached_prompt_tokens,
            output=demand.output_tokens,
            live=live_of(demand, fleets["decode"]),
        )
    )
    predicted = outlook(demand, fleets["prefill"], fleets["decode"], memory, capability.start_s)
    return PlannerView(demand=demand, capability=capability, outlook=predicted), memory


def _needs(
    view: PlannerView,
    policy: Policy,
    fleets: dict[Role, RoleCounts],
    bounds: dict[Role, Range],
    memory: Memory,
    at_s: float,
) -> tuple[Courses, Memory]:
    """The need of both roles within their bounds, recorded before stabilization smooths it."""
    courses = []
    for role in ROLES:
        course = needed(fleets[role], fleets["prefill"], view, policy)
        course, miss = corrected(course, view, fleets[role], fleets["decode"], policy, at_s)
        if miss is not None:
            memory = memory.with_miss(miss)
        courses.append(clamped(reading_bound(course, view, policy), bounds[role]))
    prefill, decode = courses
    both = WantedNodes(at_s=at_s, prefill=prefill.value, decode=decode.value)
    return (prefill, decode), memory.with_needed(both)


def _each(courses: Courses, rule: Callable[[Course], Course]) -> Courses:
    return rule(courses[0]), rule(courses[1])
