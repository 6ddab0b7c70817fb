"""How many nodes a pool should have: the rules in their order, and the decision with its reason.

In: the state of the pool (PoolObservation), what its owner wants (AutoscalingPolicy), the memory of
earlier calls (PlannerMemory). Out: the Decision, and the memory for the next call. The caller
applies the decision or only shows it, depending on the mode.

    range          current minima and maxima, with schedules              replica_limits
    scale to zero  whether the pool sleeps                                scale_to_zero
    recommend      per role, from the forecast and a node's capability    forecast, load_model
    correct        a missed target adds a node; store reads may limit     recommendation
    stabilize      up to the minimum, down to the maximum of a window     behavior
    limit          minima and maxima, then ratio and GPU budget           replica_limits,
                                                                          replica_pair
    step           the part to apply now: rates, drains, roll-outs, and   behavior,
                   whether the remaining nodes suffice                    consolidation

All else equal, more demand never gives a role fewer nodes. The exceptions are a budget or ratio
that both roles share, a store at its read limit, and a trend, which a single higher sample may end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_operator.autoscaling.planner.behavior import limit_step, stabilize
from baton_operator.autoscaling.planner.forecast import LOOKBACK_S, forecast_load, live_requests
from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    PoolObservation,
    ReplicaRange,
    RoleNodes,
    nodes_of_role,
)
from baton_operator.autoscaling.planner.memory import DemandSample, PlannerMemory
from baton_operator.autoscaling.planner.reasons import ScalingReason, StepFallback
from baton_operator.autoscaling.planner.recommendation import (
    KnownInputs,
    Recommendation,
    Recommendations,
    add_for_missed_target,
    hold_at_read_limit,
    recommend,
    why_unknown,
)
from baton_operator.autoscaling.planner.replica_limits import (
    keep_in_range,
    keep_shared_limits,
    ranges_now,
)
from baton_operator.autoscaling.planner.scale_to_zero import reason_for_zero, why_asleep
from baton_protocol.store import ROLES, Role

MISS_WINDOWS = 4.0  # scale-down windows for which a missed target is remembered
MOVE = " -> "  # in a decision's message, between the counts of a role that changes

# If neither role changes, the reason of the role with the higher rank is reported: unknown inputs,
# then too few nodes, then too many, then as many as needed.
UNKNOWN_REASONS = frozenset(
    {
        ScalingReason.DEMAND_UNKNOWN,
        ScalingReason.DEMAND_STALE,
        ScalingReason.CAPABILITY_UNKNOWN,
        ScalingReason.NODES_SILENT,
    }
)
TOO_FEW_REASONS = frozenset(
    {
        ScalingReason.CAPACITY_COMING,
        ScalingReason.STORE_LIMITED,
        ScalingReason.AT_MAXIMUM,
        ScalingReason.SCHEDULE_MAXIMUM,
        ScalingReason.RATIO_LIMITED,
        ScalingReason.BUDGET_LIMITED,
        ScalingReason.BUDGET_WAITS,
        ScalingReason.BUDGET_TOO_SMALL,
        ScalingReason.UP_STABILISING,
        ScalingReason.UP_STEP,
    }
)
MINIMUM_REASONS = frozenset({ScalingReason.AT_MINIMUM, ScalingReason.SCHEDULE_MINIMUM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`fallback`: what gave way in this step. `numbers`: the inputs and intermediate results behind
    the reason, by name, for people."""

    prefill: int
    decode: int
    reason: ScalingReason
    message: str
    numbers: Mapping[str, float]
    fallback: StepFallback = StepFallback.NONE


def plan_replicas(
    observation: PoolObservation, policy: AutoscalingPolicy, memory: PlannerMemory
) -> tuple[Decision, PlannerMemory]:
    """The replicas of both roles, and why. Pure and idempotent for the same time."""
    at_s = observation.at_s
    ranges = ranges_now(policy)
    nodes = {role: nodes_of_role(role, observation, policy.stale_after_s) for role in ROLES}
    memory = memory.at(at_s, _keep_s(policy))
    inputs, memory = _read_inputs(observation, policy, nodes, memory)
    numbers = _observed_numbers(nodes, inputs, policy, ranges)
    zero = reason_for_zero(observation, policy, ranges, nodes)
    if zero is not None:
        return _decide_zero(*zero, numbers), memory.with_recommendation(at_s, 0, 0)
    recommendations, memory = _recommend_both(inputs, policy, nodes, ranges, memory, at_s)
    recommendations = recommendations.apply(
        lambda recommendation: keep_in_range(
            stabilize(recommendation, memory, policy, at_s), ranges[recommendation.role]
        )
    )
    recommendations = keep_shared_limits(recommendations, ranges, policy, memory, at_s)
    recommendations, fallback = limit_step(
        recommendations, nodes, ranges, inputs, policy, memory, observation.rolling
    )
    decision = _decide(recommendations, fallback, numbers, why_asleep(observation.demand, nodes))
    return decision, memory


def _keep_s(policy: AutoscalingPolicy) -> float:
    longest_window_s = max(MISS_WINDOWS * policy.down_stabilization_s, policy.up_stabilization_s)
    return max(longest_window_s, LOOKBACK_S)


