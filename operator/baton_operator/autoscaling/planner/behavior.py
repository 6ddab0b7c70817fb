"""How fast the replicas move: stabilization windows, rates, and what gives way to what.

In: both recommendations within the owner's limits, the current nodes. Out: both at the numbers to
set now, each with the last rule that limited it, and the fall-back that the step took.

Stabilization: a role grows to the minimum of its recommendations within the scale-up window, and
shrinks to the maximum within the scale-down window. No role shrinks before a whole window was
observed, so a restarted operator waits.

Rates: a role grows to at most `up_factor` times its current nodes, and shrinks by at most
`down_nodes`. It shrinks only if all inputs are known, no roll-out or drain runs, and the remaining
nodes suffice.

The owner's bounds and budget apply at once, even if inputs are unknown. A violated ratio is
repaired upwards at once, but downwards no faster than for a lower load. Where no step keeps all of
these, the fall-backs of `_steps` say in which order they give way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from baton_operator.autoscaling.planner.consolidation import why_too_few
from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, ReplicaRange, RoleNodes
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.reasons import ScalingReason, StepFallback
from baton_operator.autoscaling.planner.recommendation import (
    KnownInputs,
    Recommendation,
    Recommendations,
)
from baton_operator.autoscaling.planner.replica_limits import corners_of, shared_limits
from baton_operator.autoscaling.planner.replica_pair import (
    NO_REPLICAS,
    Replicas,
    SharedLimits,
    choose_pair,
)
from baton_protocol.store import Role

# Reductions that the owner wants: they need no check that the remaining nodes suffice.
OWNERS_REASONS = frozenset(
    {
        ScalingReason.AT_MAXIMUM,
        ScalingReason.SCHEDULE_MAXIMUM,
        ScalingReason.RATIO_LIMITED,
        ScalingReason.BUDGET_LIMITED,
        ScalingReason.BUDGET_SHIFT,
        ScalingReason.BUDGET_TOO_SMALL,
    }
)


def stabilize(
    recommendation: Recommendation, memory: PlannerMemory, policy: AutoscalingPolicy, at_s: float
) -> Recommendation:
    current, desired = recommendation.current, recommendation.desired
    if desired > current > 0:  # a request to a sleeping pool has waited long enough
        window_s = policy.up_stabilization_s
        recent = memory.recommended_since(recommendation.role, at_s - window_s)
        limit = f"fewer were needed within the last {window_s:g} s"
        return recommendation.change(max(current, min(recent)), ScalingReason.UP_STABILISING, limit)
    if desired < current:
        window_s = policy.down_stabilization_s
        observed_s = at_s - (at_s if memory.since_s is None else memory.since_s)
        if observed_s < window_s:
            limit = f"observed for {observed_s:.0f} s of {window_s:g} s"
            return recommendation.change(current, ScalingReason.DOWN_STABILISING, limit)
        recent = memory.recommended_since(recommendation.role, at_s - window_s)
        replicas = min(current, max(recent))
        limit = f"{replicas} were needed within the last {window_s:g} s"
        return recommendation.change(replicas, ScalingReason.DOWN_STABILISING, limit)
    return recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """How far one role may move in this step. `lowest`: regardless of the load; `lowest_for_load`:
    only if the remaining nodes suffice. `reason` and `text` say what prevents a lower number."""

    lowest: int
    lowest_for_load: int
    highest: int
    reason: ScalingReason
    text: str


class _Step(NamedTuple):
    fallback: StepFallback
    lowest: Replicas
    highest: Replicas
    limits: SharedLimits


def limit_step(
    recommendations: Recommendations,
    nodes: Mapping[Role, RoleNodes],
    ranges: Mapping[Role, ReplicaRange],
    inputs: KnownInputs,
    policy: AutoscalingPolicy,
    memory: PlannerMemory,
    rolling: bool,
) -> tuple[Recommendations, StepFallback]:
    """`rolling`: a roll-out runs."""
    rates = {
        recommendation.role: _rate_limits(
            recommendation, nodes[recommendation.role], inputs, policy, memory, rolling
        )
        for recommendation in recommendations.both
    }
    limits = replace(
        shared_limits(policy, ranges),
        existing=Replicas(nodes["prefill"].existing, nodes["decode"].existing),
        draining=Replicas(len(nodes["prefill"].draining), len(nodes["decode"].draining)),
    )
    pair, fallback = _choose_step(recommendations, rates, ranges, limits)
    unbudgeted, _ = _choose_step(recommendations, rates, ranges, limits.without_budget())
    limited = Recommendations(
        prefill=_explain_step(
            recommendations.prefill,
            pair.prefill,
            rates["prefill"],
            waits_for_gpus=pair.prefill < unbudgeted.prefill,
        ),
        decode=_explain_step(
            recommendations.decode,
            pair.decode,
            rates["decode"],
            waits_for_gpus=pair.decode < unbudgeted.decode,
        ),
    )
    return limited, fallback


def _rate_limits(
    recommendation: Recommendation,
    nodes: RoleNodes,
    inputs: KnownInputs,
    policy: AutoscalingPolicy,
    memory: PlannerMemory,
    rolling: bool,
) -> RateLimits:
    current, desired = recommendation.current, recommendation.desired
    lowest, reason, text = _lowest(recommendation, nodes, policy, rolling)
    lowest_for_load = current
    if desired < current and lowest < current:
        remaining = max(desired, lowest)
        too_few = None
        if recommendation.reason not in OWNERS_REASONS:
            too_few = why_too_few(remaining, nodes, inputs, policy, memory)
        if too_few is None:
            lowest_for_load = remaining
        else:
            reason, text = ScalingReason.CONSOLIDATION_REFUSED, too_few
    return RateLimits(
        lowest=lowest,
        lowest_for_load=lowest_for_load,
        highest=_highest(recommendation, nodes, policy),
        reason=reason,
        text=text,
    )


def _lowest(
    recommendation: Recommendation, nodes: RoleNodes, policy: AutoscalingPolicy, rolling: bool
) -> tuple[int, ScalingReason, str]:
    """The minimum that may be set now, regardless of the load, and the rule that prevents a lower
    one."""
    current = recommendation.current
    if rolling:
        return current, ScalingReason.ROLL_OUT_RUNNING, "a roll-out is in progress"
    if recommendation.unknown is not None:
        return current, *recommendation.unknown
    if nodes.draining:
        names = ", ".join(node.name for node in nodes.draining[:3])
        return current, ScalingReason.DRAIN_RUNNING, f"{names} still draining"
    most = policy.down_nodes
    return max(0, current - most), ScalingReason.DOWN_STEP, f"at most {most} removed at once"


def _highest(recommendation: Recommendation, nodes: RoleNodes, policy: AutoscalingPolicy) -> int:
    current, desired = recommendation.current, recommendation.desired
    if desired <= current:
        return current
    staying = max(1, nodes.staying)
    most = max(staying + 1, ceil(staying * policy.up_factor - 1e-9))
    return min(desired, max(current, most))


def _choose_step(
    recommendations: Recommendations,
    rates: Mapping[Role, RateLimits],
    ranges: Mapping[Role, ReplicaRange],
    limits: SharedLimits,
) -> tuple[Replicas, StepFallback]:
    """The pair of the first step that has one. The last one always has: no nodes need no GPUs."""
    wanted = Replicas(recommendations.prefill.desired, recommendations.decode.desired)
    current = Replicas(recommendations.prefill.current, recommendations.decode.current)
    steps = _steps(current, rates, ranges, limits)
    for step in steps:
        pair = choose_pair(wanted, step.lowest, step.highest, step.limits)
        if pair is not None:
            return pair, step.fallback
    return NO_REPLICAS, steps[-1].fallback


def _steps(
    current: Replicas,
    rates: Mapping[Role, RateLimits],
    ranges: Mapping[Role, ReplicaRange],
    limits: SharedLimits,
) -> tuple[_Step, ...]:
    """The step that keeps all limits, and its fall-backs in their order: the ratio goes before the
    rate of additions, then also before the load; if that does not reach the ratio, the rates go
    first; and where the budget does not suffice, it goes before the rates, then before the ratio
    and the growth to the minima, and last before the minima."""
    minimum, maximum = corners_of(ranges)
    prefill, decode = rates["prefill"], rates["decode"]

    def within_range(pair: Replicas) -> Replicas:
        return Replicas(ranges["prefill"].clamp(pair.prefill), ranges["decode"].clamp(pair.decode))

    lowest = within_range(Replicas(prefill.lowest, decode.lowest))
    for_load = within_range(Replicas(prefill.lowest_for_load, decode.lowest_for_load))
    highest = within_range(Replicas(prefill.highest, decode.highest))
    no_growth = Replicas(min(current.prefill, minimum.prefill), min(current.decode, minimum.decode))
    any_ratio = limits.without_ratio()
    return (
        _Step(StepFallback.NONE, for_load, highest, limits),
        _Step(StepFallback.RATIO_BEFORE_RATE, for_load, maximum, limits),
        _Step(StepFallback.LIMITS_BEFORE_LOAD, lowest, maximum, limits),
        _Step(StepFallback.TOWARDS_RATIO, lowest, highest, any_ratio),
        _Step(StepFallback.BUDGET_BEFORE_RATE, minimum, maximum, limits),
        _Step(StepFallback.BUDGET_BEFORE_RATIO_AND_GROWTH, no_growth, maximum, any_ratio),
        _Step(StepFallback.BUDGET_BEFORE_MINIMUM, NO_REPLICAS, maximum, any_ratio),
    )


def _explain_step(
    recommendation: Recommendation, replicas: int, rate: RateLimits, *, waits_for_gpus: bool
) -> Recommendation:
    """`waits_for_gpus`: the number would be higher without the budget."""
    if replicas < recommendation.desired:
        if waits_for_gpus:
            held = "removed nodes still hold the GPUs"
            return recommendation.change(replicas, ScalingReason.BUDGET_WAITS, held)
        if replicas >= rate.highest:
            limit = f"at most {rate.highest} nodes in this step"
            return recommendation.change(replicas, ScalingReason.UP_STEP, limit)
        first = "the other role must grow first to keep the ratio"
        return recommendation.change(replicas, ScalingReason.RATIO_LIMITED, first)
    if replicas == rate.lowest_for_load:
        return recommendation.change(replicas, rate.reason, rate.text)
    kept = "the ratio to the other role must be kept"
    return recommendation.change(replicas, ScalingReason.RATIO_RAISED, kept)
