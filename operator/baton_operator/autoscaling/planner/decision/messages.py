"""The decision as one reason, a sentence and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from baton_operator.autoscaling.planner.demand.need import Course, PlannerView
from baton_operator.autoscaling.planner.limits.bounds import Courses
from baton_operator.autoscaling.planner.limits.schedule import Range
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import MOVE, Decision, Policy, Reason
from baton_protocol.store import ROLES, Role

# If neither role changes, the reason of the role with the higher rank is reported: unknown inputs,
# then too few nodes, then too many, then as many as needed.
BLIND = frozenset(
    {
        Reason.DEMAND_UNKNOWN,
        Reason.DEMAND_STALE,
        Reason.CAPABILITY_UNKNOWN,
        Reason.NODES_SILENT,
    }
)
SHORT = frozenset(
    {
        Reason.CAPACITY_COMING,
        Reason.STORE_LIMITED,
        Reason.AT_MAXIMUM,
        Reason.SCHEDULE_MAXIMUM,
        Reason.RATIO_LIMITED,
        Reason.BUDGET_LIMITED,
        Reason.BUDGET_WAITS,
        Reason.BUDGET_TOO_SMALL,
        Reason.UP_STABILISING,
        Reason.UP_STEP,
    }
)
QUIET = frozenset({Reason.AT_MINIMUM, Reason.SCHEDULE_MINIMUM})


def decision(
    courses: Courses,
    fleets: Mapping[Role, RoleCounts],
    view: PlannerView,
    policy: Policy,
    bounds: Mapping[Role, Range],
) -> Decision:
    main_course = max(courses, key=_weight)
    reason = main_course.reason
    wakes = all(course.now == 0 for course in courses) and any(course.value for course in courses)
    if wakes:
        reason = Reason.WOKEN
    return Decision(
        prefill=courses[0].value,
        decode=courses[1].value,
        reason=reason,
        message="; ".join(_sentence(course) for course in courses),
        numbers=numbers(courses, fleets, view, policy, bounds),
        acts=any(course.value != course.now for course in courses),
    )


def at_zero(
    cause: tuple[Reason, str], fleets: Mapping[Role, RoleCounts], numbers: Mapping[str, float]
) -> Decision:
    reason, text = cause
    return Decision(
        prefill=0,
        decode=0,
        reason=reason,
        message=f"prefill and decode 0: {text}",
        numbers=numbers,
        acts=any(fleet.desired != 0 for fleet in fleets.values()),
    )


def _weight(course: Course) -> tuple[bool, bool, float, int]:
    """Sort key: a role that changes explains the decision, and growing goes before shrinking."""
    change = (course.value - course.now) / max(1, course.now)
    return course.value != course.now, course.value > course.now, abs(change), _rank(course.reason)


def _rank(reason: Reason) -> int:
    if reason in BLIND:
        return 4
    if reason in SHORT:
        return 3
    return 0 if reason == Reason.STEADY else 1 if reason in QUIET else 2


def _sentence(course: Course) -> str:
    move = f"{course.now}{MOVE}{course.value}" if course.value != course.now else f"{course.now}"
    why = "; ".join((course.text, *dict.fromkeys(course.bounds)))
    return f"{course.role} {move} ({course.reason}: {why})"


def numbers(
    courses: Courses | tuple[()],
    fleets: Mapping[Role, RoleCounts],
    view: PlannerView,
    policy: Policy,
    bounds: Mapping[Role, Range],
) -> dict[str, float]:
    found: dict[str, float] = {}
    for course in courses:
        found.update(course.need.numbers if course.need is not None else {})
    for role in ROLES:
        fleet = fleets[role]
        found[f"{role}_ready"] = len(fleet.ready)
        found[f"{role}_coming"] = len(fleet.coming)
        found[f"{role}_draining"] = len(fleet.draining)
        found[f"{role}_desired"] = fleet.desired
        found[f"{role}_minimum"] = bounds[role].minimum
        found[f"{role}_maximum"] = bounds[role].maximum
    found["ttft_target_s"] = policy.ttft_s
    found["itl_target_s"] = policy.itl_s
    if policy.gpu_budget is not None:
        found["gpu_budget"] = policy.gpu_budget
        found["gpus_held"] = sum(fleets[role].held * bounds[role].gpus for role in ROLES)
    if view.demand is not None:
        measured = {
            "demand_age_s": view.demand.age_s,
            "requests_per_s": view.demand.requests,
            "held_requests": view.demand.held,
            "idle_s": view.demand.idle_s,
            "ttft_s": view.demand.ttft_s,
            "itl_s": view.demand.itl_s,
            "store_read_bytes_per_s": view.demand.store_read_bytes,
        }
        found.update({name: float(value) for name, value in measured.items() if value is not None})
    return {name: round(value, 6) for name, value in found.items()}