def _read_inputs(
    observation: PoolObservation,
    policy: AutoscalingPolicy,
    nodes: Mapping[Role, RoleNodes],
    memory: PlannerMemory,
) -> tuple[KnownInputs, PlannerMemory]:
    unknown = why_unknown(observation, policy)
    demand, capability = observation.demand, observation.capability
    if unknown is not None or demand is None or capability is None:
        return KnownInputs(unknown=unknown), memory
    memory = memory.with_demand(
        DemandSample(
            at_s=round(observation.at_s - demand.age_s, 3),
            requests=demand.requests,
            prompt=demand.uncached_prompt_tokens,
            output=demand.output_tokens,
            live=live_requests(demand, nodes["decode"]),
        )
    )
    forecast = forecast_load(demand, nodes["prefill"], nodes["decode"], memory, capability.start_s)
    return KnownInputs(demand=demand, capability=capability, forecast=forecast), memory


def _recommend_both(
    inputs: KnownInputs,
    policy: AutoscalingPolicy,
    nodes: Mapping[Role, RoleNodes],
    ranges: Mapping[Role, ReplicaRange],
    memory: PlannerMemory,
    at_s: float,
) -> tuple[Recommendations, PlannerMemory]:
    """What both roles need within their ranges, remembered before stabilization smooths it."""
    by_role: dict[Role, Recommendation] = {}
    for role in ROLES:
        model = recommend(nodes[role], nodes["prefill"], inputs, policy)
        corrected, miss = add_for_missed_target(
            model, inputs, nodes[role], nodes["decode"], policy, at_s
        )
        if miss is not None:
            memory = memory.with_miss(miss)
        by_role[role] = keep_in_range(hold_at_read_limit(corrected, inputs, policy), ranges[role])
    both = Recommendations(prefill=by_role["prefill"], decode=by_role["decode"])
    return both, memory.with_recommendation(at_s, both.prefill.desired, both.decode.desired)


def _decide_zero(reason: ScalingReason, text: str, numbers: Mapping[str, float]) -> Decision:
    return Decision(
        prefill=0,
        decode=0,
        reason=reason,
        message=f"prefill and decode 0: {text}",
        numbers=_rounded(numbers),
    )


def _decide(
    recommendations: Recommendations,
    fallback: StepFallback,
    numbers: Mapping[str, float],
    sleep: str | None,
) -> Decision:
    """`sleep`: why all engines sleep; None if one is awake."""
    both = recommendations.both
    asleep = not any(recommendation.current for recommendation in both)
    wakes = asleep and any(recommendation.desired for recommendation in both)
    stays = all(recommendation.desired == recommendation.current for recommendation in both)
    reason = ScalingReason.WOKEN if wakes else max(both, key=_reason_rank).reason
    if sleep is not None and stays:
        reason = ScalingReason.NODES_ASLEEP
    load_numbers: dict[str, float] = {}
    for recommendation in both:
        required = recommendation.required
        load_numbers |= required.numbers if required is not None else {}
    return Decision(
        prefill=recommendations.prefill.desired,
        decode=recommendations.decode.desired,
        reason=reason,
        message="; ".join(
            (*([sleep] if sleep else ()), *map(_sentence, both), *_fallback_sentence(fallback))
        ),
        numbers=_rounded({**load_numbers, **numbers}),
        fallback=fallback,
    )


def _reason_rank(recommendation: Recommendation) -> tuple[bool, bool, float, int]:
    """Sort key: a role that changes explains the decision, and growing goes before shrinking."""
    current, desired = recommendation.current, recommendation.desired
    change = (desired - current) / max(1, current)
    if recommendation.reason in UNKNOWN_REASONS:
        rank = 4
    elif recommendation.reason in TOO_FEW_REASONS:
        rank = 3
    elif recommendation.reason == ScalingReason.STEADY:
        rank = 0
    else:
        rank = 1 if recommendation.reason in MINIMUM_REASONS else 2
    return desired != current, desired > current, abs(change), rank


def _sentence(recommendation: Recommendation) -> str:
    current, desired = recommendation.current, recommendation.desired
    counts = f"{current}{MOVE}{desired}" if desired != current else f"{current}"
    why = "; ".join((recommendation.load_text, *dict.fromkeys(recommendation.limits)))
    return f"{recommendation.role} {counts} ({recommendation.reason}: {why})"


def _fallback_sentence(fallback: StepFallback) -> tuple[str, ...]:
    if fallback == StepFallback.NONE:
        return ()
    return (f"this step ({fallback}): {fallback.meaning}",)


def _observed_numbers(
    nodes: Mapping[Role, RoleNodes],
    inputs: KnownInputs,
    policy: AutoscalingPolicy,
    ranges: Mapping[Role, ReplicaRange],
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for role in ROLES:
        numbers[f"{role}_ready"] = len(nodes[role].ready)
        numbers[f"{role}_coming"] = len(nodes[role].starting)
        numbers[f"{role}_draining"] = len(nodes[role].draining)
        numbers[f"{role}_desired"] = nodes[role].current_replicas
        numbers[f"{role}_minimum"] = ranges[role].min_replicas
        numbers[f"{role}_maximum"] = ranges[role].max_replicas
    numbers["ttft_target_s"] = policy.ttft_s
    numbers["itl_target_s"] = policy.itl_s
    if policy.gpu_budget is not None:
        numbers["gpu_budget"] = policy.gpu_budget
        numbers["gpus_held"] = sum(nodes[role].gpu_holders * ranges[role].gpus for role in ROLES)
    if inputs.demand is not None:
        measured = {
            "demand_age_s": inputs.demand.age_s,
            "requests_per_s": inputs.demand.requests,
            "held_requests": inputs.demand.held,
            "idle_s": inputs.demand.idle_s,
            "ttft_s": inputs.demand.ttft_s,
            "itl_s": inputs.demand.itl_s,
            "store_read_bytes_per_s": inputs.demand.store_read_bytes,
        }
        numbers |= {name: float(value) for name, value in measured.items() if value is not None}
    return numbers


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in numbers.items()}
