"""Limits both needs to what the owner allows: bounds, the ratio of the roles, the GPU budget.

In: both courses. Out: the courses at an allowed pair of counts, the target of all later steps;
`scaling_rate` decides the next step. The budget takes precedence over the bounds, and both over the
ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton_operator.autoscaling.planner.demand.need import Course
from baton_operator.autoscaling.planner.limits.replica_fit import Pair, Rules, fit, gpus_of, share
from baton_operator.autoscaling.planner.limits.schedule import Range
from baton_operator.autoscaling.planner.limits.stabilization import within
from baton_operator.autoscaling.planner.memory import Memory
from baton_operator.autoscaling.planner.records import Policy, Reason
from baton_protocol.store import Role

Courses = tuple[Course, Course]  # prefill, decode

# If the budget is scarce, a role gives up nodes after this share of its scale-down window, because
# the other role needs them now.
SHIFT_SHARE = 0.25
# It does so only if the share of the worse-served role improves by more than this factor.
SHIFT_GAIN = 1.15


def clamped(course: Course, bounds: Range) -> Course:
    if course.value < bounds.minimum:
        reason = Reason.SCHEDULE_MINIMUM if bounds.scheduled_minimum else Reason.AT_MINIMUM
        return course.to(bounds.minimum, reason, f"the minimum is {bounds.minimum}")
    reason = Reason.SCHEDULE_MAXIMUM if bounds.scheduled_maximum else Reason.AT_MAXIMUM
    return course.to(bounds.clamp(course.value), reason, f"the maximum is {bounds.maximum}")


def rules_of(policy: Policy, bounds: Mapping[Role, Range]) -> Rules:
    """A pool without prefill nodes has no ratio."""
    both = bounds["prefill"].maximum > 0
    return Rules(
        gpus=(bounds["prefill"].gpus, bounds["decode"].gpus),
        budget=policy.gpu_budget,
        ratio_min=policy.ratio_min if both else None,
        ratio_max=policy.ratio_max if both else None,
    )


def box_of(bounds: Mapping[Role, Range]) -> tuple[Pair, Pair]:
    prefill, decode = bounds["prefill"], bounds["decode"]
    return (prefill.minimum, decode.minimum), (prefill.maximum, decode.maximum)


def allowed(
    courses: Courses,
    bounds: Mapping[Role, Range],
    policy: Policy,
    memory: Memory,
    at_s: float,
) -> Courses:
    low, high = box_of(bounds)
    rules = rules_of(policy, bounds)
    want = (courses[0].value, courses[1].value)
    without_budget = fit(want, low, high, replace(rules, budget=None)) or want
    courses = _ratio(courses, without_budget, policy)
    if rules.budget is None or gpus_of(without_budget, rules) <= rules.budget:
        return courses
    return _within_budget(courses, low, high, rules, policy, memory, at_s)


def _ratio(courses: Courses, pair: Pair, policy: Policy) -> Courses:
    low = 0.0 if policy.ratio_min is None else policy.ratio_min
    high = "any" if policy.ratio_max is None else f"{policy.ratio_max:g}"
    bound = f"the ratio of prefill to decode nodes must be {low:g} to {high}"

    def to(course: Course, value: int) -> Course:
        up = value > course.value
        return course.to(value, Reason.RATIO_RAISED if up else Reason.RATIO_LIMITED, bound)

    return to(courses[0], pair[0]), to(courses[1], pair[1])


def _within_budget(
    courses: Courses,
    low: Pair,
    high: Pair,
    rules: Rules,
    policy: Policy,
    memory: Memory,
    at_s: float,
) -> Courses:
    """The budget is too small for both roles: their most recent needs count, instead of those of
    the whole scale-down window."""
    now = (courses[0].now, courses[1].now)
    window = SHIFT_SHARE * policy.down_stabilisation_s
    recent_needs = tuple(
        min(course.value, max(within(memory, course.role, at_s, window))) for course in courses
    )
    want = (max(low[0], recent_needs[0]), max(low[1], recent_needs[1]))
    pair, reason = _best(want, low, high, rules), Reason.BUDGET_LIMITED
    bound = f"the budget is {rules.budget} GPUs"
    if pair is None:
        pair, reason = fit(want, (0, 0), high, _loose(rules)) or (0, 0), Reason.BUDGET_TOO_SMALL
        bound = f"the minimums need more than the budget of {rules.budget} GPUs"
    else:
        pair = _kept(pair, want, now, low, high, rules)

    def to(course: Course, value: int) -> Course:
        shifts = reason == Reason.BUDGET_LIMITED and value < course.now
        if shifts:
            return course.to(
                value, Reason.BUDGET_SHIFT, f"{bound}, and the other role needs nodes more"
            )
        return course.to(value, reason, bound)

    return to(courses[0], pair[0]), to(courses[1], pair[1])


def _best(want: Pair, low: Pair, high: Pair, rules: Rules) -> Pair | None:
    """A pair within the ratio, if there is one."""
    return fit(want, low, high, rules) or fit(want, low, high, _loose(rules))


def _kept(best: Pair, want: Pair, now: Pair, low: Pair, high: Pair, rules: Rules) -> Pair:
    """`best`, unless it takes a needed node from one role for too small a gain of the other."""
    kept = (max(low[0], min(now[0], want[0])), max(low[1], min(now[1], want[1])))
    staying = fit(want, kept, high, rules)
    if staying is None or share(best, want)[0] >= SHIFT_GAIN * share(staying, want)[0]:
        return best
    return staying


def _loose(rules: Rules) -> Rules:
    return replace(rules, ratio_min=None, ratio_max=None)
