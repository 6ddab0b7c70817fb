"""The planner's policy at one moment, from a pool's spec.

In: the pool (with the current count of an externally scaled role) and the time of day. Out: a
`Policy`. Schedules are evaluated here, in their own time zones; the planner gets only the active
ones, as windows without an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from zoneinfo import ZoneInfo

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.pool import Pool
from baton_operator.api.resources import gpus_of
from baton_operator.api.schedules import DAYS, ScheduleBounds, ScheduleSpec, minutes_of
from baton_operator.api.spec_reader import SpecError
from baton_operator.autoscaling.planner.limits.schedule import DAY, active, problems
from baton_operator.autoscaling.planner.records import Bounds, Policy, Schedule
from baton_protocol.store import ROLES, Role

_EACH_DAY = frozenset(range(len(DAYS)))


def policy_of(pool: Pool, spec: AutoscalingSpec, now: datetime) -> Policy:
    """`spec` is the pool's own. Raise SpecError for contradictory bounds."""
    ratio = spec.ratio
    policy = Policy(
        bounds={role: _bounds(pool, spec, role) for role in ROLES},
        ttft_s=spec.targets.ttft_ms / 1e3,
        itl_s=spec.targets.itl_ms / 1e3,
        percentile=spec.targets.percentile / 100.0,
        gpu_budget=pool.spec.gpu_budget,
        ratio_min=float(ratio.min) if ratio is not None and ratio.min is not None else None,
        ratio_max=float(ratio.max) if ratio is not None and ratio.max is not None else None,
        scale_to_zero_after_s=spec.scale_to_zero_after_seconds,
        up_stabilisation_s=spec.scale_up.stabilization_seconds,
        down_stabilisation_s=spec.scale_down.stabilization_seconds,
        up_step=float(spec.scale_up.factor),
        down_step=spec.scale_down.nodes,
        stale_after_s=spec.stale_after_seconds,
        headroom=spec.headroom_percent / 100.0,
        schedules=tuple(
            _held(spec, schedule) for schedule in spec.schedules if _holds(schedule, now)
        ),
    )
    # The bounds of an external role follow its PoolScaler, so the spec is not at fault.
    all_planned = not any(map(spec.is_external, ROLES))
    if all_planned and (found := problems(policy)):
        raise SpecError(f"spec.autoscaling: {'; '.join(found)}")
    return policy


def _bounds(pool: Pool, spec: AutoscalingSpec, role: Role) -> Bounds:
    gpus = gpus_of(pool.spec.role(role).resources.limits)
    if spec.is_external(role):
        count = pool.spec.role(role).replicas
        return Bounds(minimum=count, maximum=count, gpus=gpus)
    own = spec.bounds(role)
    return Bounds(minimum=own.min, maximum=own.max if own.max is not None else own.min, gpus=gpus)


def _holds(schedule: ScheduleSpec, now: datetime) -> bool:
    local = now.astimezone(ZoneInfo(schedule.time_zone))
    days = frozenset(map(DAYS.index, schedule.days)) or _EACH_DAY
    begin, end = minutes_of("from", schedule.begin), minutes_of("to", schedule.end)
    window = Schedule(days=days, from_minute=begin, to_minute=end)
    return active(window, local.weekday() * DAY + local.hour * 60 + local.minute)


def _held(spec: AutoscalingSpec, schedule: ScheduleSpec) -> Schedule:
    """For the roles whose count the planner sets."""
    written = {"prefill": schedule.prefill, "decode": schedule.decode}
    own: dict[Role, ScheduleBounds] = {
        role: bounds
        for role in ROLES
        if (bounds := written[role]) is not None and not spec.is_external(role)
    }
    return Schedule(
        days=_EACH_DAY,
        from_minute=0,
        to_minute=0,
        minimum=_side(own, "min"),
        maximum=_side(own, "max"),
    )


def _side(bounds: Mapping[Role, ScheduleBounds], side: str) -> dict[Role, int]:
    counts = {role: getattr(role_bounds, side) for role, role_bounds in bounds.items()}
    return {role: count for role, count in counts.items() if count is not None}
