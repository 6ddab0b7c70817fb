"""The planner's policy from the spec: bounds, schedules in their time zones, contradictions."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from baton_operator.api.pool import Pool
from baton_operator.api.schedules import Day, ScheduleSpec
from baton_operator.api.spec_reader import SpecError
from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, ReplicaRange
from baton_operator.autoscaling.planner.replica_limits import ranges_now
from baton_operator.autoscaling.policy import find_contradictions, is_active, policy_of
from baton_protocol.store import Role
from tests.support.kubernetes.manifests import sample_pool

BERLIN, TOKYO = "Europe/Berlin", "Asia/Tokyo"
GPU = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
# A Tuesday.
NOON = datetime(2026, 5, 5, 12, 0, tzinfo=ZoneInfo("UTC"))


def pool(autoscaling: dict[str, Any] | None = None, **spec: Any) -> Pool:
    bounds = {"mode": "auto", "prefill": {"max": 3}, "decode": {"min": 2, "max": 5}}
    return sample_pool("sim", autoscaling=bounds | (autoscaling or {}), **spec)


def policy(of: Pool, now: datetime = NOON) -> AutoscalingPolicy:
    assert of.spec.autoscaling is not None
    return policy_of(of, of.spec.autoscaling, now)


def at(schedule: dict[str, Any], now: datetime, **autoscaling: Any) -> dict[Role, ReplicaRange]:
    return ranges_now(policy(pool({"schedules": [schedule], **autoscaling}), now))


def test_omitted_fields_take_the_planner_s_defaults() -> None:
    bounds: dict[Role, ReplicaRange] = {
        "prefill": ReplicaRange(min_replicas=1, max_replicas=3, gpus=0),
        "decode": ReplicaRange(min_replicas=2, max_replicas=5, gpus=0),
    }
    assert policy(pool()) == AutoscalingPolicy(ranges=bounds)


def test_each_field_reaches_the_planner() -> None:
    more = {
        "targets": {"ttftMs": 500, "itlMs": 20, "percentile": 90},
        "ratio": {"min": "0.25", "max": 2},
        "scaleToZeroAfterSeconds": 60,
        "scaleUp": {"stabilizationSeconds": 15, "factor": "1.5"},
        "scaleDown": {"stabilizationSeconds": 30, "nodes": 2},
        "headroomPercent": 10,
        "staleAfterSeconds": 45,
    }
    planned = policy(pool(more, prefill=GPU, decode=GPU, gpuBudget=12))
    assert (planned.ttft_s, planned.itl_s, planned.percentile) == (0.5, 0.02, 0.9)
    assert (planned.ratio_min, planned.ratio_max) == (0.25, 2.0)
    assert planned.scale_to_zero_after_s == 60
    assert (planned.up_stabilization_s, planned.up_factor) == (15, 1.5)
    assert (planned.down_stabilization_s, planned.down_nodes) == (30, 2)
    assert (planned.headroom, planned.stale_after_s) == (0.1, 45)
    assert (planned.gpu_budget, planned.ranges["prefill"].gpus) == (12, 2)


def test_a_role_in_external_mode_is_fixed_at_its_count() -> None:
    planned = policy(pool({"prefill": {"mode": "external", "max": 9}}, prefill={"replicas": 4}))
    assert planned.ranges["prefill"] == ReplicaRange(min_replicas=4, max_replicas=4, gpus=0)


def test_an_external_count_over_the_budget_is_not_an_error() -> None:
    more = {"prefill": {"mode": "external"}}
    planned = policy(pool(more, prefill=GPU | {"replicas": 9}, decode=GPU, gpuBudget=6))
    assert planned.ranges["prefill"].min_replicas == 9


def test_the_error_for_minima_over_the_budget_says_what_to_do() -> None:
    with pytest.raises(
        SpecError, match="gpuBudget 5 is less than the 6 GPUs of the minimums; raise it"
    ):
        policy(pool(prefill=GPU, decode=GPU, gpuBudget=5))


HOURS = {"from": "08:00", "to": "18:00", "decode": {"min": 4}}


@pytest.mark.parametrize(
    ("zone", "hour", "minute", "holds"),
    [
        (BERLIN, 7, 59, False),
        (BERLIN, 8, 0, True),
        (BERLIN, 17, 59, True),
        (BERLIN, 18, 0, False),
        (TOKYO, 12, 0, False),
        (TOKYO, 2, 0, True),
    ],
)
def test_a_schedule_follows_its_own_time_zone(
    zone: str, hour: int, minute: int, holds: bool
) -> None:
    now = datetime(2026, 5, 5, hour, minute, tzinfo=ZoneInfo(BERLIN))
    assert (at(HOURS | {"timeZone": zone}, now)["decode"].min_replicas == 4) == holds


def test_a_schedule_follows_daylight_saving_time() -> None:
    winter = datetime(2026, 3, 27, 6, 30, tzinfo=ZoneInfo("UTC"))
    summer = datetime(2026, 3, 30, 6, 30, tzinfo=ZoneInfo("UTC"))
    berlin = HOURS | {"timeZone": BERLIN}
    assert at(berlin, winter)["decode"].min_replicas == 2
    assert at(berlin, summer)["decode"].min_replicas == 4


@pytest.mark.parametrize(
    ("days", "begin", "end", "day", "clock", "inside"),
    [
        (("Mon",), "22:00", "06:00", 4, "22:00", True),
        (("Mon",), "22:00", "06:00", 4, "21:59", False),
        (("Mon",), "22:00", "06:00", 5, "05:59", True),
        (("Mon",), "22:00", "06:00", 5, "06:00", False),
        (("Mon",), "22:00", "06:00", 4, "01:00", False),
        (("Sun",), "22:00", "06:00", 4, "00:00", True),
        (("Sun",), "22:00", "06:00", 5, "00:00", False),
        (("Tue",), "08:00", "08:00", 5, "08:00", True),
        (("Tue",), "08:00", "08:00", 6, "07:59", True),
        (("Tue",), "08:00", "08:00", 5, "07:59", False),
        (("Tue",), "08:00", "08:00", 6, "08:00", False),
        (("Tue",), "08:00", "18:00", 6, "12:00", False),
        ((), "08:00", "18:00", 6, "12:00", True),
    ],
)
def test_a_window_belongs_to_the_days_on_which_it_begins(
    days: tuple[Day, ...], begin: str, end: str, day: int, clock: str, inside: bool
) -> None:
    """4 May is a Monday. A window that ends where it begins lasts a day."""
    hour, minute = map(int, clock.split(":"))
    now = datetime(2026, 5, day, hour, minute, tzinfo=ZoneInfo("UTC"))
    assert is_active(ScheduleSpec(days=days, begin=begin, end=end), now) == inside


def test_a_later_schedule_overrides_only_the_bounds_that_it_sets() -> None:
    both = [HOURS | {"prefill": {"max": 2}}, HOURS | {"decode": {"min": 3}}]
    ranges = ranges_now(policy(pool({"schedules": both})))
    assert (ranges["decode"].min_replicas, ranges["prefill"].max_replicas) == (3, 2)


def test_schedules_do_not_apply_to_a_role_in_external_mode() -> None:
    more = {"decode": {"mode": "external"}, "schedules": [HOURS | {"decode": {"max": 1}}]}
    decode = ranges_now(policy(pool(more, decode={"replicas": 3})))["decode"]
    assert (decode.min_replicas, decode.max_replicas) == (3, 3)


@pytest.mark.parametrize(
    ("ratio", "named"),
    [
        ({"min": "4"}, "ratio.min 4 to ratio.max any"),
        ({"max": "0.1"}, "ratio.min 0 to ratio.max 0.1"),
        ({"min": "0.4", "max": "0.45"}, "ratio.min 0.4 to ratio.max 0.45"),
    ],
)
def test_a_ratio_that_no_numbers_within_the_bounds_have_is_refused_with_both_fields(
    ratio: dict[str, str], named: str
) -> None:
    """No rule of the definition sees the third: there is no fraction between these two."""
    bounds = {"prefill": {"min": 1, "max": 2}, "decode": {"min": 1, "max": 4}}
    with pytest.raises(SpecError, match=r"spec\.autoscaling: ratio: no numbers") as raised:
        policy(pool({"ratio": ratio} | bounds))
    assert named in str(raised.value)
    assert "prefill 1 to 2, decode 1 to 4" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, ()),
        (
            {"ranges": {"prefill": ReplicaRange(min_replicas=5), "decode": ReplicaRange()}},
            ("prefill: minimum 5 exceeds maximum 1; lower the minimum",),
        ),
        (
            {"gpu_budget": 1},
            ("gpuBudget 1 is less than the 2 GPUs of the minimums; raise it or lower a minimum",),
        ),
        (
            {"ratio_min": 2.0, "ratio_max": 1.0},
            ("ratio: minimum 2 exceeds maximum 1; lower the minimum",),
        ),
        (
            {"ratio_max": 0.0},
            ("ratio: maximum 0 allows no prefill node; write a number above 0",),
        ),
    ],
    ids=["none", "minimum", "budget", "ratio", "no prefill"],
)
def test_contradictions_are_reported(changes: dict[str, Any], problems: tuple[str, ...]) -> None:
    """The rules of the definition refuse most of them; older definitions accepted them."""
    ranges: dict[Role, ReplicaRange] = {"prefill": ReplicaRange(), "decode": ReplicaRange()}
    assert find_contradictions(replace(AutoscalingPolicy(ranges=ranges), **changes)) == problems


BAD = [
    (
        {"schedules": [HOURS | {"timeZone": "Mars/Olympus"}]},
        "schedules[0].timeZone: 'Mars/Olympus'",
    ),
    ({"schedules": [HOURS | {"from": "8:00 am"}]}, "schedules[0].from: '8:00 am'"),
    ({"schedules": [HOURS | {"to": "24:00"}]}, "schedules[0].to: '24:00'"),
    ({"ratio": {"max": "much"}}, "ratio.max: 'much'"),
    ({"scaleUp": {"factor": "x"}}, "scaleUp.factor: 'x'"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_invalid_values_that_an_older_definition_accepted_are_refused_by_name(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as raised:
        pool(wrong)
    assert str(raised.value).startswith(f"spec.autoscaling.{message}")
