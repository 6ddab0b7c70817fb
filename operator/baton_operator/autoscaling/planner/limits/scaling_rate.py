"""Limits how far the counts move in one step.

In: both courses, the current nodes. Out: both courses at the pair to set now, each with the last
rule that limited it. A role grows to at most `up_step` times its current nodes, and shrinks by at
most `down_step`. It shrinks only if all inputs are known, no roll-out or drain runs, and the
remaining nodes suffice.

The owner's bounds and budget apply at once, even if inputs are unknown. A violated ratio is
repaired upwards at once, but downwards no faster than for a lower load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from baton_operator.autoscaling.planner.demand.need import Course, PlannerView
from baton_operator.autoscaling.planner.limits.bounds import Courses, box_of, rules_of
from baton_operator.autoscaling.planner.limits.consolidation import refusal
from baton_operator.autoscaling.planner.limits.replica_fit import Pair, Rules, fit
from baton_operator.autoscaling.planner.limits.schedule import Range
from baton_operator.autoscaling.planner.memory import Memory
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Policy, Reason
from baton_protocol.store import Role

Bound = tuple[int, Reason, str]
# Reductions that the owner wants: they need no check that the remaining nodes suffice.
OWNERS = frozenset(
    {
        Reason.AT_MAXIMUM,
        Reason.SCHEDULE_MAXIMUM,
        Reason.RATIO_LIMITED,
        Reason.BUDGET_LIMITED,
        Reason.BUDGET_SHIFT,
        Reason.BUDGET_TOO_SMALL,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Lower and upper limits of the pair that this step sets; `_pair` tries the strictest first."""

    lowest: Pair  # the minimum that rates and known inputs allow
    floor: Pair  # the same, if the remaining nodes suffice
    top: Pair
    low: Pair  # the owner's bounds
    high: Pair


def stepped(
    courses: Courses,
    fleets: Mapping[Role, RoleCounts],
    bounds: Mapping[Role, Range],
    view: PlannerView,
    policy: Policy,
    memory: Memory,
    rolling: bool,
) -> Courses:
    low, high = box_of(bounds)
    lows = tuple(_low(course, fleets[course.role], policy, rolling) for course in courses)
    floors = tuple(
        _floor(course, low, fleets[course.role], view, policy, memory)
        for course, low in zip(courses, lows, strict=True)
    )
    tops = tuple(_top(course, fleets[course.role], policy) for course in courses)
    rules = replace(
        rules_of(policy, bounds),
        there=(_current_nodes(fleets["prefill"]), _current_nodes(fleets["decode"])),
        draining=(len(fleets["prefill"].draining), len(fleets["decode"].draining)),
    )
    spans = Spans(
        lowest=_within((lows[0][0], lows[1][0]), low, high),
        floor=_within((floors[0][0], floors[1][0]), low, high),
        top=_within((tops[0], tops[1]), low, high),
        low=low,
        high=high,
    )
    pair = _pair(courses, spans, rules)
    without_budget = _pair(courses, spans, replace(rules, budget=None))
    return (
        _explained(courses[0], pair[0], floors[0], tops[0], pair[0] < without_budget[0]),
        _explained(courses[1], pair[1], floors[1], tops[1], pair[1] < without_budget[1]),
    )


def _within(pair: Pair, low: Pair, high: Pair) -> Pair:
    return max(low[0], min(high[0], pair[0])), max(low[1], min(high[1], pair[1]))


def _current_nodes(fleet: RoleCounts) -> int:
    return max(fleet.desired, fleet.alive)


def _low(course: Course, fleet: RoleCounts, policy: Policy, rolling: bool) -> Bound:
    """The minimum that may be set now, regardless of the load, and the rule that prevents a lower
    one."""
    if rolling:
        return course.now, Reason.ROLL_OUT_RUNNING, "a roll-out is in progress"
    if course.blind is not None:
        return course.now, *course.blind
    if fleet.draining:
        names = ", ".join(node.name for node in fleet.draining[:3])
        return course.now, Reason.DRAIN_RUNNING, f"{names} still draining"
    step = policy.down_step
    return max(0, course.now - step), Reason.DOWN_STEP, f"at most {step} removed at once"


def _floor(
    course: Course, low: Bound, fleet: RoleCounts, view: PlannerView, policy: Policy, memory: Memory
) -> Bound:
    """The same, and only if the remaining nodes suffice for the load."""
    if course.value >= course.now or low[0] == course.now:
        return course.now, low[1], low[2]
    left = max(course.value, low[0])
    if course.reason not in OWNERS:
        why = refusal(course, left, fleet, view, policy, memory)
        if why is not None:
            return course.now, Reason.CONSOLIDATION_REFUSED, why
    return left, low[1], low[2]


def _top(course: Course, fleet: RoleCounts, policy: Policy) -> int:
    alive = max(1, fleet.alive)
    limit = max(alive + 1, ceil(alive * policy.up_step - 1e-9))
    return min(course.value, max(course.now, limit)) if course.value > course.now else course.now


def _pair(courses: Courses, spans: Spans, rules: Rules) -> Pair:
    """The pair from the first option that has one: all rules; a faster repair of the ratio than
    `up_step`; the same with fewer nodes than the load needs; a step towards the ratio; what the
    owner's budget forces, down to nothing."""
    want = (courses[0].value, courses[1].value)
    loose = replace(rules, ratio_min=None, ratio_max=None)
    below = (min(courses[0].now, spans.low[0]), min(courses[1].now, spans.low[1]))
    options = (
        (spans.floor, spans.top, rules),
        (spans.floor, spans.high, rules),
        (spans.lowest, spans.high, rules),
        (spans.lowest, spans.top, loose),
        (spans.low, spans.high, rules),
        (spans.low, spans.high, loose),
        (below, spans.high, loose),
        ((0, 0), spans.high, loose),
    )
    for lower, upper, option_rules in options:
        pair = fit(want, lower, upper, option_rules)
        if pair is not None:
            return pair
    return 0, 0


def _explained(course: Course, value: int, floor: Bound, top: int, budget_limits: bool) -> Course:
    """`budget_limits`: the value would be higher without the budget."""
    if value < course.value:
        if budget_limits:
            held = "removed nodes still hold the GPUs"
            return course.to(value, Reason.BUDGET_WAITS, held)
        if value >= top:
            return course.to(value, Reason.UP_STEP, f"at most {top} nodes in this step")
        return course.to(
            value, Reason.RATIO_LIMITED, "the other role must grow first to keep the ratio"
        )
    if value == floor[0]:
        return course.to(value, floor[1], floor[2])
    return course.to(value, Reason.RATIO_RAISED, "the ratio to the other role must be kept")
