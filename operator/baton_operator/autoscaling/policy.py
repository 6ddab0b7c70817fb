"""The planner's policy at one moment, from a pool's spec.

In: the pool (with the current count of an externally scaled role) and the time of day. Out: an
`AutoscalingPolicy` with the schedules that are active, each in its own time zone. A policy that no
number of nodes can satisfy is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal
from zoneinfo import ZoneInfo

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.pool import Pool
from baton_operator.api.resources import gpus_of
from baton_operator.api.schedules import DAYS, ScheduleBounds, ScheduleSpec, minutes_of
from baton_operator.api.spec_reader import SpecError
from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    ReplicaRange,
    ScheduledRange,
)
from baton_operator.autoscaling.planner.replica_limits import corners_of, shared_limits
from baton_operator.autoscaling.planner.replica_pair import choose_pair
from baton_protocol.store import ROLES, Role


def policy_of(pool: Pool, spec: AutoscalingSpec, now: datetime) -> AutoscalingPolicy:
    """`spec` is the pool's own. Raise SpecError for contradictory bounds."""
    ratio = spec.ratio
    policy = AutoscalingPolicy(
        ranges={role: _range_of(pool, spec, role) for role in ROLES},
        ttft_s=spec.targets.ttft_ms / 1e3,
        itl_s=spec.targets.itl_ms / 1e3,
        percentile=spec.targets.percentile / 100.0,
        gpu_budget=pool.spec.gpu_budget,
        ratio_min=float(ratio.min) if ratio is not None and ratio.min is not None else None,
        ratio_max=float(ratio.max) if ratio is not None and ratio.max is not None else None,
        scale_to_zero_after_s=spec.scale_to_zero_after_seconds,
        up_stabilization_s=spec.scale_up.stabilization_seconds,
        down_stabilization_s=spec.scale_down.stabilization_seconds,
        up_factor=float(spec.scale_up.factor),
        down_nodes=spec.scale_down.nodes,
        stale_after_s=spec.stale_after_seconds,
        headroom=spec.headroom_percent / 100.0,
        active_schedules=tuple(
            _scheduled_range(spec, schedule)
            for schedule in spec.schedules
            if is_active(schedule, now)
        ),
    )
    # The bounds of an external role follow its PoolScaler, so the spec is not at fault.
    all_planned = not any(map(spec.is_external, ROLES))
    if all_planned and (problems := find_contradictions(policy)):
        raise SpecError(f"spec.autoscaling: {'; '.join(problems)}")
    return policy


def _range_of(pool: Pool, spec: AutoscalingSpec, role: Role) -> ReplicaRange:
    gpus = gpus_of(pool.spec.role(role).resources.limits)
    if spec.is_external(role):
        count = pool.spec.role(role).replicas
        return ReplicaRange(min_replicas=count, max_replicas=count, gpus=gpus)
    own = spec.bounds(role)
    most = own.max if own.max is not None else own.min
    return ReplicaRange(min_replicas=own.min, max_replicas=most, gpus=gpus)


def is_active(schedule: ScheduleSpec, now: datetime) -> bool:
    """Whether `now` is in the window. A window that ends when it begins lasts a day."""
    local = now.astimezone(ZoneInfo(schedule.time_zone))
    day, minute = local.weekday(), local.hour * 60 + local.minute
    days = frozenset(map(DAYS.index, schedule.days)) or frozenset(range(len(DAYS)))
    begin, end = minutes_of("from", schedule.begin), minutes_of("to", schedule.end)
    if begin < end:
        return day in days and begin <= minute < end
    began_today = day in days and minute >= begin
    return began_today or ((day - 1) % len(DAYS) in days and minute < end)


def _scheduled_range(spec: AutoscalingSpec, schedule: ScheduleSpec) -> ScheduledRange:
    """For the roles whose count the planner sets."""
    written = {"prefill": schedule.prefill, "decode": schedule.decode}
    planned: dict[Role, ScheduleBounds] = {
        role: bounds
        for role in ROLES
        if (bounds := written[role]) is not None and not spec.is_external(role)
    }
    return ScheduledRange(
        min_replicas=_written_counts(planned, "min"), max_replicas=_written_counts(planned, "max")
    )


def _written_counts(
    bounds: Mapping[Role, ScheduleBounds], side: Literal["min", "max"]
) -> dict[Role, int]:
    counts = {
        role: role_bounds.min if side == "min" else role_bounds.max
        for role, role_bounds in bounds.items()
    }
    return {role: count for role, count in counts.items() if count is not None}


def find_contradictions(policy: AutoscalingPolicy) -> tuple[str, ...]:
    """Contradictions that no number of nodes can satisfy; the spec is rejected with them."""
    problems = []
    for role in ROLES:
        own = policy.ranges[role]
        if own.min_replicas > own.max_replicas:
            problems.append(
                f"{role}: minimum {own.min_replicas} exceeds maximum {own.max_replicas}; "
                "lower the minimum"
            )
    if policy.gpu_budget is not None:
        least = sum(own.min_replicas * own.gpus for own in policy.ranges.values())
        if least > policy.gpu_budget:
            problems.append(
                f"gpuBudget {policy.gpu_budget} is less than the {least} GPUs of the minimums; "
                "raise it or lower a minimum"
            )
    low, high = policy.ratio_min, policy.ratio_max
    if high is not None and high <= 0.0:
        problems.append(f"ratio: maximum {high:g} allows no prefill node; write a number above 0")
    if low is not None and high is not None and low > high:
        problems.append(f"ratio: minimum {low:g} exceeds maximum {high:g}; lower the minimum")
    if not problems and not _has_pair_in_ratio(policy):
        ranges = ", ".join(
            f"{role} {policy.ranges[role].min_replicas} to {policy.ranges[role].max_replicas}"
            for role in ROLES
        )
        problems.append(
            f"ratio: no numbers of nodes within the bounds ({ranges}) have a ratio from ratio.min"
            f" {low or 0:g} to ratio.max {'any' if high is None else f'{high:g}'}; widen"
            " prefill.max, decode.max or the ratio"
        )
    return tuple(problems)


def _has_pair_in_ratio(policy: AutoscalingPolicy) -> bool:
    lowest, highest = corners_of(policy.ranges)
    limits = shared_limits(policy, policy.ranges).without_budget()
    return choose_pair(lowest, lowest, highest, limits) is not None
