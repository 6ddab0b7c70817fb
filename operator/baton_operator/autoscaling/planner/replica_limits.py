"""Limits both recommendations to what the owner allows: minima, maxima, ratio and GPU budget.

In: both recommendations. Out: the same at an allowed pair of numbers, the target of all later
steps; `behavior` decides the next step. If a minimum exceeds its maximum, the maximum wins, because
it bounds the owner's cost. The budget takes precedence over the bounds, and both over the ratio. A
pool that is awake has at least one decode node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, ReplicaRange
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.reasons import ScalingReason
from baton_operator.autoscaling.planner.recommendation import Recommendation, Recommendations
from baton_operator.autoscaling.planner.replica_pair import (
    NO_REPLICAS,
    Replicas,
    SharedLimits,
    choose_pair,
    served_share,
)
from baton_protocol.store import ROLES, Role

# If the budget is scarce, a role gives up nodes after this share of its scale-down window, because
# the other role needs them now.
SHIFT_SHARE = 0.25
# It does so only if the share of the worse-served role improves by more than this factor.
SHIFT_GAIN = 1.15


def ranges_now(policy: AutoscalingPolicy) -> dict[Role, ReplicaRange]:
    """The minima and maxima that hold now, with schedules."""
    minima: dict[Role, int] = {}
    maxima: dict[Role, int] = {}
    for schedule in policy.active_schedules:
        minima.update(schedule.min_replicas)
        maxima.update(schedule.max_replicas)
    return {role: _range_now(role, policy.ranges[role], minima, maxima) for role in ROLES}


def _range_now(
    role: Role, own: ReplicaRange, minima: Mapping[Role, int], maxima: Mapping[Role, int]
) -> ReplicaRange:
    own_minimum = max(own.min_replicas, 1 if role == "decode" else 0)
    maximum = min(own.max_replicas, maxima.get(role, own.max_replicas))
    minimum = min(max(own_minimum, minima.get(role, 0)), maximum)
    return replace(
        own,
        min_replicas=minimum,
        max_replicas=maximum,
        min_is_scheduled=minimum > own_minimum,
        max_is_scheduled=maximum < own.max_replicas,
        keeps_awake=minima.get(role, 0) > 0,
    )


def keep_in_range(recommendation: Recommendation, allowed: ReplicaRange) -> Recommendation:
    minimum, maximum = allowed.min_replicas, allowed.max_replicas
    if recommendation.desired < minimum:
        scheduled = allowed.min_is_scheduled
        reason = ScalingReason.SCHEDULE_MINIMUM if scheduled else ScalingReason.AT_MINIMUM
        return recommendation.change(minimum, reason, f"the minimum is {minimum}")
    scheduled = allowed.max_is_scheduled
    reason = ScalingReason.SCHEDULE_MAXIMUM if scheduled else ScalingReason.AT_MAXIMUM
    replicas = allowed.clamp(recommendation.desired)
    return recommendation.change(replicas, reason, f"the maximum is {maximum}")


def shared_limits(policy: AutoscalingPolicy, ranges: Mapping[Role, ReplicaRange]) -> SharedLimits:
    """A pool without prefill nodes has no ratio."""
    limits = SharedLimits(
        gpus=Replicas(ranges["prefill"].gpus, ranges["decode"].gpus),
        budget=policy.gpu_budget,
        ratio_min=policy.ratio_min,
        ratio_max=policy.ratio_max,
    )
    return limits if ranges["prefill"].max_replicas > 0 else limits.without_ratio()


def corners_of(ranges: Mapping[Role, ReplicaRange]) -> tuple[Replicas, Replicas]:
    """The minimum and the maximum of both roles."""
    prefill, decode = ranges["prefill"], ranges["decode"]
    return (
        Replicas(prefill.min_replicas, decode.min_replicas),
        Replicas(prefill.max_replicas, decode.max_replicas),
    )


def keep_shared_limits(
    recommendations: Recommendations,
    ranges: Mapping[Role, ReplicaRange],
    policy: AutoscalingPolicy,
    memory: PlannerMemory,
    at_s: float,
) -> Recommendations:
    lowest, highest = corners_of(ranges)
    limits = shared_limits(policy, ranges)
    wanted = Replicas(recommendations.prefill.desired, recommendations.decode.desired)
    in_ratio = choose_pair(wanted, lowest, highest, limits.without_budget()) or wanted
    recommendations = _change_for_ratio(recommendations, in_ratio, policy)
    if limits.budget is None or limits.gpus_of(in_ratio) <= limits.budget:
        return recommendations
    since_s = at_s - SHIFT_SHARE * policy.down_stabilization_s
    return _keep_budget(recommendations, lowest, highest, limits, memory, since_s)


def _change_for_ratio(
    recommendations: Recommendations, pair: Replicas, policy: AutoscalingPolicy
) -> Recommendations:
    low = 0.0 if policy.ratio_min is None else policy.ratio_min
    high = "any" if policy.ratio_max is None else f"{policy.ratio_max:g}"
    limit = f"the ratio of prefill to decode nodes must be {low:g} to {high}"

    def change(recommendation: Recommendation, replicas: int) -> Recommendation:
        raised = replicas > recommendation.desired
        reason = ScalingReason.RATIO_RAISED if raised else ScalingReason.RATIO_LIMITED
        return recommendation.change(replicas, reason, limit)

    return Recommendations(
        prefill=change(recommendations.prefill, pair.prefill),
        decode=change(recommendations.decode, pair.decode),
    )


def _keep_budget(
    recommendations: Recommendations,
    lowest: Replicas,
    highest: Replicas,
    limits: SharedLimits,
    memory: PlannerMemory,
    since_s: float,
) -> Recommendations:
    """The budget is too small for both roles: their needs since `since_s` count, instead of those
    of the whole scale-down window."""
    prefill, decode = recommendations.both
    wanted = Replicas(
        max(lowest.prefill, _recently_needed(prefill, memory, since_s)),
        max(lowest.decode, _recently_needed(decode, memory, since_s)),
    )
    reason, limit = ScalingReason.BUDGET_LIMITED, f"the budget is {limits.budget} GPUs"
    pair = _best_in_budget(wanted, lowest, highest, limits)
    if pair is None:
        reason = ScalingReason.BUDGET_TOO_SMALL
        limit = f"the minimums need more than the budget of {limits.budget} GPUs"
        pair = choose_pair(wanted, NO_REPLICAS, highest, limits.without_ratio()) or NO_REPLICAS
    else:
        current = Replicas(prefill.current, decode.current)
        pair = _keep_current(pair, wanted, current, lowest, highest, limits)

    def change(recommendation: Recommendation, replicas: int) -> Recommendation:
        if reason == ScalingReason.BUDGET_LIMITED and replicas < recommendation.current:
            shift = f"{limit}, and the other role needs nodes more"
            return recommendation.change(replicas, ScalingReason.BUDGET_SHIFT, shift)
        return recommendation.change(replicas, reason, limit)

    return Recommendations(
        prefill=change(prefill, pair.prefill), decode=change(decode, pair.decode)
    )


def _recently_needed(recommendation: Recommendation, memory: PlannerMemory, since_s: float) -> int:
    recent = max(memory.recommended_since(recommendation.role, since_s))
    return min(recommendation.desired, recent)


def _best_in_budget(
    wanted: Replicas, lowest: Replicas, highest: Replicas, limits: SharedLimits
) -> Replicas | None:
    """A pair within the ratio, if there is one."""
    return choose_pair(wanted, lowest, highest, limits) or choose_pair(
        wanted, lowest, highest, limits.without_ratio()
    )


def _keep_current(
    best: Replicas,
    wanted: Replicas,
    current: Replicas,
    lowest: Replicas,
    highest: Replicas,
    limits: SharedLimits,
) -> Replicas:
    """`best`, unless it takes a needed node from one role for too small a gain of the other."""
    kept = Replicas(
        max(lowest.prefill, min(current.prefill, wanted.prefill)),
        max(lowest.decode, min(current.decode, wanted.decode)),
    )
    staying = choose_pair(wanted, kept, highest, limits)
    if staying is None:
        return best
    gains = served_share(best, wanted)[0] >= SHIFT_GAIN * served_share(staying, wanted)[0]
    return best if gains else staying
