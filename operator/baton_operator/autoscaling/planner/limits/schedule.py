"""The current bounds, and the contradictions in a policy.

In: the policy and the minute of the week. Out: per role a minimum and a maximum, and whether a
schedule set it. If a minimum exceeds its maximum, the maximum wins, because it bounds the owner's
cost. A pool that is awake has at least one decode node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_operator.autoscaling.planner.limits.replica_fit import Rules, fit
from baton_operator.autoscaling.planner.records import Policy, Schedule
from baton_protocol.store import ROLES, Role

DAY = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A role's current bounds. `scheduled_*`: a schedule changed the owner's bound. `keeps_awake`:
    a schedule wants nodes now."""

    minimum: int
    maximum: int
    gpus: int
    scheduled_minimum: bool = False
    scheduled_maximum: bool = False
    keeps_awake: bool = False

    def clamp(self, nodes: int) -> int:
        return max(self.minimum, min(self.maximum, nodes))


def active(schedule: Schedule, minute_of_week: int) -> bool:
    """Whether the minute is in the window. A window that ends when it begins lasts a day."""
    day, minute = divmod(minute_of_week, DAY)
    begin, end = schedule.from_minute, schedule.to_minute
    if begin < end:
        return day in schedule.days and begin <= minute < end
    begun_today = day in schedule.days and minute >= begin
    return begun_today or ((day - 1) % 7 in schedule.days and minute < end)


def ranges(policy: Policy, minute_of_week: int) -> dict[Role, Range]:
    """The bounds that hold now."""
    minima: dict[Role, int] = {}
    maxima: dict[Role, int] = {}
    for schedule in policy.schedules:
        if active(schedule, minute_of_week):
            minima.update(schedule.minimum)
            maxima.update(schedule.maximum)
    return {role: _range(policy, role, minima, maxima) for role in ROLES}


def _range(
    policy: Policy, role: Role, minima: Mapping[Role, int], maxima: Mapping[Role, int]
) -> Range:
    own = policy.bounds[role]
    least = max(own.minimum, 1 if role == "decode" else 0)
    maximum = min(own.maximum, maxima.get(role, own.maximum))
    minimum = min(max(least, minima.get(role, 0)), maximum)
    return Range(
        minimum=minimum,
        maximum=maximum,
        gpus=own.gpus,
        scheduled_minimum=minimum > least,
        scheduled_maximum=maximum < own.maximum,
        keeps_awake=minima.get(role, 0) > 0,
    )


def _has_ratio(policy: Policy) -> bool:
    """Whether the bounds allow a pair of numbers with the wanted ratio."""
    if policy.ratio_min is None and policy.ratio_max is None:
        return True
    prefill, decode = policy.bounds["prefill"], policy.bounds["decode"]
    if not prefill.maximum:
        return True  # a pool without prefill nodes has no ratio
    low = prefill.minimum, decode.minimum
    rules = Rules(gpus=(0, 0), ratio_min=policy.ratio_min, ratio_max=policy.ratio_max)
    return fit(low, low, (prefill.maximum, decode.maximum), rules) is not None


def problems(policy: Policy) -> tuple[str, ...]:
    """Contradictions that no number of nodes can satisfy; the spec is rejected with them."""
    found = []
    for role in ROLES:
        own = policy.bounds[role]
        if own.minimum > own.maximum:
            found.append(
                f"{role}: minimum {own.minimum} exceeds maximum {own.maximum}; lower the minimum"
            )
    if policy.gpu_budget is not None:
        least = sum(role_range.minimum * role_range.gpus for role_range in policy.bounds.values())
        if least > policy.gpu_budget:
            found.append(
                f"gpuBudget {policy.gpu_budget} is less than the {least} GPUs of the minimums; "
                "raise it or lower a minimum"
            )
    low, high = policy.ratio_min, policy.ratio_max
    if high is not None and high <= 0.0:
        found.append(f"ratio: maximum {high:g} allows no prefill node; write a number above 0")
    if low is not None and high is not None and low > high:
        found.append(f"ratio: minimum {low:g} exceeds maximum {high:g}; lower the minimum")
    if not found and not _has_ratio(policy):
        bounds = ", ".join(
            f"{role} {policy.bounds[role].minimum} to {policy.bounds[role].maximum}"
            for role in ROLES
        )
        found.append(
            f"ratio: no numbers of nodes within the bounds ({bounds}) have a ratio from ratio.min"
            f" {low or 0:g} to ratio.max {'any' if high is None else f'{high:g}'}; widen"
            " prefill.max, decode.max or the ratio"
        )
    return tuple(found)
